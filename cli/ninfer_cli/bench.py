"""`ninfer bench`: a model's speed, a server under load, kinds of text, single kernels, and the tables made of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ninfer_core.errors import EngineError, InvalidRequestError

from .display import Console

if TYPE_CHECKING:
    from ninfer_core.benchmarks.results import Device, Figure

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
Save = Annotated[
    Path | None,
    typer.Option("--save", metavar="DIR", help="Keep the figures in DIR/<device>.json, in place of older ones."),
]
Commit = Annotated[
    str | None, typer.Option(help="Commit to record. [default: that of the checkout the program runs from]")
]
Hardware = Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu", help="Where to run.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]


class BenchGroup(typer.core.TyperGroup):
    """`ninfer bench demo` is `ninfer bench model demo`: what names no command is a model, or an option of that."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `model` in front where it was left out."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


def group(guarded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> typer.Typer:
    """The commands of `ninfer bench`; `guarded` turns errors into exit codes."""
    app = typer.Typer(
        cls=BenchGroup,
        help="Measure speed. `ninfer bench MODEL` is short for `ninfer bench model MODEL`.",
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
    )
    for name, command in (("model", model), ("serve", serve), ("workloads", workloads), ("ops", ops), ("table", table)):
        app.command(name)(guarded(command))
    return app


def model(
    name: Annotated[str, typer.Argument(metavar="[MODEL]", help="Name or path of an artifact.")] = "",
    random_weights: Annotated[
        str, typer.Option(metavar="35b-a3b|27b|demo", help="No model: random weights of this shape, without text.")
    ] = "",
    parts: Annotated[str, typer.Option(help="What to measure: decode, batch, gap, separated by commas.")] = "decode",
    context: Annotated[
        str,
        typer.Option(metavar="N,N", help="Prompt lengths. [default: 7680,64512,130048,260096, scaled to the model]"),
    ] = "",
    drafts: Annotated[str, typer.Option(metavar="K,K", help="Tokens drafted per round, one pass each.")] = "0,3",
    forced: Annotated[
        float | None,
        typer.Option(help="Further pass whose drafts are replaced so that this many are accepted on average: 2.19."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,N", help="Sequences at once.")] = "1,2,4,8,16,32,64",
    batch_context: Annotated[int | None, typer.Option(min=64, help="Prompt tokens of each. [default: 1024]")] = None,
    gap_context: Annotated[int | None, typer.Option(min=64, help="Prompt read beside a running answer.")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Tokens of each answer. [default: 256, or 64]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Counted runs of each figure; one warm-up comes before.")] = 5,
    fill: Annotated[
        str, typer.Option(metavar="auto|read|copy", help="Read long prompts, or copy pages where that takes too long.")
    ] = "auto",
    kv_cache: Annotated[str, typer.Option(help="int8, bf16 or fp32.")] = "int8",
    device: Hardware = "auto",
    threads: Threads = None,
    save: Save = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw decode rates as SVG.")] = None,
    commit: Commit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Decode rate against depth, with and without drafts; prompts, batches, gaps. Every rate beside its byte floor."""
    from ninfer_core.benchmarks import report, suite
    from ninfer_core.benchmarks.subject import Target

    console = Console(os.environ)
    options = {} if threads is None else {"threads": threads}
    plan = suite.Plan(
        Target(name, random_weights, device, kv_cache, options),
        tuple(part.strip() for part in parts.split(",") if part.strip()),
        suite.lists(context, "--context") or None,
        suite.lists(drafts, "--drafts"),
        forced,
        suite.lists(batch, "--batch"),
        batch_context,
        gap_context,
        tokens,
        seeds,
        fill,  # type: ignore[arg-type]
        (lambda text: None) if quiet else console.note,
    )
    found, figures = suite.run(plan)
    _show(console, found, figures, report.figures_table(figures), as_json=as_json, save=save, commit=commit)
    if plot is not None:
        entries = {figure.name: figure.as_dict() for figure in figures}
        plot.write_text(report.plot(entries, found.name), encoding="utf-8")


def serve(
    name: Annotated[str, typer.Argument(metavar="[MODEL]", help="Model to serve for this; not with --url.")] = "",
    url: Annotated[str, typer.Option(help="A running server instead: its OpenAI base, http://host:port/v1.")] = "",
    served_model: Annotated[str, typer.Option(help="Model to ask for. [default: the first the server lists]")] = "",
    key: Annotated[str, typer.Option(envvar="NINFER_BENCH_KEY", help="API key of the server.")] = "",
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Requests running at once.")] = "1,2,4,8,16,32,64",
    rates: Annotated[str, typer.Option(metavar="R,R", help="Arrivals a second, at random times.")] = "",
    turns: Annotated[
        str, typer.Option(metavar="N,N", help="Second turns of conversations of so many tokens, cached and not.")
    ] = "",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of each level. [default: 4 per slot, >= 8]")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="About so many tokens of prompt.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    honour_eos: Annotated[
        bool, typer.Option("--honour-eos", help="Do not send ignore_eos: for servers that refuse it.")
    ] = False,
    device: Hardware = "auto",
    save: Save = None,
    commit: Commit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """A server under load: tokens a second, time to the first token and gaps, by concurrency and by arrival rate."""
    from ninfer_core.benchmarks import report, serving, suite
    from ninfer_core.benchmarks.results import device_of

    console = Console(os.environ)
    if bool(name) == bool(url):
        raise InvalidRequestError("name either a model to serve or the --url of a running server")
    levels, arrivals = suite.lists(concurrency, "--concurrency"), suite.numbers(rates, "--rates")
    lengths = suite.lists(turns, "--turns")
    with contextlib.ExitStack() as stack:
        if name:
            most = max(levels, default=64)
            url = stack.enter_context(own_server(name, most, device, quiet))
        served = served_model or asyncio.run(serving.served_model(url, key))
        load = serving.Load(url, served, key, prompt_tokens, max_tokens, not honour_eos)
        figures, tables = [], []
        if levels or arrivals or not lengths:
            figures = asyncio.run(serving.serve_load(load, levels=levels, rates=arrivals, requests=requests))
            tables.append(report.markdown(serving.SERVING_HEADER, serving.serving_rows(figures)))
        if lengths:
            found = asyncio.run(serving.second_turns(load, lengths))
            tables.append(report.markdown(serving.TURNS_HEADER, serving.turn_rows(found)))
            figures += found
    text = "\n\n".join(tables)
    kind = "cuda" if name and device != "cpu" and _cuda() else "cpu"
    if save is not None and not name:
        raise InvalidRequestError(
            "--save names this machine's result file, and --url may be another machine: use --json"
        )
    _show(console, device_of(kind), figures, text, as_json=as_json, save=save, commit=commit)


def workloads(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Name or path of an artifact.")] = "demo",
    only: Annotated[str, typer.Option(metavar="KIND,KIND", help="Some kinds of text only.")] = "",
    drafts: Annotated[int, typer.Option(min=0, max=5, help="Tokens drafted per round.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 5,
    device: Hardware = "auto",
    save: Save = None,
    commit: Commit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Decode rate, accepted drafts and tokens per round by kind of text: reasoning, code, translation, story, JSON."""
    from ninfer_core.benchmarks import report
    from ninfer_core.benchmarks import workloads as sets
    from ninfer_core.benchmarks.results import device_of
    from ninfer_core.engine import Engine

    console = Console(os.environ)
    chosen = sets.workloads([part.strip() for part in only.split(",") if part.strip()])
    figures: list[Figure] = []
    engine = Engine.load(name, draft_tokens=drafts, device=device, prefix_cache=False)  # type: ignore[arg-type]
    with engine:
        for work in chosen:
            if not quiet:
                console.note(
                    f"{work.name}: {len(work.prompts)} prompts, up to {work.limit(engine.context_length)} tokens"
                )
            figures += sets.run_workload(
                engine, engine.model_id, work, context=engine.context_length, seeds=range(1, seeds + 1)
            )
        kind = "cuda" if engine.route.startswith("cuda") else "cpu"
    _show(console, device_of(kind), figures, report.figures_table(figures), as_json=as_json, save=save, commit=commit)


def ops(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where ops.json goes.")] = Path("."),
    parts: Annotated[str, typer.Option(help="Some parts of the bench only, separated by commas.")] = "",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that compile.")] = None,
) -> None:
    """Every kernel on this GPU: its error against the twin, and its time beside its own byte floor."""
    from ninfer_core.benchmarks import ops as bench

    bench.run(out, parts=[part.strip() for part in parts.split(",") if part.strip()], workers=workers)


def table(
    results: Annotated[Path, typer.Argument(help="Folder of result files.")] = Path("tests/bench/results"),
    into: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Put tables into the marked places of a file; repeatable.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Also draw DIR/<device>.svg.")] = None,
) -> None:
    """The tables of README and the docs, from result files."""
    from ninfer_core.benchmarks import report
    from ninfer_core.benchmarks.results import read_all

    console = Console(os.environ)
    if not into:
        console.line(report.speed_tables(results))
    for document in into or ():
        changed = report.update(document, results)
        console.note(f"{document}: {'changed' if changed else 'is up to date'}")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for slug, found in read_all(results).items():
            if "peers" not in found["device"] and any("/decode/" in name for name in found["figures"]):
                drawing = report.plot(found["figures"], found["device"]["name"])
                (plots / f"{slug}.svg").write_text(drawing, encoding="utf-8")


def _show(
    console: Console,
    device: Device,
    figures: list[Figure],
    text: str,
    *,
    as_json: bool,
    save: Path | None,
    commit: str | None,
) -> None:
    """Print figures, and keep them if asked to."""
    from ninfer_core.benchmarks import results

    command = shlex.join(["ninfer", *sys.argv[1:]])
    if as_json:
        found = {figure.name: figure.as_dict() for figure in figures}
        about = {"name": device.name, "kind": device.kind, "memory": device.memory}
        console.json({"device": about, "command": command, "versions": results.versions(), "figures": found})
    else:
        console.line(f"{device.name}\n\n{text}")
    if save is not None:
        path = results.save(save, device, figures, command=command, commit=commit or results.commit_of())
        console.note(f"{len(figures)} figures kept in {path}")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def own_server(name: str, slots: int, device: str, quiet: bool) -> Iterator[str]:
    """`ninfer serve` in a process of its own, ended afterwards; yields its OpenAI base."""
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ninfer_cli", "serve", name, "--port", str(port), "--parallel", str(slots)]
    command += [] if device == "auto" else ["--device", device]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL if quiet else None, stdin=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}/v1"
    try:
        while True:
            if server.poll() is not None:
                raise EngineError(f"the server ended with code {server.returncode}: {shlex.join(command)} says why")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(base + "/models", timeout=5.0).status_code == 200:
                    break
            time.sleep(0.2)
        yield base
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
