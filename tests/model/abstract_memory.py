"""Shared memory for the abstract engine: whose gradients lie where, who still reads them, who may yet write.

With ``World(shared=True)`` the sum of a bucket is not one collective but::

    announce that the input is ready; barrier A; look at everybody's word
    add one's own share of the result, from everybody's input
    announce that the share is done; barrier B; look at everybody's word

The protocol sees a slow sum. This file keeps what lies in the memory, and checks that

- whoever adds finds in every member's input the gradients of this attempt of this step;
- whoever reads a result finds every share complete, and of the sum that it believes in.

Results are read when a step is applied and when a bucket is handed over, in place: nobody makes a copy, so a result
stays mapped as long as somebody holds a bucket in it. An input stays where it is, in every generation, because only
its owner writes it, and is dropped as early as can be: when its own sum is known, and else when the protocol says so.

What is simpler here than in life, and why nothing is missed:

- *A share is spoilt as soon as A returns, and right at once later.* Between the two whoever reads it sees rubbish,
  and whoever dies leaves rubbish: that is the worst that a slow writer can do. The inputs are read at the end, when
  most can have happened to them. Having added, a worker enters B at once: that only allows the others more.
- *Who writes in another division of a result than the one it was made in spoils all of it.* Everybody reads all of it.
- *A worker is stopped while it adds, nowhere else.* Elsewhere it writes nothing that others read, so it might as well
  die, unless it gets to add after it has woken. Then all others had entered A. So all that it needs to come as far was
  there before anybody took it for dead, and it might have been faster, and have been stopped while it added.
- *It wakes to enter B, and goes no further.* If it does not get as far as B, that allows the others less. It passes
  nothing after B: whoever has failed enters nothing any more, and if nobody has failed, nobody took it for dead.
- *What nobody can reach any more is forgotten:* contents that no living worker has mapped, and who would write there.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from holdfast.recovery.messages import Action, ReduceBucket

T = TypeVar("T")


class Violation(Exception):
    """A promise is broken."""


class Rule(enum.Flag):
    """A rule of the sum through shared memory, to be left out."""

    BARRIER_A = enum.auto()
    """Nobody adds before all have entered the sum."""
    BARRIER_B = enum.auto()
    """Nobody takes the sum as known before all have added."""
    ONE_WRITER = enum.auto()
    """Nobody writes into a result but who adds, so that the optimizer does not scale or clip it in place."""
    FROZEN_INPUT = enum.auto()
    """After a failure the input stays as it is until all the living have left the sum."""
    ENTRY = enum.auto()
    """A worker enters the first sum of a step only after its own optimizer has read the step before."""
    WORDS_AFTER_A = enum.auto()
    """Barrier A is not believed before everybody's word has been looked at."""
    WORDS_AFTER_B = enum.auto()
    """Barrier B is not believed before everybody's word has been looked at."""
    WORDS_OF_TODAY = enum.auto()
    """A word says of which generation it is."""
    WORD_COMES_LAST = enum.auto()
    """A word is written when all that it stands for has been written."""
    FRESH_MEMORY = enum.auto()
    """A new generation has a new result, and never writes into an old one."""
    OLD_RESULT = enum.auto()
    """A result stays mapped when its generation is over, until what is held in it has been applied or dropped."""


NO_RULE = Rule(0)
"""Nothing is left out."""


# ---------------------------------------------------------------------------------------------
# Not orders of the protocol, but what a worker waits in while it carries one out


@dataclass(frozen=True, slots=True)
class AtBarrier(Action):
    """The worker waits in barrier ``name``, which is "A" or "B", of a sum."""

    name: str
    order: ReduceBucket


@dataclass(frozen=True, slots=True)
class Adding(Action):
    """The worker adds its share of the result."""

    order: ReduceBucket


# ---------------------------------------------------------------------------------------------
# What there is


class Gradients(NamedTuple):
    """What an input holds: the attempt of ``group`` at ``step``."""

    step: int
    group: int


class What(NamedTuple):
    """One sum: of the gradients of ``whose``, in the attempt of ``group`` at ``step``; cut among ``whose``."""

    step: int
    group: int
    whose: int


class Share(NamedTuple):
    """A share of a result: which sum it was last written for, None if none, and whether it is right and complete."""

    what: What | None
    done: bool


class View(NamedTuple):
    """Something that a worker has yet to read, and what it believes to find there."""

    result: int
    bucket: int
    what: What


class Late(NamedTuple):
    """A worker that was stopped while it added.

    Args:
        rank: Who.
        result: Where it writes when it wakes.
        bucket: The same, within the result.
        what: What it adds.
        barrier: The number of its barrier B on the communicator; 0 once that communicator is gone.
    """

    rank: int
    result: int
    bucket: int
    what: What
    barrier: int


Cell = tuple[Share, ...]
"""The result of one bucket: a share by rank."""

_BLANK = Share(None, done=False)
_NOWHERE = -1


