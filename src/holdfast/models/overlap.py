"""``update="eager"``: a bucket's optimizer step runs as soon as its sum is in, and can be taken back until the step is closed.

::

    sum of bucket 0   sum of bucket 1   sum of bucket 2   closing sum
                      copy, update 0    copy, update 1    copy, update 2     kept, or taken back

A step still counts after its closing sum only. Until then a copy of what the update changes is kept: the bucket's parameters,
and the optimizer's state of them. Whoever takes the step back puts the copies back, so that the bits are those of a step that
was never begun. The memory of the copies is used again in every step.

Updates run in a thread of their own, one after the other, beside the sums that follow. Sums begin after the backward pass,
so that is what they overlap with. The last one is waited for before the closing sum compares the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.clock import Clock
from holdfast.errors import ConfigError
from holdfast.models.gradients import Buckets
from holdfast.models.optimizers import UPDATING_EACH_ALONE, may_write_gradients, updates_each_alone


def check_eager(optimizer: torch.optim.Optimizer, *, scaler: Any, clip_grad_norm: float | None) -> None:
    """Make sure that nothing needs the sums of all buckets before the first is updated."""
    needs = ""
    if scaler is not None:
        needs = "a scaler looks at all gradients before it lets the optimizer run"
    elif clip_grad_norm is not None:
        needs = f"clip_grad_norm={clip_grad_norm:g} takes the norm of all gradients"
    elif not updates_each_alone(optimizer):
        kinds = ", ".join(kind.__name__ for kind in UPDATING_EACH_ALONE)
        more = " with hooks, or a step of its own" if type(optimizer) in UPDATING_EACH_ALONE else ""
        needs = f"only of plain {kinds} it is known that they update each parameter alone, got {type(optimizer).__name__}{more}"
    if needs:
        raise ConfigError(f"update eager runs the optimizer before all sums are there, and {needs}: use update lazy")


class UndoCopy:
    """What the update of a bucket changes, as it was before."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._parameters = [parameter for parameter in parameters if id(parameter) in held]
        self._optimizer = optimizer
        self._room: dict[tuple[int, str], torch.Tensor] = {}
        self._before: list[tuple[int, dict[str, Any] | None]] = []

    @property
    def size_bytes(self) -> int:
        """Memory that it takes; it grows with the optimizer's state, in the first steps."""
        return sum(tensor.nbytes for tensor in self._room.values())

    @torch.no_grad()
    def take(self) -> None:
        """Copy what an update with the gradients that are there will change."""
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            state = self._optimizer.state.get(parameter)
            self._before.append((i, None if state is None else dict(state)))
            for key, tensor in _tensors(parameter, state):
                self._room_for(i, key, tensor).copy_(tensor)

    @torch.no_grad()
    def put_back(self) -> None:
        """Let everything be as it was, to the bit: what the optimizer had nothing of, it has nothing of again."""
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
        """Hear that the update stays; the memory is for the next copy."""
        self._before = []

    def _room_for(self, i: int, key: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._room.get((i, key))
        if room is None or (room.shape, room.dtype, room.device) != (tensor.shape, tensor.dtype, tensor.device):
            room = self._room[i, key] = torch.empty_like(tensor)
        return room


def _tensors(parameter: nn.Parameter, state: dict[str, Any] | None) -> list[tuple[str, torch.Tensor]]:
    """Return the parameter, called "", and the tensors that the optimizer keeps for it."""
    kept = [(key, value) for key, value in (state or {}).items() if isinstance(value, torch.Tensor)]
    return [("", parameter), *kept]


@dataclass(slots=True)
class Spent:
    """What updating eagerly took, over all steps; see :class:`~holdfast.records.types.UpdatedEagerly`."""

    steps: int = 0
    buckets: int = 0
    undone: int = 0
    copy_s: float = 0.0
    update_s: float = 0.0
    waited_s: float = 0.0
    undo_s: float = 0.0


class Eager:
    """Updates one bucket after another: in a thread ``beside`` the sums that follow, or at once."""

    def __init__(
        self, buckets: Buckets, optimizer: torch.optim.Optimizer, clock: Clock, spent: Spent, *, beside: bool
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
        """Update the parameters of a bucket, whose sum is in ``result``, divided already; this may return before."""
        self._updated.append(bucket)
        if self._thread is None:
            self._update(bucket, result)
        else:
            self._running.append(self._thread.submit(self._update, bucket, result))

    def wait(self) -> None:
        """Return when all updates that were begun are done; raises what one of them raised."""
        if not self._running:
            return
        began_s = self._clock.now_s()
        running, self._running = self._running, []
        wait(running)
        self.spent.waited_s += self._clock.now_s() - began_s
        for update in running:
            update.result()

    def keep(self) -> None:
        """Hear that the step is closed: its updates stay."""
        self.wait()
        for bucket in self._updated:
            self._copies[bucket].forget()
        self.spent.steps += bool(self._updated)
        self._updated = []

    def undo(self) -> None:
        """Take the updates of the step in progress back."""
        self.wait()
        began_s = self._clock.now_s()
        for bucket in self._updated:
            self._copies[bucket].put_back()
        self.spent.undone += len(self._updated)
        self.spent.undo_s += self._clock.now_s() - began_s
        self._updated = []

    def _update(self, bucket: int, result: torch.Tensor) -> None:
        """Step with the gradients of this bucket alone: the optimizer passes over parameters that have none."""
        began_s = self._clock.now_s()
        self._buckets.give_gradients_of(bucket, result, private=may_write_gradients(self._optimizer))
        self._copies[bucket].take()
        copied_s = self._clock.now_s()
        self._optimizer.step()
        self._buckets.drop_gradients_of(bucket)
        self.spent.buckets += 1
        self.spent.copy_s += copied_s - began_s
        self.spent.update_s += self._clock.now_s() - copied_s
