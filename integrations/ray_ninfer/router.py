"""Ray Serve's request router with the choice of `routing`: by conversation, then by load."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .replica import HttpCall
from .routing import Balance


class ConversationRouter(RequestRouter):
    """Sends a conversation to the replica that holds its prefix; a full one is passed over by Serve itself."""

    def initialize_state(self, spread: int = 4) -> None:
        """`spread`: how many requests more than the idlest replica one may have and still get its conversations."""
        self._balance = Balance(spread)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank, the best first."""
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request, call = "", None
        if pending_request is not None:
            request, call = pending_request.metadata.internal_request_id, _call(pending_request)
        key, avoid = (call.key, call.avoid) if call is not None else (None, ())
        return [[named[name]] for name in self._balance.order(request, key, named, time.monotonic(), avoid)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the request and remember where its conversation is."""
        call = _call(pending_request)
        key = call.key if call is not None else None
        self._balance.sent(pending_request.metadata.internal_request_id, key, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request has ended, in whatever way."""
        self._balance.ended(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone."""
        super().update_replicas(replicas)
        self._balance.keep([replica.replica_id.unique_id for replica in replicas])


def _call(pending: PendingRequest) -> HttpCall | None:
    return pending.args[0] if pending.args and isinstance(pending.args[0], HttpCall) else None
