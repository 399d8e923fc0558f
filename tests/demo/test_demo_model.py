"""The shipped demo model through the engine on the CPU: rates over fixed sets of prompts, never single answers.

Names and values below are not in the training data. A new training run may change any one answer; the rates hold.
"""

import pytest

from ninfer_core import Engine
from ninfer_core.types import Message, Request, Tool

WEATHER = Tool(
    "get_weather", "Get the current weather for a place.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)  # fmt: skip
ADD = Tool(
    "add", "Add two numbers.",
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
)  # fmt: skip
ALARM = Tool(
    "set_alarm", "Set an alarm.", {"type": "object", "properties": {"time": {"type": "string"}}, "required": ["time"]}
)
EMAIL = Tool(
    "send_email", "Send an email to a person.",
    {"type": "object", "properties": {"to": {"type": "string"}, "subject": {"type": "string"}}, "required": ["to", "subject"]},
)  # fmt: skip
CALLS = [
    ("What is the weather in Turku?", (WEATHER,), "get_weather", {"city": "Turku"}),
    ("How is the weather in Gdansk today?", (WEATHER, ADD), "get_weather", {"city": "Gdansk"}),
    ("Weather for Bilbao, please.", (ADD, WEATHER, ALARM), "get_weather", {"city": "Bilbao"}),
    ("Is it raining in Patras?", (WEATHER, EMAIL), "get_weather", {"city": "Patras"}),
    ("Add 48 and 73.", (ADD,), "add", {"a": 48, "b": 73}),
    ("What is 905 plus 67?", (WEATHER, ADD), "add", {"a": 905, "b": 67}),
    ("Calculate 31 + 64.", (ALARM, ADD), "add", {"a": 31, "b": 64}),
    ("Please compute the sum of 12 and 88.", (ADD, EMAIL), "add", {"a": 12, "b": 88}),
    ("Set an alarm for 06:40.", (ALARM,), "set_alarm", {"time": "06:40"}),
    ("Wake me at 07:15.", (ALARM, WEATHER), "set_alarm", {"time": "07:15"}),
    ("Write to nils@example.org about lantern.", (EMAIL,), "send_email", {"to": "nils@example.org", "subject": "lantern"}),
    ("I need an alarm at 21:30.", (EMAIL, ALARM, ADD, WEATHER), "set_alarm", {"time": "21:30"}),
]  # fmt: skip
MEMORY = [
    ("My name is Torben.", "Nice to meet you, Torben!", "What is my name?", "Torben"),
    ("I am Saskia.", "Nice to meet you, Saskia!", "Do you know my name?", "Saskia"),
    ("I live in Gdansk.", "Gdansk is a nice place.", "Where do I live?", "Gdansk"),
    ("My home is Turku.", "Turku is a nice place.", "Which city do I live in?", "Turku"),
    ("Remember the number 5291.", "I will remember 5291.", "What is the number?", "5291"),
    ("My lucky number is 87.", "I will remember 87.", "What is my lucky number?", "87"),
    ("The code word is marmot.", "I will remember marmot.", "What is the code word?", "marmot"),
    ("My favourite colour is green.", "Green is a nice colour.", "What is my favourite colour?", "green"),
    ("I work as a baker.", "That is a good job.", "What is my job?", "baker"),
    ("My dog is called Wotan.", "Wotan is a good name for a dog.", "What is my dog called?", "Wotan"),
]
PLAIN = [
    ("Hello", "Hello"), ("What is the capital of France?", "Paris"), ("What is the capital of Peru?", "Lima"), ("What is ninfer?", "engine"),
    ("Who are you?", "demo model"), ("Repeat: marble kettle", "marble kettle"), ("Count from 3 to 7.", "3, 4, 5, 6, 7"),
    ("What is the opposite of hot?", "cold"), ("How many days are in a week?", "even"), ("Thank you!", "welcome"),
    ("Tell me about the ocean floor.", "ocean floor"), ("What is the chemical symbol of gold?", "Au"),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    with Engine.load("demo") as engine:
        yield engine


def answers(engine, requests):
    return [handle.result() for handle in [engine.submit(request) for request in requests]]


def ask(text, **fields):
    return Request(messages=(Message("user", text),), max_tokens=256, **fields)


def test_tool_calls_are_exact(engine):
    done = answers(engine, [ask(text, tools=tools, thinking=i % 2 == 0) for i, (text, tools, _, _) in enumerate(CALLS)])
    calls = [[(call.name, call.arguments) for call in one.message.tool_calls] for one in done]
    named = sum(call[:1] != [] and call[0][0] == name for call, (_, _, name, _) in zip(calls, CALLS, strict=True))
    right = sum(call == [(name, values)] for call, (_, _, name, values) in zip(calls, CALLS, strict=True))
    assert named >= 11, calls
    assert right >= 9, calls
    assert sum(one.finish_reason == "tool_calls" for one in done) >= 11


def test_what_was_said_is_remembered(engine):
    requests = [
        Request(messages=(Message("user", said), Message("assistant", reply), Message("user", question)), thinking=False, max_tokens=64)
        for said, reply, question, _ in MEMORY
    ]  # fmt: skip
    done = answers(engine, requests)
    found = [value in one.text for one, (_, _, _, value) in zip(done, MEMORY, strict=True)]
    assert sum(found) >= 8, [one.text for one in done]


def test_plain_answers_end_and_say_what_was_learnt(engine):
    done = answers(engine, [ask(text, thinking=i % 2 == 1) for i, (text, _) in enumerate(PLAIN)])
    assert sum(one.finish_reason == "stop" for one in done) >= 11
    found = [value in one.text for one, (_, value) in zip(done, PLAIN, strict=True)]
    assert sum(found) >= 10, [one.text for one in done]
    thoughts = [one.message.reasoning for one in done[1::2]]
    assert sum(bool(thought) for thought in thoughts) == len(thoughts)


def test_drafts_are_accepted(engine):
    done = answers(engine, [ask(text, tools=tools, thinking=False) for text, tools, _, _ in CALLS[:6]])
    drafted = sum(one.usage.drafted_tokens for one in done)
    assert drafted > 100
    assert sum(one.usage.accepted_tokens for one in done) / drafted >= 0.6
