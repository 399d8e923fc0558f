"""Presets over HTTP: names with a system message and parameters, in every API, beside what a request says itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ninfer_core.testing import Reply, Script, ScriptedEngine
from ninfer_core.types import Request

from .conftest import Running

USER: list[Any] = [{"role": "user", "content": "hi"}]
PRESETS = """
[Terse]
model = "scripted"
system = "Be terse."
think = false
temperature = 0.25
seed = 7
max_tokens = 40
stop = ["END", "FIN"]

[deep]
model = "scripted"
thinking_budget = 9

[orphan]
model = "nobody"
"""


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    path = tmp_path / "presets.toml"
    path.write_text(PRESETS)
    return path


@pytest.fixture
def server(serve: Callable[..., Running], presets: Path) -> Running:
    return serve(ScriptedEngine(Script(Reply("Hello!", reasoning="hm"), burst=64)), presets=presets)


def shape(request: Request) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in request.messages]


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 40}),
    ("/api/chat", {"messages": USER}),
    ("/api/generate", {"prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_preset_fills_what_a_request_leaves_open(
    server: Running, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = server.post(path, {**body, "model": "terse", "stream": stream})
    assert answer.status_code == 200 and '"model":"terse"' in answer.text and "Hello!" in answer.text
    request = server.last
    assert shape(request) == [("system", "Be terse."), ("user", "hi")]
    assert (request.sampling.temperature, request.sampling.seed, request.max_tokens) == (0.25, 7, 40)
    assert request.stop == ("END", "FIN") and request.thinking is False


def test_what_a_request_says_itself_counts(server: Running) -> None:
    body = {
        "model": "TERSE:latest",
        "temperature": 1.5,
        "seed": 3,
        "max_tokens": 12,
        "stop": "Z",
        "reasoning_effort": "low",
    }
    messages = [{"role": "developer", "content": "Be long."}, *USER]
    assert server.post("/v1/chat/completions", {**body, "messages": messages}).status_code == 200
    request = server.last
    assert shape(request)[0][1] == "Be long." and len(request.messages) == 2
    assert (request.sampling.temperature, request.sampling.seed, request.max_tokens) == (1.5, 3, 12)
    assert request.stop == ("Z",) and request.thinking is True and request.thinking_budget == 4096


def test_choices_get_seeds_of_their_own(server: Running) -> None:
    assert server.post("/v1/chat/completions", {"model": "terse", "messages": USER, "n": 3}).status_code == 200
    assert sorted(request.sampling.seed for request in server.engine.requests) == [7, 8, 9]


def test_a_prompt_without_turns_gets_the_parameters_alone(server: Running) -> None:
    assert server.post("/v1/completions", {"model": "terse", "prompt": ["a", "b"], "n": 2}).status_code == 200
    seeds = [(request.prompt, request.sampling.seed) for request in server.engine.requests]
    assert sorted(seeds) == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]
    assert all(not request.messages and request.thinking is None for request in server.engine.requests)


def test_a_limit_on_thinking_alone_leaves_it_on(server: Running) -> None:
    server.post("/api/chat", {"model": "deep", "messages": USER, "stream": False})
    assert server.last.thinking is None and server.last.thinking_budget == 9
    server.post("/api/chat", {"model": "deep", "messages": USER, "stream": False, "think": False})
    assert server.last.thinking is False and server.last.thinking_budget is None


def test_counts_agree_with_usage(server: Running) -> None:
    body = {"model": "terse", "messages": USER}
    counted = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    used = server.post("/v1/messages", {**body, "max_tokens": 5}).json()["usage"]
    assert counted == used["input_tokens"] + used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
    tokens = server.post("/v1/responses/input_tokens", {"model": "terse", "input": "hi"}).json()["input_tokens"]
    assert tokens == counted == server.post("/tokenize", {**body, "enable_thinking": False}).json()["count"]
    assert "Be terse." in server.post("/apply-template", body).json()["prompt"]
    assert counted > server.post("/v1/messages/count_tokens", {"messages": USER}).json()["input_tokens"]


def test_presets_are_listed_and_shown_with_their_model(server: Running) -> None:
    ids = [item["id"] for item in server.http.get("/v1/models").json()["data"]]
    assert "terse" in ids and "deep" in ids and "orphan" not in ids
    tag = next(tag for tag in server.http.get("/api/tags").json()["models"] if tag["name"] == "terse")
    assert tag["details"]["parent_model"] == "scripted"
    shown = server.post("/api/show", {"model": "terse"}).json()
    assert shown["system"] == "Be terse."
    lines = shown["parameters"].splitlines()
    assert {"temperature 0.25", "num_predict 40", 'stop "END"', 'stop "FIN"'} < set(lines)
    assert all(len(line.split(" ", 1)) == 2 for line in lines)
    assert 'SYSTEM "Be terse."' in shown["modelfile"]
    assert "system" not in server.post("/api/show", {"model": "scripted"}).json()


def test_presets_are_not_managed_over_http(server: Running) -> None:
    refused = server.http.request("DELETE", "/api/delete", json={"model": "terse"})
    assert refused.status_code == 400 and "is a preset" in refused.json()["error"]
    assert server.post("/api/copy", {"source": "terse", "destination": "x"}).status_code == 400
    assert server.post("/api/pull", {"model": "terse", "stream": False}).json() == {"status": "success"}
    missing = server.post("/v1/chat/completions", {"model": "orphan", "messages": USER})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_the_file_is_read_anew_when_it_changes(server: Running, presets: Path) -> None:
    body = {"model": "gpt-mine", "messages": USER}
    server.post("/v1/chat/completions", body)
    assert shape(server.last) == [("user", "hi")], "a foreign name is the loaded model"
    presets.write_text('[gpt-mine]\nmodel = "scripted"\nsystem = "Mine."\n')
    os.utime(presets, ns=(1, 1))
    server.post("/v1/chat/completions", body)
    assert shape(server.last)[0] == ("system", "Mine.")
    presets.write_text("[gpt-mine]\nmodel = 5\n")
    os.utime(presets, ns=(2, 2))
    server.post("/v1/chat/completions", body)
    assert shape(server.last)[0] == ("system", "Mine."), "a broken file changes nothing"
    presets.unlink()
    server.post("/v1/chat/completions", body)
    assert shape(server.last) == [("user", "hi")]


def test_a_preset_of_another_model_switches(start: Any, models: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[helper]\nmodel = "beta"\nsystem = "Help."\n')
    server = start(presets=path)
    answer = server.post("/v1/chat/completions", {"model": "helper", "messages": USER, "stream": True})
    assert answer.status_code == 200 and '"model":"helper"' in answer.text
    assert models.events == ["close alpha", "load beta"]
    request = server.state.engine.requests[-1]
    assert shape(request) == [("system", "Help."), ("user", "hi")]
    done = server.post("/api/generate", {"model": "helper", "keep_alive": 0, "stream": False}).json()
    assert done["done_reason"] == "unload"
