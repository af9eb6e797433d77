"""Who is alive, and how tensors are summed.

:class:`~holdfast.comm.base.Communicator` is the seam: :mod:`~holdfast.comm.ulfm` (Open MPI, real processes) and
:mod:`~holdfast.comm.virtual` (many workers in one process) implement it, and :class:`~holdfast.comm.allreduce.ordered.OrderedSum`
adds gradients on top of either, in an order that belongs to the job.
"""

from holdfast.comm.allreduce.checksums import checksum
from holdfast.comm.allreduce.ordered import SUM, Mean, OrderedSum, Span
from holdfast.comm.base import Communicator, share_bytes
from holdfast.comm.connect import connect
from holdfast.comm.p2p import Mail
from holdfast.comm.subgroup import Subgroup
from holdfast.comm.virtual import VirtualCommunicator

__all__ = [
    "SUM",
    "Communicator",
    "Mail",
    "Mean",
    "OrderedSum",
    "Span",
    "Subgroup",
    "VirtualCommunicator",
    "checksum",
    "connect",
    "share_bytes",
]
