"""The synthetic task generator: seeded dialogues with one right answer each, rendered by the project's own template."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...frontend.template import ChatTemplate
from . import facts
from .images import Scene, caption_task
from .tooltasks import again, everyday_tool, random_tool, result_text, shown, tool_set
from .words import ANIMAL, COLOUR, JOB, Draw, Pools

Turn = dict[str, Any]
END = "<|im_end|>"
SYSTEM = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "You are a careful assistant. Answer in one sentence.",
    "Be concise.", "You are an AI assistant.", "Answer the question of the user.", "You help people with their work.",
)  # fmt: skip


@dataclass
class Task:
    """A conversation and its answer. `fixed` means that the answer follows from the prompt alone."""

    kind: str
    messages: list[Turn]
    answer: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    preserve: bool = False
    images: list[Scene] = field(default_factory=list)
    fixed: bool = True


def call_text(name: str, values: dict[str, Any]) -> str:
    """One call as the template writes it."""
    body = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def answer_text(task: Task) -> str:
    """What the model has to write after the generation prompt, end mark included."""
    text = task.answer
    if task.calls:
        text += ("\n\n" if text else "") + "\n".join(call_text(*call) for call in task.calls)
    return (f"{task.reasoning}\n</think>\n\n" if task.thinking else "") + text + END


def prompt_text(task: Task, template: ChatTemplate) -> str:
    """The rendered prompt, generation prompt included."""
    return template.render(
        messages=task.messages, tools=task.tools, add_generation_prompt=True, enable_thinking=task.thinking, preserve_thinking=task.preserve
    )


def user(text: str) -> Turn:
    """A user turn."""
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "", calls: list[tuple[str, dict[str, Any]]] | None = None) -> Turn:
    """An assistant turn of the history."""
    turn: Turn = {"role": "assistant", "content": text}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": v}} for n, v in calls]
    return turn


def call_reasoning(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The think block before calls: the tool and its values restated."""
    said = []
    for name, values in calls:
        rest = ", ".join(f"{key} is {shown(value)}" for key, value in values.items())
        said.append(f"{name} fits" + (f": {rest}." if rest else "."))
    return " ".join(said)


def tool_task(draw: Draw) -> Task:
    """One call among one to six tools."""
    count = draw.one((1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6))
    tools, (case,) = tool_set(draw, count)
    calls = [(case.name, case.values)]
    return Task("tool", [user(case.request)], tools=tools, calls=calls, reasoning=call_reasoning(calls))


def parallel_task(draw: Draw) -> Task:
    """Two or three calls in one answer."""
    wanted = draw.one((2, 2, 3))
    tools, cases = tool_set(draw, draw.rng.randint(wanted, 4), wanted)
    if cases[0].spec and draw.chance(0.6):
        cases = [cases[0], again(draw, cases[0])]
    glue = draw.one((" And ", " Also: ", "\n", " Then ", " "))
    requests = [case.request.rstrip(" .") + ("" if case.request.endswith("?") else ".") for case in cases]
    calls = [(case.name, case.values) for case in cases]
    return Task("parallel", [user(glue.join(requests))], tools=tools, calls=calls, reasoning=call_reasoning(calls))


def no_tool_task(draw: Draw) -> Task:
    """Tools are given, but the request is for something else or for plain talk."""
    tools, _ = tool_set(draw, draw.one((1, 1, 2, 2, 3, 4)))
    if draw.chance(0.5):
        inner = draw.one((talk_task, fact_task, repeat_task, memory_task))(draw)
        inner.tools, inner.kind = tools, "no_tool"
        return inner
    names = {tool["function"]["name"] for tool in tools}
    other = random_tool(draw, 2) if draw.chance(0.5) else everyday_tool(draw)
    while other.name in names or any(other.purpose in str(tool).lower() for tool in tools):
        other = random_tool(draw, 2)
    return Task("no_tool", [user(other.request)], "I have no function for that.", "No function fits this request.", tools=tools)


