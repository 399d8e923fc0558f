"""Ray Serve's request router with the choice of `routing`: by conversation, then by load."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .routing import Affinity, Key

_FOLLOWED = 2.0


class ConversationRouter(RequestRouter):
    """Sends a conversation to the replica that holds its prefix; a full one is passed over by Serve itself."""

    def initialize_state(self, spread: int = 4) -> None:
        """`spread`: how many requests more than the idlest replica one may have and still get its conversations."""
        self._affinity = Affinity(spread)
        self._sent: dict[str, str] = {}  # request to replica
        self._meant: dict[str, tuple[str, float]] = {}  # chosen, not sent yet: a burst must not see an idle replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank, the best first."""
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        now = time.monotonic()
        # A choice that was not followed, because the replica was full or the client left, soon stops counting.
        self._meant = {request: choice for request, choice in self._meant.items() if now - choice[1] < _FOLLOWED}
        own = pending_request.metadata.internal_request_id if pending_request is not None else ""
        loads = dict.fromkeys(named, 0)
        for name in [*self._sent.values(), *(name for request, (name, _) in self._meant.items() if request != own)]:
            if name in loads:
                loads[name] += 1
        order = self._affinity.order(_key(pending_request), loads)
        if own and order:
            self._meant[own] = (order[0], now)
        return [[named[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the request and remember where its conversation is."""
        request = pending_request.metadata.internal_request_id
        self._meant.pop(request, None)
        self._sent[request] = replica_id.unique_id
        self._affinity.routed(_key(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request has ended, in whatever way."""
        self._sent.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone."""
        super().update_replicas(replicas)
        self._affinity.keep([replica.replica_id.unique_id for replica in replicas])


def _key(pending: PendingRequest | None) -> Key | None:
    return pending.args[0].key if pending is not None and pending.args else None
