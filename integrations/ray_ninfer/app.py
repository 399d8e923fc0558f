"""The Ray Serve application: `build` for `serve run` and config files, `serve` for `ninfer serve --ray`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ninfer_cli.server.settings import ServerSettings
from ray import serve as ray_serve
from ray.exceptions import AuthenticationError as RayAuthenticationError
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import HTTPOptions, RequestRouterConfig
from starlette.types import Receive, Scope, Send

from ninfer_core.errors import AuthenticationError, EngineError, ServerUnreachableError

from .deployments import ServedFront, ServedReplica
from .plan import Plan, check_address
from .router import ConversationRouter

NAME = "ninfer"


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


def application(plan: Plan, replica: type[ServedReplica] = ServedReplica) -> Application:
    """The application of a plan; `replica` may be a class of your own, say with further methods for its handle."""
    room = plan.settings.slots
    resources = {"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus}
    options: dict[str, Any] = {
        "ray_actor_options": resources,
        "max_ongoing_requests": room + plan.settings.max_queue,
        "max_queued_requests": max(1, plan.settings.max_queue),
        "graceful_shutdown_timeout_s": plan.drain,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": plan.health_period,
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
            "upscale_delay_s": plan.grow_after,
            "downscale_delay_s": plan.shrink_after,
            # Averaged over no more than the delay, so that a delay is what it says; Serve measures every 10 s.
            "look_back_period_s": max(10.5, min(30.0, plan.grow_after)),
        }
    else:
        options["num_replicas"] = plan.replicas
    replicas = ray_serve.deployment(replica, name="replica", **options).bind(plan.model, plan.options, plan.settings)
    front = ray_serve.deployment(
        ray_serve.ingress(_Gate())(ServedFront),
        name="front",
        num_replicas=plan.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=plan.drain,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return front.bind(replicas, plan.settings)


def build(args: dict[str, Any]) -> Application:
    """The application of a config file's `args`; see `Plan.of`."""
    return application(Plan.of(args))


def serve(settings: ServerSettings, model: str, options: dict[str, Any], replicas: str) -> int:
    """Run the application on the cluster of RAY_ADDRESS, or on one of this machine's own, until a signal.

    Raises:
        InvalidRequestError: `replicas` is neither a number nor `auto`, or a setting needs one process.
        ServerUnreachableError: no cluster answers at RAY_ADDRESS.
        AuthenticationError: the cluster wants another token.
        EngineError: Ray could not start the application, say because no replica could load the model.
    """
    count: int | str = int(replicas) if replicas.isdecimal() else replicas
    Plan(model, options, settings, count)  # what is wrong shows before a cluster is started
    connect(os.environ)
    stop = threading.Event()
    shared = False
    try:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: stop.set())
        there = ray.cluster_resources()
        gpus = int(there.get("GPU", 0)) if options.get("device") != "cpu" else 0
        most = gpus or int(there.get("CPU", 1))
        plan = Plan(model, options, settings, count, max_replicas=max(1, most), num_gpus=1 if gpus else 0, num_cpus=1)
        try:
            shared = bool(ray_serve.status().proxies)
            if not shared:
                ray_serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
            ray_serve.run(application(plan), name=NAME, route_prefix="/")
        except (RuntimeError, RayError) as error:
            raise EngineError(f"Ray Serve could not start the application: {error}") from error
        where = "the address of the Serve that ran there" if shared else f"http://{settings.host}:{settings.port}"
        sys.stderr.write(f"ninfer: {replicas} replicas of {model} on {where}\n")
        stop.wait()
    finally:
        # Requests may end; what takes longer ends with our own cluster, or after its drain time on one that stays.
        # A Serve that others started keeps their applications.
        end = partial(ray_serve.delete, NAME) if shared else ray_serve.shutdown
        ending = threading.Thread(target=end, name="ninfer-ray-end", daemon=True)
        ending.start()
        ending.join(settings.shutdown_grace + 10.0)
        ray.shutdown()
    return 0


def connect(environ: Mapping[str, str]) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine.

    Raises:
        ServerUnreachableError: nothing answers there.
        AuthenticationError: the cluster refuses this client's token.
    """
    address = environ.get("RAY_ADDRESS", "")
    where = f"the Ray cluster of RAY_ADDRESS={address}" if address else "a Ray cluster of this machine"
    check_address(address)
    try:
        ray.init(namespace="serve", log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises bare exceptions too, say for a node that was too slow to start
        if _unauthenticated(error):
            raise AuthenticationError(
                f"{where} refused this client's token: give the cluster's own in RAY_AUTH_TOKEN or as the file "
                "RAY_AUTH_TOKEN_PATH, with RAY_AUTH_MODE=token"
            ) from error
        raise ServerUnreachableError(f"{where} could not be used: {_first_line(error)}") from error


def _unauthenticated(error: BaseException | None) -> bool:
    """Whether a token was the cause, which Ray may say only in the text of a cause that is a traceback."""
    while error is not None:
        if isinstance(error, RayAuthenticationError) or "AuthenticationError" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
