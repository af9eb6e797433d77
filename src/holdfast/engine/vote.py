"""The commit vote: the few integers that all workers reduce as a step closes, each with its name and its reduction.

A vote is a dataclass. The order of its fields is the order of the integers. Every integer is sent so that *one* reduction, the
maximum, gives what its field asks for: the largest as it is, the smallest as its complement, "any of them" as a number that is not
0. A field that is None is not sent. Which fields are None follows from the settings and the step, so it is the same at all workers.

How it travels: up to :data:`~holdfast.comm.allreduce.shm.MAX_INTEGERS` (15) integers go through memory that workers share, at no cost.
More go as a message, which any fabric can carry and which takes a round trip. Of a replicated model the largest vote has 15: 6 of
the guard, 9 of the loop. Of a split model the certificate adds 2, and 2 for *each* part in a step that hashes everything
(:data:`~holdfast.integrity.hash_chain.WHOLE_EVERY`): that is the one vote that is sent as a message, once in 256 steps.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from holdfast.errors import InternalError
from holdfast.integrity.hash_chain import said_of_part
from holdfast.recovery.messages import NO_NOTE, Note


@dataclass(frozen=True, slots=True)
class Reduction:
    """How workers reduce a value by a maximum of integers.

    Args:
        sent: Returns what stands for a value in the maximum.
        heard: Returns what the maximum says.
    """

    sent: Callable[[Any], int] = operator.pos
    heard: Callable[[int], Any] = operator.pos


def as_largest() -> Any:
    """Declare a field of which all hear the largest."""
    return field(metadata={"reduction": Reduction()})


def as_smallest() -> Any:
    """Declare a field of which all hear the smallest: the complement of the largest complement."""
    return field(metadata={"reduction": Reduction(operator.invert, operator.invert)})


def as_any(yes: int = 1) -> Any:
    """Declare a field of which all hear whether it is true anywhere; ``yes``, above 0, stands for it."""
    return field(metadata={"reduction": Reduction(lambda value: int(yes) if value else 0, lambda maximum: maximum > 0)})


class Ballot:
    """A dataclass that is reduced field by field: an integer, another ballot, several of them, or None for nothing."""

    __slots__ = ()

    def pack(self) -> list[int]:
        """Return the integers whose maxima say it all, each from -2**63 to 2**63 - 1."""
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
        """Return what all say together, in the shape of what this worker said.

        Raises:
            InternalError: if there are not as many as :meth:`pack` returns.
        """
        said = iter(maxima)
        try:
            heard = self._unpack(said)
        except StopIteration:
            heard = None
        if heard is None or next(said, None) is not None:
            raise InternalError(f"a vote of {len(self.pack())} integers was answered with {len(maxima)}")
        return heard

    def _unpack(self, said: Iterator[int]) -> Self:
        kind: Any = type(self)
        heard: dict[str, Any] = {}
        for name, reduction in _reductions(kind):
            value = getattr(self, name)
            if value is None:
                heard[name] = None
            elif reduction is not None:
                heard[name] = reduction.heard(next(said))
            elif isinstance(value, Ballot):
                heard[name] = value._unpack(said)
            else:
                heard[name] = tuple([ballot._unpack(said) for ballot in value])
        return type(self)(**heard)


@functools.cache
def _reductions(kind: Any) -> tuple[tuple[str, Reduction | None], ...]:
    """Return the fields of a ballot, and the reduction of each that is an integer."""
    return tuple((each.name, each.metadata.get("reduction")) for each in dataclasses.fields(kind))


@dataclass(slots=True)
class Spread(Ballot):
    """The largest and the smallest of numbers that workers have: whether they differ.

    Args:
        largest: Of all.
        smallest: Of all.
    """

    largest: int = as_largest()
    smallest: int = as_smallest()

    @classmethod
    def of(cls, numbers: Collection[int]) -> Self:
        """Return that of some numbers from 0 to 2**62 - 1; of none, what changes nothing in that of others."""
        high, low = said_of_part(numbers)
        return cls(high, ~low)

    @property
    def differs(self) -> bool:
        """Whether not all numbers are the same."""
        return self.largest != self.smallest


@dataclass(slots=True, kw_only=True)
class GuardVote(Ballot):
    """What the guard says as a step closes.

    Args:
        altered: A message of the step was altered on its way; None without ``guard_sums``.
        replicas: Digests of the state before the step, see :mod:`holdfast.integrity.state_hashes`; None with guard ``off``.
        ranges: What was found out of range, see :class:`~holdfast.integrity.range_check.Ranging`; None unless it is looked for.
        odd: Ranks that computed otherwise than before; None unless it is looked for.
    """

    altered: bool | None = as_any()
    replicas: Spread | None
    ranges: int | None = as_largest()
    odd: Spread | None


@dataclass(slots=True, kw_only=True)
class CommitVote(Ballot):
    """What one worker says as a step closes; and, unpacked, what all say together.

    Args:
        guard: See there.
        parts: Digests of the parts of a split model that the certificate hashes in this step; empty of a replicated one.
        step: The step that is closed, the same everywhere.
        stop: A script asked to stop after this step.
        leave: A worker was told to leave, so that all stop.
        change: A worker waits to join, or was told to leave the others.
        stays: A worker was not told to leave the others.
        has_store: A worker reaches the store that members agree in.
        ask: The lead knows of changes that the running job is to take.
        save: The lead wants a checkpoint after this step; None where that does not depend on its clock.
    """

    guard: GuardVote
    parts: tuple[Spread, ...]
    step: Spread
    stop: bool = as_any(Note.STOP)
    leave: bool = as_any(Note.LEAVE)
    change: bool = as_any(Note.CHANGE)
    stays: bool = as_any()
    has_store: bool = as_any()
    ask: bool = as_any(Note.ASK)
    save: bool | None = as_any()

    @property
    def notes(self) -> Note:
        """What it says of the step that follows. If none stays, or none reaches the store, no worker would go on: all stop."""
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
