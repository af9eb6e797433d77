"""Overlapped optimizer (``Settings.overlap_optimizer``): a bucket is updated once it is reduced, and can be undone until the vote.

::

    all-reduce 0      all-reduce 1      all-reduce 2      commit vote
                      copy, update 0    copy, update 1    copy, update 2     kept, or undone

A step still counts only after its commit vote. Until then the state that an update changes is kept as a copy: the
bucket's parameters and their optimizer state. A rollback restores the copies, so that the bits are those of a step that
never began. The memory of the copies is reused in every step.

Updates run one after another in a separate thread, concurrently with the following all-reduces. These start after the
backward pass, so updates overlap with communication and the commit vote only; a guard that reads the parameters waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from holdfast.base.clock import Clock
from holdfast.errors import ConfigError
from holdfast.models.gradients import BucketLayout
from holdfast.models.optimizers import UPDATING_EACH_ALONE, may_write_gradients, updates_each_alone
from holdfast.state.context import OverlapCost


def check_overlap(optimizer: torch.optim.Optimizer, *, scaler: Any, clip_grad_norm: float | None) -> None:
    """Check that no part of the update needs the all-reduces of all buckets."""
    needs = ""
    if scaler is not None:
        needs = "a scaler checks all gradients before it lets the optimizer run"
    elif clip_grad_norm is not None:
        needs = f"clip_grad_norm={clip_grad_norm:g} needs the norm of all gradients"
    elif not updates_each_alone(optimizer):
        kinds = ", ".join(kind.__name__ for kind in UPDATING_EACH_ALONE)
        more = " with hooks, or a step of its own" if type(optimizer) in UPDATING_EACH_ALONE else ""
        needs = f"only plain {kinds} are known to update each parameter alone, got {type(optimizer).__name__}{more}"
    if needs:
        raise ConfigError(f"overlap_optimizer runs the optimizer before all sums are known, but {needs}")


class UndoCopy:
    """The state that the update of a bucket changes, as it was before."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._parameters = [parameter for parameter in parameters if id(parameter) in held]
        self._optimizer = optimizer
        self._room: dict[tuple[int, str], torch.Tensor] = {}
        self._before: list[tuple[int, dict[str, Any] | None]] = []

    @property
    def size_bytes(self) -> int:
        """Its memory; it grows with the optimizer state in the first steps."""
        return sum(tensor.nbytes for tensor in self._room.values())

    @torch.no_grad()
    def take(self) -> None:
        """Copy the state that an update with the current gradients will change."""
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            state = self._optimizer.state.get(parameter)
            self._before.append((i, None if state is None else dict(state)))
            for key, tensor in _tensors(parameter, state):
                self._room_for(i, key, tensor).copy_(tensor)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the copied state to the bit: optimizer state that did not exist is removed again."""
        for i, before in self._before:
            parameter = self._parameters[i]
            if before is None:
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = before
            for key, tensor in _tensors(parameter, before):
                tensor.copy_(self._room[i, key])
        self.forget()

    def forget(self) -> None:
        """Discard the copy, because the update is kept; its memory is reused."""
        self._before = []

    def _room_for(self, i: int, key: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._room.get((i, key))
        if room is None or (room.shape, room.dtype, room.device) != (tensor.shape, tensor.dtype, tensor.device):
            room = self._room[i, key] = torch.empty_like(tensor)
        return room


def _tensors(parameter: nn.Parameter, state: dict[str, Any] | None) -> list[tuple[str, torch.Tensor]]:
    """Return the parameter, under the name "", and its optimizer state tensors."""
    kept = [(key, value) for key, value in (state or {}).items() if isinstance(value, torch.Tensor)]
    return [("", parameter), *kept]


class OverlappedOptimizer:
    """Updates one bucket after another: in a thread ``beside`` the following all-reduces, or synchronously."""

    def __init__(
        self, buckets: BucketLayout, optimizer: torch.optim.Optimizer, clock: Clock, spent: OverlapCost, *, beside: bool
    ) -> None:
        self._buckets = buckets
        self._optimizer = optimizer
        self._clock = clock
        self._copies = [UndoCopy([p.parameter for p in layout.places], optimizer) for layout in buckets.layouts]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-update") if beside else None
        self._running: list[Future[None]] = []
        self._updated: list[int] = []
        self.spent = spent

    @property
    def size_bytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.size_bytes for copy in self._copies)

    def update(self, bucket: int, result: torch.Tensor) -> None:
        """Start the update of a bucket whose mean gradient is ``result``; may return before it is done."""
        self._updated.append(bucket)
        if self._thread is None:
            self._update(bucket, result)
        else:
            self._running.append(self._thread.submit(self._update, bucket, result))

    def wait(self) -> None:
        """Wait for all updates that were started; raises their errors."""
        if not self._running:
            return
        began_s = self._clock.now_s()
        running, self._running = self._running, []
        wait(running)
        self.spent.waited_s += self._clock.now_s() - began_s
        for update in running:
            update.result()

    def keep(self) -> None:
        """Keep the updates of the step, which is committed."""
        self.wait()
        for bucket in self._updated:
            self._copies[bucket].forget()
        self.spent.steps += bool(self._updated)
        self._updated = []

    def undo(self) -> None:
        """Undo the updates of the step in progress."""
        self.wait()
        began_s = self._clock.now_s()
        for bucket in self._updated:
            self._copies[bucket].put_back()
        self.spent.undone += len(self._updated)
        self.spent.undo_s += self._clock.now_s() - began_s
        self._updated = []

    def _update(self, bucket: int, result: torch.Tensor) -> None:
        """Run an optimizer step with the gradients of this bucket only: it skips parameters without a gradient."""
        began_s = self._clock.now_s()
        self._buckets.set_gradients_of(bucket, result, result, private=may_write_gradients(self._optimizer))
        self._copies[bucket].take()
        copied_s = self._clock.now_s()
        self._optimizer.step()
        self._buckets.drop_gradients_of(bucket)
        self.spent.buckets += 1
        self.spent.copy_s += copied_s - began_s
        self.spent.update_s += self._clock.now_s() - copied_s
