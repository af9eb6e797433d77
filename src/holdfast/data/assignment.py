"""How many slices a mini-batch has, and who computes which. Pure: a function of what all workers know."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Home = tuple[int, int]
"""The slices that a worker has while nobody is missing: the first, and the one after the last."""


def homes(slices: int, seats: int) -> list[Home]:
    """Return the slices of each seat, as even as can be."""
    cuts = [-(-seat * slices // seats) for seat in range(seats + 1)]
    return list(itertools.pairwise(cuts))


def share_out(
    slices: int, at_home: Mapping[int, Home], speeds: Mapping[int, float], *, aligned: bool = False
) -> list[int]:
    """Return the rank that holds each slice: in runs, so that the last to finish finishes as early as can be.

    Of all runs that end so early it takes those that move few slices from where they are at home or, ``aligned``, those
    that end where large groups do, so that in the order ``tree`` much can be added before it is sent.

    Args:
        slices: How many there are, all taking the same time.
        at_home: Of each worker, in the order of the runs, which slices are its own; these ascend, too.
        speeds: How fast workers compute, relative to each other; who is not named counts as 1.
        aligned: The sum is a tree over slice numbers.
    """
    ranks = list(at_home)
    least, most = _bounds(slices, ranks, speeds)
    others_least, others_most = sum(least.values()), sum(most.values())
    ends: list[int] = []
    for rank, following in zip(ranks, [*ranks[1:], None], strict=True):
        others_least, others_most = others_least - least[rank], others_most - most[rank]
        start = ends[-1] if ends else 0
        low = max(start + least[rank], slices - others_most)
        high = min(start + most[rank], slices - others_least)
        free = (at_home[rank][1], slices if following is None else at_home[following][0])

        ends.append(min(range(low, high + 1), key=functools.partial(_cost, free, aligned)))
    starts = [0, *ends]
    return [rank for rank, start, stop in zip(ranks, starts, ends, strict=False) for _ in range(start, stop)]


def _bounds(slices: int, ranks: Sequence[int], speeds: Mapping[int, float]) -> tuple[dict[int, int], dict[int, int]]:
    """Return how many slices each worker must have, and may have, if the last to finish is to finish as early as can be.

    Each slice goes to whoever would have finished it first (for slices that take the same time nothing is better). That
    says when the last one finishes, and so how many anybody may have. Who has some then is left one at least.
    """
    pace = {rank: speeds.get(rank, 1.0) for rank in ranks}
    counts = dict.fromkeys(ranks, 0)
    due = [(1 / pace[rank], rank) for rank in ranks]
    heapq.heapify(due)
    latest = 0.0
    for _ in range(slices):
        latest, rank = due[0]
        counts[rank] += 1
        heapq.heapreplace(due, ((counts[rank] + 1) / pace[rank], rank))
    most = {rank: count + ((count + 1) / pace[rank] <= latest) for rank, count in counts.items()}
    return {rank: min(1, count) for rank, count in counts.items()}, most


def _cost(free: Home, aligned: bool, stop: int) -> tuple[int, int, int]:
    """Return what speaks against a run that ends at ``stop``, where the next one begins; it is not 0.

    Anywhere in ``free`` it may end without moving anything. If ``aligned``, it is first of all to end where a large group does.
    """
    moved = max(free[0] - stop, stop - free[1], 0)
    group = stop & -stop  # the largest power of two that divides it
    return (-group if aligned else 0, moved, -stop)  # to take more now leaves more room to all who come later


# ---------------------------------------------------------------------------------------------
# How many slices: --slices auto

_LONGER = 1.15
"""A step may take so many times as long as with an even split: with more slices it comes closer, and each costs more."""
_LEAST_SAMPLES = 8
"""Smaller slices are not chosen: what a slice costs besides its samples would weigh more than what balance gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A number of slices, and what it is good for."""

    slices: int  # pieces of a mini-batch
    workers: int  # that the job is started with
    losses: int  # of so many of them it bears the loss
    batch_size: int  # samples of a mini-batch

    @property
    def longer(self) -> float:
        """How many times as long as with an even split a step takes at most, after up to :attr:`losses` losses."""
        return max(self.longer_after(lost) for lost in range(self.losses + 1))

    def longer_after(self, lost: int) -> float:
        """Return how much more the busiest of those who are left has than in an even split; 1 is as much."""
        left = self.workers - lost
        return -(-self.slices // left) * -(-self.batch_size // self.slices) * left / self.batch_size

    @property
    def line(self) -> str:
        """What the user should know."""
        some = f"{self.slices} slice{'s' * (self.slices > 1)} of a mini-batch"
        if not self.losses:
            return f"{some}: with one worker there is nothing to share"
        gone = "1" if self.losses == 1 else f"up to {self.losses}"
        percent = math.ceil(100 * (self.longer - 1) - 0.01)
        longer = f"takes at most {percent} % longer than an even split" if percent else "takes as long as an even split"
        size, even = -(-self.batch_size // self.slices), -(-self.batch_size // self.workers)
        cost = f"{size} samples each instead of {even}, and small ones cost more a sample (docs/explanation/performance-slices.md)"
        if self.slices == self.workers:
            cost = f"{size} samples each, one slice a worker"
            cost += ", because smaller ones would cost more than they gain" * (self.longer > _LONGER)
        return f"{some}: after the loss of {gone} of {self.workers} workers a step {longer}; {cost}"


def choose_slices(workers: int, losses: int, batch_size: int) -> Choice:
    """Return the smallest number of slices with which the loss of workers leaves the work nearly even.

    It is a multiple of ``workers``, so that nobody waits while all are there. Where slices would become too small, it is
    the number that leaves the work most even.

    Args:
        workers: That the job is started with, ``>= 1``.
        losses: Of how many of them the loss is to be borne; 0: a quarter, at least one. Somebody must be left.
        batch_size: Samples of a mini-batch, ``>= 1``.
    """
    losses = min(losses or max(1, workers // 4), workers - 1)
    most = max(workers, batch_size // _LEAST_SAMPLES)
    choices = []
    for slices in range(workers, most + 1, workers):
        choices.append(Choice(slices=slices, workers=workers, losses=losses, batch_size=batch_size))
        if choices[-1].longer <= _LONGER:
            return choices[-1]
    return min(choices, key=lambda choice: choice.longer)
