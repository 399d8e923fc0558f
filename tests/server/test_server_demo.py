"""The whole way with the demo model: real weights behind a real socket, through each vendor's client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from ninfer_cli.server.app import build_app
from ninfer_cli.server.settings import ServerSettings

from ninfer_core.engine import Engine
from ninfer_core.store import demo_path
from ninfer_core.wire import _usage_of as usage_of
from tests.serving import serving

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[str, Engine]]:
    """The address of a server over the demo engine."""
    engine = Engine.load("demo", device="cpu", max_sequences=2, threads=1, host_cache_gb=0.05)
    with serving(build_app(engine, ServerSettings(slots=2), artifact=demo_path())) as port:
        yield f"http://127.0.0.1:{port}", engine
    engine.close()


def test_every_client_gets_the_same_answer(demo: tuple[str, Engine]) -> None:
    url, engine = demo
    chat = openai.OpenAI(base_url=url + "/v1", api_key="none")
    whole = chat.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=120)
    text = whole.choices[0].message.content
    assert text and "Paris" in text and whole.choices[0].finish_reason == "stop"
    streamed = chat.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=120, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    response = chat.responses.create(model="demo", input=QUESTION, temperature=0, max_output_tokens=120)
    assert response.output_text == text
    message = anthropic.Anthropic(base_url=url, api_key="none").messages.create(
        model="demo",
        messages=QUESTION,
        max_tokens=120,
        thinking={"type": "adaptive"},
        extra_body={"temperature": 0},
    )
    assert message.content[-1].text == text  # type: ignore[union-attr]
    line = ollama.Client(host=url).chat(model="demo", messages=QUESTION, options={"temperature": 0, "num_predict": 120})
    assert line.message.content == text
    assert whole.usage and whole.usage.prompt_tokens == line.prompt_eval_count == response.usage.input_tokens  # type: ignore[union-attr]
    assert whole.usage.completion_tokens == line.eval_count == message.usage.output_tokens
    end = time.monotonic() + 5
    while engine.stats()["running"] and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.stats()["running"] == 0


def test_the_same_seed_gives_the_same_text(demo: tuple[str, Engine]) -> None:
    url, _ = demo
    body = {"messages": QUESTION, "seed": 11, "temperature": 1.0, "max_tokens": 24, "n": 2}
    first, second = (httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json() for _ in range(2))
    texts = [[c["message"] for c in answer["choices"]] for answer in (first, second)]
    assert texts[0] == texts[1] and first["system_fingerprint"] == second["system_fingerprint"]


def test_a_client_that_leaves_frees_its_pages(demo: tuple[str, Engine]) -> None:
    url, engine = demo
    before = engine.stats()
    body = {"messages": QUESTION, "ignore_eos": True, "max_tokens": 3000, "stream": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        assert engine.stats()["running"] == 1
    end = time.monotonic() + 5
    while engine.stats()["running"] and time.monotonic() < end:
        time.sleep(0.01)
    after = engine.stats()
    assert after["running"] == 0 and after["slots_free"] == before["slots_free"]


def test_overflow_of_the_real_window(demo: tuple[str, Engine]) -> None:
    url, engine = demo
    long = [{"role": "user", "content": "Paris is a city. " * 4000}]
    error = httpx.post(url + "/v1/chat/completions", json={"messages": long}, timeout=60).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["n_ctx"] == engine.context_length
    entry = httpx.get(url + "/v1/models").json()["data"][0]
    assert entry["context_length"] == engine.context_length
    tag = httpx.get(url + "/api/tags").json()["models"][0]
    assert tag["size"] > 1_000_000 and len(tag["digest"]) == 64


def test_a_response_format_is_enforced(demo: tuple[str, Engine]) -> None:
    url, _ = demo
    body = {"messages": QUESTION, "response_format": {"type": "json_object"}, "max_tokens": 200, "temperature": 0}
    answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)


def test_constraints_are_enforced_or_refused_and_never_ignored(demo: tuple[str, Engine]) -> None:
    url, _ = demo
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }

    def post(**fields: Any) -> httpx.Response:
        body = {"messages": QUESTION, "max_tokens": 60, "temperature": 0, "reasoning_effort": "none", **fields}
        return httpx.post(url + "/v1/chat/completions", json=body, timeout=120)

    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for fields in ({"response_format": named}, {"guided_json": schema}):
        answer = json.loads(post(**fields).json()["choices"][0]["message"]["content"])
        assert list(answer) == ["city"] and isinstance(answer["city"], str)
    assert post(guided_choice=["left", "right"]).json()["choices"][0]["message"]["content"] in ("left", "right")
    unenforceable = {**schema, "not": {"patternProperties": {"^x": {"type": "string"}}}}
    refused = post(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": unenforceable}})
    assert refused.status_code == 400 and "'not'" in refused.json()["error"]["message"]
    function = {"name": "weather", "strict": True, "parameters": schema}
    called = post(tools=[{"type": "function", "function": function}], tool_choice="required", parallel_tool_calls=False)
    choice = called.json()["choices"][0]
    call = choice["message"]["tool_calls"][0]["function"]
    assert choice["finish_reason"] == "tool_calls" and call["name"] == "weather"
    assert list(json.loads(call["arguments"])) == ["city"]


def test_a_gap_is_filled_between_prompt_and_suffix(demo: tuple[str, Engine]) -> None:
    url, engine = demo
    marks = [engine.tokenizer.special[f"<|fim_{name}|>"] for name in ("prefix", "suffix", "middle")]
    before, after = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))<|fim_middle|>"
    expected = 3 + len(engine.tokenizer.encode(before)) + len(engine.tokenizer.encode(after, allow_special=False))
    body = {"prompt": before, "suffix": after, "max_tokens": 4, "temperature": 0, "echo": True}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == expected and answer["choices"][0]["text"].startswith(before)
    ids = engine.tokenizer.encode(before)
    same = httpx.post(url + "/v1/completions", json={**body, "prompt": ids}, timeout=60).json()
    assert same["choices"][0]["text"] == answer["choices"][0]["text"]
    options = {"temperature": 0, "num_predict": 4}
    line = {"model": "demo", "prompt": before, "suffix": after, "stream": False, "options": options}
    filled = httpx.post(url + "/api/generate", json=line, timeout=60).json()
    assert filled["prompt_eval_count"] == expected and filled["response"] == answer["choices"][0]["text"][len(before) :]
    shown = httpx.post(url + "/api/show", json={"model": "demo"}, timeout=60).json()
    assert "insert" in shown["capabilities"] and ".Suffix" in shown["template"] and len(set(marks)) == 3


def test_gauges_of_the_prefix_cache(demo: tuple[str, Engine]) -> None:
    url, engine = demo
    body = {"messages": [{"role": "user", "content": "Count. " * 60}], "max_tokens": 2, "temperature": 0}
    usage = [httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()["usage"] for _ in range(2)]
    cached = [found["prompt_tokens_details"]["cached_tokens"] for found in usage]
    assert usage[1]["prompt_tokens_details"]["known_tokens"] >= cached[1]
    assert usage_of(usage[1]).known_tokens == usage[1]["prompt_tokens_details"]["known_tokens"]
    found = {}
    for line in httpx.get(url + "/metrics").text.splitlines():
        if line.startswith("ninfer:"):
            name, _, value = line.partition(" ")
            found[name.partition("{")[0]] = float(value)
    stats = engine.stats()
    assert cached[1] > 0 and found["ninfer:prefix_cache_hits_total"] >= cached[1]
    assert found["ninfer:prefix_cache_checkpoints"] == stats["checkpoints"] > 0
    assert found["ninfer:kv_pages"] == stats["pages_total"] and found["ninfer:kv_pages_cached"] > 0
    assert found["ninfer:prefix_cache_host_bytes_limit"] == stats["host_bytes_total"] > 40e6
    assert found["ninfer:prefix_cache_host_restored"] == stats["host_restored"]
    assert found["ninfer:kv_pages_in_use"] == 0 and found["ninfer:prefix_cache_lookup_hits"] >= 1
