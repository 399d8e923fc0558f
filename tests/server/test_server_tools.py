"""Metrics, health, the llama.cpp-style endpoints, discovery by editors, the published description."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import datetime
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ninfer_core.testing import End, Reply, Script, ScriptedEngine, Tokens

USER: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
VLLM = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
]
LLAMACPP = [
    "prompt_tokens_total",
    "prompt_seconds_total",
    "prompt_tokens_seconds",
    "tokens_predicted_total",
    "tokens_predicted_seconds_total",
    "predicted_tokens_seconds",
    "requests_processing",
    "requests_deferred",
    "n_tokens_max",
    "n_decode_total",
    "n_busy_slots_per_decode",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
]


def samples(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_metrics_and_their_aliases(serve: Any) -> None:
    server = serve(Script(["x</think>", Tokens("a", "b", drafted=3)]), metrics_compat=frozenset({"vllm", "llamacpp"}))
    usage = [server.post(CHAT, {"messages": USER}).json()["usage"] for _ in range(2)]
    server.lines(CHAT, {"messages": USER, "stream": True})
    server.post(CHAT, {"messages": []})
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.text)
    missing = [f"vllm:{name}" for name in VLLM if f"vllm:{name}" not in found]
    missing += [f"llamacpp:{name}" for name in LLAMACPP if f"llamacpp:{name}" not in found]
    assert not missing, missing
    prompt, made = usage[0]["prompt_tokens"], usage[0]["completion_tokens"]
    for prefix in ("ninfer:", "vllm:", "llamacpp:"):
        assert found[f"{prefix}prompt_tokens_total"] == 3 * prompt
    assert found["ninfer:generation_tokens_total"] == found["llamacpp:tokens_predicted_total"] == 3 * made
    assert found["ninfer:request_success_total"] == found["vllm:request_success_total"] == 3
    assert found["ninfer:accepted_tokens_total"] == 3 and found["ninfer:draft_tokens_total"] == 9
    assert found["vllm:time_to_first_token_seconds_count"] == 3 == found["vllm:request_prompt_tokens_count"]
    assert found["llamacpp:n_tokens_max"] == prompt + made
    assert 'ninfer:http_requests_total{path="/v1/chat/completions",status="400"} 1.0' in answer.text


def test_aliases_are_off_by_default_and_paths_stay_few(serve: Any) -> None:
    server = serve()
    for i in range(5):
        server.http.get(f"/v1/models/absent-{i}")
        server.http.get(f"/nothing-{i}")
    text = server.http.get("/metrics").text
    assert "vllm:" not in text and "llamacpp:" not in text and "absent-" not in text and "nothing-" not in text


def test_tokenize_and_back(serve: Any) -> None:
    server = serve()
    answer = server.post("/tokenize", {"content": "Grüße<|im_end|>", "with_pieces": True}).json()
    assert answer["count"] == len(answer["tokens"]) == 8
    assert answer["tokens"][2] == {"id": answer["tokens"][2]["id"], "piece": [0xC3]}
    ids = server.post("/tokenize", {"content": "Grüße<|im_end|>"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["content"] == "Grüße<|im_end|>"
    for fields in ({}, {"enable_thinking": False}, {"thinking_budget": 0}, {"reasoning_effort": "none"}):
        counted = server.post("/tokenize", {"messages": USER, **fields}).json()["count"]
        assert counted == server.post(CHAT, {"messages": USER, **fields}).json()["usage"]["prompt_tokens"]
    prompt = server.post("/apply-template", {"messages": USER, "enable_thinking": False}).json()["prompt"]
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert server.post("/tokenize", {}).status_code == 400


def test_discovery_by_editors(serve: Any) -> None:
    server = serve()
    for path in ("/", "/api/version", "/api/tags", "/health"):
        head = server.http.head(path)
        assert head.status_code == 200 and head.content == b""
    assert "Ollama is running" in server.http.get("/").text
    version = server.http.get("/api/version").json()["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)
    for body in ({"model": "scripted"}, {"name": "scripted"}, {"model": "Scripted:latest", "verbose": True}):
        shown = server.post("/api/show", body).json()
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == 32768
        keys = [key for key in shown["model_info"] if "context_length" in key]
        assert len(keys) == 1, "one client takes the first key with that word in it"
        assert all(len(line.split()) == 2 for line in shown["parameters"].splitlines())
        assert "num_ctx 32768" in shown["parameters"] and ".Suffix" not in shown["template"]
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
    tag = server.http.get("/api/tags").json()["models"][0]
    assert {"name", "model", "size", "digest", "modified_at", "details", "capabilities"} <= set(tag)
    loaded = server.http.get("/api/ps").json()["models"][0]
    assert datetime.fromisoformat(loaded["expires_at"]) > datetime.fromisoformat(tag["modified_at"])
    assert loaded["context_length"] == 32768
    entry = server.http.get("/v1/models").json()["data"][0]
    assert entry["max_model_len"] == entry["context_length"] == entry["meta"]["n_ctx_train"] == 32768
    page = server.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert page["first_id"] == page["last_id"] == "scripted" and page["has_more"] is False
    assert server.http.get("/v1/models/absent", headers={"anthropic-version": "x"}).json()["type"] == "error"


def test_model_names_with_colons_slashes_and_escapes(serve: Any) -> None:
    engine = ScriptedEngine("x", name="qwen3.6:27b", aliases=("my/alias",))
    server = serve(engine)
    for name in ("qwen3.6:27b", "qwen3.6%3A27b", "QWEN3.6:27B", "my/alias", "my%2Falias", "Qwen/Qwen3.6-27B"):
        assert server.http.get(f"/v1/models/{name}").status_code == 200, name
    for name in ("qwen3.6:27b", "qwen3.6-27b", "Qwen/Qwen3.6-27B", "qwen3.6:27b:latest"):
        assert server.post(CHAT, {"messages": USER, "model": name}).json()["model"] == name
    assert server.post(CHAT, {"messages": USER, "model": "qwen3.6:35b"}).status_code == 404
    tag = server.http.get("/api/tags").json()["models"][0]
    assert tag["name"] == "qwen3.6:27b" and tag["details"]["parameter_size"] == "27B"


def test_copy_delete_and_pull(serve: Any) -> None:
    server = serve(ScriptedEngine("Hello!"))
    assert server.post("/api/copy", {"source": "scripted", "destination": "mine"}).status_code == 200
    answer = server.post("/api/chat", {"model": "mine", "messages": USER, "stream": False}).json()
    assert answer["model"] == "mine" and answer["message"]["content"] == "Hello!"
    assert "mine" in [model["name"] for model in server.http.get("/api/tags").json()["models"]]
    assert server.post("/api/copy", {"source": "absent", "destination": "x"}).status_code == 404
    assert server.post("/api/copy", {"source": "scripted", "destination": " "}).status_code == 400
    removed = server.http.request("DELETE", "/api/delete", json={"model": "mine"})
    assert removed.status_code == 200
    assert server.post("/api/show", {"model": "mine"}).status_code == 404
    loaded = server.http.request("DELETE", "/api/delete", json={"model": "scripted"})
    assert loaded.status_code == 400 and "loaded" in loaded.json()["error"]
    assert server.http.request("DELETE", "/api/delete", json={"model": "absent"}).status_code == 404
    lines = [json.loads(line) for line in server.lines("/api/pull", {"model": "scripted"})]
    assert lines[-1] == {"status": "success"}
    refused = server.post("/api/pull", {"model": "absent"})
    assert refused.status_code == 400 and "ninfer pull" in refused.json()["error"]
    assert server.post("/v1/embeddings", {"input": "x"}).status_code == 400


def test_properties_and_slots(serve: Any) -> None:
    server = serve()
    props = server.http.get("/props").json()
    assert (
        props["n_ctx"] == 32768 and props["modalities"]["vision"] is False and "<|im_start|>" in props["chat_template"]
    )
    assert len(server.http.get("/slots").json()) == props["total_slots"]
    assert server.http.get("/load").json() == {"server_load": 0}
    assert set(server.http.get("/version").json()) == {"version"}


def test_the_description_is_valid_and_complete(serve: Any) -> None:
    server = serve()
    document = server.http.get("/openapi.json").json()
    text = json.dumps(document)
    assert "$ref" not in json.dumps(document["paths"][CHAT]["post"]["requestBody"])
    assert "422" not in [
        status for path in document["paths"].values() for op in path.values() for status in op["responses"]
    ]
    for path in (CHAT, "/v1/responses", "/v1/messages", "/api/chat", "/v1/completions", "/tokenize"):
        assert document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert "cdn" not in text and server.http.get("/docs").status_code == 404


def test_reasoning_field_can_be_renamed(serve: Any) -> None:
    for name, fields in (("reasoning", {"reasoning"}), ("both", {"reasoning", "reasoning_content"})):
        server = serve(Reply("x", reasoning="hm"), reasoning_field=name)
        message = server.post(CHAT, {"messages": USER}).json()["choices"][0]["message"]
        assert set(message) & {"reasoning", "reasoning_content"} == fields
        lines = server.lines(CHAT, {"messages": USER, "stream": True})
        shown = {key for line in lines if line[6:7] == "{" for key in json.loads(line[6:])["choices"][0]["delta"]}
        assert shown & {"reasoning", "reasoning_content"} == fields


def test_only_reasoning_before_the_limit(serve: Any) -> None:
    server = serve(Script(["thinking on and on", End("length")]))
    message = server.post(CHAT, {"messages": USER}).json()["choices"][0]
    assert message["finish_reason"] == "length" and message["message"]["content"] == ""
    answer = server.post("/v1/messages", {"messages": USER, "max_tokens": 9, "thinking": {"type": "enabled"}}).json()
    assert [block["type"] for block in answer["content"]] == ["thinking"] and answer["stop_reason"] == "max_tokens"
    line = server.post("/api/chat", {"messages": USER, "stream": False}).json()
    assert line["message"]["content"] == "" and line["message"]["thinking"] and line["done_reason"] == "length"


def test_many_event_loops_are_not_needed(serve: Any) -> None:
    """Answers of parallel requests never cross."""
    import httpx

    server = serve(ScriptedEngine(Script(lambda r: r.messages[-1].text * 3, rate=300, burst=3), max_sequences=8))

    async def ask(client: httpx.AsyncClient, word: str) -> bool:
        body = {"messages": [{"role": "user", "content": word}], "stream": True}
        async with client.stream("POST", CHAT, json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line[6:7] == "{"]
        chunks = [json.loads(line[6:]) for line in lines]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        return text == word * 3 and len({chunk["id"] for chunk in chunks}) == 1

    async def crowd() -> list[bool]:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            return await asyncio.gather(*(ask(client, f"document-{i:02d} ") for i in range(24)))

    assert all(asyncio.run(crowd()))
