"""All private names of torch that Holdfast uses, in one place.

A newer torch may change them silently, so :data:`TRIED` names the newest version they were tried with. ``make test-torch VERSION=...``
tries another one. Not here are the methods by which torch calls a process group or a work
(``distributed/group_base.py`` and what is made of it, ``distributed/work.py``).
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn, optim
from torch.optim import optimizer as _optimizer
from torch.utils._pytree import tree_flatten, tree_map

__all__ = [
    "JOINED",
    "TRIED",
    "buffers_of",
    "check_version",
    "copy_each",
    "fake_tensors",
    "gather_flat",
    "gloo_options",
    "gradient_hooks",
    "has_step_hooks",
    "logging_data",
    "offset_in_file",
    "parameters_of",
    "task_of_backward",
    "tree_flatten",
    "tree_map",
    "untried",
    "version_of",
]

TRIED = "2.14.1"
"""The newest torch version in which these private names are known to work as described here."""

JOINED = "_match_all_reduce_for_bwd_pass"
"""The method of DistributedDataParallel that sums for a rank that has no more data, as many times as the others' reducers."""


def untried(version: str) -> str:
    """Return the line that warns of torch ``version``; "" if it is not of a newer minor version than :data:`TRIED`."""
    if _minor(version) <= _minor(TRIED):
        return ""
    return f"torch {version} is newer than {TRIED}, the newest that Holdfast was tried with; if something breaks, install that one"


@functools.cache
def check_version() -> None:
    """Write one line on stderr, once a process, if the torch that is installed is newer than what was tried."""
    if line := untried(torch.__version__):
        sys.stderr.write(f"holdfast: {line}\n")
        sys.stderr.flush()


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


# -- tensors, modules and optimizers


def version_of(tensor: torch.Tensor) -> int:
    """Return how many times a tensor was written to in place."""
    return tensor._version


def copy_each(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each value into its tensor, all in one call."""
    torch._foreach_copy_(into, values)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that a module itself has, by name, to be changed there."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers that a module itself has, by name, to be changed there."""
    return module._buffers


def gradient_hooks(parameter: nn.Parameter) -> tuple[int, int]:
    """Return how many hooks see the gradient of a parameter on its way, and how many once it is accumulated."""
    hooks: Any = parameter
    return len(hooks._backward_hooks or ()), len(hooks._post_accumulate_grad_hooks or ())


def has_step_hooks(optimizer: optim.Optimizer) -> bool:
    """Return whether anything is called before or after a step of this optimizer, or of every one."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _optimizer._global_optimizer_pre_hooks
        or _optimizer._global_optimizer_post_hooks
    )


def task_of_backward() -> int:
    """Return the number of the backward pass that this thread carries out, -1 if none."""
    return torch._C._current_graph_task_id()


# -- files


def fake_tensors() -> AbstractContextManager[object]:
    """Return a context in which ``torch.load`` reads no values, and notes where in the file they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def offset_in_file(tensor: torch.Tensor) -> int:
    """Return where the storage of a tensor begins that was loaded in :func:`fake_tensors`, bytes; -1 if torch does not say."""
    return int(getattr(tensor.untyped_storage(), "_checkpoint_offset", -1))


# -- process groups


def gloo_options(timeout: timedelta, devices: list[Any]) -> Any:
    """Return the options of a Gloo group with one thread, as there is one operation at a time.

    Args:
        timeout: Of making connections.
        devices: Where it listens; :meth:`ProcessGroupGloo.create_device` makes them.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._threads, options._devices = timeout, 1, devices
    return options


def gather_flat(group: Any, out: torch.Tensor, part: torch.Tensor) -> Any:
    """Begin to gather the parts of all members, one behind the other in ``out``, and return the work."""
    return group._allgather_base(out, part)


def logging_data(model: Any) -> dict[str, Any]:
    """Return DistributedDataParallel's logging data on its buckets; no public name says what was allocated."""
    data: dict[str, Any] = model._get_ddp_logging_data()
    return data
