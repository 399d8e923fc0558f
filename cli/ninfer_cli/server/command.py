"""`ninfer serve`: options and environment, binding, loading behind an answering port, and an orderly end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ninfer_core import store
from ninfer_core.errors import InvalidRequestError, MissingDependencyError

from .. import exits
from ..display import Console, loading
from ..options import ContextLength, complete_model
from ..presets import plain, presets_path, read_presets
from .address import Address, bind, holder_of, parse_address
from .durations import parse_duration
from .settings import DEFAULT_PORT, ServerSettings

if TYPE_CHECKING:
    from ninfer_core.engine import Engine

    from .boot import Models


GROUPS = {
    "Address and access": ("host", "port", "api_key", "api_key_file", "insecure_no_auth", "origins"),
    "Model and memory": (
        "context_length", "draft_tokens", "kv_cache", "prefix_cache", "prefix_cache_tokens", "checkpoints",
        "host_cache_gb", "cache_answers", "vision", "device", "threads",
    ),
    "Requests": (
        "parallel", "max_queue", "max_per_client", "max_body", "request_timeout", "queue_timeout", "unload_after",
        "load_timeout", "shutdown_grace",
    ),
    "Answers": (
        "strict_models", "presets", "reasoning_field", "store_responses", "allow_remote_media", "media_root",
    ),
    "Watching": ("metrics_compat", "request_log"),
    "Several GPUs": ("ray", "replicas"),
}  # fmt: skip


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name or path of an artifact to load first; requests can ask for any other installed one. "
            "[default: a published model if one is installed, else demo]",
            autocompletion=complete_model,
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(envvar="NINFER_HOST", help="Address to listen on: host, :port, host:port, [::1]:port or a URL."),
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=0, max=65535, help=f"Port. [default: {DEFAULT_PORT}]")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="NINFER_API_KEY", help="Key that clients must send; repeatable.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(envvar="NINFER_API_KEY_FILE", metavar="FILE", help="File with one key per line.")
    ] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Serve a network without keys. Everyone there can use the model.")
    ] = False,
    origins: Annotated[
        str, typer.Option(envvar="NINFER_ORIGINS", help="Further browser origins, separated by commas; * allows all.")
    ] = "",
    context_length: ContextLength = None,
    parallel: Annotated[
        int, typer.Option(min=1, max=1024, envvar="NINFER_NUM_PARALLEL", help="Requests that run at once.")
    ] = 4,
    max_queue: Annotated[
        int, typer.Option(min=0, envvar="NINFER_MAX_QUEUE", help="Requests that may wait; more are refused with 503.")
    ] = 64,
    max_per_client: Annotated[
        int | None, typer.Option(min=1, help="Requests that one key (or address) may have at once; more get a 429.")
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option(min=0, max=5, help="Tokens to draft per round.")] = None,
    kv_cache: Annotated[
        str | None, typer.Option(envvar="NINFER_KV_CACHE_TYPE", help="int8, bf16 or fp32. [default: int8]")
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Keep what was read for prompts that begin alike."),
    ] = True,
    prefix_cache_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Room for that beside running requests, tokens. [default: one context]"),
    ] = None,
    checkpoints: Annotated[
        int | None, typer.Option(min=1, max=4096, help="States kept for that. [default: as memory allows]")
    ] = None,
    host_cache_gb: Annotated[
        float | None,
        typer.Option(min=0, help="Host memory for what the prefix cache would give up, GB. [default: none]"),
    ] = None,
    cache_answers: Annotated[
        bool, typer.Option("--cache-answers/--no-cache-answers", help="Keep what was written, too.")
    ] = True,
    vision: Annotated[
        bool, typer.Option("--vision", envvar="NINFER_VISION", help="Load the vision tower and take images and videos.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. [default: the first GPU, else cpu]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    strict_models: Annotated[
        bool, typer.Option("--strict-models", help="Refuse claude-* and gpt-* names instead of serving the model.")
    ] = False,
    reasoning_field: Annotated[
        str, typer.Option(help="Field of thinking in chat answers: reasoning_content, reasoning or both.")
    ] = "reasoning_content",
    store_responses: Annotated[
        int, typer.Option(min=0, help="Past responses kept for previous_response_id; 0 keeps none.")
    ] = 0,
    metrics_compat: Annotated[str, typer.Option(help="Further metric names: vllm, llamacpp, or both.")] = "",
    allow_remote_media: Annotated[
        str | None,
        typer.Option(metavar="DOMAINS", help="Fetch http(s) images from these domains (commas), or from 'any' host."),
    ] = None,
    media_root: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder whose files requests may name.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request body, MiB.")] = 64,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds until a request fails, queue time included.")
    ] = None,
    queue_timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds a request may wait for its turn before it gets a 503.")
    ] = None,
    unload_after: Annotated[
        str,
        typer.Option(
            "--keep-alive",
            envvar="NINFER_KEEP_ALIVE",
            help="How long an unused model stays loaded: seconds, 5m, 1h30m, or -1 for ever.",
        ),
    ] = "-1",
    load_timeout: Annotated[
        str, typer.Option(envvar="NINFER_LOAD_TIMEOUT", help="How long a request waits while its model is loaded.")
    ] = "5m",
    shutdown_grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests to end.")] = 10.0,
    request_log: Annotated[
        str | None, typer.Option(metavar="FILE", help="Append one JSON line per request; - writes to stderr.")
    ] = None,
    presets: Annotated[
        Path | None,
        typer.Option(
            envvar="NINFER_PRESETS",
            metavar="FILE",
            help="Names with a system message and parameters. [default: ~/.config/ninfer/presets.toml]",
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve from a Ray cluster: the one of RAY_ADDRESS, else one of this machine.")
    ] = False,
    replicas: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="With --ray: engines, one GPU each. [default: auto, by load]"),
    ] = None,
) -> None:
    """Serve models to OpenAI, Anthropic and Ollama clients, one loaded at a time."""
    address = parse_address(host, port)
    presets = presets or presets_path(os.environ)
    preset = read_presets(presets).get(plain(model))
    model = preset.model if preset else model
    settings = ServerSettings(
        host=address.host,
        port=address.port,
        api_keys=read_keys(api_key or (), api_key_file),
        insecure_no_auth=insecure_no_auth,
        origins=_words(origins),
        strict_models=strict_models,
        max_body_bytes=max_body << 20,
        request_timeout=request_timeout,
        queue_timeout=queue_timeout,
        slots=parallel,
        max_queue=max_queue,
        max_per_client=max_per_client,
        shutdown_grace=shutdown_grace,
        unload_after=parse_duration(unload_after, "NINFER_KEEP_ALIVE"),
        load_timeout=parse_duration(load_timeout, "NINFER_LOAD_TIMEOUT"),
        reasoning_field=_reasoning_field(reasoning_field),
        metrics_compat=frozenset(_words(metrics_compat)),
        media_domains=None if allow_remote_media is None else _domains(allow_remote_media),
        media_root=media_root,
        stored_responses=store_responses,
        request_log=request_log,
        presets=presets,
    )
    fields: dict[str, Any] = {"max_sequences": parallel, "max_queue": max_queue}
    given = {
        "context_length": context_length,
        "draft_tokens": draft_tokens,
        "kv_cache": kv_cache,
        "prefix_cache": _prefix_cache(prefix_cache, prefix_cache_tokens, checkpoints),
        "checkpoints": checkpoints,
        "cache_answers": None if cache_answers else False,
        "host_cache_gb": host_cache_gb,
        "vision": vision or None,
        "device": device,
        "threads": threads,
    }
    fields |= {name: value for name, value in given.items() if value is not None}

    models = InstalledModels(fields)
    if ray:
        raise typer.Exit(_run_with_ray(settings, model or models.find("").name, fields, replicas or "auto"))
    if replicas is not None:
        raise InvalidRequestError(f"--replicas {replicas} needs --ray: one process serves one engine", param="replicas")
    raise typer.Exit(run(settings, address, model, models))


def _run_with_ray(settings: ServerSettings, model: str, fields: dict[str, Any], replicas: str) -> int:
    """The Ray application, which is a package of its own. The exit code.

    Raises:
        MissingDependencyError: it, or Ray, is not installed.
        InvalidRequestError: a wrong number of replicas, or an option that needs a single process.
    """
    if settings.unload_after >= 0:
        raise InvalidRequestError(
            f"--keep-alive is {settings.unload_after:g} s, but replicas keep their model: with --ray it must be -1",
            param="keep_alive",
        )
    found = list(entry_points(group="ninfer.serve", name="ray"))
    if not found:
        raise MissingDependencyError("ray", "ray", "--ray")
    try:
        start = found[0].load()
    except ImportError as error:
        raise MissingDependencyError(error.name or "ray", "ray", "--ray") from error
    return int(start(settings, model, fields, replicas))


class InstalledModels:
    """The models of this machine as engines with the server's options."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def find(self, name: str) -> store.ModelEntry:
        """The installed model of a name; of no name a published model, the first by name, or the demo."""
        if name:
            return store.describe(name)
        entries = [entry for entry in store.installed() if entry.known and entry.known.repository]
        return entries[0] if entries else store.describe("demo")

    def load(self, path: str) -> Engine:
        """A loaded engine; how far it is shows on stderr."""
        from ninfer_core.engine import Engine

        console, name = Console(os.environ), store.describe(path).name
        with loading(console, name) as progress:
            engine = Engine.load(path, progress=progress, **self._fields)
        console.note(f"ninfer: {name} is loaded")
        return engine

    def describe(self, path: str) -> Any:
        """The same without its weights."""
        from ninfer_core.engine import EngineOptions, ModelCard

        return ModelCard(EngineOptions(model=path, **self._fields))


