"""Replicas of the demo model on a Ray cluster of this machine: what the page on Ray promises, seen happening.

    python -m tests.tools.ray_cluster [CHECK ...]

Checks, in this order: clients, prefixes, left, killed, unhealthy, metrics, redeployed, scaled, joined, refused. Needs
`ninfer[serve,ray]` and the three SDKs; takes about ten minutes on two busy cores. Exits with 1 if a check fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import ray
from ray import serve
from ray_ninfer.app import NAME

from tests.tools.ray_support import LONG, PATIENCE, Cluster, Streams, run_checks, wait


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


def left(cluster: Cluster) -> str:
    """A client that leaves ends its generation in the replica."""
    body = {"model": "demo", "prompt": LONG, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        for _ in range(12):
            next(lines)

    def gone() -> bool:
        records = [json.loads(line) for line in cluster.log.read_text().splitlines()]
        return any(record.get("outcome") == "disconnect" for record in records)

    return f"ended after {wait(gone, 'the generation ends'):.1f} s"


def killed(cluster: Cluster) -> str:
    """One replica killed under eight streams: its own end with an error event, the others are whole, a new one comes."""
    before = cluster.replicas()
    assert len(before) == 2, before
    streams = Streams(cluster, 8, tokens=400)
    wait(streams.begun, "all streams have begun")
    os.kill(before[0], signal.SIGKILL)
    again = wait(lambda: len(now := cluster.replicas()) == 2 and before[0] not in now, "a new replica")
    ends = streams.stop()
    counts = {end: sum(found == end for found, _ in ends) for end in {found for found, _ in ends}}
    assert set(counts) == {"done", "error event"} and all(events for _, events in ends), ends
    wait(lambda: cluster.running() == 2, "two replicas run")
    return f"{counts}, a new process after {again:.1f} s"


def unhealthy(cluster: Cluster) -> str:
    """An engine that can make no token: Serve replaces its replica, and nobody who asks meanwhile sees an error."""
    pid = serve.get_deployment_handle("replica", NAME).break_engine.remote().result(timeout_s=PATIENCE)
    began, answered = time.monotonic(), 0
    while pid in cluster.replicas() or cluster.running() < 2:
        cluster.chat([{"role": "user", "content": f"{answered}: hello"}], tokens=4)
        answered += 1
        assert time.monotonic() - began < PATIENCE, "the replica was not replaced"
    return f"replaced after {time.monotonic() - began:.0f} s, {answered} requests answered meanwhile"


def metrics(cluster: Cluster) -> str:
    """The server's series are among those that Ray exports for Prometheus, one of each per replica."""
    found: dict[str, set[str]] = {}

    def there() -> bool:
        found.clear()
        for node in ray.nodes():
            text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
            for line in text.splitlines():
                if line.startswith("ray_ninfer_"):
                    name, _, tags = line.partition("{")
                    found.setdefault(name, set()).add(tags.partition('replica="')[2].partition('"')[0])
        return any(len(replicas - {""}) >= 2 for replicas in found.values())

    took = wait(there, "series of two replicas")
    return f"{len(found)} series, after {took:.0f} s: {', '.join(sorted(found)[:3])}, ..."


def redeployed(cluster: Cluster) -> str:
    """A redeployment under four clients that never pause: every stream is whole."""
    old = set(cluster.replicas())
    streams = Streams(cluster, 4, tokens=60, first=100, again=True)
    wait(streams.begun, "all streams have begun")
    began = time.monotonic()
    cluster.deploy()
    took = time.monotonic() - began
    ends = streams.stop()
    wait(lambda: not old & set(cluster.replicas()), "the old replicas end")
    assert ends and all(end == "done" for end, _ in ends), [end for end in ends if end[0] != "done"]
    return f"{len(ends)} streams whole, {took:.0f} s"


def scaled(cluster: Cluster) -> str:
    """Autoscaling: more than a replica can run raises their number, idling lowers it, and no stream is cut."""
    cluster.deploy(replicas="auto", max_replicas=2, slots=2, grow_after=2.0, shrink_after=4.0)
    wait(lambda: cluster.running() == 1, "one replica while nothing is asked")
    streams = Streams(cluster, 8, tokens=80, first=200, again=True)
    grown = wait(lambda: cluster.running() == 2, "a second replica under load")
    ends = streams.stop()
    shrunk = wait(lambda: cluster.running() == 1, "one replica again")
    assert all(end == "done" for end, _ in ends), ends
    return f"1 to 2 after {grown:.0f} s of 8 requests for 2 places, 2 to 1 after {shrunk:.0f} s idle, {len(ends)} streams whole"


def _command(cluster: Cluster, log: Path, **environment: str) -> subprocess.Popen[str]:
    """`ninfer serve demo --ray --replicas 1` against a cluster; what it says goes to `log`."""
    command = [sys.executable, "-c", "from ninfer_cli.main import main; main()", "serve", "demo", "--ray"]
    command += ["--replicas", "1", "--device", "cpu", "--threads", "1", "--parallel", "2", "--port", "0"]
    with log.open("w") as file:
        return subprocess.Popen(command, stderr=file, stdout=file, text=True, env={**os.environ, **environment})


def joined(cluster: Cluster) -> str:
    """`ninfer serve --ray` with RAY_ADDRESS: a rolling update of the application there, which ends with the command."""
    log = cluster.log.with_name("joined.log")
    process = _command(cluster, log, RAY_ADDRESS=cluster.address)
    try:
        took = wait(lambda: "replicas of demo" in log.read_text() or process.poll() is not None, "the command serves")
        assert process.poll() is None, log.read_text()
        cluster.chat([{"role": "user", "content": "Hello"}])
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0, log.read_text()
    finally:
        process.kill()
    wait(lambda: NAME not in serve.status().applications, "the application is gone")
    assert httpx.get(f"{cluster.url}/-/routes").status_code == 200, "Serve itself is gone"
    return f"served after {took:.0f} s, ended by SIGINT, exit code 0, the cluster's Serve goes on"


def refused(cluster: Cluster) -> str:
    """A wrong RAY_ADDRESS and a wrong token are one line on standard error and the exit code 4."""
    cases = {
        "nobody there": ({"RAY_ADDRESS": "127.0.0.1:9"}, "RAY_ADDRESS=127.0.0.1:9 does not answer"),
        "no address": ({"RAY_ADDRESS": "nonsense"}, "RAY_ADDRESS=nonsense could not be used"),
        "wrong token": (
            {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
            "refused this client's token",
        ),
    }
    said = []
    for name, (environment, text) in cases.items():
        log = cluster.log.with_name("refused.log")
        process = _command(cluster, log, **environment)
        try:
            code = process.wait(PATIENCE)
        finally:
            process.kill()
        lines = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        assert code == 4 and len(lines) == 1 and text in lines[0], f"{name}: {code}, {log.read_text()[-1500:]}"
        said.append(name)
    return ", ".join(said)


CHECKS: dict[str, Callable[[Cluster], str]] = {
    check.__name__: check
    for check in (clients, prefixes, left, killed, unhealthy, metrics, redeployed, scaled, joined, refused)
}


def main() -> int:
    """The checks that were asked for, or all."""
    asked = sys.argv[1:] or list(CHECKS)
    if unknown := set(asked) - set(CHECKS):
        sys.exit(f"no check is called {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    began = time.monotonic()
    cluster = Cluster()
    try:
        cluster.deploy()
        print(f"| two replicas up | | {time.monotonic() - began:.0f} s |", flush=True)
        return run_checks(cluster, {name: check for name, check in CHECKS.items() if name in asked})
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(main())
