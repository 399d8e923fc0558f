"""Replica and front as Ray Serve deploys them: loading, what Ray's errors mean, the server's series in its metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ninfer_cli.server.app import build_app
from ninfer_cli.server.host import ModelHost, loaded
from ninfer_cli.server.settings import ServerSettings
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.metrics import Gauge

from ninfer_core import store
from ninfer_core.engine import Engine
from ninfer_core.errors import EngineBusyError

from .front import Front
from .replica import HttpCall, Replica, ReplicaLostError

# The process or its machine is gone, or what it had sent but this process had not fetched yet went with it.
_LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)


class ServedReplica(Replica):
    """A loaded model. Serve keeps it while `check_health` passes, and lets its streams end before it stops it."""

    def __init__(self, model: str, options: dict[str, Any], settings: ServerSettings) -> None:
        entry = store.describe(model)
        engine = Engine.load(str(entry.path), **options)
        host = ModelHost(settings, loaded(engine, str(entry.path), entry.path, entry.name))
        super().__init__(engine, build_app(host, settings), serve.get_replica_context().replica_id.unique_id)
        self._gauges = EngineGauges()

    async def check_health(self) -> None:
        """As for every replica; Serve asks every few seconds, which is also how often the metrics are published."""
        self._gauges.publish(self.app.state.server.metrics.registry)
        await super().check_health()

    def __del__(self) -> None:
        if hasattr(self, "app"):
            self.close()


class ServedFront(Front):
    """The front of a deployment; `handle` is that of the replicas."""

    def __init__(self, handle: Any, settings: ServerSettings) -> None:
        super().__init__(RayReplicas(handle), settings)


class RayReplicas:
    """The replicas behind a Serve handle."""

    def __init__(self, handle: Any) -> None:
        self._calls = handle.options(stream=True).call

    async def call(self, call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        """As `front.Replicas`."""
        batches = self._calls.remote(call)
        try:
            async for batch in batches:
                yield batch
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise EngineBusyError("all replicas are full; try again shortly", retry_after=1.0) from error
        except _LOST as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}") from error
        except RayTaskError as error:
            if isinstance(error.cause, ReplicaLostError):
                raise ReplicaLostError(error.cause.reason, error.cause.replica) from error
            raise
        finally:
            batches.cancel()


class EngineGauges:
    """The server's Prometheus series as metrics of Ray, under the same names with `_` for `:`; Ray tags the replica."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def publish(self, registry: Any) -> None:
        """Set every series to its value of now."""
        for family in registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    name = sample.name.replace(":", "_")
                    gauge = Gauge(name, description=family.documentation, tag_keys=tuple(sorted(sample.labels)))
                    self._gauges[sample.name] = gauge
                gauge.set(float(sample.value), tags=dict(sample.labels))