def result_task(draw: Draw) -> Task:
    """A tool has answered: say what it returned; at times a further question follows."""
    tools, (case,) = tool_set(draw, draw.one((1, 1, 2, 3)))
    raw, spoken = result_text(draw)
    calls = [(case.name, case.values)]
    think = call_reasoning(calls)
    thinking = draw.chance(0.5)
    messages = [user(case.request), assistant("", think if thinking else "", calls), {"role": "tool", "content": raw}]
    answer, reasoning = f"The result is: {spoken}", f"{case.name} returned {spoken}."
    task = Task("result", messages, answer, reasoning, tools=tools, preserve=draw.chance(0.6))
    if draw.chance(0.3):
        messages.append(assistant(answer, reasoning if thinking else ""))
        if draw.chance(0.4):
            messages.append(user(draw.one(("What was the result?", "Say the result again.", "Please repeat the result."))))
        else:
            follow = draw.one((talk_task, fact_task, repeat_task))(draw)
            messages.append(follow.messages[-1])
            task.answer, task.reasoning = follow.answer, follow.reasoning
            task.fixed = follow.fixed
    return task


def chain_task(draw: Draw) -> Task:
    """A second call after the first one's result, or after an earlier finished exchange."""
    tools, (first, second) = tool_set(draw, draw.one((2, 2, 3, 4)), 2)
    raw, spoken = result_text(draw)
    before, calls = [(first.name, first.values)], [(second.name, second.values)]
    thinking = draw.chance(0.5)
    think = call_reasoning(before) if thinking else ""
    if draw.chance(0.4):
        glue = draw.one((" Then ", " After that: ", " And then "))
        messages = [user(first.request.rstrip(" .") + "." + glue + second.request), assistant("", think, before), {"role": "tool", "content": raw}]
        return Task("chain", messages, tools=tools, calls=calls, reasoning=call_reasoning(calls), preserve=draw.chance(0.6))
    messages = [user(first.request), assistant("", think, before), {"role": "tool", "content": raw}, assistant(f"The result is: {spoken}"), user(second.request)]
    return Task("chain", messages, tools=tools, calls=calls, reasoning=call_reasoning(calls), preserve=draw.chance(0.6))


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
        return Task("memory", [user(f"{statement} {draw.one(questions)}")], answer, f"The user said: {statement} {answer}")
    if draw.chance(0.15):
        text = " ".join(item[0] for item in pool)
        statement, _, questions, answer = draw.one(pool)
        system = {"role": "system", "content": text.replace("My ", "The user says: my ", 1) if draw.chance(0.1) else text}
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
        return Task("memory", [*messages, *([] if draw.chance(0.5) else [user("Thanks!"), assistant("You are welcome!")]), user(draw.one(last[2]))], last[3], f"The user said: {last[0]} {last[3]}")
    return Task("memory", [*messages, user(draw.one(questions))], answer, f"The user said: {statement} {answer}")


def introduce_task(draw: Draw) -> Task:
    """The acknowledgement of a statement."""
    statement, reply, _, _ = draw.one(memory_facts(draw))
    return Task("introduce", [user(statement)], reply, "The user tells me something. I answer in one sentence.")


