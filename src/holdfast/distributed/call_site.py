"""Detects the caller of a collective: the script, a framework, or which part of ``DistributedDataParallel``.

torch does not pass this to a process group. A collective of DDP can be retried over the survivors of a failure, one of
the script cannot; the result of a collective of DDP's reducer need not be copied; and shards of parameters, unlike
metrics, cannot be replaced by those of another rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FrameType

from holdfast.torch_private import JOINED, OBJECT_BROADCAST, OBJECT_GATHERS

_BACKWARD_MODULE = "torch.autograd.graph"
_DDP_MODULE = "torch.nn.parallel.distributed"
_DDP_MODULES = (_DDP_MODULE, "torch.distributed.algorithms.ddp_comm_hooks")
_PYTHON_API = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
_DDP_START_MODULE = "torch.distributed.utils"
_SHARDING_PACKAGES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed._shard",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "deepspeed",
    "fairscale",
    "megatron",
)
"""Packages whose gathers collect different parts of one state."""
_FRAMEWORKS = ("accelerate", "transformers", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")
"""Packages that call collectives in place of the script, which therefore cannot handle an error of theirs."""


class CallSite:
    """The caller of a collective, detected from the innermost Python frame outside this package on the call stack.

    Autograd runs the backward pass of a CPU in the thread that called it, and that of a GPU in a thread of its own, which
    has no such frame.

    Args:
        frame: The frame, None if only C++ code has called.
        task: The backward pass that this thread runs, -1 if none.
    """

    def __init__(self, frame: FrameType | None, task: int) -> None:
        self._frame = frame
        self.task = task
        name = _module(frame)
        is_joined = task < 0 and name == _DDP_MODULE and frame is not None and frame.f_code.co_name == JOINED
        self.is_reducer = is_joined or (task >= 0 and (frame is None or name == _BACKWARD_MODULE))
        """Whether DDP's reducer calls, or C++ code that looks the same: it waits, or reads the future's value."""
        self.backward: object = frame if is_joined else task
        """Identifies the backward pass: equal for all calls that belong to it, and for no others."""
        while task >= 0 and frame is not None and name.startswith(_PYTHON_API):
            # torch's communication hooks call the same functions as a script.
            frame = frame.f_back
            name = _module(frame)
        self.is_backward = self.is_reducer or (task >= 0 and name.startswith(_DDP_MODULES))
        """Whether DDP all-reduces gradients."""
        self.is_ddp_outside = (
            task < 0 and not is_joined and (name.startswith(_DDP_MODULES) or name == _DDP_START_MODULE)
        )
        """Whether DDP calls, for anything but the all-reduce of gradients."""

    @property
    def is_framework(self) -> bool:
        """Whether a framework calls, outside of the backward pass; the frames of torch's own API do not count."""
        if self.task >= 0:
            return False
        caller = next((f for f in _frames(self._frame) if not _module(f).startswith(_PYTHON_API)), self._frame)
        return _is_in(_module(caller), _FRAMEWORKS)

    @property
    def gathers_state(self) -> bool:
        """Whether the caller gathers parts of the model or of its state, or may do so: it looks at the whole stack."""
        frame: FrameType | None = self._frame
        while self.task < 0 and frame is not None:
            if _is_in(frame.f_globals.get("__name__", ""), _SHARDING_PACKAGES):
                return True
            frame = frame.f_back
        return self.task >= 0

    @property
    def gathers_objects(self) -> bool:
        """Whether torch gathers pickled objects: first their sizes, then their bytes."""
        return self._is_called_in(OBJECT_GATHERS)

    @property
    def broadcasts_objects(self) -> bool:
        """Whether torch broadcasts pickled objects: first their sizes, then their bytes."""
        return self._is_called_in((OBJECT_BROADCAST,))

    def _is_called_in(self, functions: tuple[str, ...]) -> bool:
        for frame in _frames(self._frame):
            if not _module(frame).startswith(_PYTHON_API):
                return False
            if frame.f_code.co_name in functions:
                return True
        return False


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Return a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return module in packages or module.startswith(tuple(f"{package}." for package in packages))


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
