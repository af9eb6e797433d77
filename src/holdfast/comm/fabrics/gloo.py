"""``gloo``: PyTorch process groups, rebuilt among the survivors after a failure; membership is kept in a store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.comm.fabrics.base import Endpoint, Fabric
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.comm.base import Communicator, MessageCommunicator
    from holdfast.membership import Store

_PATIENCE_S = 10.0
"""Time for which a worker tries to reach the store of its launcher, in seconds."""

_sessions, _process_groups = itertools.count(), itertools.count()


class GlooFabric(Fabric):
    """Needs only torch. Workers can join a running job, which survives the loss of a node."""

    name = "gloo"
    starts_each = True
    can_join = True
    survives_node_loss = True

    def connect(self, endpoint: Endpoint) -> Communicator:
        """Return the communicator of a worker whose launcher hosts the store."""
        from holdfast.comm.c10d import C10dCommunicator

        store, world = _store_and_world(endpoint, _sessions)
        return C10dCommunicator(store, endpoint.rank, world if endpoint.rank in world else None)

    def connect_messages(self, endpoint: Endpoint) -> MessageCommunicator:
        """Return the communicator of a rank whose launcher hosts the store."""
        from holdfast.comm.c10d_messages import C10dMessageCommunicator

        store, world = _store_and_world(endpoint, _process_groups)
        return C10dMessageCommunicator(store, endpoint.rank, world)


def _store_and_world(endpoint: Endpoint, earlier: Iterator[int]) -> tuple[Store, Sequence[int]]:
    """Return the store and the first members; ``earlier`` counts the connections of this kind in this process.

    Each has agreements of its own: a script may train twice, and all workers connect in the same order.
    """
    from holdfast.membership import open_store
    from holdfast.membership.scope import store_scope

    if not endpoint.store or endpoint.rank < 0:
        raise ConfigError(
            "the gloo fabric needs a launcher that sets rank and store: start with"
            " `holdfast run --fabric gloo -n 4 SCRIPT`"
        )
    world = range(endpoint.workers) if endpoint.ranks is None else endpoint.ranks
    store = open_store(endpoint.store, endpoint.token, patience_s=_PATIENCE_S)
    number = next(earlier)
    return (store_scope(store, f"again/{number}/") if number else store), world
