"""One loaded model at a time: switching in order, keep-alive, limits on loading, names, and the store over HTTP."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from ninfer_cli.server.durations import parse_duration

from ninfer_core import store
from ninfer_core.errors import InvalidRequestError
from tests import serving

from .conftest import Running, ScriptedModels

USER: list[Any] = [{"role": "user", "content": "hi"}]


def ask(server: Running, model: str | None, text: str = "hi", **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **more}
    answer = server.post("/v1/chat/completions", body if model is None else {**body, "model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


wait_for = partial(serving.wait_for, seconds=20.0)


def test_a_request_for_another_model_switches(start: Any, models: ScriptedModels) -> None:
    server = start()
    assert text_of(ask(server, "alpha")) == text_of(ask(server, None)) == "alpha"
    answer = ask(server, "beta")
    assert (text_of(answer), answer["model"]) == ("beta", "beta")
    assert models.events == ["close alpha", "load beta"], "the old one is closed before the new one is loaded"
    assert text_of(ask(server, None)) == "beta", "without a name the loaded model answers"
    assert text_of(ask(server, "claude-x")) == "beta" and text_of(ask(server, "BETA:latest")) == "beta"
    refused = server.post("/v1/chat/completions", {"messages": USER, "model": "delta"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert models.events == ["close alpha", "load beta"]


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 50}),
    ("/api/chat", {"messages": USER}),
    ("/api/generate", {"prompt": "hi"}),
]
NO_TOOLS = ("/v1/completions", "/api/generate")


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_every_api_switches(start: Any, models: ScriptedModels, path: str, body: dict[str, Any], stream: bool) -> None:
    server = start()
    answer = server.post(path, {**body, "model": "beta", "stream": stream})
    assert answer.status_code == 200 and "beta" in answer.text
    assert models.events == ["close alpha", "load beta"]
    assert wait_for(lambda: server.state.host.leases == 0)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_begins_before_its_model_is_loaded(
    start: Any, models: ScriptedModels, path: str, body: dict[str, Any]
) -> None:
    server = start(heartbeat=0.05)
    models.gate = threading.Event()
    with server.http.stream("POST", path, json={**body, "model": "beta", "stream": True}) as answer:
        assert answer.status_code == 200
        read = (line for line in answer.iter_lines() if line)
        early = [next(read) for _ in range(6)]
        assert models.events[-1] == "load beta" and server.state.host.loading == "beta"
        models.gate.set()
        lines = [*early, *read]
    assert len(lines) > 6
    if path.startswith("/api"):
        assert all(json.loads(line)["model"] == "beta" for line in lines) and json.loads(lines[-1])["done"] is True
        assert json.loads(lines[-1])["load_duration"] > 2e8
    elif path == "/v1/messages":
        assert set(early) == {"event: ping", 'data: {"type":"ping"}'} and "event: message_stop" in lines
    else:
        assert all(line.startswith(":") for line in early)
        assert lines[-1] == "data: [DONE]" or '"type":"response.completed"' in lines[-1]


@pytest.mark.parametrize(("path", "body"), [item for item in BODIES if item[0] not in NO_TOOLS])
def test_a_stream_that_begins_early_tells_of_tools_left_out(
    start: Any, models: ScriptedModels, path: str, body: dict[str, Any]
) -> None:
    """The header goes out before the model is there, so it may not depend on anything that needs it."""
    server = start()
    tools = [{"type": "web_search_20250305", "name": "web"}, {"type": {"odd": 1}}]
    asked = {**body, "stream": True, "tools": tools}
    for name in ("alpha", "beta"):
        with server.http.stream("POST", path, json={**asked, "model": name}) as answer:
            assert answer.headers["x-ninfer-warning"] == "tools left out: web_search_20250305, {'odd': 1}"
            answer.read()


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_tells_that_its_model_could_not_be_loaded(
    start: Any, models: ScriptedModels, path: str, body: dict[str, Any]
) -> None:
    server = start()
    models.broken.add("beta")
    lines = server.lines(path, {**body, "model": "beta", "stream": True})
    last = json.loads(lines[-1].removeprefix("data: "))
    assert "beta is damaged" in lines[-1] and "[DONE]" not in lines[-1]
    if path == "/v1/responses":
        assert lines[-2] == "event: response.failed" and last["response"]["error"]["code"] == "server_error"
    elif path == "/v1/messages":
        assert lines[-2] == "event: error" and last["error"]["type"] == "api_error"
    else:
        assert "error" in last
    assert wait_for(lambda: server.state.host.leases == 0)
    assert text_of(ask(server, "alpha")) == "alpha"


def test_a_wrong_request_is_told_in_a_stream_that_has_begun(start: Any) -> None:
    server = start()
    body = {"messages": USER, "model": "beta", "stream": True, "stop": ["x"] * 40}
    lines = server.lines("/v1/chat/completions", body)
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["param"] == "stop"
    assert server.post("/v1/chat/completions", {**body, "model": "beta"}).status_code == 400, "it is loaded now"


def test_a_stream_that_is_left_while_it_waits(start: Any, models: ScriptedModels) -> None:
    server = start()
    with ThreadPoolExecutor(4) as pool:
        held = pool.submit(ask, server, "alpha", "hold")
        assert wait_for(lambda: server.state.host.leases == 1)
        body = {"messages": USER, "model": "beta", "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert next(answer.iter_lines()).startswith(":")
        assert wait_for(lambda: not server.state.host._queue)
        models.hold.set()
        held.result(10)
    assert wait_for(lambda: server.state.host.leases == 0) and models.events == []


def test_metrics_carry_the_name_of_the_model_that_answered(start: Any) -> None:
    server = start(metrics_compat=frozenset({"vllm"}))
    for name in ("alpha", "beta", "beta"):
        ask(server, name)
    text = server.http.get("/metrics").text
    for model, count in (("alpha", 1), ("beta", 2)):
        assert f'ninfer:request_success_total{{finished_reason="stop",model_name="{model}"}} {count}.0' in text
        assert f'vllm:request_success_total{{finished_reason="stop",model_name="{model}"}} {count}.0' in text
    assert 'ninfer:num_requests_running{model_name="beta"} 0.0' in text
    assert 'num_requests_running{model_name="alpha"}' not in text, "a gauge tells about what is loaded"


def test_tokenizing_for_another_model_than_the_loaded_one(start: Any, models: ScriptedModels) -> None:
    server = start()
    for path, body in (
        ("/tokenize", {"content": "hi"}),
        ("/detokenize", {"tokens": [1]}),
        ("/apply-template", {"messages": USER}),
    ):
        assert server.post(path, {**body, "model": "alpha"}).status_code == 200
        assert server.post(path, {**body, "model": "delta"}).status_code == 404
    assert not models.events
    assert server.post("/tokenize", {"content": "hi", "model": "beta"}).status_code == 200
    assert models.events == ["close alpha", "load beta"], "as any other request that names a model"


def test_what_waits_goes_first_and_nobody_overtakes(start: Any, models: ScriptedModels) -> None:
    server = start()
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, server, "alpha", "hold")
        assert wait_for(lambda: server.state.host.leases == 1)
        switch = pool.submit(ask, server, "beta")
        assert wait_for(lambda: len(server.state.host._queue) == 1)
        late = pool.submit(ask, server, "alpha")
        assert wait_for(lambda: len(server.state.host._queue) == 2)
        time.sleep(0.1)
        assert models.events == [] and not (switch.done() or late.done())
        models.hold.set()
        answers = [text_of(item.result(20)) for item in (first, switch, late)]
    assert answers == ["alpha held", "beta", "alpha"]
    assert models.events == ["close alpha", "load beta", "close beta", "load alpha"]


def test_requests_for_one_model_share_a_switch(start: Any, models: ScriptedModels) -> None:
    server = start()
    models.slow["beta"] = 0.3
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: text_of(ask(server, "beta")), range(8)))
    assert answers == ["beta"] * 8 and models.events == ["close alpha", "load beta"]


def test_a_model_that_cannot_be_loaded(start: Any, models: ScriptedModels) -> None:
    server = start()
    models.broken.add("beta")
    refused = server.post("/v1/chat/completions", {"messages": USER, "model": "beta"})
    assert refused.status_code == 500 and "damaged" in refused.json()["error"]["message"]
    assert server.http.get("/health").json() == {"status": "ok"}, "the next request loads what it needs"
    assert text_of(ask(server, "alpha")) == "alpha"
    models.broken.clear()
    assert text_of(ask(server, "beta")) == "beta"


def test_an_engine_that_failed_is_loaded_again(start: Any, models: ScriptedModels) -> None:
    server = start()
    server.state.host.engine.state = "failed"
    assert server.http.get("/health").status_code == 503
    assert text_of(ask(server, "alpha")) == "alpha" and models.events == ["close alpha", "load alpha"]


def test_loading_that_takes_too_long(start: Any, models: ScriptedModels) -> None:
    server = start(load_timeout=0.3)
    models.gate = threading.Event()
    refused = server.post("/v1/messages", {"messages": USER, "max_tokens": 9, "model": "beta"})
    assert refused.status_code == 529 and "--load-timeout" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "10"
    health = server.http.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "loading"
    models.gate.set()
    assert wait_for(lambda: server.state.host.loading is None)
    assert text_of(ask(server, "beta")) == "beta" and models.events == ["close alpha", "load beta"]


def test_a_full_queue(start: Any, models: ScriptedModels) -> None:
    server = start(slots=1, max_queue=1)
    with ThreadPoolExecutor(8) as pool:
        held = pool.submit(ask, server, "alpha", "hold")
        assert wait_for(lambda: server.state.host.leases == 1)
        waiting = [pool.submit(ask, server, "beta") for _ in range(2)]
        assert wait_for(lambda: len(server.state.host._queue) == 2)
        for stream in (False, True):
            full = server.post("/api/chat", {"model": "beta", "messages": USER, "stream": stream})
            assert full.status_code == 503 and "which is the limit" in full.json()["error"]
            assert int(full.headers["retry-after"]) >= 1
        models.hold.set()
        assert [text_of(item.result(60)) for item in (held, *waiting)] == ["alpha held", "beta", "beta"]


def test_a_limit_on_waiting(start: Any, models: ScriptedModels) -> None:
    server = start(queue_timeout=0.4)
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(ask, server, "alpha", "hold")
        assert wait_for(lambda: server.state.host.leases == 1)
        body = {"model": "beta", "messages": USER}
        assert server.post("/api/chat", {**body, "stream": False}).status_code == 503
        late = server.post("/api/chat", {**body, "stream": True})
        assert late.status_code == 200 and "which is the limit" in json.loads(late.text.splitlines()[-1])["error"]
        models.hold.set()
        held.result(60)
    assert wait_for(lambda: not server.state.host.leases) and not server.state.host._queue
    assert text_of(ask(server, "alpha")) == "alpha" and models.events == []


def test_a_client_that_leaves_while_it_waits(start: Any, models: ScriptedModels) -> None:
    server = start()
    with ThreadPoolExecutor(4) as pool:
        held = pool.submit(ask, server, "alpha", "hold")
        assert wait_for(lambda: server.state.host.leases == 1)
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/chat/completions", {"messages": USER, "model": "beta"}, timeout=0.3)
        assert wait_for(lambda: not server.state.host._queue)
        models.hold.set()
        held.result(10)
    assert text_of(ask(server, "alpha")) == "alpha" and models.events == [], "nothing was switched for nobody"


# --- keep-alive -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        (5, 5),
        (-1, -1),
        ("5m", 300),
        ("0", 0),
        ("0s", 0),
        ("-1", -1),
        ("-1m", -60),
        ("1h30m", 5400),
        ("300ms", 0.3),
        ("1.5s", 1.5),
        ("10", 10),
    ],
)
def test_the_grammar_of_keep_alive(value: Any, seconds: float) -> None:
    assert parse_duration(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "5 m", "m", "5x", "--1", "1m-1s", "nan"])
def test_what_is_no_keep_alive(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="keep_alive"):
        parse_duration(value)


def ps(server: Running) -> list[dict[str, Any]]:
    return list(server.http.get("/api/ps").json()["models"])


def test_keep_alive_unloads_and_the_next_request_loads(start: Any, models: ScriptedModels) -> None:
    server = start()
    body = {"model": "alpha", "messages": USER, "stream": False}
    assert server.post("/api/chat", {**body, "keep_alive": 0}).json()["done_reason"] == "stop"
    assert wait_for(lambda: models.events == ["close alpha"]) and wait_for(lambda: ps(server) == [])
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/props").json()["is_sleeping"] is True
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "alpha", "it can be asked for"
    last = server.post("/api/chat", {**body, "keep_alive": "90s"}).json()
    assert models.events == ["close alpha", "load alpha"] and last["load_duration"] > 1000
    assert wait_for(lambda: not server.state.host.leases), "the time starts when the request has left, after its answer"
    (entry,) = ps(server)
    assert 0 < datetime.fromisoformat(entry["expires_at"]).timestamp() - time.time() <= 90
    server.post("/api/chat", {**body, "keep_alive": "0.1s"})
    assert wait_for(lambda: len(models.events) == 3), "the last request's counts"
    server.post("/api/chat", {**body, "keep_alive": "90s"})
    assert wait_for(lambda: server.state.host._timer is not None)
    earlier = server.state.host._timer
    server.post("/api/chat", {**body, "keep_alive": -1})
    assert earlier.cancelled() and server.state.host._timer is None
    assert models.events == ["close alpha", "load alpha", "close alpha", "load alpha"]
    (entry,) = ps(server)
    assert datetime.fromisoformat(entry["expires_at"]).timestamp() - time.time() > 10**8
    wrong = server.post("/api/chat", {**body, "keep_alive": "soon"})
    assert wrong.status_code == 400 and "keep_alive" in wrong.json()["error"]


def test_the_servers_own_keep_alive(start: Any, models: ScriptedModels) -> None:
    server = start(unload_after=0.3)
    ask(server, "alpha")
    assert wait_for(lambda: models.events == ["close alpha"])
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(ask, server, "alpha", "hold")
        assert wait_for(lambda: server.state.host.leases == 1)
        models.events.clear()
        time.sleep(0.6)
        assert not models.events, "a model is never unloaded under a request"
        models.hold.set()
        held.result(10)
    assert wait_for(lambda: models.events == ["close alpha"])


def test_empty_requests_load_and_unload(start: Any, models: ScriptedModels) -> None:
    server = start()
    assert server.post("/api/generate", {"model": "beta", "stream": False}).json()["done_reason"] == "load"
    assert models.events == ["close alpha", "load beta"] and ps(server)[0]["name"] == "beta"
    models.events.clear()
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(ask, server, "beta", "hold")
        assert wait_for(lambda: server.state.host.leases == 1)
        done = server.post("/api/chat", {"model": "beta", "messages": [], "keep_alive": 0, "stream": False}).json()
        assert done["done_reason"] == "unload" and not models.events
        models.hold.set()
        assert text_of(held.result(10)) == "beta held"
    assert wait_for(lambda: models.events == ["close beta"])
    missing = server.post("/api/generate", {"model": "delta", "keep_alive": 0})
    assert missing.status_code == 404
    other = server.post("/api/generate", {"model": "gamma", "keep_alive": 0, "stream": False})
    assert other.json()["done_reason"] == "unload" and models.events == ["close beta"]


# --- lists and the store ----------------------------------------------------------------------------------------------


def test_lists_name_everything_that_can_be_asked_for(start: Any, models: ScriptedModels) -> None:
    server = start()
    names = [item["name"] for item in server.http.get("/api/tags").json()["models"]]
    assert names[0] == "alpha" and {"beta", "gamma", "demo"} <= set(names)
    listed = {item["id"]: item for item in server.http.get("/v1/models").json()["data"]}
    assert set(names) == set(listed) and listed["beta"]["context_length"] == 777
    anthropic = server.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [item["id"] for item in anthropic["data"]] == list(listed)
    assert server.http.get("/v1/models/gamma").json()["id"] == "gamma"
    shown = server.post("/api/show", {"model": "gamma"}).json()
    assert "num_ctx 777" in shown["parameters"] and "tools" in shown["template"]
    assert server.post("/api/show", {"model": "delta"}).status_code == 404
    (entry,) = ps(server)
    assert (entry["name"], entry["running"], entry["waiting"]) == ("alpha", 0, 0)
    assert models.events == [], "looking loads nothing"


def test_copy_and_delete(start: Any, models: ScriptedModels, tmp_path: Path) -> None:
    server = start()

    def delete(name: str) -> httpx.Response:
        return server.http.request("DELETE", "/api/delete", json={"model": name})

    assert server.post("/api/copy", {"source": "beta", "destination": "second"}).status_code == 200
    assert store.describe("second").alias_of == "beta"
    assert text_of(ask(server, "second")) == "beta" and ask(server, "beta")["model"] == "beta"
    assert models.events == ["close alpha", "load beta"], "a further name is the same model"
    assert server.post("/api/copy", {"source": "delta", "destination": "x"}).status_code == 404
    assert server.post("/api/copy", {"source": "beta", "destination": "alpha"}).status_code == 400
    assert delete("second").status_code == 200 and "second" not in store.aliases()
    assert delete("gamma").status_code == 200 and not (tmp_path / "models/gamma").exists()
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(ask, server, "beta", "hold")
        assert wait_for(lambda: server.state.host.leases == 1)
        assert delete("beta").status_code == 409
        models.hold.set()
        held.result(10)
    assert wait_for(lambda: not server.state.host.leases)
    assert delete("beta").status_code == 200 and not (tmp_path / "models/beta").exists()
    assert models.events[-1] == "close beta"
    assert delete("beta").status_code == 404 and delete("demo").status_code == 400
    assert text_of(ask(server, "alpha")) == "alpha"


def test_a_fixed_engine_is_not_switched(serve: Any) -> None:
    server = serve()
    name = server.engine.served_names[0]
    assert not server.state.host.switches
    body = {"model": name, "messages": [], "stream": False}
    assert server.post("/api/chat", {**body, "keep_alive": 0}).json()["done_reason"] == "unload"
    assert server.post("/api/chat", body).json()["done_reason"] == "load"
    assert server.post("/api/chat", {**body, "messages": USER}).status_code == 200
    assert server.post("/api/pull", {"model": "qwen3.6:27b"}).status_code == 400
