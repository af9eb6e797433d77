"""The number of slices of a mini-batch, and their assignment to workers. Pure: a function of what all workers know."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Home = tuple[int, int]
"""The range of a worker's slices while no worker is missing: the first, and the one after the last."""


def even_ranges(slices: int, seats: int) -> list[Home]:
    """Return the range of slices of each seat, as even as possible."""
    cuts = [-(-seat * slices // seats) for seat in range(seats + 1)]
    return list(itertools.pairwise(cuts))


def assign_slices(
    slices: int, preferred: Mapping[int, Home], speeds: Mapping[int, float], *, aligned: bool = False
) -> list[int]:
    """Return the rank that computes each slice: in contiguous ranges, such that the last worker finishes as early as possible.

    Among equally good assignments it chooses the one that moves fewest slices from their usual workers, or, if ``aligned``, the
    one whose ranges end at large groups, so that in the order ``tree`` many slices can be reduced before they are sent.

    Args:
        slices: Number of slices, all taking the same time.
        preferred: For each worker, in the order of the ranges, the range of its usual slices; ascending, too.
        speeds: Relative speeds of workers; the default is 1.
        aligned: The reduction is a tree over slice numbers.
    """
    ranks = list(preferred)
    least, most = _bounds(slices, ranks, speeds)
    others_least, others_most = sum(least.values()), sum(most.values())
    ends: list[int] = []
    for rank, following in zip(ranks, [*ranks[1:], None], strict=True):
        others_least, others_most = others_least - least[rank], others_most - most[rank]
        start = ends[-1] if ends else 0
        low = max(start + least[rank], slices - others_most)
        high = min(start + most[rank], slices - others_least)
        free = (preferred[rank][1], slices if following is None else preferred[following][0])

        ends.append(min(range(low, high + 1), key=functools.partial(_cost, free, aligned)))
    starts = [0, *ends]
    return [rank for rank, start, stop in zip(ranks, starts, ends, strict=False) for _ in range(start, stop)]


def _bounds(slices: int, ranks: Sequence[int], speeds: Mapping[int, float]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the least and the most slices of each worker, such that the last worker finishes as early as possible.

    Each slice goes to the worker that would finish it first, which is optimal for slices that take the same time. That
    determines when the last worker finishes, and so the maxima. A worker with any slices keeps at least one.
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
    """Return the cost of a range that ends at ``stop``, where the next one begins; ``stop`` is not 0.

    Ending anywhere in ``free`` moves no slices. If ``aligned``, ending at a large group has priority.
    """
    moved = max(free[0] - stop, stop - free[1], 0)
    group = stop & -stop  # the largest power of two that divides it
    return (-group if aligned else 0, moved, -stop)  # taking more now leaves more choice to the workers that follow


# ---------------------------------------------------------------------------------------------
# How many slices: --slices auto

_LONGER = 1.15
"""Maximum step time relative to an even split: more slices come closer, but each slice has a cost."""
_LEAST_SAMPLES = 8
"""Smaller slices are not chosen: the overhead of a slice would exceed the gain in balance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceChoice:
    """A number of slices, and the failures for which it was chosen."""

    slices: int  # slices of a mini-batch
    workers: int  # initial number of workers
    losses: int  # number of failed workers that it must tolerate
    batch_size: int  # samples of a mini-batch

    @property
    def longer(self) -> float:
        """The maximum step time after up to :attr:`losses` failures, relative to an even split."""
        return max(self.longer_after(lost) for lost in range(self.losses + 1))

    def longer_after(self, lost: int) -> float:
        """Return the busiest survivor's load after ``lost`` failures, relative to an even split; 1 is the same load."""
        left = self.workers - lost
        return -(-self.slices // left) * -(-self.batch_size // self.slices) * left / self.batch_size

    @property
    def line(self) -> str:
        """A summary for the user."""
        some = f"{self.slices} slice{'s' * (self.slices > 1)} of a mini-batch"
        if not self.losses:
            return f"{some}: with one worker there is nothing to share"
        gone = "1" if self.losses == 1 else f"up to {self.losses}"
        percent = math.ceil(100 * (self.longer - 1) - 0.01)
        longer = f"takes at most {percent} % longer than an even split" if percent else "takes as long as an even split"
        size, even = -(-self.batch_size // self.slices), -(-self.batch_size // self.workers)
        cost = f"{size} samples each instead of {even}, and small ones cost more per sample (docs/explanation/performance-slices.md)"
        if self.slices == self.workers:
            cost = f"{size} samples each, one slice per worker"
            cost += ", because smaller ones would cost more than they gain" * (self.longer > _LONGER)
        return f"{some}: after the loss of {gone} of {self.workers} workers a step {longer}; {cost}"


def choose_slices(workers: int, losses: int, batch_size: int) -> SliceChoice:
    """Return the smallest number of slices for which the work stays nearly even after failures.

    It is a multiple of ``workers``, so that no worker waits while all are alive. If slices would become too small, it is
    the number for which the work is most even.

    Args:
        workers: Initial number of workers, ``>= 1``.
        losses: Number of failures to tolerate; 0: a quarter of the workers, at least one. At least one worker must survive.
        batch_size: Samples of a mini-batch, ``>= 1``.
    """
    losses = min(losses or max(1, workers // 4), workers - 1)
    most = max(workers, batch_size // _LEAST_SAMPLES)
    choices = []
    for slices in range(workers, most + 1, workers):
        choices.append(SliceChoice(slices=slices, workers=workers, losses=losses, batch_size=batch_size))
        if choices[-1].longer <= _LONGER:
            return choices[-1]
    return min(choices, key=lambda choice: choice.longer)