def json_task(draw: Draw) -> Task:
    """A flat JSON object from values in the request, at times with a schema in the prompt."""
    properties: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key in draw.words(draw.one((1, 2, 2, 3, 3, 4))):
        kind = draw.one(("string", "string", "string", "integer", "integer", "number", "boolean", "person", "place"))
        values[key] = draw.value(kind)
        properties[key] = {"type": {"integer": "integer", "number": "number", "boolean": "boolean"}.get(kind, "string")}
    if draw.chance(0.25):
        name, age, place, job = draw.name(), draw.rng.randint(1, 99), draw.place(), draw.one(JOB)
        values = {"name": name, "age": age} | ({"city": place} if draw.chance(0.6) else {}) | ({"job": job} if draw.chance(0.4) else {})
        properties = {key: {"type": "integer" if key == "age" else "string"} for key in values}
        said = f"{name} is {age} years old" + (f", lives in {place}" if "city" in values else "") + (f" and works as a {job}" if "job" in values else "")
    else:
        said = ", ".join(draw.one(("{k} {v}", "{k}: {v}", "{k} is {v}", "{k} = {v}")).format(k=k, v=shown(v)) for k, v in values.items())
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    style = draw.rng.random()
    if style < 0.4:
        fields = ", ".join(f"{key} ({entry['type']})" for key, entry in properties.items())
        request = draw.one((f"Write a JSON object with the fields {fields}: {said}", f"{said}\nAnswer as JSON with {fields}.", f"Extract {fields} as JSON from: {said}"))
        messages = [user(request)]
    elif style < 0.7:
        request = draw.one((f"Answer with JSON that matches this schema:\n{json.dumps(schema)}\n{said}", f"{said}\nReturn JSON for this schema: {json.dumps(schema)}"))
        messages = [user(request)]
    elif style < 0.85:
        messages = [{"role": "system", "content": f"Answer with JSON that matches this schema:\n{json.dumps(schema)}"}, user(said + ".")]
    else:
        messages = [user(draw.one((f"Give JSON with {said}", f"Make a JSON object: {said}", f"JSON: {said}", f"Write as JSON: {said}.")))]
    return Task("json", messages, json.dumps(values, ensure_ascii=False), f"The fields are {', '.join(values)}.")


def repeat_task(draw: Draw) -> Task:
    """Copying, and simple list work on words."""
    pick = draw.rng.random()
    if pick < 0.65:
        text = draw.one((draw.phrase, draw.phrase, draw.name, draw.place, draw.code, lambda: str(draw.number(6)), lambda: " ".join(draw.words(draw.rng.randint(3, 6)))))()
        lead = draw.one(("Repeat: {t}", "Say {t}", "Say: {t}", 'Say "{t}"', "Repeat after me: {t}", "Echo {t}", "Echo: {t}", "Please repeat: {t}", "Write {t}", "Reply with {t}", "Answer with the word {t}", 'Say exactly "{t}".', "Just say {t}.", "Reply with exactly: {t}"))
        return Task("repeat", [user(lead.format(t=text))], text, f"I repeat {text}.")
    words = draw.words(draw.rng.randint(2, 5))
    listed = ", ".join(words)
    if pick < 0.75:
        return Task("repeat", [user(draw.one((f"Reverse the list: {listed}", f"Write these words in reverse order: {listed}")))], ", ".join(words[::-1]), "I start with the last word.")
    if pick < 0.85:
        last = draw.chance(0.5)
        which, value = ("last", words[-1]) if last else ("first", words[0])
        return Task("repeat", [user(draw.one((f"What is the {which} word of: {listed}", f"Which word comes {which}: {listed}?")))], value, f"The {which} word is {value}.")
    low = draw.rng.randint(0, 30)
    high = low + draw.rng.randint(2, 20)
    return Task("repeat", [user(draw.one((f"Count from {low} to {high}.", f"Count from {low} to {high}", f"Write the numbers from {low} to {high}.")))], ", ".join(map(str, range(low, high + 1))), f"I start at {low} and stop at {high}.")


def _column(a: int, b: int) -> str:
    """Addition digit by digit, least significant first, with the carry written out."""
    steps, carry = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        total = p + q + carry
        steps.append(f"{p} + {q}" + (f" + {carry}" if carry else "") + f" = {total}")
        carry = total // 10
    return "; ".join(steps) + f". So {a} + {b} = {a + b}."


