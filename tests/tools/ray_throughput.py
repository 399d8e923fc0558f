"""Aggregate throughput of several GPUs behind one address against that of one.

    python -m tests.tools.ray_throughput --random 35b-a3b              # two GPUs, random weights of full size
    python -m tests.tools.ray_throughput --device cpu --at-once 2 --tokens 16 --without-ray     # a try without a GPU

Measured is one server, asked directly, with so many requests at once, and all of them through the front with as many
for each. With Ray installed the many are replicas of the Ray application, else (or with --without-ray) server
processes behind the same front and routing code; the output says which. Exits with 1 if a request fails, or if GPUs
reach less than 0.95 of one times their number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from ninfer_core.benchmarks.serving import Load, Sample, _closed, served_model
from tests.tools.ray_processes import engine_fields, free_port, load, process

SHARE = 0.95
"""Of perfect scaling; 1.9 times one GPU with two."""


@contextlib.contextmanager
def one_server(given: argparse.Namespace, number: int) -> Iterator[str]:
    """A server on one GPU, asked directly."""
    arguments = [
        f"--{name}={getattr(given, name)}" for name in ("model", "random", "device", "slots", "context", "drafts")
    ]
    # A card each, also where the caller was given some of the machine's only.
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    card = cards[number] if number < len(cards) and cards[number] else str(number)
    environment = {} if given.device == "cpu" else {"CUDA_VISIBLE_DEVICES": card}
    with process("server", free_port(), *arguments, patience=given.patience, **environment) as url:
        yield url


@contextlib.contextmanager
def processes(given: argparse.Namespace) -> Iterator[str]:
    """Server processes behind the front, without Ray. They start at once, since loading takes long."""
    ready: list[str] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def keep(number: int) -> None:
        try:
            with one_server(given, number) as url:
                ready.append(url)
                over.wait()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=keep, args=(number,)) for number in range(given.replicas)]
    for thread in threads:
        thread.start()
    try:
        while len(ready) < given.replicas and not failed:
            time.sleep(0.05)
        if failed:
            raise failed[0]
        with process("front", free_port(), *ready, f"--slots={given.slots}", patience=given.patience) as url:
            yield url
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def ray_replicas(given: argparse.Namespace) -> Iterator[str]:
    """Replicas of the Ray application on a cluster of this machine."""
    import ray
    from ninfer_cli.server.app import build_app
    from ninfer_cli.server.host import ModelHost, loaded
    from ninfer_cli.server.settings import ServerSettings
    from ray import serve
    from ray_ninfer.app import NAME, application
    from ray_ninfer.deployments import EngineGauges, ServedReplica
    from ray_ninfer.plan import Plan

    class GivenReplica(ServedReplica):
        """A replica of the model of the command line, which may have random weights."""

        def __init__(self, model: str, options: dict[str, Any], settings: ServerSettings) -> None:
            self.engine = load(given.model, given.random, **options)
            self.app = build_app(ModelHost(settings, loaded(self.engine, model, None, model)), settings)
            self.name = serve.get_replica_context().replica_id.unique_id
            self._gauges = EngineGauges()

    gpus = 0 if given.device == "cpu" else given.replicas
    port = free_port()
    plan = Plan(
        given.model, engine_fields(given), ServerSettings(slots=given.slots, max_queue=1024), given.replicas,
        fronts=given.fronts, num_gpus=1 if gpus else 0,
    )  # fmt: skip
    ray.init(num_cpus=given.replicas, num_gpus=gpus, include_dashboard=False, namespace="serve", log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(plan, GivenReplica), name=NAME, route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Sum:
    """What all clients of a measurement saw."""

    tokens: int
    seconds: float
    failed: int
    error: str

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def _client(barrier: Any, results: Any, url: str, given: argparse.Namespace, number: int) -> None:
    """One client process: a warm-up, then its share at the same time as the others. Seeds differ, so no prefix helps."""

    async def run() -> tuple[list[Sample], float]:
        model = await served_model(url + "/v1")
        asked = Load(url + "/v1", model, prompt_tokens=given.prompt, max_tokens=given.tokens, timeout=given.patience)
        limits, seed = httpx.Limits(max_connections=None), (number + 1) * 1_000_000
        async with httpx.AsyncClient(base_url=asked.url, timeout=given.patience, limits=limits) as client:
            # Twice what one server holds, so that each makes its graphs and plans, whichever requests it gets.
            await _closed(client, asked, given.at_once, 2 * given.at_once, seed)
            await asyncio.to_thread(barrier.wait)
            began = time.perf_counter()
            done = await _closed(client, asked, given.at_once, given.rounds * given.at_once, seed + 500_000)
            return done, time.perf_counter() - began

    try:
        samples, seconds = asyncio.run(run())
        errors = [sample.error for sample in samples if sample.error]
        tokens = sum(sample.tokens for sample in samples if not sample.error)
        results.put((tokens, seconds, len(errors), errors[0] if errors else ""))
    except BaseException as error:
        barrier.abort()
        results.put((0, 1.0, 1, f"{type(error).__name__}: {error}"))


def measure(url: str, given: argparse.Namespace, servers: int) -> Sum:
    """The load of one server times `servers`, each from a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(servers), spawn.Queue()
    clients = [spawn.Process(target=_client, args=(barrier, results, url, given, n)) for n in range(servers)]
    for client in clients:
        client.start()
    parts = [results.get() for _ in clients]
    for client in clients:
        client.join()
    error = next((part[3] for part in parts if part[3]), "")
    return Sum(sum(p[0] for p in parts), max(p[1] for p in parts), sum(p[2] for p in parts), error)


def main() -> int:
    """Both measurements, a table and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="an installed model")
    parser.add_argument("--random", default="", help="random weights of a shape instead: 35b-a3b, 27b, demo")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--fronts", type=int, default=2, help="with Ray: processes that read and route requests")
    parser.add_argument("--at-once", type=int, default=16, help="requests at once for each server")
    parser.add_argument("--rounds", type=int, default=4, help="requests of a measurement, over those at once")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for loading, and for a request")
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.slots = given.at_once
    with_ray = not given.without_ray and importlib.util.find_spec("ray") is not None

    with one_server(given, 0) as url:
        single = measure(url, given, 1)
    print(f"one server, asked directly: {single.rate:,.1f} tok/s", flush=True)
    behind = "Ray replicas" if with_ray else "server processes without Ray, same front and routing code"
    with ray_replicas(given) if with_ray else processes(given) as url:
        many = measure(url, given, given.replicas)
    ratio, failed = many.rate / single.rate, single.failed + many.failed
    print(f"{given.replicas} behind one address ({behind}): {many.rate:,.1f} tok/s, {ratio:.2f} times one")
    print(f"{given.random or given.model}, device {given.device}, {given.at_once} requests at once for each server, "
          f"{given.tokens} tokens each, {failed} failed")  # fmt: skip
    if failed:
        print(f"first error: {single.error or many.error}")
    wanted = SHARE * given.replicas
    if given.device == "cpu":
        print("no verdict: servers on the CPU share its cores")
    else:
        print(f"{'reached' if ratio >= wanted else 'NOT reached'}: {wanted:.2f} times one")
    if given.json:
        told = {
            "one": asdict(single),
            "many": asdict(many),
            "ratio": ratio,
            "ray": with_ray,
            "replicas": given.replicas,
        }
        given.json.write_text(json.dumps(told, indent=1))
    return 1 if failed or (given.device != "cpu" and ratio < wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
