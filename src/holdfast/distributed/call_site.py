"""Detects the caller of a collective: the script, a framework, or which part of ``DistributedDataParallel``.

torch does not pass this to a process group. The result of a collective of DDP's reducer need not be copied, and
the caller decides whether a collective is retried over the survivors of a failure: see :mod:`~holdfast.distributed.parts`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in its __all__

from holdfast.base.torch_private import JOINED, MODULE_CALL, OBJECT_BROADCAST, OBJECT_GATHERS

_BACKWARD_MODULE = "torch.autograd.graph"
_DDP_MODULE = "torch.nn.parallel.distributed"
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_ZERO_HOOK = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
_JOIN_MODULE = "torch.distributed.algorithms.join"
_SYNC_NORM_MODULE = "torch.nn.modules._functions"
_PYTHON_API = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "typing_extensions",  # it wraps functions that torch has deprecated
    "warnings",  # likewise, from Python 3.13 on
)
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
    "transformers.integrations.tensor_parallel",
    _ZERO_HOOK,
    "deepspeed",
    "fairscale",
    "megatron",
)
"""Packages whose collectives exchange different parts of one state."""
OPTIMIZER_PACKAGES = ("torch.distributed.optim", _ZERO_HOOK, "deepspeed", "fairscale", "megatron")
"""Those of them that split the state of an optimizer whose parameters are on all ranks."""
_AVERAGES = "torch.distributed.optim.post_localSGD_optimizer"
"""A module of one of them that averages whole replicas."""
_FUNCTIONS = "torch.distributed._functional_collectives"
"""Its collectives get copies of the caller's tensors, which do not show whether those carry gradients."""
_FRAMEWORKS = ("accelerate", "transformers", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")
"""Packages that call collectives in place of the script, which therefore cannot handle an error of theirs."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What the call stack of a collective says.

    Args:
        sharding: The package on it that splits a state over ranks, or "".
        in_function: An autograd function calls.
        in_forward: A module's forward pass calls.
        in_training: That of a module in training mode.
    """

    sharding: str
    in_function: bool
    in_forward: bool
    in_training: bool


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
        caller = frame
        while caller is not None and _module(caller).startswith(_PYTHON_API):
            caller = caller.f_back  # torch's hooks and join() call the same functions as a script
        self._caller = frame if caller is None else caller
        name = _module(self._caller)
        # A hook makes its later sums, such as the second one of PowerSGD, in callbacks, which run in another thread.
        by_hook = name.startswith(_HOOKS) and name != _ZERO_HOOK
        by_ddp = name.startswith(_DDP_MODULE)
        self.is_backward = self.is_reducer or by_hook or (task >= 0 and by_ddp)
        """Whether DDP all-reduces gradients."""
        self.is_join = task < 0 and name == _JOIN_MODULE
        """Whether ``join()`` counts the ranks that still have data."""
        self.is_ddp_outside = self.is_join or (task < 0 and not is_joined and (by_ddp or name == _DDP_START_MODULE))
        """Whether DDP calls, for anything but the all-reduce of gradients."""
        self.normalises = name == _SYNC_NORM_MODULE
        """Whether ``SyncBatchNorm`` exchanges statistics, in a forward or a backward pass."""

    @property
    def framework(self) -> str:
        """The framework that calls, outside of the backward pass, or ""; the frames of torch's own API do not count."""
        return _framework_of(_module(self._caller)) if self.task < 0 else ""

    @property
    def place(self) -> str:
        """File and line of the call, such as ``train.py, line 12``, below those of torch; "" if only C++ code calls."""
        frame = next((f for f in _frames(self._caller) if not _module(f).startswith(("torch.", *_PYTHON_API))), None)
        return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"

    @property
    def stack(self) -> Stack:
        """What the whole call stack says."""
        sharding, in_function, in_forward, in_training = "", False, False, False
        for frame in _frames(self._frame):
            name = _module(frame)
            sharding = sharding or _sharding_of(name)
            if name == _FUNCTIONS:
                in_function = in_function or torch.is_grad_enabled()
            elif name == "torch.autograd.function":
                in_function = True
            elif name == "torch.nn.modules.module" and frame.f_code.co_name == MODULE_CALL:
                in_forward = True
                in_training = in_training or bool(frame.f_locals["self"].training)
        return Stack(sharding, in_function, in_forward, in_training)

    @property
    def is_gradient_hook(self) -> bool:
        """Whether a hook that a script has for a parameter, or for DDP's buckets, calls: it averages gradients of replicas."""
        hook = None
        for frame in _frames(self._caller):
            if _module(frame) == _BACKWARD_MODULE:
                break
            hook = frame
        if hook is None or _module(hook).startswith("torch."):
            return False
        return any(isinstance(value, nn.Parameter | GradBucket) for value in hook.f_locals.values())

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
def _sharding_of(module: str) -> str:
    """Return the package that splits a state over ranks and that a module belongs to, or ""."""
    return "" if module == _AVERAGES else _package_of(module, _SHARDING_PACKAGES)


@functools.cache
def _framework_of(module: str) -> str:
    """Return the framework that a module belongs to, or ""."""
    return _package_of(module, _FRAMEWORKS)


def _package_of(module: str, packages: tuple[str, ...]) -> str:
    return next((package for package in packages if f"{module}.".startswith(f"{package}.")), "")


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