class Memory(NamedTuple):
    """All shared memory. Results are numbered by age: the last one is that of this generation.

    Args:
        inputs: By rank and bucket.
        words: By rank, the newest barrier that it has announced on this communicator; 0 where barriers do not lie.
        results: By age and bucket.
        views: By rank and bucket, in which result the worker takes part in the sum, or holds it.
        readers: By rank, what an optimizer that runs beside the sums has yet to read.
        late: Who may still wake up.
    """

    inputs: tuple[tuple[Gradients | None, ...], ...] = ()
    words: tuple[int, ...] = ()
    results: tuple[tuple[Cell, ...], ...] = ()
    views: tuple[tuple[int, ...], ...] = ()
    readers: tuple[tuple[View, ...], ...] = ()
    late: tuple[Late, ...] = ()


def first_memory(workers: int, buckets: int) -> Memory:
    """Return the memory in which nothing has been written yet."""
    return Memory(
        inputs=((None,) * buckets,) * workers,
        words=(0,) * workers,
        results=(_blank_result(workers, buckets),),
        views=((_NOWHERE,) * buckets,) * workers,
        readers=((),) * workers,
    )


@functools.cache
def ranks(mask: int) -> tuple[int, ...]:
    """Return the ranks in ``mask``."""
    return tuple(rank for rank in range(mask.bit_length()) if mask & 1 << rank)


# ---------------------------------------------------------------------------------------------
# What changes


