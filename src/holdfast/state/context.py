"""The job context that outlives one training loop: members, progress, and where records and checkpoints are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from holdfast.base.clock import Clock
from holdfast.base.side_work import say
from holdfast.checkpoint import LoadedCheckpoint, WritePlan
from holdfast.comm import Communicator, OrderedAllReduce
from holdfast.config import Settings
from holdfast.data.ledger import SampleCounts
from holdfast.faults.process import Injector
from holdfast.records.beacon import Beacon, NoBeacon
from holdfast.records.logger import Logger
from holdfast.records.types import Finished
from holdfast.recovery.messages import Action
from holdfast.state.manager import CheckpointManager


@dataclass(slots=True)
class RecoveryContext:
    """A recovery, or a planned regrouping because the membership changes."""

    before: tuple[int, ...]  # the members before it
    decision: str = "continue"  # named as in holdfast.records.types.Recovered
    redone_steps: int = 0  # steps that are recomputed
    held_since_s: float = 0.0  # job's clock when a planned regrouping interrupted training; 0 after a failure
    orders: dict[str, int] = field(default_factory=dict)  # how often each action was carried out, by name
    times_s: dict[str, float] = field(default_factory=dict)  # total time of each action, by name

    def count(self, order: Action, took_s: float) -> None:
        """Count an action that was carried out."""
        name = type(order).__name__
        self.orders[name] = self.orders.get(name, 0) + 1
        self.times_s[name] = self.times_s.get(name, 0.0) + took_s


@dataclass(slots=True, kw_only=True)
class RebuildInfo:
    """Context of a recovery that must survive while the application is rebuilt."""

    recovery: RecoveryContext  # as far as it had come
    reached: int  # steps begun before the failure
    snapshot_s: float  # time to discard the step in progress, and to take the snapshot if there is one
    unwound_s: float  # when the snapshot was complete and the old application began to unwind
    connected_s: float = 0.0  # when the new session had connected to the other workers
    loaded_s: float = 0.0  # when the state was loaded


@dataclass(slots=True)
class LiveSettings:
    """Settings that can change during the job; equal at all workers. Written by :mod:`holdfast.engine.live_config` only.

    Args:
        strategy: The recovery strategy.
        checkpoint_every: Steps between checkpoints.
        checkpoint_auto: The checkpoint interval is chosen from measured costs and failure rates.
        applied: Number of change requests applied so far.
        slicing: Changes to how mini-batches are divided, see :meth:`holdfast.data.position.DataPosition.change`.
    """

    strategy: str
    checkpoint_every: int = 0
    checkpoint_auto: bool = False
    applied: int = 0
    slicing: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the initial values."""
        return cls(settings.strategy, settings.checkpoint_every, settings.checkpoint_auto)


@dataclass(slots=True)
class CommittedState:
    """The result of the last committed step. Written when a step is committed and when a state is loaded."""

    step: int = 0  # number of steps committed
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last committed step
    link: str = ""  # the newest link of the certificate's hash chain; "" if there is none

    def begin_again(self) -> None:
        """Reset to before the first step, for an application that is rebuilt."""
        self.step, self.link = 0, ""


@dataclass(frozen=True, slots=True)
class ScriptEpoch:
    """An epoch of a script that asks for its epochs, and where its first loop is; see :meth:`Session.epochs`."""

    call: int  # which call of ``epochs`` in the script, from 0
    number: int  # the epoch, as the script counts
    loop: int  # training loops before it
    first_epoch: int  # epochs of data that these loops have begun


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """A copy, in host memory, of the state at the end of a training loop, whatever the script does to the model afterwards."""

    step: int  # number of steps that it contains
    content: WritePlan | None  # the state; None where other workers keep it, or it is saved
    info: dict[str, Any]  # metadata of its checkpoint
    finished: tuple[Finished, ...]  # the records of this process about the end of the loop


