"""Which collectives continue over the survivors of a failure, and what is lost with a rank in all others.

Replicas, and figures about them, are the same or of the same kind on all ranks: sums, barriers and broadcasts of a script
continue over the survivors. Parts of one state, which each rank has for itself, are lost with their rank. torch does not
say which of the two a collective exchanges. It shows in its caller, its tensors, its group, and earlier collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from holdfast.base.torch_private import is_parameter
from holdfast.distributed.call_site import OPTIMIZER_PACKAGES, CallSite

_AGAIN = "start again from a checkpoint (holdfast run --max-restarts N does so by itself)"
_SHARDS = f"{{ranks}} held a shard of the state: {_AGAIN}, or give HSDP a second replica"
_OPTIMIZER = f"{{ranks}} held a part of the optimizer's state, and this step has updated no parameter: {_AGAIN}"
_GRADIENTS = f"the tensors carry gradients, and the features or activations of {{ranks}} are lost: {_AGAIN}; detach a tensor that is only a metric"
_BACKWARD = f"a backward pass calls it, and what {{ranks}} had for it is lost: {_AGAIN}"
_SUBGROUP = f"the group is a part of the world, so {{ranks}} may have held a part of the model: {_AGAIN}"
_MODEL = (
    f"a forward pass without DistributedDataParallel calls it, so {{ranks}} may have held a part of the model: {_AGAIN}"
)
_FEATURES = f"a forward pass in training calls it, and the features of {{ranks}} are lost: {_AGAIN}"
_MIXED = f"collectives of this script carry gradients, so {{ranks}} may have held a part of the model: {_AGAIN}"
_POLICY = "--empty-seats is raise: the next call is over the survivors, and with fill this one would be, too"
_ROOT = "use a root that is alive, such as holdfast.distributed.alive()[0]"


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a collective if a rank of its group has failed.

    Args:
        recovers: It is retried over the survivors.
        scales: Its sum is multiplied by the initial number of ranks over that of the survivors.
        lost: What is lost and what to do, with ``{ranks}`` for the failed ranks, if it does not recover.
        is_part: What the failed ranks had for it is lost, also to later calls.
    """

    recovers: bool = False
    scales: bool = False
    lost: str = ""
    is_part: bool = False

    def advice(self, dead: Sequence[int], *, root: int = -1) -> str:
        """Return a sentence about what is lost and what to do, or ""; ``root`` is a global rank, -1 for none."""
        text = _ROOT if root in dead and not self.is_part else self.lost
        if not text:
            return ""
        words = text.format(ranks=f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))}")
        return f". {words[0].upper()}{words[1:]}"


EXCHANGED = Fate(lost=f"what {{ranks}} held for the others is lost: {_AGAIN}", is_part=True)
"""Of a collective in which each rank has something else for each other rank."""


class Evidence:
    """What the collectives of this process have shown about its job.

    It is equal on all ranks, because only groups of all ranks add to it: a rank knows nothing of the calls in the groups
    of others.
    """

    def __init__(self) -> None:
        self.replicates = False
        """``DistributedDataParallel`` keeps replicas on all ranks of the job."""
        self.splits_optimizer = False
        """Each rank has a part of the optimizer's state, and the others depend on its updates."""
        self._parts = ""

    def fate(
        self,
        call_site: CallSite,
        tensors: Iterable[torch.Tensor],
        policy: str,
        *,
        spans_job: bool,
        gathers: bool = False,
    ) -> Fate:
        """Return the fate of a collective.

        Args:
            call_site: Its caller.
            tensors: Its tensors.
            policy: The value of ``--empty-seats``.
            spans_job: Its group has all ranks of the start.
            gathers: Each rank has a tensor of its own in the result.
        """
        if call_site.is_backward or call_site.is_ddp_outside:
            self.replicates = self.replicates or spans_job
            if self.splits_optimizer:
                return Fate(lost=_OPTIMIZER, is_part=True)
            return Fate(recovers=True)
        if call_site.normalises:
            return Fate(recovers=True)
        lost = self._lost(call_site, list(tensors), spans_job=spans_job, gathers=gathers)
        if lost:
            return Fate(lost=lost, is_part=True)
        if policy == "raise":
            return Fate(lost=_POLICY)
        return Fate(recovers=True, scales=policy == "fill" and spans_job)

    def fate_of_barrier(self, policy: str) -> Fate:
        """Return the fate of a barrier in any group: no rank has anything for it, so its caller does not matter."""
        if self._parts:
            return Fate(lost=self._parts, is_part=True)
        return Fate(lost=_POLICY) if policy == "raise" else Fate(recovers=True)

    def _lost(self, call_site: CallSite, tensors: list[torch.Tensor], *, spans_job: bool, gathers: bool) -> str:
        stack = call_site.stack
        if stack.sharding:
            if spans_job:
                self._note(stack.sharding)
            return _SHARDS
        if call_site.task >= 0 and not (spans_job and not gathers and call_site.is_gradient_hook):
            self._note_mixed(spans_job=spans_job)
            return _BACKWARD
        if gathers and any(map(is_parameter, tensors)):
            return _SHARDS
        if call_site.framework == "torchmetrics":
            return ""
        dims = 1 if call_site.framework else 0  # frameworks repeat a loss for each sample
        carrying = [tensor for tensor in tensors if tensor.requires_grad and not self._is_loss(tensor, dims)]
        if stack.in_function or carrying:
            # A lone number may be a loss that the script has not detached, which says nothing about its model.
            if stack.in_function or not all(tensor.is_leaf or tensor.numel() == 1 for tensor in carrying):
                self._note_mixed(spans_job=spans_job)
            return _GRADIENTS
        if call_site.framework:
            return ""
        if not spans_job:
            return _SUBGROUP
        if stack.in_forward and not self.replicates:
            return _MODEL
        return _FEATURES if gathers and stack.in_training else self._parts

    def _note(self, package: str) -> None:
        if package in OPTIMIZER_PACKAGES:
            self.splits_optimizer = True
        if package != "torch.distributed.checkpoint":  # which also saves the state of replicas
            self._parts = _SHARDS

    def _note_mixed(self, *, spans_job: bool) -> None:
        if spans_job and not self._parts:
            self._parts = _MIXED

    def _is_loss(self, tensor: torch.Tensor, dims: int) -> bool:
        """Return whether a tensor with gradients is a loss that the script has not detached: replicas have no partial losses."""
        return self.replicates and (tensor.numel() == 1 or tensor.dim() <= dims)


seen = Evidence()
"""The evidence of this process."""


def watch_sharded_optimizer(module: ModuleType) -> None:
    """Note when a script makes a ``ZeroRedundancyOptimizer``: ranks depend on its parts from its first step on."""
    kind: Any = module.ZeroRedundancyOptimizer
    make = kind.__init__

    @functools.wraps(make)
    def note_and_make(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.splits_optimizer = True
        make(self, *args, **kwargs)

    kind.__init__ = note_and_make