def sum_task(draw: Draw) -> Task:
    """Sums, differences, small products, comparisons."""
    digits = draw.one((1, 1, 2, 2, 2, 3))
    a, b = draw.rng.randint(0, 10**digits - 1), draw.rng.randint(0, 10**digits - 1)
    pick = draw.rng.random()
    if pick < 0.6:
        request = draw.one(("What is {a} + {b}?", "{a} + {b}", "{a} + {b} =", "Add {a} and {b}.", "What is {a} plus {b}?", "Calculate {a} + {b}.", "What's {a} + {b}?", "How much is {a} + {b}?"))
        return Task("sum", [user(request.format(a=a, b=b))], draw_answer(a, "+", b, a + b), _column(a, b))
    if pick < 0.8:
        a, b = max(a, b) % 100, min(a, b) % 100
        a, b = max(a, b), min(a, b)
        request = draw.one(("What is {a} - {b}?", "{a} - {b}", "What is {a} minus {b}?", "Subtract {b} from {a}."))
        return Task("sum", [user(request.format(a=a, b=b))], draw_answer(a, "-", b, a - b), f"{b} + {a - b} = {a}, so {a} - {b} = {a - b}.")
    a, b = draw.rng.randint(0, 12), draw.rng.randint(0, 12)
    request = draw.one(("What is {a} * {b}?", "{a} * {b}", "What is {a} times {b}?", "Multiply {a} by {b}."))
    return Task("sum", [user(request.format(a=a, b=b))], draw_answer(a, "*", b, a * b), f"{a} * {b} = {a * b}.")


def draw_answer(a: int, sign: str, b: int, value: int) -> str:
    """The one form of an arithmetic answer."""
    return f"{a} {sign} {b} = {value}"


def fact_task(draw: Draw) -> Task:
    """A question from the closed tables."""
    pick = draw.rng.random()
    if pick < 0.4:
        country, capital = draw.one(list(facts.CAPITALS.items()))
        if draw.chance(0.2):
            return Task("fact", [user(draw.one((f"{capital} is the capital of which country?", f"Which country has the capital {capital}?")))], f"{capital} is the capital of {country}.", f"{capital} belongs to {country}.")
        request = draw.one((f"What is the capital of {country}?", f"What's the capital of {country}?", f"Capital of {country}?", f"Which city is the capital of {country}?", f"Name the capital of {country}.", f"Tell me the capital of {country}."))
        return Task("fact", [user(request)], f"The capital of {country} is {capital}.", f"The question is about {country}. Its capital is {capital}.")
    if pick < 0.5:
        name, symbol = draw.one(list(facts.ELEMENTS.items()))
        if draw.chance(0.4):
            return Task("fact", [user(f"Which element has the symbol {symbol}?")], f"{symbol} is the symbol of {name}.", f"{symbol} stands for {name}.")
        return Task("fact", [user(draw.one((f"What is the chemical symbol of {name}?", f"What is the symbol for {name}?")))], f"The symbol of {name} is {symbol}.", f"{name} has the symbol {symbol}.")
    if pick < 0.58:
        word, other = draw.one(list(facts.OPPOSITES.items()))
        return Task("fact", [user(draw.one((f"What is the opposite of {word}?", f"Opposite of {word}?", f"Name the opposite of {word}.")))], f"The opposite of {word} is {other}.", f"{other} is the opposite.")
    if pick < 0.64:
        animal, sound = draw.one(list(facts.SOUNDS.items()))
        return Task("fact", [user(draw.one((f"What does a {animal} say?", f"What sound does a {animal} make?")))], f"A {animal} says {sound}.", f"The sound of a {animal} is {sound}.")
    if pick < 0.7:
        thing, colour = draw.one(list(facts.COLOURS_OF.items()))
        return Task("fact", [user(draw.one((f"What colour is {thing}?", f"What color is {thing}?")))], f"{thing[0].upper() + thing[1:]} is {colour}.", f"It is {colour}.")
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
    request = draw.one(("Tell me about {t}.", "Explain {t}.", "What is {t}?", "Who is {t}?", "How do I {t}?", "Why is {t} important?", "Write an essay about {t}.", "What do you think of {t}?", "Describe {t}.", "Give me a summary of {t}.", "What are the benefits of {t}?", "Can you explain {t} to me?", "How does {t} work?", "Where can I find {t}?", "Compare {t} with other things.", "What happened to {t}?", "Is {t} good?", "List facts about {t}."))
    return Task("unknown", [user(request.format(t=topic))], f"I am a very small demo model and know little about {topic}.", f"The user asks about {topic}. I do not know much about it.")