@dataclass(slots=True)
class LoopState:
    """Progress across training loops, and the state that one loop leaves to the next.

    Written by the session between loops, by a loop at its start and end, and when a state is loaded.

    Args:
        slices: Slices of a mini-batch, fixed for the job.
        order: Order in which the gradients of slices are added, fixed for the job; "" until it is chosen, see
            :mod:`holdfast.state.order_choice`.
        number: Training loops before this one.
        epoch: Epochs begun by earlier loops.
        offset: Samples of the next epoch that were consumed before this job.
        first_step: Steps committed before this loop.
        loaded: A checkpoint that belongs to a later loop than this one; the loops before that one are skipped.
        finished: The ``Finished`` records of the last loop.
        totals: Sample accounts of earlier loops.
        sum: The gradient all-reduce; created by the first loop.
        describe: Returns the state of a framework whose loop is trained, as plain JSON, to save it with each checkpoint.
        script_epoch: The epoch in progress of a script that asks for its epochs.
        calls: Calls of ``epochs`` so far.
        has_missed: This worker, which is to join others, came too late for a loop.
        is_counted_once: The epoch of the loaded checkpoint is known only if an epoch has one loop.
        at_end: The state at the end of the last loop; None within a loop, and where nothing needs to be saved.
        is_saving_end: ``at_end`` is being saved.
        past: The call of ``epochs`` that has ended last, and its number of epochs, until a loop begins.
        may_save_outside: The script's end, or SIGTERM outside of a loop, reaches this session, which can save ``at_end`` then.
    """

    slices: int
    order: str = ""
    number: int = 0
    epoch: int = 0
    offset: int = 0
    first_step: int = 0
    loaded: LoadedCheckpoint | None = None
    finished: list[Finished] = field(default_factory=list)
    totals: SampleCounts = field(default_factory=SampleCounts)
    sum: OrderedAllReduce | None = None
    describe: Callable[[], dict[str, Any]] | None = None
    script_epoch: ScriptEpoch | None = None
    calls: int = 0
    has_missed: bool = False
    is_counted_once: bool = False
    at_end: LoopEnd | None = None
    is_saving_end: bool = False
    past: tuple[int, int] | None = None
    may_save_outside: bool = False

    def end(self, epochs: int) -> None:
        """Advance to the next loop after one of ``epochs`` epochs that was trained or skipped."""
        self.number, self.epoch, self.offset = self.number + 1, self.epoch + epochs, 0

    def begin_again(self) -> None:
        """Reset to before the first loop, for an application that is rebuilt."""
        self.number = self.epoch = self.offset = self.first_step = self.calls = 0
        self.loaded, self.finished, self.totals = None, [], SampleCounts()
        self.script_epoch = self.at_end = self.past = None


@dataclass(slots=True)
class PendingRequests:
    """Signals and requests that only this worker knows of so far, for the next commit vote.

    No field is written by signal handlers and by the script's thread: a handler may run in the middle of ``x |= y``.

    Args:
        ends_loop: The script asked to stop after this step. Written by its thread.
        stops_all: All workers must stop. Set by signal handlers and before a loop, and never cleared.
        leaves: This worker was asked to leave the job. Set by signal handlers, and never cleared.
    """

    ends_loop: bool = False
    stops_all: bool = False
    leaves: bool = False


@dataclass(slots=True)
class RebuildState:
    """Rebuilds of the application in this process. Written by :mod:`holdfast.engine.reinit_context` and in recoveries.

    Args:
        count: Number of rebuilds.
        current: The rebuild in progress, from teardown until training resumes.
        snapshot: The state at the failure, kept until the next commit because a worker may need it until then.
    """

    count: int = 0
    current: RebuildInfo | None = None
    snapshot: LoadedCheckpoint | None = None


