"""Detects the caller of a collective: the script, or which part of ``DistributedDataParallel``.

torch does not pass this to a process group. A collective of DDP can be retried over the survivors of a failure, one of
the script cannot; and the result of a collective of DDP's reducer need not be copied.
"""

from __future__ import annotations

from types import FrameType

from holdfast.torch_private import JOINED

_BACKWARD_MODULE = "torch.autograd.graph"
_DDP_MODULE = "torch.nn.parallel.distributed"
_DDP_MODULES = (_DDP_MODULE, "torch.distributed.algorithms.ddp_comm_hooks")
_PYTHON_API = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
_DDP_START_MODULE = "torch.distributed.utils"


class CallSite:
    """The caller of a collective, detected from the innermost Python frame outside this package on the call stack.

    ``task`` is the backward pass that this thread runs, -1 if none.
    """

    def __init__(self, frame: FrameType, task: int) -> None:
        self.task = task
        name = _module(frame)
        is_joined = task < 0 and name == _DDP_MODULE and frame.f_code.co_name == JOINED
        self.is_reducer = is_joined or (task >= 0 and name == _BACKWARD_MODULE)
        """Whether DDP's reducer calls, or C++ code that looks the same: it waits, or reads the future's value."""
        self.backward: object = frame if is_joined else task
        """Identifies the backward pass: equal for all calls that belong to it, and for no others."""
        while task >= 0 and name.startswith(_PYTHON_API) and frame.f_back is not None:
            # torch's communication hooks call the same functions as a script.
            frame = frame.f_back
            name = _module(frame)
        self.is_backward = self.is_reducer or (task >= 0 and name.startswith(_DDP_MODULES))
        """Whether DDP all-reduces gradients."""
        self.is_ddp_outside = (
            task < 0 and not is_joined and (name.startswith(_DDP_MODULES) or name == _DDP_START_MODULE)
        )
        """Whether DDP calls, for anything but the all-reduce of gradients."""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