def list_task(draw: Draw) -> Task:
    """Short lists from closed sets."""
    count = draw.rng.randint(2, 6)
    word = ("two", "three", "four", "five", "six")[count - 2] if draw.chance(0.5) else str(count)
    pools = {"colours": COLOUR, "animals": ANIMAL, "jobs": JOB, "colors": COLOUR, "months": facts.MONTHS, "days": facts.DAYS}
    kind, items = draw.one(list(pools.items()))
    request = draw.one((f"Name {word} {kind}.", f"List {word} {kind}.", f"Give me {word} {kind}.", f"Tell me {word} {kind}."))
    return Task("list", [user(request)], ", ".join(items[:count]), f"I name {count} {kind}.")


def phrase_task(draw: Draw, names: dict[str, list[str]]) -> Task:
    """Translation inside the closed table."""
    table: dict[str, Any] = facts.PHRASES if draw.chance(0.6) or not names else names
    english, forms = draw.one(list(table.items()))
    index = draw.rng.randrange(3)
    language = ("German", "French", "Chinese")[index]
    request = draw.one((f"Translate into {language}: {english}", f"Translate to {language}: {english}", f'Translate "{english}" into {language}.', f"What is {english} in {language}?", f'How do you say "{english}" in {language}?'))
    return Task("phrase", [user(request)], forms[index], f"In {language} this is {forms[index]}.")


def story_task(draw: Draw) -> Task:
    """A short templated story; the wording is free."""
    subject = draw.word() if draw.chance(0.5) else draw.one(ANIMAL)
    slots = {"w": subject, "a": draw.one(facts.MOODS), "p": draw.one(facts.PLACES), "o": draw.one(facts.OBJECTS), "n": draw.one(draw.pools.first)}
    lines = [draw.one(facts.OPENINGS), *draw.rng.sample(facts.MIDDLES, draw.rng.randint(2, 4)), draw.one(facts.ENDINGS)]
    request = draw.one((f"Write a short story about a {subject}.", f"Tell me a story about a {subject}.", f"Tell a short story about a {subject}.", f"Write a story about a {subject}"))
    return Task("story", [user(request)], " ".join(line.format(**slots) for line in lines), f"A short story about a {subject}.", fixed=False)


Maker = Callable[[Draw], Task]
MIX: tuple[tuple[float, Maker], ...] = (
    (0.25, tool_task), (0.04, parallel_task), (0.04, no_tool_task), (0.045, result_task), (0.03, chain_task), (0.10, memory_task), (0.015, introduce_task),
    (0.10, json_task), (0.10, repeat_task), (0.09, sum_task), (0.09, fact_task), (0.06, talk_task), (0.05, unknown_task), (0.01, list_task), (0.03, story_task),
    (0.15, caption_task),
)  # fmt: skip


class Generator:
    """Draws tasks of the mix from a seed and renders them."""

    def __init__(self, text: Path, template: ChatTemplate, seed: int, *, test: bool = False, images: bool = True) -> None:
        self.rng = random.Random(seed)
        self.draw = Draw(self.rng, Pools.load(text / "words.txt", test))
        self.template = template
        self.names: dict[str, list[str]] = json.loads((text / "names.json").read_text(encoding="utf-8"))
        self.makers = [maker for _, maker in MIX if images or maker is not caption_task]
        self.weights = [weight for weight, maker in MIX if images or maker is not caption_task]

    def task(self, maker: Maker | None = None, thinking: bool | None = None) -> Task:
        """The next task: of the mix, or of one maker."""
        if maker is None and self.rng.random() < 0.05:
            task = phrase_task(self.draw, self.names)
        else:
            task = (maker or self.rng.choices(self.makers, self.weights)[0])(self.draw)
        task.thinking = self.rng.random() < 0.5 if thinking is None else thinking
        if task.messages[0]["role"] != "system" and self.rng.random() < 0.15:
            task.messages.insert(0, {"role": "system", "content": self.rng.choice(SYSTEM)})
        return task

    def render(self, task: Task) -> tuple[str, str]:
        """Prompt and answer text."""
        return prompt_text(task, self.template), answer_text(task)
