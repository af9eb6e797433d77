"""Divergent replicas: state per worker where one process runs several workers and one of them differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.models.training_state import clone

_Looked = TypeVar("_Looked")


@dataclass(slots=True)
class _State:
    """Parameter data and optimizer state."""

    data: list[torch.Tensor]
    optimizer: Any


class DivergentReplicas:
    """Weights and optimizer state per worker; empty while all workers share the state in the model.

    A state altered on one worker stays its own. The worker computes its slices with it and updates it in the same steps
    as the others update theirs, because only gradients are exchanged. The model holds the state of one worker at a
    time: of the one that computes, otherwise of the lowest.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._first: _State | None = None
        self._own: dict[int, _State] = {}
        self._local_ranks: tuple[int, ...] = ()
        self._now: _State

    def take(self, rank: int, here: Sequence[int]) -> None:
        """Give ``rank`` alone, among workers ``here``, the state in the model; a single worker owns it already."""
        if len(here) == 1:
            return
        self._local_ranks = tuple(here)
        if self._first is None:
            self._first = self._now = _State([p.data for p in self._parameters], self._optimizer.state)
        if rank not in self._own:
            self._enter(self._first)
            kept = defaultdict(dict, {p: clone(state) for p, state in self._optimizer.state.items()})
            self._own[rank] = _State([parameter.data.clone() for parameter in self._parameters], kept)
        self._enter(self._own[rank])

    @property
    def differ(self) -> bool:
        """Whether a worker has, or had, a state of its own."""
        return self._first is not None

    def enter(self, rank: int) -> None:
        """Load the state of ``rank`` into the model, because it computes."""
        if self._first is not None:
            self._enter(self._own.get(rank, self._first))

    def rest(self, here: Sequence[int]) -> None:
        """Load the state of the lowest of ``here``, because none computes. States of other workers are discarded."""
        if self._first is not None and here:
            self._local_ranks = tuple(here)
            self._own = {rank: state for rank, state in self._own.items() if rank in here}
            self.enter(min(here))

    def forget(self) -> None:
        """Let all workers share one state again, because the model's is about to be replaced."""
        if self._first is not None:
            self._enter(self._first)
            self._first, self._own = None, {}

    def groups(self, here: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the workers of ``here`` in groups that share one state."""
        if self._first is None:
            return [tuple(here)]
        alone: list[tuple[int, ...]] = [(rank,) for rank in here if rank in self._own]
        shared_ranks = tuple(rank for rank in here if rank not in self._own)
        return [shared_ranks, *alone] if shared_ranks else alone

    def each(self) -> Iterator[int]:
        """Load each state into the model in turn, with copies of the current gradients; yield how many follow."""
        if self._first is None:
            yield 0
            return
        gradients = [parameter.grad for parameter in self._parameters]
        groups = self.groups(self._local_ranks)
        for number, group in enumerate(groups, 1):
            self.enter(group[0])
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()  # an optimizer may modify it
            yield len(groups) - number
        self.enter(min(self._local_ranks))

    def of_each(self, here: Sequence[int], look: Callable[[], _Looked]) -> dict[int, _Looked]:
        """Return by worker the result of ``look`` with the state of that worker in the model."""
        results: dict[int, _Looked] = {}
        for group in self.groups(here):
            self.enter(group[0])
            results |= dict.fromkeys(group, look())
        if self._first is not None:
            self.enter(min(here))
        return results

    def _enter(self, state: _State) -> None:
        if state is not self._now:
            self._now.optimizer = self._optimizer.state
            self._now = state
            self._optimizer.state = state.optimizer
            for parameter, data in zip(self._parameters, state.data, strict=True):
                parameter.data = data
