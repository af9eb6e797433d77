"""``virtual``: many virtual workers in one process, deterministic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.comm.fabrics.base import Endpoint, Fabric

if TYPE_CHECKING:
    from holdfast.comm.base import Communicator


class VirtualFabric(Fabric):
    """One process runs all workers, and can lose any of them at an exact moment."""

    name = "virtual"
    one_process = True

    def connect(self, endpoint: Endpoint) -> Communicator:
        """Return a communicator that runs all workers."""
        from holdfast.comm.virtual import VirtualCommunicator

        return VirtualCommunicator(endpoint.workers if endpoint.ranks is None else endpoint.ranks)
