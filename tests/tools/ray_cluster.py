"""Two replicas of the demo model on a Ray cluster of this machine: clients, prefixes, a killed replica, a redeployment.

    python -m tests.tools.ray_cluster

Needs `ninfer[serve,ray]` and the three SDKs; takes about three minutes on two cores. Exits with 1 if a check fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray_ninfer.app import build

PROCESS = "ray::ServeReplica:ninfer:replica"
LONG = "Tell a long story about a lighthouse, a storm and the keeper's daughter. "


class Cluster:
    """A local cluster with two replicas, and what the checks do to it."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, namespace="serve", log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})
        self.log = Path(tempfile.mkdtemp(prefix="ninfer-ray-")) / "requests.jsonl"
        self.url = f"http://127.0.0.1:{self.port}"
        self.deploy()

    def deploy(self) -> None:
        """Deploy, or deploy anew: Serve takes every call for a new version."""
        args = {
            "replicas": 2,
            "settings": {"slots": 4, "request_log": str(self.log)},
            "options": {"device": "cpu", "threads": 1},
        }
        serve.run(build(args), name="ninfer", route_prefix="/")

    def replicas(self) -> list[int]:
        """Process ids of the replicas, all descendants of this process."""
        parents, found = {}, []
        for entry in Path("/proc").iterdir():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (entry / "cmdline").read_text().startswith(PROCESS):
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue
        return sorted(pid for pid in found if _descends(pid, parents))

    def chat(self, messages: list[dict[str, str]], tokens: int = 16) -> dict[str, Any]:
        """A chat answer that is not streamed."""
        body = {"model": "demo", "messages": messages, "max_tokens": tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)
        answer.raise_for_status()
        return dict(answer.json())

    def stream(self, number: int, tokens: int, seen: dict[int, int] | None = None) -> tuple[str, int]:
        """A streamed completion of its own conversation: how it ended, and its events, also in `seen`."""
        body = {
            "model": "demo", "prompt": f"{number}: {LONG * 3}", "max_tokens": tokens, "stream": True,
            "logit_bias": {"258": -100, "256": -100}, "ignore_eos": True,
        }  # fmt: skip
        events, end = 0, "cut"
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as answer:
                if answer.status_code != 200:
                    return f"status {answer.status_code}", 0
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        end = "done"
                    elif line.startswith("data: "):
                        events += 1
                        if seen is not None:
                            seen[number] = events
                        if "error" in json.loads(line[6:]):
                            end = "error event"
        except httpx.HTTPError as error:
            end = type(error).__name__
        return end, events


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def clients(cluster: Cluster) -> str:
    """Every SDK, plain and streamed."""
    import anthropic
    import ollama
    import openai

    say = [{"role": "user", "content": "Say hello."}]
    first = openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)
    plain = first.chat.completions.create(model="demo", messages=say, max_tokens=12, temperature=0)  # type: ignore
    parts = list(first.chat.completions.create(model="demo", messages=say, max_tokens=12, temperature=0, stream=True))  # type: ignore
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    thought = "".join(getattr(part.choices[0].delta, "reasoning_content", None) or "" for part in parts if part.choices)
    message = plain.choices[0].message
    assert text == (message.content or "") and thought == (getattr(message, "reasoning_content", None) or "")
    assert text or thought
    second = anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0)
    with second.messages.stream(model="demo", messages=say, max_tokens=12) as stream:  # type: ignore[arg-type]
        final = stream.get_final_message()
    assert final.usage.output_tokens > 0 and final.stop_reason is not None
    third = ollama.Client(host=cluster.url)
    lines = list(third.chat(model="demo", messages=say, stream=True, options={"num_predict": 12}))
    assert lines[-1].done and lines[-1].eval_count
    return f"OpenAI {len(parts)} chunks, Anthropic {final.usage.output_tokens} tokens, Ollama {len(lines)} lines"


def prefixes(cluster: Cluster) -> str:
    """The second turn of each of eight conversations finds what the first one left."""
    talks, cached = [], []
    for number in range(8):
        talk = [{"role": "user", "content": f"Conversation {number}. {LONG * 8}"}]
        answer = cluster.chat(talk)
        talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        talks.append([*talk, {"role": "user", "content": "And then?"}])
    for talk in talks:
        usage = cluster.chat(talk)["usage"]
        cached.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
    assert all(hit > 0 for hit, _ in cached), cached
    return "cached/prompt " + " ".join(f"{hit}/{prompt}" for hit, prompt in cached)


def killed(cluster: Cluster) -> str:
    """One replica killed under eight streams: its own end with an error event, the others are whole, a new one comes."""
    before = cluster.replicas()
    assert len(before) == 2, before
    again: list[float] = []

    def kill() -> None:
        os.kill(before[0], signal.SIGKILL)
        began = time.monotonic()
        while len(now := cluster.replicas()) != 2 or before[0] in now:
            assert time.monotonic() - began < 90, "no new replica after 90 s"
            time.sleep(0.2)
        again.append(time.monotonic() - began)

    ends = _together(cluster, 8, tokens=400, then=kill)
    counts = {end: sum(found == end for found, _ in ends) for end in {found for found, _ in ends}}
    assert set(counts) == {"done", "error event"} and all(events for _, events in ends), ends
    return f"{counts}, a new process after {again[0]:.1f} s"


def left(cluster: Cluster) -> str:
    """A client that leaves ends its generation in the replica."""
    body = {"model": "demo", "prompt": LONG, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(12):
            next(lines)
    began = time.monotonic()
    while True:
        records = [json.loads(line) for line in cluster.log.read_text().splitlines()]
        gone = [record for record in records if record.get("outcome") == "disconnect"]
        if gone:
            return f"ended after {time.monotonic() - began:.1f} s"
        assert time.monotonic() - began < 15, "still running after 15 s"
        time.sleep(0.1)


def _together(cluster: Cluster, count: int, tokens: int, then: Callable[[], None]) -> list[tuple[str, int]]:
    ends: list[tuple[str, int]] = []
    seen: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda n=n: ends.append(cluster.stream(n, tokens, seen)), daemon=True)
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    while not all(seen.get(number, 0) >= 3 for number in range(count)) and len(ends) < count:
        time.sleep(0.02)
    then()
    for thread in threads:
        thread.join()
    return ends


def redeployed(cluster: Cluster) -> str:
    """A redeployment under four clients that never pause: every stream is whole."""
    old, ends, over = set(cluster.replicas()), [], threading.Event()

    def load(number: int) -> None:
        while not over.is_set():
            if number % 2:
                ends.append(cluster.stream(number, 60))
            else:
                cluster.chat([{"role": "user", "content": f"{number}: {LONG}"}])
                ends.append(("done", 1))

    threads = [threading.Thread(target=load, args=(100 + n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    began = time.monotonic()
    cluster.deploy()
    took = time.monotonic() - began
    time.sleep(1)
    over.set()
    for thread in threads:
        thread.join()
    assert not old & set(cluster.replicas()), "an old replica still runs"
    assert ends and all(end == "done" for end, _ in ends), [end for end in ends if end[0] != "done"]
    return f"{len(ends)} streams whole, {took:.0f} s"


def main() -> int:
    """All checks; a table of what came out."""
    began, failed = time.monotonic(), 0
    cluster = Cluster()
    print(f"| two replicas up | {time.monotonic() - began:.0f} s |", flush=True)
    try:
        for check in (clients, prefixes, left, killed, redeployed, prefixes):
            try:
                result = check(cluster)
            except Exception as error:
                failed += 1
                result = f"FAILED: {type(error).__name__}: {error}"
            print(f"| {check.__name__} | {result} |", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
