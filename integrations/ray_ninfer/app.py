"""The Ray Serve application: `build` for `serve run` and config files, `serve` for `ninfer serve --ray`."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass, field, fields
from typing import Any

import ray
from ninfer_cli.server.settings import ServerSettings
from ray import serve as ray_serve
from ray.serve import Application
from ray.serve.config import HTTPOptions, RequestRouterConfig
from starlette.types import Receive, Scope, Send

from ninfer_core.errors import InvalidRequestError

from .front import Front
from .replica import Replica
from .router import ConversationRouter

NAME = "ninfer"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: `options` go to `Engine.load`, `replicas` is a number or "auto" (1 to `max_replicas`, by load).

    `drain` is how long a replica that is replaced may go on with its requests, seconds; `fronts` how many processes
    read requests and choose replicas; `num_gpus` and `num_cpus` are what one replica asks Ray for.
    """

    model: str = "demo"
    options: dict[str, Any] = field(default_factory=dict)
    settings: ServerSettings = field(default_factory=ServerSettings)
    replicas: int | str = 1
    max_replicas: int = 8
    fronts: int = 1
    num_gpus: float = 0
    num_cpus: float = 1
    drain: float = 600.0

    def __post_init__(self) -> None:
        if self.replicas != "auto" and (not isinstance(self.replicas, int) or self.replicas < 1):
            raise InvalidRequestError(f"replicas must be at least 1, or auto; not {self.replicas!r}", param="replicas")
        if self.max_replicas < 1 or self.fronts < 1:
            raise InvalidRequestError(
                f"max_replicas and fronts must be at least 1, not {self.max_replicas} and {self.fronts}",
                param="max_replicas",
            )
        if self.settings.stored_responses:
            raise InvalidRequestError(
                f"store_responses is {self.settings.stored_responses}, but a replica cannot read what another one "
                "keeps: with Ray it must be 0",
                param="store_responses",
            )


class _Gate:
    """The ASGI entry of a front's process."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await ray_serve.get_replica_context().servable_object.forward(scope, receive, send)


def application(plan: Plan) -> Application:
    """The application of a plan."""
    room = plan.settings.slots
    resources = {"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus}
    options: dict[str, Any] = {
        "ray_actor_options": resources,
        "max_ongoing_requests": room + plan.settings.max_queue,
        "max_queued_requests": max(1, plan.settings.max_queue),
        "graceful_shutdown_timeout_s": plan.drain,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "request_router_config": RequestRouterConfig(
            request_router_class=ConversationRouter, request_router_kwargs={"spread": room}
        ),
    }
    if plan.replicas == "auto":
        # What a replica runs and what waits there both count as ongoing: more than it can run at once asks for another.
        options["autoscaling_config"] = {
            "min_replicas": 1,
            "max_replicas": plan.max_replicas,
            "target_ongoing_requests": room,
        }
    else:
        options["num_replicas"] = plan.replicas
    replicas = ray_serve.deployment(Replica, name="replica", **options).bind(plan.model, plan.options, plan.settings)
    front = ray_serve.deployment(
        ray_serve.ingress(_Gate())(Front),
        name="front",
        num_replicas=plan.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=plan.drain,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return front.bind(replicas, plan.settings)


def build(args: dict[str, Any]) -> Application:
    """The application of a config file's `args`: the fields of `Plan`, with `settings` as an object.

    Raises:
        InvalidRequestError: an unknown or wrong field.
    """
    known = {item.name for item in fields(Plan)}
    if unknown := sorted(set(args) - known):
        raise InvalidRequestError(f"args has {', '.join(unknown)}; it knows {', '.join(sorted(known))}", param="args")
    settings = dict(args.get("settings", {}))
    known = {item.name for item in fields(ServerSettings)}
    if unknown := sorted(set(settings) - known):
        raise InvalidRequestError(
            f"settings has {', '.join(unknown)}; it knows {', '.join(sorted(known))}", param="settings"
        )
    for name in ("api_keys", "origins", "media_domains"):
        if settings.get(name) is not None:
            settings[name] = tuple(settings[name])
    if "metrics_compat" in settings:
        settings["metrics_compat"] = frozenset(settings["metrics_compat"])
    checked = ServerSettings(**settings)
    options = {"max_sequences": checked.slots, "max_queue": checked.max_queue, **args.get("options", {})}
    return application(Plan(**{**args, "settings": checked, "options": options}))


def serve(settings: ServerSettings, model: str, options: dict[str, Any], replicas: str) -> int:
    """Run the application on the cluster of RAY_ADDRESS, or on one of this machine's own, until a signal.

    Raises:
        InvalidRequestError: `replicas` is neither a number nor `auto`, or a setting needs one process.
    """
    count: int | str = int(replicas) if replicas.isdecimal() else replicas
    Plan(model, options, settings, count)  # what is wrong shows before a cluster is started
    ray.init(namespace="serve", log_to_driver=False, configure_logging=False)
    stop = threading.Event()
    try:
        there = ray.cluster_resources()
        gpus = int(there.get("GPU", 0)) if options.get("device") != "cpu" else 0
        most = gpus or int(there.get("CPU", 1))
        ray_serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
        plan = Plan(model, options, settings, count, max_replicas=max(1, most), num_gpus=1 if gpus else 0, num_cpus=1)
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: stop.set())
        ray_serve.run(application(plan), name=NAME, route_prefix="/")
        sys.stderr.write(f"ninfer: {replicas} replicas of {model} on http://{settings.host}:{settings.port}\n")
        stop.wait()
    finally:
        # Requests may end; what takes longer ends with our own cluster, or after its drain time on one that stays.
        ending = threading.Thread(target=ray_serve.shutdown, name="ninfer-ray-end", daemon=True)
        ending.start()
        ending.join(settings.shutdown_grace + 10.0)
        ray.shutdown()
    return 0
