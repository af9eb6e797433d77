"""What outlives one training loop: who is there, how far they are, and where things are written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from holdfast.data.ledger import Account
from holdfast.models.overlap import Spent
from holdfast.recovery.messages import NO_NOTE, Action, Note

if TYPE_CHECKING:  # the torch.distributed backend needs none of these
    from holdfast.checkpoint import Loaded
    from holdfast.clock import Clock
    from holdfast.comm import Communicator, OrderedSum
    from holdfast.config import Settings
    from holdfast.faults.process import Injector
    from holdfast.records.beacon import Beacon, NoBeacon
    from holdfast.records.logger import Logger
    from holdfast.records.types import Finished
    from holdfast.state.manager import Keeper


@dataclass(slots=True)
class Recovery:
    """A recovery, or a meeting because members change.

    Args:
        before: The members then.
        decision: What was decided, as :class:`~holdfast.records.types.Recovered` has it.
        redone_steps: How many steps are computed again.
        held_since_s: When training was interrupted without a failure; 0 after a failure.
        orders: How often each order was carried out, by name.
        times_s: How long these took.
    """

    before: tuple[int, ...]
    decision: str = "continue"
    redone_steps: int = 0
    held_since_s: float = 0.0
    orders: dict[str, int] = field(default_factory=dict)
    times_s: dict[str, float] = field(default_factory=dict)

    def count(self, order: Action, took_s: float) -> None:
        """Count an order that was carried out."""
        name = type(order).__name__
        self.orders[name] = self.orders.get(name, 0) + 1
        self.times_s[name] = self.times_s.get(name, 0.0) + took_s


@dataclass(slots=True, kw_only=True)
class Rebuilding:
    """What is known, while the application is built again, of why and since when.

    Args:
        before: Who was there before the failure.
        reached: Steps begun until then.
        orders: How often each order was carried out in this recovery.
        times_s: How long it took for them.
        snapshot_s: To take the step in progress back, and the snapshot if one is taken here.
        unwound_s: When it was taken, and the old application began to go.
        connected_s: When the new session met the others.
        loaded_s: When the state was loaded.
    """

    before: tuple[int, ...]
    reached: int
    orders: dict[str, int]
    times_s: dict[str, float]
    snapshot_s: float
    unwound_s: float
    connected_s: float = 0.0
    loaded_s: float = 0.0


@dataclass(slots=True)
class Live:
    """What may change while the job runs, the same at all workers. Written by :mod:`holdfast.engine.live_config` alone.

    Args:
        strategy: What survivors do.
        checkpoint_every: Steps between checkpoints.
        checkpoint_auto: Checkpoints are taken as often as pays.
        taken: How many requests for a change were taken.
        cut: How mini-batches are cut otherwise than planned, see :meth:`holdfast.data.position.Place.change`.
    """

    strategy: str
    checkpoint_every: int = 0
    checkpoint_auto: bool = False
    taken: int = 0
    cut: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return what holds at the beginning."""
        return cls(settings.strategy, settings.checkpoint_every, settings.checkpoint_auto)


@dataclass(slots=True)
class Committed:
    """What the last committed step left. Written when a step is committed and when a state is loaded.

    Args:
        step: Steps committed.
        metrics: Of the last committed step.
        link: The certificate's last; "" where there is none.
    """

    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    link: str = ""

    def begin_again(self) -> None:
        """Go back to before the first step, for an application that is built again."""
        self.step, self.link = 0, ""


@dataclass(slots=True)
class Loops:
    """Where training is between loops, and what one loop leaves to the next.

    Written by the session between loops, by a loop at its beginning and end, and when a state is loaded.

    Args:
        slices: Pieces of a mini-batch, fixed for the job.
        number: Training loops before this one.
        epoch: Epochs begun by earlier loops.
        first_step: Steps committed before this loop.
        loaded: A checkpoint of a later loop than this one: the loops before it are left out.
        finished: The ``Finished`` records of the last loop.
        totals: Accounts of earlier loops.
        sum: Adds the gradients; made by the first loop.
    """

    slices: int
    number: int = 0
    epoch: int = 0
    first_step: int = 0
    loaded: Loaded | None = None
    finished: list[Finished] = field(default_factory=list)
    totals: Account = field(default_factory=Account)
    sum: OrderedSum | None = None

    def end(self, epochs: int) -> None:
        """Go on to the next loop after one of so many epochs, which was trained or left out."""
        self.number, self.epoch = self.number + 1, self.epoch + epochs

    def begin_again(self) -> None:
        """Go back to before the first loop, for an application that is built again."""
        self.number = self.epoch = self.first_step = 0
        self.loaded, self.finished, self.totals = None, [], Account()


@dataclass(slots=True)
class Told:
    """What this worker was told and the others do not know yet. Written by signals and by the script's thread.

    Args:
        notes: What this worker brings to the next vote: that all are to stop.
        leaves: Whether this worker is to leave the others.
    """

    notes: Note = NO_NOTE
    leaves: bool = False


@dataclass(slots=True)
class Rebuilds:
    """The application built again in this process. Written by :mod:`holdfast.session.reinit_context` and at recoveries.

    Args:
        count: How often it was.
        current: Since it was taken down, until training goes on.
        snapshot: The state at the fault, as long as a worker may need it: until a step is committed.
    """

    count: int = 0
    current: Rebuilding | None = None
    snapshot: Loaded | None = None


@dataclass(slots=True)
class Platform:
    """The kind of this worker. Written by :mod:`holdfast.state.platform_check`.

    Args:
        kind: Of this worker, see :mod:`holdfast.state.platform`.
        given_up: How workers of different kinds broke the promise of bits, as far as this one knows; "" if they did not.
    """

    kind: dict[str, str] = field(default_factory=dict)
    given_up: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What outlives one training loop: who is there, and where things are written.

    Nothing of it is set again: what changes stands in objects of its own, divided by what writes them.

    Args:
        settings: As asked for.
        comm: The living.
        clock: For ``t_s``.
        log: Takes records.
        beacon: Says where this worker is.
        faults: Strikes as planned.
        keeper: Checkpoints.
        first_members: The workers that the job was started with.
        committed: What the last committed step left.
        loops: What one loop leaves to the next.
        live: What may change while the job runs.
        told: What this worker was told.
        rebuilds: The application built again.
        platform: The kind of this worker.
        spent: On updating buckets before their step was closed. Written by :mod:`holdfast.models.overlap`.
        altered: What did not arrive here as it was given, in the step in progress, and who gave it; -1 for a sum. Written where sums
            and hand-overs arrive, emptied by :mod:`holdfast.integrity.checksums`.
    """

    settings: Settings
    comm: Communicator
    clock: Clock
    log: Logger
    beacon: Beacon | NoBeacon
    faults: Injector
    keeper: Keeper
    first_members: tuple[int, ...]
    committed: Committed
    loops: Loops
    live: Live
    told: Told = field(default_factory=Told)
    rebuilds: Rebuilds = field(default_factory=Rebuilds)
    platform: Platform = field(default_factory=Platform)
    spent: Spent = field(default_factory=Spent)
    altered: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.committed.step

    @property
    def loop(self) -> int:
        """Training loops before this one."""
        return self.loops.number

    @property
    def is_lead(self) -> bool:
        """Whether the lowest worker alive is played here: it writes what is written once."""
        return self.comm.members[0] in self.comm.here

    def announce(self) -> None:
        """Let those who come later know which loop goes on, and of what kind they must be."""
        self.comm.announce(self.loop, json.dumps(self.platform.kind))