def _prefix_cache(on: bool, tokens: int | None, checkpoints: int | None) -> bool | int | None:
    """The engine's option; None is its default."""
    if on:
        return tokens
    if tokens is not None or checkpoints is not None:
        given = "--prefix-cache-tokens" if tokens is not None else "--checkpoints"
        raise InvalidRequestError(f"{given} needs the prefix cache, which --no-prefix-cache turns off", param=given)
    return False


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _domains(text: str) -> tuple[str, ...]:
    return () if text.strip().lower() == "any" else _words(text)


def _reasoning_field(value: str) -> Any:
    if value not in ("reasoning_content", "reasoning", "both"):
        raise InvalidRequestError(
            f"--reasoning-field is {value!r}; it must be reasoning_content, reasoning or both", param="reasoning_field"
        )
    return value


def read_keys(keys: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """All API keys: those given, and the lines of the key file that are neither empty nor comments."""
    found = [key.strip() for key in keys if key.strip()]
    if file is not None:
        lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
        own = [line for line in lines if line and not line.startswith("#")]
        if not own:
            raise InvalidRequestError(f"the key file {file} holds no key", param="api_key_file")
        found += own
    return tuple(dict.fromkeys(found))


def run(settings: ServerSettings, address: Address, model: str, models: Models) -> int:
    """Bind, answer "loading" while the first model is loaded, then serve until a signal. The exit code.

    Raises:
        NinferError: the model could not be loaded.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(error.name or "fastapi", "serve", "the HTTP server") from error
    try:
        sockets = bind(address)
    except OSError as error:
        holder = holder_of(address)
        sys.stderr.write(
            f"error: cannot listen on {address.host}:{address.port}: {(error.strerror or str(error)).lower()}{holder}; "
            f"choose another port, for example: ninfer serve {model or 'MODEL'} --port {address.port + 1}\n"
        )
        return exits.PORT
    from .boot import Boot, GracefulServer

    boot = Boot(settings, models, model)
    server = GracefulServer(boot, settings)
    loading = threading.Thread(target=boot.load, args=(server.stop,), name="ninfer-load", daemon=True)
    loading.start()
    shown = f"http://{address.shown}:{sockets[0].getsockname()[1]}"
    sys.stderr.write(f"ninfer: listening on {shown}, loading {model or 'a model'}\n")
    try:
        server.run(sockets=sockets)
    finally:
        boot.close()
        for item in sockets:
            item.close()
    if loading.is_alive():
        # Stopped while loading: the interpreter's own shutdown would abort on a thread inside native code.
        sys.stderr.flush()
        os._exit(exits.OK)
    if boot.error is not None:
        raise boot.error
    return 0
