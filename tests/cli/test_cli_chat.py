"""The conversation behind the interactive prompt: turns, parameters, undo, save and load; and how input is read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ninfer_cli.chat import PARAMETERS, Chat, Settings, parse_parameter
from ninfer_cli.inputs import message_from_json, message_to_json
from ninfer_cli.line_editor import message_of, unfinished

from ninfer_core.errors import InvalidRequestError
from ninfer_core.types import Image, Message, Text, ToolCall, Video

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.builds(
    ToolCall, st.text("abc", min_size=1), words, st.dictionaries(words, st.integers() | words | st.booleans())
)
parts = st.builds(Text, words) | st.just(Image(url="data:image/png;base64,AA")) | st.just(Video(path="/v.mp4"))
messages = st.builds(
    Message,
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    words | st.lists(parts, max_size=3).map(tuple),
    reasoning=st.none() | words.filter(bool),
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | words,
    name=st.none() | words,
)


@given(messages)
def test_a_message_survives_its_json_form(message: Message) -> None:
    assert message_from_json(message_to_json(message), "m") == message


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["ask", "fail", "empty", "regen", "undo", "clear", "reload", "attach"]), max_size=25))
def test_a_conversation_is_always_questions_and_answers(actions: list[str]) -> None:
    chat, asked, expected = Chat(Settings("S", parameters={"seed": 5, "stop": ("x", "y")})), 0, []
    for action in actions:
        if action in ("ask", "fail", "empty"):
            asked += 1
            request = chat.ask(f"q{asked}")
            assert request.messages[0] == Message("system", "S") and request.messages[-1].text.endswith(f"q{asked}")
            assert (request.sampling.seed, request.stop) == (5, ("x", "y"))
            if action == "fail":
                chat.abandon()
                continue
            answer = Message("assistant", f"a{asked}" if action == "ask" else "")
            chat.answer(answer)
            expected.append([request.messages[-1]] + [answer] * (action == "ask"))
        elif action == "regen":
            request = chat.regenerate()
            assert (request is None) == (not expected)
            if request:
                assert request.sampling.seed != 5
                chat.answer(Message("assistant", "again"))
                expected[-1] = [expected[-1][0], Message("assistant", "again")]
        elif action == "undo":
            assert chat.undo() == bool(expected)
            expected = expected[:-1]
        elif action == "clear":
            chat.clear()
            expected = []
        elif action == "attach":
            chat.attach("f", "text")
        else:
            with tempfile.TemporaryDirectory() as folder:
                chat.save(Path(folder) / "c")
                other = Chat(Settings())
                other.load(Path(folder) / "c")
                assert (other.messages, other.settings) == (chat.messages, chat.settings)
        assert chat.messages == [message for turn in expected for message in turn]


@pytest.mark.parametrize(
    ("text", "more"),
    [("a", False), ("a\\", True), ("a\\\nb", False), ('"""', True), ('"""a', True), ('"""a\n"""', False), ("", False)],
)
def test_when_enter_starts_a_new_line(text: str, more: bool) -> None:
    assert unfinished(text) is more


@pytest.mark.parametrize(
    ("typed", "meant"), [(" a ", "a"), ("a\\\nb", "a\nb"), ('"""\na\n\nb\n"""', "a\n\nb"), ('"""', "")]
)
def test_what_a_typed_text_means(typed: str, meant: str) -> None:
    assert message_of(typed) == meant


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_every_parameter_has_limits_that_are_enforced(name: str) -> None:
    if name == "stop":
        assert parse_parameter(name, "x") == "x"
        return
    parameter = PARAMETERS[name]
    inside = parameter.low if not parameter.open_low else parameter.low + 1
    assert parse_parameter(name, str(inside)) == inside
    for bad in (str(parameter.low - 1), "nan", "inf", "word"):
        with pytest.raises(InvalidRequestError, match=name):
            parse_parameter(name, bad)
    if parameter.high < 1e30:
        with pytest.raises(InvalidRequestError, match=name):
            parse_parameter(name, str(parameter.high + 1))


def test_attached_texts_survive_an_abandoned_turn() -> None:
    chat = Chat(Settings())
    chat.attach("a.txt", "alpha")
    chat.ask("q")
    chat.abandon()
    assert not chat.messages and "alpha" in chat.ask("q2").messages[-1].text
    chat.answer(Message("assistant", "ok"))
    assert "alpha" not in chat.ask("q3").messages[-1].text


def test_a_saved_chat_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    chat = Chat(Settings(parameters={"top_k": 3}), (Message("user", "q"), Message("assistant", "a")))
    for text in (
        "{",
        "{}",
        '{"messages": [{"role": "x"}]}',
        '{"messages": [], "parameters": {"top_k": -9}}',
        '{"messages": [], "parameters": {"top_k": "a"}}',
        '{"messages": [], "parameters": []}',
        '{"messages": [], "thinking": 7}',
    ):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(InvalidRequestError):
            chat.load(tmp_path / "c.json")
        assert len(chat.messages) == 2 and chat.settings.parameters == {"top_k": 3}


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    chat = Chat(Settings(), (Message("user", "q"),))
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError):
        chat.save(target)
    assert target.is_dir() and list(tmp_path.iterdir()) == [target]


def test_nothing_to_regenerate_or_undo() -> None:
    chat = Chat(Settings())
    assert chat.regenerate() is None and chat.undo() is False


def test_levels_of_thinking() -> None:
    settings = Settings()
    settings.think("low")
    assert settings.request(()).thinking is True and settings.request(()).thinking_budget == 4096
    settings.think("")
    assert settings.request(()).thinking_budget == 4096, "no level leaves the limit"
    settings.think("high")
    assert settings.request(()).thinking is True and settings.request(()).thinking_budget is None
    settings.set("thinking_budget", "7")
    settings.think("off")
    assert settings.request(()).thinking is False and settings.request(()).thinking_budget is None
    with pytest.raises(InvalidRequestError, match="known: none, off, minimal, low"):
        settings.think("harder")
    assert settings.thinking is False
