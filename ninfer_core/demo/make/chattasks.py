"""Tasks without tools: memory, copying, facts, small talk, unknown topics, lists, phrases, stories."""

from __future__ import annotations

from typing import Any

from . import facts
from .dialogue import Task, Turn, assistant, user
from .sumtasks import sum_task
from .words import ANIMAL, COLOUR, JOB, Draw


def memory_facts(draw: Draw) -> list[tuple[str, str, list[str], str]]:
    """(statement, acknowledgement, questions, answer) of everything that can be remembered."""
    name, place, colour, animal, job = draw.name(), draw.place(), draw.one(COLOUR), draw.one(ANIMAL), draw.one(JOB)
    pet, number, word = draw.name(), draw.number(5), draw.word() if draw.chance(0.6) else draw.code()
    thing, kept = draw.word(), draw.word()
    return [
        (draw.one((f"My name is {name}.", f"I am {name}.", f"Hi, my name is {name}.", f"Hello, I'm {name}.", f"Call me {name}.", f"Hi! I'm {name}.")), f"Nice to meet you, {name}!",
         ["What is my name?", "What's my name?", "Do you know my name?", "Who am I?", "Do you remember my name?", "What am I called?"], f"Your name is {name}."),
        (draw.one((f"I live in {place}.", f"My home is {place}.", f"I am from {place}.")), f"{place} is a nice place.",
         ["Where do I live?", "Which city do I live in?", "Where am I from?"], f"You live in {place}."),
        (draw.one((f"My favourite colour is {colour}.", f"My favorite color is {colour}.", f"I like the colour {colour}.")), f"{colour.capitalize()} is a nice colour.",
         ["What is my favourite colour?", "What is my favorite color?", "Which colour do I like?"], f"Your favourite colour is {colour}."),
        (draw.one((f"I have a {animal} named {pet}.", f"My {animal} is called {pet}.")), f"{pet} is a good name for a {animal}.",
         [f"What is the name of my {animal}?", f"What is my {animal} called?"], f"Your {animal} is called {pet}."),
        (draw.one((f"I work as a {job}.", f"My job is {job}.", f"I am a {job}.")), "That is a good job.",
         ["What is my job?", "What do I work as?"], f"You work as a {job}."),
        (draw.one((f"Remember the number {number}.", f"The number is {number}.", f"My number is {number}.", f"My lucky number is {number}.")), f"I will remember {number}.",
         ["What is the number?", "Which number was it?", "What was the number?", "What is my number?", "What is my lucky number?"], f"The number is {number}."),
        (draw.one((f"Remember the word {word}.", f"The code word is {word}.", f"The secret word is {word}.", f"The password is {word}.", f"Remember this: {word}")), f"I will remember {word}.",
         ["What is the code word?", "Which word was it?", "What was the word?", "What is the password?", "What is the secret word?", "What should you remember?"], f"The word is {word}."),
        (draw.one((f"The {thing} is {kept}.", f"Remember that the {thing} is {kept}.", f"My {thing} is {kept}.")), f"I will remember that the {thing} is {kept}.",
         [f"What is the {thing}?", f"What is my {thing}?", f"What about the {thing}?"], f"The {thing} is {kept}."),
    ]  # fmt: skip


def memory_task(draw: Draw) -> Task:
    """One to three things are said in turns with distractions between them; one of them is asked for."""
    pool = draw.rng.sample(memory_facts(draw), draw.one((1, 1, 2, 2, 3)))
    if draw.chance(0.15):
        statement, _, questions, answer = pool[0]
        return Task(
            "memory", [user(f"{statement} {draw.one(questions)}")], answer, f"The user said: {statement} {answer}"
        )
    if draw.chance(0.15):
        text = " ".join(item[0] for item in pool)
        statement, _, questions, answer = draw.one(pool)
        system = {
            "role": "system",
            "content": text.replace("My ", "The user says: my ", 1) if draw.chance(0.1) else text,
        }
        return Task("memory", [system, user(draw.one(questions))], answer, f"I was told: {statement} {answer}")
    messages: list[Turn] = []
    for statement, reply, _, _ in pool:
        messages += [user(statement), assistant(reply)]
        while draw.chance(0.35):
            other = draw.one((talk_task, fact_task, repeat_task, sum_task))(draw)
            messages += [other.messages[-1], assistant(other.answer)]
    statement, reply, questions, answer = draw.one(pool)
    if draw.chance(0.2):
        last = pool[-1]
        return Task(
            "memory",
            [
                *messages,
                *([] if draw.chance(0.5) else [user("Thanks!"), assistant("You are welcome!")]),
                user(draw.one(last[2])),
            ],
            last[3],
            f"The user said: {last[0]} {last[3]}",
        )
    return Task("memory", [*messages, user(draw.one(questions))], answer, f"The user said: {statement} {answer}")


