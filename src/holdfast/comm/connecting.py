"""Selects the fabric, and connects this process to the other workers."""

from __future__ import annotations

import os

from holdfast.comm.base import Communicator, MessageCommunicator
from holdfast.comm.fabrics.base import Endpoint
from holdfast.comm.fabrics.registry import DEFAULT, make_fabric
from holdfast.comm.launchers import chosen, others_started
from holdfast.errors import ConfigError


def connect(fabric: str, endpoint: Endpoint | None = None) -> Communicator:
    """Return the communicator of this process.

    Args:
        fabric: A name of :mod:`~holdfast.comm.fabrics.registry`, or "" for ``ulfm`` under mpirun and
            one virtual worker otherwise.
        endpoint: With what it connects; None: what its launcher says.

    Raises:
        ConfigError: if the fabric cannot work here; or if none was given, and another launcher started this process as
            one of several. Each would train alone, and all would save to the same place.
    """
    name = chosen(fabric)
    if not fabric and name == "virtual" and (reason := others_started(os.environ)):
        raise ConfigError(reason)
    return make_fabric(name).connect(endpoint or Endpoint())


def connect_messages(fabric: str, endpoint: Endpoint) -> MessageCommunicator:
    """Return the communicator of this process for the ``torch.distributed`` backend.

    The arguments are those of :func:`connect`; ``fabric`` "" is ``ulfm``, because each rank needs a process.

    Raises:
        ConfigError: if the fabric cannot work here, or has no such communicator.
    """
    return make_fabric(fabric or DEFAULT).connect_messages(endpoint)