class MemoryDraft:
    """A memory that is being changed by one move. Of a world without shared memory it is empty, and stays so.

    Args:
        memory: Before the move.
        without: Rules that are left out.
        keep_input: Whether an input stays whole until its step is over, not only until its sum is known.
    """

    def __init__(self, memory: Memory, without: Rule, *, keep_input: bool) -> None:
        self._shared = bool(memory.results)
        self._without = without
        self._keep_input = keep_input
        self._workers = len(memory.inputs)
        self._inputs = list(memory.inputs)
        self._words = list(memory.words)
        self._results = list(memory.results)
        self._views = list(memory.views)
        self._readers = list(memory.readers)
        self._late = {late.rank: late for late in memory.late}

    def keeps(self, rule: Rule) -> bool:
        """Return whether ``rule`` is kept."""
        return rule not in self._without

    # -- inputs

    def compute(self, rank: int, step: int, group: int) -> None:
        """Let ``rank`` write its gradients of all buckets."""
        if self._shared:
            self.drop(rank)
            self._inputs[rank] = (Gradients(step, group),) * len(self._inputs[rank])

    def summed(self, rank: int, bucket: int) -> None:
        """Let ``rank`` drop the input of ``bucket``, because its sum is known there."""
        if self._shared and not self._keep_input:
            self._inputs[rank] = _replaced(self._inputs[rank], bucket, None)

    def failed(self, rank: int) -> None:
        """Let ``rank`` do what it does as soon as a sum has failed."""
        if self._shared and not self.keeps(Rule.FROZEN_INPUT):
            self._inputs[rank] = (None,) * len(self._inputs[rank])

    def drop(self, rank: int) -> None:
        """Let ``rank`` drop all inputs and let go of all results."""
        if self._shared:
            self._inputs[rank] = (None,) * len(self._inputs[rank])
            self._views[rank] = (_NOWHERE,) * len(self._views[rank])

    # -- the sum

    def enter(self, rank: int, bucket: int) -> None:
        """Let ``rank`` take part in the sum of ``bucket``, in the newest result."""
        self._views[rank] = _replaced(self._views[rank], bucket, len(self._results) - 1)

    def announce(self, rank: int, barrier: int) -> None:
        """Let ``rank`` write its word: it is ready for ``barrier``."""
        self._words[rank] = barrier

    def all_announced(self, members: int, barrier: int) -> bool:
        """Return whether the words of all members say that they were ready for ``barrier``."""
        return all(self._words[rank] >= barrier for rank in ranks(members))

    def begin_to_add(self, rank: int, bucket: int, what: What) -> None:
        """Let ``rank`` write the first numbers of its share."""
        self._write(rank, self._views[rank][bucket], bucket, Share(what, done=False), what)

    def add(self, rank: int, bucket: int, what: What) -> None:
        """Let ``rank`` add its share to the end."""
        for member in ranks(what.whose):
            if self._inputs[member][bucket] != (what.step, what.group):
                msg = f"wrong input: {rank} adds bucket {bucket}, and the input of {member} is not of this sum"
                raise Violation(msg)
        self._write(rank, self._views[rank][bucket], bucket, Share(what, done=True), what)

    def _write(self, rank: int, result: int, bucket: int, share: Share, what: What) -> None:
        spoilt = Share(what, done=False)
        cell = list(self._results[result][bucket])
        for other, there in enumerate(cell):
            if there.what is not None and there.what.whose != what.whose:
                cell[other] = spoilt
        cell[rank] = share
        self._results[result] = _replaced(self._results[result], bucket, tuple(cell))

    # -- reading the result

    def what_lies(self, rank: int, bucket: int) -> int:
        """Return whose gradients ``rank`` would take the result of ``bucket`` to be, if it never heard of B there.

        Raises:
            Violation: if it has no share of its own in it.
        """
        view = self._views[rank][bucket]
        what = None if view == _NOWHERE else self._results[view][bucket][rank].what
        if what is None:
            msg = f"result not complete: {rank} reads bucket {bucket}, and has added nothing to it"
            raise Violation(msg)
        return what.whose

    def read(self, rank: int, bucket: int, what: What) -> None:
        """Let ``rank`` read ``bucket`` where it holds it."""
        if self._shared:
            self._read(rank, View(self._views[rank][bucket], bucket, what))

    def apply(self, rank: int, whats: Sequence[What]) -> None:
        """Let ``rank`` run its optimizer on ``whats``, by bucket."""
        if not self._shared:
            return
        self.finish_reading(rank)
        views = tuple(View(self._views[rank][bucket], bucket, what) for bucket, what in enumerate(whats))
        if not self.keeps(Rule.ENTRY):
            self._readers[rank] = views
            return
        for view in views:
            self._read(rank, view)
            if not self.keeps(Rule.ONE_WRITER):
                scaled = (Share(view.what._replace(whose=0), done=False),) * self._workers
                self._results[view.result] = _replaced(self._results[view.result], view.bucket, scaled)

    def finish_reading(self, rank: int) -> None:
        """Let the optimizer of ``rank`` read what it has yet to read."""
        for view in self._readers[rank]:
            self._read(rank, view)
        self._readers[rank] = ()

    def _read(self, rank: int, view: View) -> None:
        for member in ranks(view.what.whose):
            share = _BLANK if view.result == _NOWHERE else self._results[view.result][view.bucket][member]
            if share != (view.what, True):
                kind = "not complete" if share.what in (None, view.what) else "overwritten"
                msg = f"result {kind}: {rank} reads bucket {view.bucket} of step {view.what.step}, share of {member}"
                raise Violation(msg)

    # -- generations, and who comes late

    def renew(self) -> None:
        """Begin a new generation."""
        if not self._shared:
            return
        if not self.keeps(Rule.OLD_RESULT):
            self._results = [_blank_result(self._workers, len(self._inputs[0])) for _ in self._results]
        if self.keeps(Rule.FRESH_MEMORY):
            self._results.append(_blank_result(self._workers, len(self._inputs[0])))
        if self.keeps(Rule.WORDS_OF_TODAY):
            self._words = [0] * self._workers  # those of another generation do not count
        self._late = {rank: late._replace(barrier=0) for rank, late in self._late.items()}

    def stop(self, rank: int, bucket: int, what: What, barrier: int) -> None:
        """Stop ``rank`` while it adds; ``barrier`` is the number of the barrier B before it."""
        self._late[rank] = Late(rank, self._views[rank][bucket], bucket, what, barrier)

    def wake(self, rank: int) -> Late:
        """Let ``rank`` finish its share, from what it finds; return what it was doing."""
        late = self._late.pop(rank)
        expected = (late.what.step, late.what.group)
        is_right = all(self._inputs[member][late.bucket] == expected for member in ranks(late.what.whose))
        self._write(rank, late.result, late.bucket, Share(late.what, done=is_right), late.what)
        return late

    def may_enter(self, barrier: int) -> int:
        """Return those who may wake up and enter ``barrier``."""
        return sum(1 << late.rank for late in self._late.values() if late.barrier == barrier)

    # -- the end of a move

    def finish(self, living: int, members: int) -> Memory:
        """Forget what nobody can reach any more, and number the results anew."""
        if not self._shared:
            return Memory()
        for rank in range(self._workers):
            if not living & 1 << rank:
                self._views[rank] = (_NOWHERE,) * len(self._views[rank])
                self._readers[rank] = ()
            if not members & 1 << rank:
                self._inputs[rank] = (None,) * len(self._inputs[rank])
        newest = len(self._results) - 1
        reached = {(view, bucket) for views in self._views for bucket, view in enumerate(views)}
        reached |= {(view.result, view.bucket) for views in self._readers for view in views}
        kept = sorted({view for view, _ in reached if view != _NOWHERE} | {newest})
        number = {result: new for new, result in enumerate(kept)} | {_NOWHERE: _NOWHERE}
        blank = (_BLANK,) * self._workers
        late = (late for _, late in sorted(self._late.items()))
        return Memory(
            inputs=tuple(self._inputs),
            words=tuple(self._words),
            results=tuple(
                tuple(cell if (old, bucket) in reached else blank for bucket, cell in enumerate(self._results[old]))
                for old in kept
            ),
            views=tuple(tuple(number[view] for view in views) for views in self._views),
            readers=tuple(tuple(v._replace(result=number[v.result]) for v in views) for views in self._readers),
            late=tuple(
                this._replace(result=number[this.result])
                for this in late
                if this.result == newest or (this.result, this.bucket) in reached
            ),
        )


def _blank_result(workers: int, buckets: int) -> tuple[Cell, ...]:
    return ((_BLANK,) * workers,) * buckets


def _replaced(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