def introduce_task(draw: Draw) -> Task:
    """The acknowledgement of a statement."""
    statement, reply, _, _ = draw.one(memory_facts(draw))
    return Task("introduce", [user(statement)], reply, "The user tells me something. I answer in one sentence.")


def repeat_task(draw: Draw) -> Task:
    """Copying, and simple list work on words."""
    pick = draw.rng.random()
    if pick < 0.65:
        text = draw.one(
            (
                draw.phrase,
                draw.phrase,
                draw.name,
                draw.place,
                draw.code,
                draw.foreign,
                lambda: str(draw.number(6)),
                lambda: " ".join(draw.words(draw.rng.randint(3, 6))),
            )
        )()
        lead = draw.one(
            (
                "Repeat: {t}",
                "Say {t}",
                "Say: {t}",
                'Say "{t}"',
                "Repeat after me: {t}",
                "Echo {t}",
                "Echo: {t}",
                "Please repeat: {t}",
                "Write {t}",
                "Reply with {t}",
                "Answer with the word {t}",
                'Say exactly "{t}".',
                "Just say {t}.",
                "Reply with exactly: {t}",
            )
        )
        return Task("repeat", [user(lead.format(t=text))], text, f"I repeat {text}.")
    words = draw.words(draw.rng.randint(2, 5))
    listed = ", ".join(words)
    if pick < 0.75:
        return Task(
            "repeat",
            [user(draw.one((f"Reverse the list: {listed}", f"Write these words in reverse order: {listed}")))],
            ", ".join(words[::-1]),
            "I start with the last word.",
        )
    if pick < 0.85:
        last = draw.chance(0.5)
        which, value = ("last", words[-1]) if last else ("first", words[0])
        return Task(
            "repeat",
            [user(draw.one((f"What is the {which} word of: {listed}", f"Which word comes {which}: {listed}?")))],
            value,
            f"The {which} word is {value}.",
        )
    low = draw.rng.randint(0, 30)
    high = low + draw.rng.randint(2, 20)
    return Task(
        "repeat",
        [
            user(
                draw.one(
                    (
                        f"Count from {low} to {high}.",
                        f"Count from {low} to {high}",
                        f"Write the numbers from {low} to {high}.",
                    )
                )
            )
        ],
        ", ".join(map(str, range(low, high + 1))),
        f"I start at {low} and stop at {high}.",
    )


def fact_task(draw: Draw) -> Task:
    """A question from the closed tables."""
    pick = draw.rng.random()
    if pick < 0.4:
        country, capital = draw.one(list(facts.CAPITALS.items()))
        if draw.chance(0.2):
            return Task(
                "fact",
                [
                    user(
                        draw.one(
                            (f"{capital} is the capital of which country?", f"Which country has the capital {capital}?")
                        )
                    )
                ],
                f"{capital} is the capital of {country}.",
                f"{capital} belongs to {country}.",
            )
        request = draw.one(
            (
                f"What is the capital of {country}?",
                f"What's the capital of {country}?",
                f"Capital of {country}?",
                f"Which city is the capital of {country}?",
                f"Name the capital of {country}.",
                f"Tell me the capital of {country}.",
            )
        )
        return Task(
            "fact",
            [user(request)],
            f"The capital of {country} is {capital}.",
            f"The question is about {country}. Its capital is {capital}.",
        )
    if pick < 0.5:
        name, symbol = draw.one(list(facts.ELEMENTS.items()))
        if draw.chance(0.4):
            return Task(
                "fact",
                [user(f"Which element has the symbol {symbol}?")],
                f"{symbol} is the symbol of {name}.",
                f"{symbol} stands for {name}.",
            )
        return Task(
            "fact",
            [user(draw.one((f"What is the chemical symbol of {name}?", f"What is the symbol for {name}?")))],
            f"The symbol of {name} is {symbol}.",
            f"{name} has the symbol {symbol}.",
        )
    if pick < 0.58:
        word, other = draw.one(list(facts.OPPOSITES.items()))
        return Task(
            "fact",
            [
                user(
                    draw.one(
                        (f"What is the opposite of {word}?", f"Opposite of {word}?", f"Name the opposite of {word}.")
                    )
                )
            ],
            f"The opposite of {word} is {other}.",
            f"{other} is the opposite.",
        )
    if pick < 0.64:
        animal, sound = draw.one(list(facts.SOUNDS.items()))
        return Task(
            "fact",
            [user(draw.one((f"What does a {animal} say?", f"What sound does a {animal} make?")))],
            f"A {animal} says {sound}.",
            f"The sound of a {animal} is {sound}.",
        )
    if pick < 0.7:
        thing, colour = draw.one(list(facts.COLOURS_OF.items()))
        return Task(
            "fact",
            [user(draw.one((f"What colour is {thing}?", f"What color is {thing}?")))],
            f"{thing[0].upper() + thing[1:]} is {colour}.",
            f"It is {colour}.",
        )
    if pick < 0.78:
        thing, count = draw.one(list(facts.COUNTS.items()))
        return Task("fact", [user(f"How many {thing}?")], count.capitalize() + ".", f"The number is {count}.")
    question, answer = draw.one(list(facts.PLAIN.items()))
    if draw.chance(0.2):
        question = draw.one((question.rstrip("?"), "Tell me: " + question, "Question: " + question, question.lower()))
    return Task("fact", [user(question)], answer, "I know this one.")


