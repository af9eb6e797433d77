"""The commit vote: a few integers that all workers reduce at the end of a step, each with its name and its reduction.

A vote is a dataclass, and the order of its fields is the order of the integers. Every integer is encoded so that *one*
reduction, the maximum, gives the reduction of its field: the largest value directly, the smallest by its complement,
"any" as a number other than 0. A field that is None is not sent. The settings and the step decide which.

Transport: up to :data:`~holdfast.comm.allreduce.shm.MAX_INTEGERS` (15) integers go through shared memory at no cost.
More go as a message, which any fabric can carry and which takes a round trip. For a replicated model the largest vote
has 15: 6 of the guard, 9 of the loop; 2 more where a stream or a sampler of the script gives the data. For a split model the certificate adds 2, and 2 for *each* part in a step that
hashes the whole state (every :data:`~holdfast.integrity.hash_chain.WHOLE_EVERY` = 256 steps): that one is a message.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from holdfast.errors import InternalError
from holdfast.recovery.messages import NO_NOTE, Note

NOTHING = -(1 << 63)
"""The digest of a part, and its complement, as sent by a worker that does not hold the part: smaller than any other."""


@dataclass(frozen=True, slots=True)
class VoteReduction:
    """How workers reduce a value by a maximum of integers."""

    sent: Callable[[Any], int] = operator.pos  # encodes a value as an integer for the maximum
    heard: Callable[[int], Any] = operator.pos  # decodes the maximum


def as_largest() -> Any:
    """Declare a field that is reduced to its largest value."""
    return field(metadata={"reduction": VoteReduction()})


def as_smallest() -> Any:
    """Declare a field that is reduced to its smallest value: the complement of the largest complement."""
    return field(metadata={"reduction": VoteReduction(operator.invert, operator.invert)})


def as_any(yes: int = 1) -> Any:
    """Declare a field that is reduced to whether it is true at any worker; ``yes``, above 0, encodes true."""
    return field(
        metadata={"reduction": VoteReduction(lambda value: int(yes) if value else 0, lambda maximum: maximum > 0)}
    )


class Ballot:
    """A dataclass that is reduced field by field: integers, other ballots, sequences of ballots, or None (not sent)."""

    __slots__ = ()

    def pack(self) -> list[int]:
        """Return the integers to reduce by a maximum, each from -2**63 to 2**63 - 1."""
        kind: Any = type(self)
        packed: list[int] = []
        for name, reduction in _reductions(kind):
            value = getattr(self, name)
            if value is None:
                continue
            if reduction is not None:
                packed.append(reduction.sent(value))
            elif isinstance(value, Ballot):
                packed += value.pack()
            else:
                packed += [integer for ballot in value for integer in ballot.pack()]
        return packed

    def unpack(self, maxima: Sequence[int]) -> Self:
        """Return the combined vote of all workers, in the shape of this worker's vote.

        Raises:
            InternalError: if the number of maxima is not the number of integers that :meth:`pack` returns.
        """
        numbers = iter(maxima)
        try:
            vote = self._unpack(numbers)
        except StopIteration:
            vote = None
        if vote is None or next(numbers, None) is not None:
            raise InternalError(f"a vote of {len(self.pack())} integers was reduced to {len(maxima)}")
        return vote

    def _unpack(self, numbers: Iterator[int]) -> Self:
        kind: Any = type(self)
        values: dict[str, Any] = {}
        for name, reduction in _reductions(kind):
            value = getattr(self, name)
            if value is None:
                values[name] = None
            elif reduction is not None:
                values[name] = reduction.heard(next(numbers))
            elif isinstance(value, Ballot):
                values[name] = value._unpack(numbers)
            else:
                values[name] = tuple([ballot._unpack(numbers) for ballot in value])
        return type(self)(**values)


@functools.cache
def _reductions(kind: Any) -> tuple[tuple[str, VoteReduction | None], ...]:
    """Return the fields of a ballot, and the reduction of each that is an integer."""
    return tuple((each.name, each.metadata.get("reduction")) for each in dataclasses.fields(kind))


@dataclass(slots=True)
class MinMax(Ballot):
    """The largest and the smallest of a value across workers, which shows whether they differ."""

    largest: int = as_largest()  # the largest value at any worker
    smallest: int = as_smallest()  # the smallest value at any worker

    @classmethod
    def of(cls, numbers: Collection[int]) -> Self:
        """Return the spread of numbers from 0 to 2**62 - 1; of none, the neutral element of the reduction."""
        return cls(max(numbers), min(numbers)) if numbers else cls(NOTHING, ~NOTHING)

    @property
    def differs(self) -> bool:
        """Whether the numbers are not all equal."""
        return self.largest != self.smallest


@dataclass(slots=True, kw_only=True)
class GuardVote(Ballot):
    """The guard's part of a commit vote.

    Args:
        altered: A message of the step was corrupted in transit; None without ``guard_sums``.
        replicas: Digests of the state before the step, see :mod:`holdfast.integrity.state_hashes`; None with guard ``off``.
        ranges: Out-of-range findings, see :class:`~holdfast.integrity.range_check.RangeCheck`; None if not checked.
        odd: Ranks whose recomputation gave different results; None if not checked.
    """

    altered: bool | None = as_any()
    replicas: MinMax | None
    ranges: int | None = as_largest()
    odd: MinMax | None


@dataclass(slots=True, kw_only=True)
class CommitVote(Ballot):
    """One worker's vote on a step; unpacked, the combined vote of all workers.

    Args:
        guard: See :class:`GuardVote`.
        parts: Digests of the parts of a split model that the certificate hashes in this step; empty if replicated.
        step: The step voted on, equal everywhere; or :func:`leaver_vote`.
        stop: A script asked to stop after this step.
        leave: A worker was asked to leave in a way that stops all workers.
        change: A worker waits to join, or was asked to leave while the job continues.
        stays: This worker was not asked to leave.
        has_store: This worker reaches the membership store.
        ask: The lead knows of change requests for the running job.
        save: The lead wants a checkpoint after this step; None if that does not depend on its clock.
        data: Digest of the data that follow, equal everywhere; None if workers cannot have different data.
    """

    guard: GuardVote
    parts: tuple[MinMax, ...]
    step: MinMax
    stop: bool = as_any(Note.STOP)
    leave: bool = as_any(Note.LEAVE)
    change: bool = as_any(Note.CHANGE)
    stays: bool = as_any()
    has_store: bool = as_any()
    ask: bool = as_any(Note.ASK)
    save: bool | None = as_any()
    data: MinMax | None = None

    @property
    def notes(self) -> Note:
        """Flags for the next step. If no worker stays, or none reaches the store, none could continue: all stop."""
        continues = self.stays and self.has_store
        notes = NO_NOTE
        if self.stop:
            notes |= Note.STOP
        if self.leave or not continues:
            notes |= Note.LEAVE
        if self.change and continues:
            notes |= Note.CHANGE
        if self.ask:
            notes |= Note.ASK
        return notes

    @property
    def has_left(self) -> bool:
        """Whether a worker has left the loop."""
        return self.step.smallest < 0

    @property
    def has_all_left(self) -> bool:
        """Whether all workers have."""
        return self.step.largest < 0

    def leaver_line(self) -> str:
        """Return a line for the user about a worker that left the loop while others computed the next step."""
        last, next_step = self.step.largest - 1, self.step.largest
        return (
            f"rank {-1 - self.step.smallest} left the loop after step {last}, while other ranks were in step {next_step}:"
            " all workers stop training after the same step. To end early, call loader.stop()"
        )


def leaver_vote(rank: int) -> MinMax:
    """Return what a worker whose script has left the loop votes in place of the step: negative, and its rank."""
    return MinMax(-1, -1 - rank)
