"""``gloo``: PyTorch process groups, rebuilt among the survivors after a failure; membership is kept in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.comm.fabrics.base import Endpoint, Fabric
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.comm.base import Communicator


class GlooFabric(Fabric):
    """Needs only torch. Workers can join a running job, which survives the loss of a node."""

    name = "gloo"
    starts_each = True
    can_join = True
    survives_node_loss = True

    def connect(self, endpoint: Endpoint) -> Communicator:
        """Return the communicator of a worker whose launcher hosts the store."""
        from holdfast.comm.c10d import C10dCommunicator
        from holdfast.membership import open_store

        if not endpoint.store or endpoint.rank < 0:
            raise ConfigError(
                "the gloo fabric needs a launcher that sets rank and store: start with"
                " `holdfast run --fabric gloo -n 4 SCRIPT`"
            )
        world = range(endpoint.workers) if endpoint.ranks is None else endpoint.ranks
        store = open_store(endpoint.store, endpoint.token)
        return C10dCommunicator(store, endpoint.rank, world if endpoint.rank in world else None)
