"""A Ray cluster on this machine with replicas of the demo model, and the clients that the Ray checks send at it."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray_ninfer.app import NAME, application
from ray_ninfer.deployments import ServedReplica
from ray_ninfer.plan import Plan

PROCESS = "ray::ServeReplica:ninfer:replica"
LONG = "Tell a long story about a lighthouse, a storm and the keeper's daughter. "
PATIENCE = 240.0
"""Seconds for what should take a few; two busy cores need it."""


class BreakableReplica(ServedReplica):
    """A replica whose engine can be made unable to make a token, by its own rules for a device that is gone."""

    async def break_engine(self) -> int:
        """The process id, once the engine knows that it cannot go on."""

        def broken(*_: Any) -> Any:
            raise RuntimeError("the device is gone")

        self.engine._runner.probe = self.engine._runner.renew = broken
        self.engine._scheduler.suspect = True
        self.engine._scheduler.notify()
        end = time.monotonic() + PATIENCE
        while self.engine.health()["status"] not in ("restarting", "failed"):
            assert time.monotonic() < end, self.engine.health()
            time.sleep(0.01)
        return os.getpid()


class Cluster:
    """A local cluster, and what the checks do to it."""

    def __init__(self, cpus: int = 3) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        os.environ.pop("RAY_ADDRESS", None)
        for attempt in range(3):
            try:
                ray.init(num_cpus=cpus, num_gpus=0, include_dashboard=False, namespace="serve", log_to_driver=False)
                break
            except Exception:  # Ray gives a node 30 s to start, whatever else the machine does
                ray.shutdown()
                if attempt == 2:
                    raise
        self.address = ray.get_runtime_context().gcs_address
        self.log = Path(tempfile.mkdtemp(prefix="ninfer-ray-")) / "requests.jsonl"
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(self, **args: Any) -> None:
        """Deploy, or deploy anew: Serve takes every call for a new version."""
        slots = args.pop("slots", 4)
        settings = {"slots": slots, "request_log": str(self.log)}
        plan = Plan.of(
            {"replicas": 2, "health_period": 2.0, "settings": settings, "options": {"device": "cpu", "threads": 1}}
            | args
        )
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})
        serve.run(application(plan, BreakableReplica), name=NAME, route_prefix="/")

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

    def running(self) -> int:
        """Replicas that Serve counts as running."""
        deployment = serve.status().applications[NAME].deployments["replica"]
        return int(deployment.replica_states.get("RUNNING", 0))

    def chat(self, messages: list[dict[str, str]], tokens: int = 16) -> dict[str, Any]:
        """A chat answer that is not streamed."""
        body = {"model": "demo", "messages": messages, "max_tokens": tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"
        return dict(answer.json())

    def stream(self, number: int, tokens: int, seen: dict[int, int] | None = None) -> tuple[str, int]:
        """A streamed completion of its own conversation: how it ended, and its events, also in `seen`."""
        body = {
            "model": "demo", "prompt": f"{number}: {LONG * 3}", "max_tokens": tokens, "stream": True,
            "logit_bias": {"258": -100, "256": -100}, "ignore_eos": True,
        }  # fmt: skip
        events, end = 0, "cut"
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
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

    def close(self) -> None:
        """End the applications and the cluster."""
        serve.shutdown()
        ray.shutdown()


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def wait(condition: Callable[[], Any], what: str) -> float:
    """The seconds until a condition holds.

    Raises:
        AssertionError: it does not within `PATIENCE`.
    """
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE, f"{what}: not after {PATIENCE:.0f} s"
        time.sleep(0.2)
    return time.monotonic() - began


class Streams:
    """Streams that run beside a check: `count` at once, each once or (`again`) until `stop`."""

    def __init__(self, cluster: Cluster, count: int, tokens: int, *, first: int = 0, again: bool = False) -> None:
        self.ends: list[tuple[str, int]] = []
        self.seen: dict[int, int] = {}
        self._over = threading.Event()

        def run(number: int) -> None:
            while True:
                self.ends.append(cluster.stream(number, tokens, self.seen))
                if not again or self._over.is_set():
                    return

        numbers = range(first, first + count)
        self.threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in numbers]
        for thread in self.threads:
            thread.start()

    def begun(self) -> bool:
        """Whether every stream has had some events, or has ended."""
        return sum(count >= 3 for count in self.seen.values()) + len(self.ends) >= len(self.threads)

    def stop(self) -> list[tuple[str, int]]:
        """Wait for the streams; how each ended."""
        self._over.set()
        for thread in self.threads:
            thread.join()
        return self.ends


def run_checks(cluster: Cluster, checks: dict[str, Callable[[Cluster], str]]) -> int:
    """Run the checks and print a table of what came out; the exit code."""
    failed = 0
    for name, check in checks.items():
        began = time.monotonic()
        try:
            result = check(cluster)
        except Exception as error:
            failed += 1
            result = f"FAILED: {type(error).__name__}: {error}"
        print(f"| {name} | {result} | {time.monotonic() - began:.0f} s |", flush=True)
    return 1 if failed else 0
