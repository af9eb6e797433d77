"""All private names of torch that Holdfast uses, in one place.

A newer torch may change them silently, so :data:`TRIED` is the newest version that they were tested with. ``make test-torch VERSION=...``
tests another one. Not listed here are the methods through which torch calls a process group or a work
(``distributed/group_base.py`` and its subclasses, ``distributed/work.py``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn, optim
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import optimizer as _optimizer
from torch.utils._pytree import tree_flatten, tree_map

from holdfast.base.side_work import say

__all__ = [
    "JOINED",
    "MODULE_CALL",
    "OBJECT_BROADCAST",
    "OBJECT_GATHERS",
    "TRIED",
    "add_each",
    "agree_on_common_rank",
    "begin_event",
    "buffers_of",
    "check_version",
    "copy_each",
    "debug_server",
    "drop_graph",
    "fake_tensors",
    "gather_flat",
    "gloo_options",
    "has_step_hooks",
    "is_of_normalisation",
    "is_parameter",
    "is_profiling",
    "logging_data",
    "offset_in_file",
    "parameters_of",
    "rebuild_reducer",
    "rendezvous_handlers",
    "source_of",
    "task_of_backward",
    "tree_flatten",
    "tree_map",
    "untried",
    "version_of",
    "why_not_rebuilt",
    "zero_each",
]

TRIED = "2.14.1"
"""The newest torch version in which these private names are known to work as described here."""

JOINED = "_match_all_reduce_for_bwd_pass"
"""The DistributedDataParallel method that issues the bucket all-reduces of a rank without data, to match the other ranks' reducers."""

MODULE_CALL = "_call_impl"
"""The method of a module that calls its forward pass."""

OBJECT_GATHERS = ("all_gather_object", "gather_object")
"""The functions of ``torch.distributed`` that gather the sizes of pickled objects, and then their bytes."""

OBJECT_BROADCAST = "broadcast_object_list"
"""The function of ``torch.distributed`` that broadcasts the sizes of pickled objects, and then their bytes."""


def untried(version: str) -> str:
    """Return a warning for torch ``version``, or "" unless its minor version is newer than that of :data:`TRIED`."""
    if _minor(version) <= _minor(TRIED):
        return ""
    return f"torch {version} is newer than {TRIED}, the newest that Holdfast was tested with; if something breaks, install that one"


@functools.cache
def check_version() -> None:
    """Warn on stderr, once per process, if the installed torch is newer than the newest tested version."""
    if line := untried(torch.__version__):
        say(line)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


# -- tensors, modules and optimizers


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor: how many times it was modified in place."""
    return tensor._version


def add_each(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Add each value to its tensor, all in one call."""
    torch._foreach_add_(into, values)


