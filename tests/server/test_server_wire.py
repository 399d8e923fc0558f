"""What answers say beside their text (seeds, stop strings, token ids), and what the server says about requests."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest
from ninfer_cli.server.openai_chat import ChatEncoder
from ninfer_cli.server.settings import ServerSettings

from ninfer_core.client import Client
from ninfer_core.errors import InvalidRequestError
from ninfer_core.testing import Reply, Script, ScriptedEngine, Wait

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]


def test_a_drawn_seed_is_told_and_gives_the_same_answer_again(serve: Any) -> None:
    server = serve(Reply("text"))
    drawn = [server.post(CHAT, {"messages": USER}).json()["choices"][0]["seed"] for _ in range(3)]
    assert len(set(drawn)) == 3
    several = server.post(CHAT, {"messages": USER, "seed": 5, "n": 3}).json()["choices"]
    assert [choice["seed"] for choice in several] == [5, 6, 7]
    assert server.post(RAW, {"prompt": "hi", "seed": 9}).json()["choices"][0]["seed"] == 9
    last = server.lines(CHAT, {"messages": USER, "stream": True, "seed": 8})[-2]
    assert json.loads(last.removeprefix("data: "))["choices"][0]["seed"] == 8


def test_the_stop_string_that_matched_is_told_by_every_api_that_can(serve: Any) -> None:
    server = serve(Reply("one two three"))
    choice = server.post(CHAT, {"messages": USER, "stop": ["x", "two"]}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]) == ("stop", "two", "one ")
    assert "stop_reason" not in server.post(CHAT, {"messages": USER}).json()["choices"][0]
    assert server.post(RAW, {"prompt": "x", "stop": "two"}).json()["choices"][0]["stop_reason"] == "two"
    message = server.post("/v1/messages", {"messages": USER, "max_tokens": 99, "stop_sequences": ["two"]}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two")


def test_the_client_gets_seed_stop_string_and_token_ids(serve: Any) -> None:
    engine = ScriptedEngine(Reply("one two"))
    server = serve(engine)
    local = engine.generate("hi", thinking=False, stop=["tw"], logprobs=1, seed=3)
    with Client(server.url) as client:
        remote = client.generate("hi", thinking=False, stop=["tw"], logprobs=1, seed=3)
        drawn = client.generate("hi", thinking=False)
        raw = client.generate(prompt="hi", stop=["tw"], logprobs=1, seed=3)
    assert (remote.seed, remote.stop_sequence, remote.text) == (local.seed, local.stop_sequence, local.text)
    assert (raw.seed, raw.stop_sequence) == (3, "tw") and isinstance(drawn.seed, int)
    ids = [item.token_id for item in local.logprobs]
    assert ids and [item.token_id for item in remote.logprobs] == ids == [item.token_id for item in raw.logprobs]
    assert bytes(ids) == b"".join(item.bytes for item in local.logprobs), "one token per byte"


def test_vendor_clients_take_the_further_fields(serve: Any) -> None:
    server = serve(Reply("one two"))
    chat = openai.OpenAI(base_url=server.url + "/v1", api_key="x", _strict_response_validation=True)
    whole = chat.chat.completions.create(model="scripted", messages=USER, logprobs=True, top_logprobs=2, stop="two")
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
    text = chat.completions.create(model="scripted", prompt="hi", logprobs=1, stop="two")
    assert text.choices[0].logprobs and len(text.choices[0].logprobs.tokens or ()) >= 4


def test_one_client_may_have_so_many_requests(serve: Any) -> None:
    hold = Event()
    server = serve(
        ScriptedEngine(Script(["</think>", Wait(hold), "x"])), max_per_client=2, api_keys=("first", "second")
    )

    def post(key: str, path: str = CHAT, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return server.post(path, {"messages": USER, "max_tokens": 9, **more}, headers=headers)

    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(post, "first") for _ in range(2)]
        while server.state.fairness.in_flight < 2:
            pass
        refused = post("first")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert post("first", "/v1/messages").json()["error"]["type"] == "rate_limit_error"
        assert "limit for one client" in post("first", "/api/chat", stream=False).json()["error"]
        held.append(pool.submit(post, "second"))
        while server.state.fairness.in_flight < 3:
            pass
        hold.set()
        assert [item.result(10).status_code for item in held] == [200, 200, 200]
    assert post("first").status_code == 200
    with pytest.raises(InvalidRequestError, match="max_per_client"):
        ServerSettings(max_per_client=0)


def test_what_is_ignored_is_in_the_log(serve: Any, tmp_path: Path) -> None:
    server = serve("Hello!", request_log=str(tmp_path / "log"))
    server.post(CHAT, {"messages": USER, "metadata": {"a": "b"}, "frobnicate": 1})
    options = {"temperature": 0, "num_gpu": 99, "mirostat": 2}
    server.post("/api/chat", {"messages": USER, "stream": False, "options": options, "shift": True})
    server.post(CHAT, {"messages": USER})
    server.state.log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[0]["ignored"] == ["frobnicate", "metadata"]
    assert lines[1]["ignored"] == ["options.mirostat", "options.num_gpu", "shift"]
    assert "ignored" not in lines[2]


def test_what_a_prompt_without_turns_cannot_carry_is_refused(serve: Any) -> None:
    server = serve()
    for extra, name in (({"system": "x"}, "system"), ({"images": ["aGk="]}, "images")):
        answer = server.post("/api/generate", {"prompt": "a", "raw": True, **extra})
        assert answer.status_code == 400 and name in answer.json()["error"]
    refused = server.post(RAW, {"prompt": "a", "suffix": "b"}).json()["error"]
    assert refused["param"] == "suffix" and "<|fim_prefix|>" in refused["message"]


def test_a_fault_at_the_very_end_is_told_too(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take a stream that just stops for complete."""

    def fail(*_: Any) -> bytes:
        raise KeyError("a fault of ours")

    server = serve("Hello!")
    monkeypatch.setattr(ChatEncoder, "end", fail)
    lines = server.lines(CHAT, {"messages": USER, "stream": True})
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "fault of ours" not in lines[-1] and server.idle()