@dataclass(slots=True)
class PlatformState:
    """The platform of this worker. Written by :mod:`holdfast.state.platform_check`.

    Args:
        properties: Properties of the platform that decide result bits, see :mod:`holdfast.state.platform`.
        given_up: Why bit-exactness no longer holds across platforms, as known to this worker; "" if it holds.
        differs: Workers are on different platforms, whatever is promised, as all of them know since the loop was loaded.
        hashes_differ: Python's hashes are not those of other workers or of the checkpoint, and this was said.
    """

    properties: dict[str, str] = field(default_factory=dict)
    given_up: str = ""
    differs: bool = False
    hashes_differ: bool = False


@dataclass(slots=True)
class SliceLoad:
    """How many slices this worker computes. Written by :mod:`holdfast.models.trainable`."""

    now: int = 0  # in the step in progress
    least: int | None = None  # in any step so far

    def note(self, slices: int) -> None:
        """Note the slices of a step that begins."""
        self.now = slices
        self.least = slices if self.least is None else min(self.least, slices)

    @property
    def has_grown(self) -> bool:
        """Whether this worker has taken over slices: it once began a step with fewer."""
        return self.least is not None and self.now > self.least


@dataclass(slots=True)
class OverlapCost:
    """Time spent on overlapped updates, over all steps; see :class:`~holdfast.records.types.OptimizerOverlapped`."""

    steps: int = 0
    buckets: int = 0
    undone: int = 0
    copy_s: float = 0.0
    update_s: float = 0.0
    waited_s: float = 0.0
    undo_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The job context that outlives one training loop. Its fields are never reassigned.

    Mutable state is in separate objects, one for each module that writes it.

    Args:
        settings: The job's settings.
        comm: The communicator of the workers that are alive.
        clock: Gives the ``t_s`` of records.
        log: Writes records.
        beacon: Publishes this worker's phase and progress.
        faults: Injects planned faults.
        checkpoints: Checkpoint schedule, writers and retention.
        first_members: The workers that the job was started with.
        committed: The result of the last committed step.
        loops: Progress across training loops.
        live: Settings that can change while the job runs.
        pending: Signals and requests that only this worker knows of.
        rebuilds: Rebuilds of the application.
        platform: The platform of this worker.
        spent: Time spent on updating buckets before the commit vote. Written by :mod:`holdfast.models.overlap`.
        altered: Senders of messages of the step in progress that arrived corrupted here; -1 for the result of an
            all-reduce. Written where messages arrive, emptied by :mod:`holdfast.integrity.checksums`.
        load: How many slices this worker computes.
    """

    settings: Settings
    comm: Communicator
    clock: Clock
    log: Logger
    beacon: Beacon | NoBeacon
    faults: Injector
    checkpoints: CheckpointManager
    first_members: tuple[int, ...]
    committed: CommittedState
    loops: LoopState
    live: LiveSettings
    pending: PendingRequests = field(default_factory=PendingRequests)
    rebuilds: RebuildState = field(default_factory=RebuildState)
    platform: PlatformState = field(default_factory=PlatformState)
    spent: OverlapCost = field(default_factory=OverlapCost)
    altered: dict[str, int] = field(default_factory=dict)
    load: SliceLoad = field(default_factory=SliceLoad)

    @property
    def step(self) -> int:
        """Number of steps committed."""
        return self.committed.step

    @property
    def loop(self) -> int:
        """Training loops before this one."""
        return self.loops.number

    @property
    def is_lead(self) -> bool:
        """Whether this process plays the lowest rank alive, which writes everything that is written once."""
        return self.comm.members[0] in self.comm.local_ranks

    def warn(self, text: str) -> None:
        """Tell the user of a problem that does not end training."""
        say(f"worker {self.comm.local_ranks[0]}: {text}")

    def announce(self) -> None:
        """Publish the current loop, the required platform and the epoch for workers that join later."""
        epoch = self.loops.script_epoch
        announced = {"platform": self.platform.properties, "epoch": None if epoch is None else asdict(epoch)}
        self.comm.announce(self.loop, json.dumps(announced))