def copy_each(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each value into its tensor, all in one call."""
    torch._foreach_copy_(into, values)


def scale_each(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply each tensor in place, all in one call."""
    torch._foreach_mul_(tensors, factor)


def zero_each(tensors: list[torch.Tensor]) -> None:
    """Set each tensor to zero in place, all in one call."""
    if tensors:
        torch._foreach_zero_(tensors)


def is_of_normalisation(module: nn.Module, name: str) -> bool:
    """Return whether a buffer of a module belongs to torch: statistics of a normalisation layer, or a spectral norm."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return name in ("running_mean", "running_var", "num_batches_tracked")
    hooks = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm))
    return isinstance(module, _SpectralNorm) or any(name in (f"{hook.name}_u", f"{hook.name}_v") for hook in hooks)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, another leaf with a gradient, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return base.requires_grad and base.is_leaf


def drop_graph(tensor: torch.Tensor) -> None:
    """Let go of the graph that computed a tensor, unless it is a view, whose graph cannot be replaced."""
    if tensor._base is None:
        tensor.detach_()


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the mutable dict of a module's own parameters, by name."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the mutable dict of a module's own buffers, by name."""
    return module._buffers


def has_step_hooks(optimizer: optim.Optimizer) -> bool:
    """Return whether a hook runs before or after a step of this optimizer, be it its own or a global one."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _optimizer._global_optimizer_pre_hooks
        or _optimizer._global_optimizer_post_hooks
    )


def task_of_backward() -> int:
    """Return the id of the backward pass that this thread executes, -1 if none."""
    return torch._C._current_graph_task_id()


# -- files


def is_profiling() -> bool:
    """Return whether a profiler of torch is on."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def begin_event(name: str, inputs: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Begin an event of torch's profiler; any thread may call what is returned, once, to end it."""
    event = torch.autograd._record_function_with_args_enter(name, *inputs)  # type: ignore[attr-defined]
    ended: torch.futures.Future[None] = torch.futures.Future()
    # The profiler is in the state of the thread that began the event, and its callback carries that to where it ends.
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(event, ended)
    return functools.partial(ended.set_result, None)


def fake_tensors() -> AbstractContextManager[object]:
    """Return a context in which ``torch.load`` reads no values and records their offsets in the file."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def offset_in_file(tensor: torch.Tensor) -> int:
    """Return the file offset, in bytes, of the storage of a tensor loaded under :func:`fake_tensors`; -1 if torch does not know."""
    return int(getattr(tensor.untyped_storage(), "_checkpoint_offset", -1))


# -- process groups


def gloo_options(timeout: timedelta, devices: list[Any]) -> Any:
    """Return the options of a Gloo process group with one thread, since one operation runs at a time.

    Args:
        timeout: Timeout for connecting.
        devices: Devices to listen on, from :meth:`ProcessGroupGloo.create_device`.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._threads, options._devices = timeout, 1, devices
    return options


def gather_flat(group: Any, out: torch.Tensor, part: torch.Tensor) -> Any:
    """Start an all-gather of equal parts into ``out``, in rank order, and return the work."""
    return group._allgather_base(out, part)


def rendezvous_handlers() -> dict[str, Any]:
    """Return the mutable dict of the functions that make a process group's store, by the scheme of their URL."""
    # torch.distributed.rendezvous is a function, which hides the module of that name.
    handlers: dict[str, Any] = vars(importlib.import_module("torch.distributed.rendezvous"))["_rendezvous_handlers"]
    return handlers


def source_of(work: Any) -> int:
    """Return the place in its group of the process whose message a completed receive from any source has taken."""
    return int(work._source_rank())


def logging_data(model: Any) -> dict[str, Any]:
    """Return DistributedDataParallel's logging data on its buckets; no public name reports the allocated sizes."""
    data: dict[str, Any] = model._get_ddp_logging_data()
    return data


def why_not_rebuilt(model: Any) -> str:
    """Return why :func:`rebuild_reducer` cannot rebuild the reducer of a DistributedDataParallel, "" if it can."""
    if model.mixed_precision is not None:
        return "mixed_precision=..."
    if getattr(model, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params=..."
    return ""


def rebuild_reducer(model: Any) -> None:
    """Replace the reducer of a DistributedDataParallel by a new one, as if the model had just been wrapped.

    Its own way of unpickling builds a reducer without any collective. The old reducer goes first, and its gradient
    hooks with it. Communication hooks are registered with the new one.
    """
    state = model.__getstate__()
    del model.reducer, model.logger
    model.__setstate__(state)
    model._static_graph_delay_allreduce_enqueued = False
    for hook, its_state in model._comm_hooks:
        torch.distributed._register_comm_hook(model.reducer, its_state, hook)  # type: ignore[attr-defined]


def debug_server(path: str) -> Any:
    """Return a server of torch's debug handlers for this process, at a new UNIX socket; it stops when it is dropped.

    Raises:
        ImportError: this build of torch has none.
    """
    from torch._C._distributed_c10d import _WorkerServer

    return _WorkerServer(path)


def agree_on_common_rank(kind: Any, instead: Callable[[Any], int | None]) -> None:
    """Let ``instead`` choose where no rank is a candidate for the one that ``DistributedDataParallel`` copies the model from.

    Args:
        kind: The class.
        instead: Receives the process group, and returns the same rank on all of them, or None to let torch raise.
    """
    find = kind._find_common_rank

    def find_or_choose(self: Any, input_rank: int, rank_cond: bool) -> int:
        try:
            return int(find(self, input_rank, rank_cond))
        except ValueError:  # on all ranks alike
            rank = instead(self.process_group)
            if rank is None:
                raise
            return rank

    kind._find_common_rank = find_or_choose
