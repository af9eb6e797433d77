"""What there is in the abstract engine: a world, its workers, their communicator and weights; and the moves."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.recovery import Protocol, Strategy
from holdfast.recovery.messages import (
    NO_NOTE,
    Action,
    Event,
    FetchConfig,
    HandOver,
    LoadCheckpoint,
    Note,
    Progress,
    ReduceBucket,
    SendState,
    ShareProgress,
    VoteStep,
)
from model.abstract_members import NO_LAPSE, Lapse, Wish, Wishes
from model.abstract_memory import NO_RULE, AtBarrier, Memory, Rule
from model.abstract_parts import ABSENT, UNKNOWN, Giving, Split, Swap


class Given(NamedTuple):
    """A state that is given or loaded.

    Args:
        steps: In it.
        taken: How often its settings were changed.
        homes: Number of the homes that the giver knows; UNKNOWN if there are none.
    """

    steps: int
    taken: int
    homes: int = UNKNOWN


class Snapshot(NamedTuple):
    """A state that a worker has kept in memory: the steps in it, -1 if there is none, and how often its settings were changed."""

    steps: int
    taken: int = 0


NO_SNAPSHOT = Snapshot(-1)


class Offer(NamedTuple):
    """What a worker brings to loading where bits may flip.

    Args:
        corrupt: It has heard that somebody's state is corrupt.
        verified: The newest state that it has kept, and that is known to be right.
        trusted: The newest step whose state is known to have been right.
        given: What was published, of who leads.
    """

    corrupt: bool
    verified: Snapshot
    trusted: int
    given: Given | None


class Parts(NamedTuple):
    """Parts of a model: steps in each, ABSENT where there is none."""

    steps: tuple[int, ...]


Payload = int | Progress | Given | Parts | Offer
"""What one worker brings to a sum, as far as others care."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A small job and the engine under it.

    Args:
        workers: Workers at the start.
        deaths: The most workers that die.
        steps: Steps of the job.
        buckets: Buckets of a step.
        checkpoint_every: Steps between two checkpoints.
        all_publish: Whether every survivor must be told that a step is stable, not only somebody.
        lossy: Whether a step may go without the gradients of a dead worker, as with ``forward``.
        in_place: Whether a failed sum spoils its input.
        rooted: Buckets that are broadcast by the lowest worker, not summed, so that the root completes alone.
        uniform: Whether ``Agree`` returns the same everywhere although somebody died.
        atomic: Whether moves are joined where that loses nothing.
        shared: Whether buckets are summed through shared memory.
        late: Whether a worker may be stopped while it adds, and wake up late. It counts as one that dies.
        lying: Whether the barriers of a sum may return although a dead member has not entered them.
        keep_input: Whether gradients stay whole until their step is over, not only until their sum is known.
        without: Rules of the sum through shared memory that are left out.
        newcomers: Workers that may come.
        leavers: Workers that may be told to leave.
        changes: Strategies that the running job may be changed to, one after the other.
        flips: The most bits that flip in somebody's state, each of which is found in a closing sum, at once or later.
        early: Whether a worker may begin the sums of all buckets but the last while it computes.
        transient: Whether no state is corrupt then, and a message of the step was altered.
        rotation: Steps between two snapshots that are kept for that, each known to be right when the next is taken.
        snapshots: Whether who builds its application again takes a snapshot, and not what was published.
        atomic_shrink: A new communicator is there for all of its members at once, so a revoke cannot meet a shrink.
        lapses: What the engine does wrong.
        split: How the model is split over the workers, and then a step has no buckets; None if everybody has all of it.
        make_protocol: Makes one worker's protocol, as :class:`Protocol` is made. Give a broken one to
            see that it is found out.
    """

    workers: int = 3
    deaths: int = 2
    steps: int = 2
    buckets: int = 2
    checkpoint_every: int = 1
    all_publish: bool = False
    lossy: bool = False
    in_place: bool = False
    rooted: frozenset[int] = frozenset()
    uniform: bool = True
    atomic: bool = True
    shared: bool = False
    late: bool = False
    lying: bool = False
    keep_input: bool = False
    without: Rule = NO_RULE
    newcomers: int = 0
    leavers: frozenset[int] = frozenset()
    changes: tuple[Strategy, ...] = ()
    flips: int = 0
    early: bool = False
    transient: bool = False
    rotation: int = 1
    snapshots: bool = True
    atomic_shrink: bool = False
    lapses: Lapse = NO_LAPSE
    split: Split | None = None
    make_protocol: Callable[..., Protocol] = Protocol


# ---------------------------------------------------------------------------------------------
# What there is. Sets of workers, and of buckets, are bit masks.


@dataclass(frozen=True, slots=True)
class Returning(Action):
    """Not an order: the agreement or the shrink has been decided, and the worker is about to hear."""

    event: Event


@dataclass(frozen=True, slots=True)
class Doing(Action):
    """Not an order: the worker has orders, and is about to carry out the first of them."""

    orders: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Computing(Action):
    """Not an order: the worker computes a step, while its thread may begin sums of buckets."""

    step: int


class Begun(enum.Enum):
    """What the thread that begins sums early is doing."""

    NOTHING = enum.auto()
    WAITS = enum.auto()
    """It waits in the newest sum that the worker has entered."""
    FAILED = enum.auto()
    """This sum has failed, which the worker does not know yet."""


@dataclass(frozen=True, slots=True)
class GiveUp(Action):
    """Not an order: the protocol says that the job cannot go on."""


class Worker(NamedTuple):
    """A living worker.

    Args:
        mind: Its protocol, by number.
        waits: The order that it waits in.
        sums: Sums that it has entered on this communicator.
        steps: Steps in its weights, LOADING while they are being replaced, JOINING if it has not got the others' yet.
        group: Who shared the mini-batch whose gradients it has, 0 if it has none.
        inputs: Buckets whose own gradient it still has.
        have: By bucket, whose gradients are in the sum that it holds, 0 if it holds none; by part, those of which chains.
        saved: It was ordered to save and stop.
        told: Steps that it was told are stable, if that is checked.
        heard: Of CHANGE, ASK and LEAVE, what it has heard in closing sums and nothing was done about.
        calm: It is about to meet the others because members change, and has seen no failure.
        taken: How often its settings were changed.
        used: The same, when it applied the newest of its steps.
        aside: The same, of those that it has been given; 0 if there are none that do not count yet.
        given: The state that it has been given as a newcomer; None if there is none.
        homes: Number of the homes that count for it.
        parts: By part, the steps in its weights.
        staged: By part, the steps in what it has been given and what does not count yet.
        next_homes: Number of the homes that are to count.
        place: Exchanges of the attempt that it has completed.
        snapshot: Steps in the snapshot that it took before it built its application again; -1 if it has none.
        corrupt: It has heard that somebody's state is corrupt, or a message was altered, and has not gone back yet.
        candidate: The newest state that it has kept, where bits may flip.
        verified: The newest of them that is known to be right.
        trusted: The newest step whose state is known to have been right.
        uncounted: Sums of the step that its thread has completed, and the worker has not counted.
        thread: What that thread is doing.
        spoiled: Gradients have changed after their sum had begun, so that this attempt must fail.
    """

    mind: int
    waits: Action
    sums: int
    steps: int
    group: int
    inputs: int
    have: tuple[int, ...]
    saved: bool = False
    told: int = 0
    heard: Note = NO_NOTE
    calm: bool = False
    taken: int = 0
    used: int = 0
    aside: int = 0
    given: Given | None = None
    homes: int = UNKNOWN
    parts: tuple[int, ...] = ()
    staged: tuple[int, ...] = ()
    next_homes: int = UNKNOWN
    place: int = 0
    snapshot: int = -1
    corrupt: bool = False
    candidate: Snapshot = NO_SNAPSHOT
    verified: Snapshot = NO_SNAPSHOT
    trusted: int = -1
    uncounted: int = 0
    thread: Begun = Begun.NOTHING
    spoiled: bool = False

    def without_gradients(self) -> Worker:
        """Return the worker with nothing of a step in its hands."""
        return self._replace(group=0, inputs=0, have=(0,) * len(self.have), place=0)

    def without_staged(self) -> Worker:
        """Return the worker with no parts but those that count."""
        return self._replace(staged=(ABSENT,) * len(self.parts), next_homes=UNKNOWN)


class Sum(NamedTuple):
    """A sum that somebody can still complete: its number on the communicator, what it is, and who brought what.

    ``result`` is what a closing sum says, or how many changes are taken; -1 as long as nobody knows it.
    """

    number: int
    what: tuple[object, ...]
    entered: int
    brought: tuple[tuple[int, Payload], ...]
    result: int = -1


class State(NamedTuple):
    """Everything.

    Args:
        workers: By rank; None if dead or left.
        left: Those who left.
        members: The group of the communicator.
        failed: Living members who saw a sum fail on it.
        revokers: Living members who revoked it.
        fenced: Everybody is known to have left the shrink that made it.
        sums: Those in progress.
        swaps: Exchanges in progress.
        log: By step, what was put into the weights; None once everybody alive has it.
        published: Steps in the newest published state.
        published_taken: How often the settings had been changed when that was made: they are a part of it.
        deaths_left: How many may still die.
        memory: What is shared, empty if nothing is.
        wishes: Who wants to come or leave.
    """

    workers: tuple[Worker | None, ...]
    left: int
    members: int
    failed: int
    revokers: int
    fenced: bool
    sums: tuple[Sum, ...]
    swaps: tuple[Swap, ...]
    log: tuple[tuple[int, ...] | None, ...]
    published: int
    published_taken: int
    deaths_left: int
    memory: Memory
    wishes: Wishes


class Die(NamedTuple):
    """``rank`` dies."""

    rank: int


class Complete(NamedTuple):
    """``rank`` has the result of the sum that it waits in."""

    rank: int


class Fail(NamedTuple):
    """The sum that ``rank`` waits in fails there."""

    rank: int


class Hear(NamedTuple):
    """``rank`` returns from what was decided."""

    rank: int


class Do(NamedTuple):
    """``rank`` carries out its next order."""

    rank: int


class Decide(NamedTuple):
    """The agreement, or the shrink, is decided; those in ``yes`` hear True."""

    yes: int


class Add(NamedTuple):
    """``rank`` has added its share, and enters barrier B."""

    rank: int


class Stop(NamedTuple):
    """``rank`` is stopped while it adds; everybody takes it for dead."""

    rank: int


class Wake(NamedTuple):
    """``rank`` wakes up, adds its share where it was doing so, and enters barrier B."""

    rank: int


class Read(NamedTuple):
    """The optimizer of ``rank`` has read the results."""

    rank: int


class Begin(NamedTuple):
    """The thread of ``rank``, which computes, enters the sum of its next bucket."""

    rank: int


class Compute(NamedTuple):
    """``rank`` has computed its step."""

    rank: int


class Spoil(NamedTuple):
    """``rank`` has computed its step, and has changed gradients after their sum had begun. It counts as a death."""

    rank: int


Move = Begin | Compute | Spoil | Die | Complete | Fail | Hear | Do | Decide | Add | Stop | Wake | Read | Wish


def waits_in_sum(worker: Worker) -> bool:
    """Return whether ``worker``, or its thread, waits in the newest sum that it has entered."""
    return isinstance(worker.waits, SUMS) or worker.thread is Begun.WAITS


SUMS = (ReduceBucket, AtBarrier, VoteStep, HandOver, ShareProgress, LoadCheckpoint, FetchConfig, SendState, Giving)
"""What all do on the communicator, and may fail: a sum, but for :class:`SendState` and :class:`Giving`."""


def lowest(mask: int) -> int:
    """Return the lowest rank in ``mask``."""
    return (mask & -mask).bit_length() - 1


def living_ranks(workers: Sequence[Worker | None]) -> int:
    """Return the ranks in ``workers`` that are alive."""
    living, bit = 0, 1
    for worker in workers:
        if worker is not None:
            living |= bit
        bit <<= 1
    return living
