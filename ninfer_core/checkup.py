"""What works on this machine: device, route, memory, disk, models and packages, each with how to mend what does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import hub, library, store
from .cards import Card, cards
from .config import PUBLISHED
from .errors import ArtifactError, DeviceError, InvalidRequestError, NinferError
from .footprint import OVERHEAD, fused_footprint
from .inventory import inventory
from .store import ModelEntry

Level = Literal["ok", "note", "fail"]
_LOW_DISK = 25 * 10**9
_EXTRAS = {"serve": ("fastapi", "uvicorn", "prometheus_client", "zstandard"), "vision": ("PIL", "av")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: `note` is worth knowing, `fail` stops something from working; `mend` says what to do about it.

    `error` is the class of error that a command would meet because of a `fail`.
    """

    name: str
    level: Level
    text: str
    mend: str = ""
    error: type[NinferError] | None = None


def checkup(environ: Mapping[str, str] | None = None, *, verify: bool = False) -> Iterator[Finding]:
    """All findings of this machine, in the order in which things depend on each other; never raises.

    `verify` also reads every installed model: digests, scales, padding.
    """
    env = os.environ if environ is None else environ
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("python", _python),
        ("packages", _packages),
        ("device", _device),
        ("memory", _memory),
        ("disk", lambda: _disk(env)),
        ("models", lambda: _models(env, verify)),
        ("downloads", lambda: _downloads(env)),
    )
    for name, check in checks:
        try:
            yield from check()
        except NinferError as error:
            yield Finding(name, "fail", error.message, error=type(error))
        except Exception as error:
            yield Finding(name, "fail", f"{type(error).__name__}: {error}", "report this with the whole output")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _python() -> Iterator[Finding]:
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    yield Finding("python", "ok", f"{text}, {os.cpu_count()} CPUs")


def _packages() -> Iterator[Finding]:
    found = [f"{name} {_version(name)}" for name in ("ninfer", "torch", "triton", "tokenizers", "huggingface_hub")
             if _version(name)]  # fmt: skip
    yield Finding("packages", "ok", ", ".join(found))
    if sys.platform == "linux" and not _version("triton"):
        yield Finding("packages", "note", "triton is missing: no kernels on a GPU", "pip install triton")
    for extra, modules in _EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            purpose = {"serve": "the HTTP server", "vision": "images and video"}[extra]
            yield Finding("packages", "note", f"{purpose} cannot be used: {', '.join(missing)} missing",
                          f'pip install "ninfer[{extra}]"')  # fmt: skip


def _driver() -> str:
    """The version of the NVIDIA driver; empty where there is none."""
    version = Path("/proc/driver/nvidia/version")
    if version.is_file():
        words = version.read_text(errors="replace").split("\n")[0].split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""
    return ""


def _device() -> Iterator[Finding]:
    import torch

    driver = _driver()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _card(index, driver)
    elif driver and not torch.version.cuda:
        yield Finding(
            "device", "fail", f"an NVIDIA driver ({driver}) is there, but this torch ({torch.__version__}) is built "
            "for the CPU alone", "install a build of torch with CUDA (pytorch.org tells the command)", DeviceError,
        )  # fmt: skip
    elif driver:
        yield Finding(
            "device", "fail", f"an NVIDIA driver ({driver}) is there, but torch {torch.__version__} (CUDA "
            f"{torch.version.cuda}) sees no card", "update the driver to one for that CUDA version, and look at "
            "CUDA_VISIBLE_DEVICES", DeviceError,
        )  # fmt: skip
    else:
        yield Finding(
            "device", "note", "no NVIDIA GPU: the demo model runs well, the published models slowly if at all"
        )
    from .runtime.loading import choose_device

    yield Finding("route", "ok", f"what would compute: {choose_device('auto')[1]}")


