"""The collectives of a newcomer that has no seat yet: they complete without the other ranks, which do not call them.

A script makes collectives before its first step: ``DistributedDataParallel`` compares the shapes of all ranks and
broadcasts the weights. A newcomer runs the same script while the others train, so its own values stand for those of
all ranks. What it computed counts for nothing: ``register`` replaces it by the state of a survivor.
"""

# mypy: disable-error-code="override, assignment, misc"
# (torch's stubs give each method two signatures, one of which it never calls on a group made in Python.)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Work
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.distributed.comm_thread import CommThread
from holdfast.distributed.group_base import GroupBase, Tensors
from holdfast.distributed.members import GroupMembers
from holdfast.distributed.tasks import CollectiveCall
from holdfast.distributed.tensors import one, overwrite, plain
from holdfast.distributed.work import PendingWork
from holdfast.errors import ConfigError

BEFORE_REGISTER = "on a newcomer before holdfast.distributed.register(...), because the other ranks do not call it"


def _alone(act: Callable[..., list[torch.Tensor]]) -> Callable[..., Work]:
    """Return the collective that ``act`` carries out alone, as long as this worker has no seat."""
    name = act.__name__

    def collective(self: SoloCollectives, *args: Any, **kwargs: Any) -> Work:
        if self._engine.joining.is_seated:
            work: Work = getattr(super(SoloCollectives, self), name)(*args, **kwargs)
            return work
        return self._completed(act(self, *args, **kwargs), name)

    collective.__name__, collective.__doc__ = name, act.__doc__
    return collective


class SoloCollectives(GroupBase):
    """Collectives of one rank, which stands for all, until it has a seat; it must not train before."""

    def __init__(self, engine: CommThread, members: GroupMembers, rank: int, timeout_s: float) -> None:
        super().__init__(engine, members, rank, timeout_s)
        self.guard = register_optimizer_step_pre_hook(lambda *_: engine.meeting.stay_outside())
        """Ends a script that trains without having called ``register``, which removes it."""

    @_alone
    def broadcast(self, tensors: Tensors, options: Any) -> list[torch.Tensor]:
        """Keep the tensor."""
        if options.rootRank != self._index and self._call_site().broadcasts_objects:
            raise ConfigError(f"broadcast_object_list from rank {options.rootRank} is not possible {BEFORE_REGISTER}")
        return list(tensors)

    @_alone
    def allreduce(self, tensors: Tensors, options: Any = None) -> list[torch.Tensor]:
        """Keep the tensor, as if it were the mean of all ranks."""
        if self._call_site().is_backward:
            self._engine.meeting.stay_outside()
        return list(tensors)

    @_alone
    def allreduce_coalesced(self, tensors: Tensors, options: Any = None) -> list[torch.Tensor]:
        """Keep the tensors."""
        return list(tensors)

    @_alone
    def reduce(self, tensors: Tensors, options: Any) -> list[torch.Tensor]:
        """Keep the tensor."""
        return list(tensors)

    @_alone
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any = None) -> list[torch.Tensor]:
        """Gather this rank's tensor in place of each rank's."""
        return _fill(one(outputs, "all_gather"), one(inputs, "all_gather"))

    @_alone
    def all_gather_single(self, out: torch.Tensor, part: torch.Tensor, options: Any = None) -> list[torch.Tensor]:
        """Gather this rank's tensor in place of each rank's."""
        _fill(self._parts(out, part, "all_gather_into_tensor"), part)
        return [out]

    _allgather_base = all_gather_single

    @_alone
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> list[torch.Tensor]:
        """Gather this rank's tensor in place of each rank's, if this is the root."""
        return _fill(one(outputs, "gather") if options.rootRank == self._index else [], one(inputs, "gather"))

    @_alone
    def barrier(self, opts: Any = None) -> list[torch.Tensor]:
        """Return at once."""
        return []

    def _completed(self, result: list[torch.Tensor], what: str) -> Work:
        work = PendingWork(result, what, self._timeout_s, lambda _: None)
        work.complete()
        self._pending = work
        return work

    def _submit(self, call: CollectiveCall) -> Work:
        """Refuse any other collective of a newcomer."""
        self._check_seated(call.what)
        return super()._submit(call)

    def _transfer(self, tensor: torch.Tensor, what: str, *args: Any, **kwargs: Any) -> Work:
        """Refuse a message of a newcomer."""
        self._check_seated(what)
        return super()._transfer(tensor, what, *args, **kwargs)  # type: ignore[no-any-return]

    def _check_seated(self, what: str) -> None:
        if not self._engine.joining.is_seated:
            raise ConfigError(f"{what} is not possible {BEFORE_REGISTER}")


def _fill(outs: Tensors, part: torch.Tensor) -> list[torch.Tensor]:
    for out in outs:
        overwrite(out, plain(part))
    return list(outs)
