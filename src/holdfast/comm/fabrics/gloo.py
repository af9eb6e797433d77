"""``gloo``: PyTorch process groups, rebuilt among the survivors after a failure; membership is kept in a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.comm.fabrics.base import Endpoint, Fabric
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.comm.base import Communicator, MessageCommunicator
    from holdfast.membership import Store

_PATIENCE_S = 10.0
"""Time for which a worker tries to reach the store of its launcher, in seconds."""


class GlooFabric(Fabric):
    """Needs only torch. Workers can join a running job, which survives the loss of a node."""

    name = "gloo"
    starts_each = True
    can_join = True
    survives_node_loss = True

    def connect(self, endpoint: Endpoint) -> Communicator:
        """Return the communicator of a worker whose launcher hosts the store."""
        from holdfast.comm.c10d import C10dCommunicator

        store, world = _store_and_world(endpoint)
        return C10dCommunicator(store, endpoint.rank, world if endpoint.rank in world else None)

    def connect_messages(self, endpoint: Endpoint) -> MessageCommunicator:
        """Return the communicator of a rank whose launcher hosts the store."""
        from holdfast.comm.c10d_messages import C10dMessageCommunicator

        store, world = _store_and_world(endpoint)
        return C10dMessageCommunicator(store, endpoint.rank, world)


def _store_and_world(endpoint: Endpoint) -> tuple[Store, Sequence[int]]:
    from holdfast.membership import open_store

    if not endpoint.store or endpoint.rank < 0:
        raise ConfigError(
            "the gloo fabric needs a launcher that sets rank and store: start with"
            " `holdfast run --fabric gloo -n 4 SCRIPT`"
        )
    world = range(endpoint.workers) if endpoint.ranks is None else endpoint.ranks
    return open_store(endpoint.store, endpoint.token, patience_s=_PATIENCE_S), world
