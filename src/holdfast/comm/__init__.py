"""Communication between workers: membership, collectives, and the deterministic all-reduce.

:class:`~holdfast.comm.base.Communicator` is the interface. It is implemented by :mod:`~holdfast.comm.ulfm` (Open MPI,
real processes), :mod:`~holdfast.comm.c10d` (PyTorch's process groups) and :mod:`~holdfast.comm.virtual` (many workers
in one process). :class:`~holdfast.comm.allreduce.ordered.OrderedAllReduce` all-reduces gradients over any of them in a fixed
order. Names are imported lazily: the launcher uses only :mod:`~holdfast.comm.fabrics`, which does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast.comm.allreduce.checksums import checksum
    from holdfast.comm.allreduce.ordered import SUM, MeanDivisor, OrderedAllReduce, SlotSpan
    from holdfast.comm.allreduce.staged import make_allreduce
    from holdfast.comm.base import Communicator, MessageCommunicator, broadcast_bytes
    from holdfast.comm.connecting import connect
    from holdfast.comm.device import device_of
    from holdfast.comm.p2p import Mailbox
    from holdfast.comm.subgroup import Subgroup
    from holdfast.comm.virtual import VirtualCommunicator

_NAMES = {
    "allreduce.checksums": ("checksum",),
    "allreduce.ordered": ("SUM", "MeanDivisor", "OrderedAllReduce", "SlotSpan"),
    "allreduce.staged": ("make_allreduce",),
    "base": ("Communicator", "MessageCommunicator", "broadcast_bytes"),
    "connecting": ("connect",),
    "device": ("device_of",),
    "p2p": ("Mailbox",),
    "subgroup": ("Subgroup",),
    "virtual": ("VirtualCommunicator",),
}
_WHERE = {name: f".{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "SUM",
    "Communicator",
    "Mailbox",
    "MeanDivisor",
    "MessageCommunicator",
    "OrderedAllReduce",
    "SlotSpan",
    "Subgroup",
    "VirtualCommunicator",
    "broadcast_bytes",
    "checksum",
    "connect",
    "device_of",
    "make_allreduce",
]

__getattr__ = lazy(__name__, _WHERE)