def _card(index: int, driver: str) -> Finding:
    import torch

    from .runtime.loading import OLDEST

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    text = (
        f"{properties.name} (compute capability {properties.major}.{properties.minor}, driver {driver or 'unknown'}, "
        f"CUDA {torch.version.cuda}), {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    )
    if (properties.major, properties.minor) < OLDEST:
        need = ".".join(map(str, OLDEST))
        return Finding(
            "device", "fail", text, f"the kernels need compute capability {need}; use --device cpu", DeviceError
        )
    return Finding("device", "ok", text)


def _memory() -> Iterator[Finding]:
    free, total = _ram()
    if total:
        yield Finding("memory", "ok", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB of main memory available")
    for index, card in enumerate(cards()):
        for known in store.KNOWN:
            if known.repository:
                yield _fits(known, card, index)


def _fits(known: store.KnownModel, card: Card, index: int) -> Finding:
    """The longest context of a published model in the memory that a card has free now."""
    config = PUBLISHED[known.model_id]
    footprint = fused_footprint(config, dict(inventory(config)))
    limit = config.max_position_embeddings
    here, empty = (footprint.longest(count - OVERHEAD, limit) for count in (card.free, card.total))
    text = f"{known.name} on card {index} ({card.name}): a context of up to {here:,} tokens fits in what is free"
    if here:
        more = f"; {empty:,} fit when nothing else uses the card" if empty > here else ""
        return Finding("memory", "ok", text + more)
    need = (footprint.total(4096) + OVERHEAD) / 1e9
    text = (
        f"{known.name} does not fit on card {index} ({card.name}): {card.free / 1e9:.1f} GB are free, and a context of "
        f"4,096 tokens needs {need:.1f} GB"
    )
    return Finding("memory", "note", text, "end what else uses the card" if empty else "take a larger card")


def _ram() -> tuple[int, int]:
    """Available and all main memory in bytes; zeros where the system does not tell."""
    if Path("/proc/meminfo").is_file():
        lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
        values = {name: int(text.split()[0]) * 1024 for name, _, text in lines if text.split()[:1]}
        return values.get("MemAvailable", 0), values.get("MemTotal", 0)
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0, 0


def _disk(env: Mapping[str, str]) -> Iterator[Finding]:
    folders = {store.models_dir(env): "models"}
    if not env.get("NINFER_MODELS"):
        folders[store.hub_dir(env)] = "hub cache"
    for folder, name in folders.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        text = f"{free / 1e9:.1f} GB free for the {name} at {folder}"
        if not os.access(existing, os.W_OK):
            yield Finding("disk", "fail", f"{text}, which cannot be written", "set NINFER_MODELS to another folder",
                          InvalidRequestError)  # fmt: skip
        elif free < _LOW_DISK:
            yield Finding(
                "disk", "note", text, "a published model takes up to 23 GB; NINFER_MODELS names another folder"
            )
        else:
            yield Finding("disk", "ok", text)


def _models(env: Mapping[str, str], verify: bool) -> Iterator[Finding]:
    entries = store.survey(env)
    for entry in store.usable(entries):
        if entry.alias_of:
            continue
        yield _verified(entry) if verify else _room_for(entry)
    for entry in entries:
        if entry.problem:
            known = entry.known or next((model for model in store.KNOWN if model.name == entry.name), None)
            again = f"ninfer pull {known.name}, or " if known and known.repository else ""
            yield Finding("models", "fail", f"{entry.name} at {entry.path} is not usable: {entry.problem}",
                          f"{again}ninfer rm {entry.name}", ArtifactError)  # fmt: skip
    if not any(entry.known and entry.known.repository and not entry.problem for entry in entries):
        yield Finding("models", "note", "neither of the two published models is installed", "ninfer pull qwen3.6:27b")


def _room_for(entry: ModelEntry) -> Finding:
    """Whether the weights, which take about as much memory as the artifact, can be loaded now."""
    import torch

    cuda = torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if cuda else _ram()[0]
    text = f"{entry.name}: {entry.size / 1e9:.2f} GB at {entry.path}"
    if free and entry.size > free:
        where = "GPU" if cuda else "main"
        return Finding("models", "note", f"{text}; {free / 1e9:.1f} GB of {where} memory are free: too little for it",
                       "end what else uses that memory (`ninfer ps`, nvidia-smi)")  # fmt: skip
    return Finding("models", "ok", text)


def _verified(entry: ModelEntry) -> Finding:
    from .artifact import Artifact

    try:
        with Artifact.open(entry.path) as artifact:
            report = artifact.verify()
    except ArtifactError as error:
        again = f"ninfer rm {entry.name}, then pull it again"
        return Finding(
            "models", "fail", f"{entry.name} at {entry.path} is damaged: {error.message}", again, ArtifactError
        )
    return Finding("models", "ok", f"{entry.name}: verified, {report.tensors:,} tensors in {len(report.files)} files")


def _downloads(env: Mapping[str, str]) -> Iterator[Finding]:
    variable = hub.offline(env)
    if variable:
        yield Finding("downloads", "note", f"{variable} is set: nothing is downloaded", f"unset {variable} to pull")
    for left in library.leftovers(env):
        if left.size and left.age > library.DAY:
            yield Finding(
                "downloads", "note", f"{left.path} is an unfinished download or conversion, {left.size / 1e9:.1f} GB, "
                f"unchanged for {left.age / library.DAY:.0f} days", "pull the model again to finish it, or delete it",
            )  # fmt: skip