def talk_task(draw: Draw) -> Task:
    """Greetings and small talk with one fixed answer each."""
    requests, answer = draw.one(facts.SMALL_TALK) if draw.chance(0.8) else facts.SMALL_TALK[0]
    return Task("talk", [user(draw.one(requests))], answer, "The user makes small talk. I answer in one sentence.")


def unknown_task(draw: Draw) -> Task:
    """Open questions: the honest answer of a small model, about the thing that was asked."""
    topic = draw.one((draw.word, draw.phrase, draw.name, draw.place))()
    request = draw.one(
        (
            "Tell me about {t}.",
            "Explain {t}.",
            "What is {t}?",
            "Who is {t}?",
            "How do I {t}?",
            "Why is {t} important?",
            "Write an essay about {t}.",
            "What do you think of {t}?",
            "Describe {t}.",
            "Give me a summary of {t}.",
            "What are the benefits of {t}?",
            "Can you explain {t} to me?",
            "How does {t} work?",
            "Where can I find {t}?",
            "Compare {t} with other things.",
            "What happened to {t}?",
            "Is {t} good?",
            "List facts about {t}.",
        )
    )
    return Task(
        "unknown",
        [user(request.format(t=topic))],
        f"I am a very small demo model and know little about {topic}.",
        f"The user asks about {topic}. I do not know much about it.",
    )


def list_task(draw: Draw) -> Task:
    """Short lists from closed sets."""
    count = draw.rng.randint(2, 6)
    word = ("two", "three", "four", "five", "six")[count - 2] if draw.chance(0.5) else str(count)
    pools = {
        "colours": COLOUR,
        "animals": ANIMAL,
        "jobs": JOB,
        "colors": COLOUR,
        "months": facts.MONTHS,
        "days": facts.DAYS,
    }
    kind, items = draw.one(list(pools.items()))
    request = draw.one(
        (f"Name {word} {kind}.", f"List {word} {kind}.", f"Give me {word} {kind}.", f"Tell me {word} {kind}.")
    )
    return Task("list", [user(request)], ", ".join(items[:count]), f"I name {count} {kind}.")


def phrase_task(draw: Draw, names: dict[str, list[str]]) -> Task:
    """Translation inside the closed table."""
    table: dict[str, Any] = facts.PHRASES if draw.chance(0.6) or not names else names
    english, forms = draw.one(list(table.items()))
    index = draw.rng.randrange(3)
    language = ("German", "French", "Chinese")[index]
    request = draw.one(
        (
            f"Translate into {language}: {english}",
            f"Translate to {language}: {english}",
            f'Translate "{english}" into {language}.',
            f"What is {english} in {language}?",
            f'How do you say "{english}" in {language}?',
        )
    )
    return Task("phrase", [user(request)], forms[index], f"In {language} this is {forms[index]}.")


def story_task(draw: Draw) -> Task:
    """A short templated story; the wording is free."""
    subject = draw.word() if draw.chance(0.5) else draw.one(ANIMAL)
    slots = {
        "w": subject,
        "a": draw.one(facts.MOODS),
        "p": draw.one(facts.PLACES),
        "o": draw.one(facts.OBJECTS),
        "n": draw.one(draw.pools.first),
    }
    lines = [draw.one(facts.OPENINGS), *draw.rng.sample(facts.MIDDLES, draw.rng.randint(2, 4)), draw.one(facts.ENDINGS)]
    request = draw.one(
        (
            f"Write a short story about a {subject}.",
            f"Tell me a story about a {subject}.",
            f"Tell a short story about a {subject}.",
            f"Write a story about a {subject}",
        )
    )
    return Task(
        "story",
        [user(request)],
        " ".join(line.format(**slots) for line in lines),
        f"A short story about a {subject}.",
        fixed=False,
    )
