"""The initial state of a loop, the same at every worker: from a checkpoint, or from the lowest worker.

Loading is repeated when a failure interrupts it, and under ``restart`` after every failure. Some workers may then have
finished it and others not, so the reductions here never depend on how far this worker got.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.base.orders import is_tree
from holdfast.checkpoint import LoadedCheckpoint, take
from holdfast.checkpoint.snapshot import SnapshotBuffer
from holdfast.checkpoint.writer import WriteResult
from holdfast.data.ledger import SampleCounts
from holdfast.data.position import DataPosition
from holdfast.data.seeds import generator_states, set_generator_states
from holdfast.engine.live_config import LiveConfig
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError, ScriptError
from holdfast.integrity.hash_chain import GENESIS
from holdfast.integrity.sdc_guard import HealSnapshot, SdcGuard
from holdfast.integrity.snapshots import copied
from holdfast.models.trainable import Trainable
from holdfast.models.training_state import clone
from holdfast.records.types import Finished
from holdfast.recovery.registry import strategy_class
from holdfast.state.context import JobContext, LoopEnd
from holdfast.state.hash_seed import compare_hashes_with_checkpoint, hashes
from holdfast.state.loop_end import is_saved, keepers, lone_attempt
from holdfast.state.order_choice import choose_order, order_of_checkpoint
from holdfast.state.platform_check import compare_platforms, compare_with_checkpoint, warn_of_samples
from holdfast.state.run_log import RunLog
from holdfast.state.transfer import receive_state, send_state

_NO_SAMPLES = -(1 << 62) - 1
"""Less than the complement of any digest of samples."""


class StateRestorer:
    """Saves the training state, and brings all workers to the same state."""

    def __init__(
        self,
        job: JobContext,
        trainable: Trainable,
        position: DataPosition,
        log: RunLog,
        live_config: LiveConfig,
        guard: SdcGuard,
    ) -> None:
        self._job = job
        self._trainable = trainable
        self._position = position
        self._log = log
        self._live_config = live_config
        self._guard = guard
        self._initial: LoadedCheckpoint | None = None
        self._begun_from: int | None = None
        self._received_state: tuple[Any, dict[str, Any]] | None = None
        self.belongs_to_later_loop = False
        self.has_stopped = False
        """Whether the state was saved after a loop that the script had stopped."""

    def load(self, *, trained: bool) -> bool:
        """Load the newest intact checkpoint that this loop can resume from; without one, make the replicas equal.

        If a worker's state is corrupt, roll back to the newest state known to be right, and return True. This worker is ``trained``
        once it has passed the start of this loop.

        Raises:
            ReplicasDiffer: if there is no state to roll back to.
            ConfigError: if the workers' platforms differ and that is not allowed, or their samplers or streams do.
            ScriptError: if their datasets have different samples.
        """
        compare_platforms(self._job)
        self._read_samples()
        self._set_order(choose_order(self._job))
        way = self._guard.share_state()
        if way is None:
            self._load(trained=trained)
            self._compare_data()
            if not self.belongs_to_later_loop:
                self._guard.begin(self._keep)
            return False
        self._guard.rolled_back(way, self._keep, self._roll_back(way, trained=trained))
        return True

    def _set_order(self, order: str) -> None:
        self._job.loops.order = order
        if self._job.loops.sum is not None:
            self._job.loops.sum.order = order
        self._position.align(in_tree=is_tree(order))

    def _read_samples(self) -> None:
        if len(self._job.comm.processes) > 1:  # one process has no other to compare them with
            self._position.read_samples()

    def _compare_data(self) -> None:
        """Check that all workers have the same data before them: some samples, and what a sampler or a stream decides.

        Samples may be unknown at some workers. Where platforms differ, they may be computed to other bits.
        """
        is_alone = len(self._job.comm.processes) == 1
        if self.belongs_to_later_loop or ((order := self._position.digest()) is None and is_alone):
            return
        digest, platform = order or 0, self._job.platform
        samples = -1 if is_alone or platform.differs or platform.given_up else self._position.samples
        numbers = (digest, ~digest, samples, ~samples if samples >= 0 else _NO_SAMPLES)
        high, low, most, least = self._job.comm.maximum(numbers)
        if high != ~low:
            raise ConfigError(self._position.why_differs())
        if most >= 0 and most != ~least:
            raise ScriptError(
                f"workers have different samples in their datasets of {self._position.plan.num_samples}: every worker"
                " must have all of them, not a part by its rank, and they must depend on nothing but the script's arguments"
                " and random numbers that are seeded alike"
            )

    def _compare_samples(self, info: dict[str, Any], *, joins: bool) -> None:
        """Warn if samples of the loop are not those of the checkpoint, or of the workers that this one joins.

        On another platform they may have other bits.
        """
        if joins:
            self._read_samples()
        then, now, job = info.get("samples", -1), self._position.samples, self._job
        if then not in (-1, now) and now >= 0 and info.get("platform") == job.platform.properties:
            warn_of_samples(job, joins=joins)

    def _find_data(self) -> None:
        """Find the restored position in a stream; meanwhile this worker does not count as stuck."""
        if not self._position.must_seek:
            return
        self._job.beacon.publish_busy(busy=True)
        try:
            self._position.find()
        finally:
            self._job.beacon.publish_busy(busy=False)

    def _roll_back(self, way: HealSnapshot, *, trained: bool) -> str:
        """Roll back to the newest state known to be right, and return the name of its source."""
        job = self._job
        job.rebuilds.snapshot = None
        job.checkpoints.drop()
        proposal = (-1, 0)
        if job.is_lead:
            self._remove_after(way.newest)  # before any worker can continue, since the lead may fail later
            proposal = (self._find(trained=trained) if way.kept is None else -1, secrets.randbits(62))
        step, token = job.comm.maximum(proposal)
        job.checkpoints.start_over(token, 0)
        if way.kept is not None:
            self._restore(way.kept)
            return "snapshot"
        if step >= 0:
            self._restore(job.checkpoints.load(step), keeps=True)
            return "checkpoint"
        if self._initial is None:
            raise self._guard.nothing_to_go_back_to()
        self._restore(self._initial)
        return "beginning"

    def _remove_after(self, newest: int) -> None:
        try:
            self._job.checkpoints.remove_after(newest)
        except CheckpointError as error:
            self._log.warn(f"checkpoints of steps after {newest} are corrupt and cannot be removed: {error}")

    def keep_on_joining(self) -> None:
        """Take a snapshot of the state that newcomers start from, as all workers do then."""
        self._guard.newcomers_joined(self._keep)

    def keep_after_step(self) -> None:
        """Take a snapshot of the state, if one is due."""
        self._guard.applied(self._keep)

    def _keep(self, room: LoadedCheckpoint | None) -> LoadedCheckpoint:
        state = self._state(self._trainable.shared_state())
        return self._loaded(self._job.step, copied(state, None if room is None else room.state), copied(self._info()))

    def _load(self, *, trained: bool) -> None:
        job = self._job
        strategy = strategy_class(job.live.strategy)
        if strategy.rebuilds and self._load_snapshot():
            return
        job.checkpoints.drop()
        # Only the lead searches, since two workers could find different steps. The token marks everything saved from here on.
        proposal = (-1, 0, 0)
        if job.is_lead:
            proposal = (self._find(trained=trained), secrets.randbits(62), job.checkpoints.choose_fallback())
        step, token, fallback = job.comm.maximum(proposal)
        job.checkpoints.start_over(token, fallback)
        if step >= 0:
            self._begun_from = step
            loaded = job.checkpoints.load(step, self._trainable.wanted(job.comm.members))
            then = loaded.info.get("platform", {})
            compare_with_checkpoint(job, then)
            compare_hashes_with_checkpoint(job, loaded.info.get("hashes", {}), then.get("python", ""))
            self._restore(loaded, keeps=True)
            return
        if self._initial is not None:
            self._restore(self._initial)
        self._trainable.make_equal(job.comm)
        if strategy.needs_checkpoint or not self._trainable.is_replicated:  # any strategy may lose a part of it
            self._initial = self._loaded(job.step, clone(self._state(self._trainable.shared_state())), self._info())

    def take_snapshot(self, heard: int) -> None:
        """Keep the state before the step in progress for the next ``reinit``, if this worker is to keep it.

        ``heard`` are flags from commit votes that have not been acted on yet; they are restored from its ``info``.
        """
        job, source = self._job, self._job.settings.reinit_from
        if source == "checkpoint" or (source == "root" and not job.is_lead):
            return
        if self.belongs_to_later_loop:  # nothing has been computed since it was loaded
            job.rebuilds.snapshot = job.loops.loaded
            return
        state = clone(self._state(self._trainable.shared_state()))
        job.rebuilds.snapshot = self._loaded(job.step, state, self._info() | {"heard": heard})

    def _load_snapshot(self) -> bool:
        """Restore the snapshot that was taken at the failure, sent by a worker that has it; return whether there is one.

        A receiver keeps its copy, and can send it in turn if the sender fails.
        """
        job, comm = self._job, self._job.comm
        if job.rebuilds.snapshot is not None and job.rebuilds.snapshot.info["loop"] < job.loop:
            job.rebuilds.snapshot = None  # of a finished loop
        snapshot = job.rebuilds.snapshot
        newest = -1 if snapshot is None else snapshot.step
        step, *lacks = comm.maximum((newest, *(snapshot is None and rank in comm.local_ranks for rank in comm.members)))
        if step < 0:
            if job.rebuilds.current is not None and job.settings.reinit_from != "checkpoint" and job.is_lead:
                self._log.warn("the workers with the snapshot of the failure have failed, too: rolling back further")
            return False
        without = tuple(rank for rank, lack in zip(comm.members, lacks, strict=True) if lack)
        if snapshot is None:
            snapshot = self._loaded(step, *receive_state(comm, without))
        elif without:
            send_state(comm, without, snapshot.state, snapshot.info)
        job.rebuilds.snapshot = snapshot
        self._restore(snapshot)
        return True

    def _loaded(self, step: int, state: dict[str, Any], info: dict[str, Any]) -> LoadedCheckpoint:
        return LoadedCheckpoint(step=step, state=state, info=info, generation=self._job.comm.generation)

    def save(self, *, has_ended: bool = False, has_stopped: bool = False) -> None:
        """Begin a checkpoint of the state before the step in progress; it does not count yet.

        Args:
            has_ended: The loop ends with this state.
            has_stopped: The script has stopped it.
        """
        job = self._job
        if self.belongs_to_later_loop:
            return  # the loaded checkpoint contains more than this loop knows
        comm, trainable = job.comm, self._trainable
        self._log.mark("checkpoint")
        writers = trainable.writers(comm)
        own_state = trainable.state_dict() if comm.local_ranks in writers else {}
        state = {"replica": own_state} if not (trainable.is_replicated or job.is_lead) else self._state(own_state)
        marks = self._end_marks(has_stopped=has_stopped) if has_ended else {}
        if marks:
            job.checkpoints.put_off(job.step)  # a checkpoint of this step that is due anyway does not have them
        job.checkpoints.begin(
            job.step,
            state,
            self._info() | marks,
            writers,
            comm.local_ranks,
            comm.generation,
            distinct=not trainable.is_replicated,
        )

    def save_without_store(self) -> list[WriteResult]:
        """Save the state before the step in progress, unless this step or a later one is saved already; return the outcomes."""
        checkpoints = self._job.checkpoints
        if self.belongs_to_later_loop or checkpoints.last() >= self._job.step:
            return checkpoints.poll()
        checkpoints.drop()
        content = take(self._state(self._trainable.state_dict()))
        return [
            *checkpoints.finish(),
            checkpoints.save_alone(self._job.step, content, self._info(), lone_attempt(self._job)),
        ]

    def keep_end(self, finished: Sequence[Finished], *, has_stopped: bool) -> None:
        """Keep a copy of the state at the end of this loop until the next one begins, whatever the script does to the model.

        The first one of a step counts: once the script has left the loop, it may load other weights before the loop ends.
        """
        loops = self._job.loops
        if loops.at_end is None or loops.at_end.step != self._job.step:
            loops.at_end = self._copy_end(finished, has_stopped=has_stopped)
            return
        info = loops.at_end.info | ({"stopped": True} if has_stopped else {})
        loops.at_end = dataclasses.replace(loops.at_end, info=info, finished=tuple(finished))

    def _copy_end(self, finished: Sequence[Finished], *, has_stopped: bool) -> LoopEnd | None:
        """Return a copy of the state; without its content if this worker need not save it; None if it cannot be saved."""
        job = self._job
        if not (job.loops.may_save_outside and (self._trainable.is_replicated or job.checkpoints.is_named)):
            return None
        without = LoopEnd(job.step, None, {}, tuple(finished))
        marks = self._end_marks(has_stopped=has_stopped)
        # a split model was saved at the end of its loop, where its workers still agree
        if not (self._trainable.is_replicated and set(keepers(job)) & set(job.comm.local_ranks)):
            return without
        if is_saved(job, job.step, marks):
            return without
        try:
            copy = SnapshotBuffer(pins=False).copy(take(self._state(self._trainable.shared_state())))
        except (RuntimeError, MemoryError, CheckpointError) as error:  # no memory, or something that is not data
            if job.checkpoints.is_named:
                self._log.warn(f"the state at the end of the loop cannot be kept, in case it must be saved: {error}")
            return None
        return dataclasses.replace(without, content=copy, info=self._info() | marks)

    def _end_marks(self, *, has_stopped: bool) -> dict[str, Any]:
        """Return what the metadata of a checkpoint say about the end of a loop: it is over early, or training is."""
        return ({"ended": True} if self._position.has_more else {}) | ({"stopped": True} if has_stopped else {})

    def _state(self, replica: dict[str, Any]) -> dict[str, Any]:
        return {
            "replica": replica,
            "ledger": self._position.state_dict(),
            "metrics": self._job.committed.metrics,
            "generators": generator_states(),
        }

    def _info(self) -> dict[str, Any]:
        job = self._job
        return {
            **self._position.info(),
            "loop": job.loop,
            "first_step_of_loop": job.loops.first_step,
            "first_epoch_of_loop": job.loops.epoch,
            "order": job.loops.order,
            "workers": len(job.comm.members),
            "totals": dataclasses.asdict(job.loops.totals),
            "changes": self._live_config.state(),
            "platform": job.platform.properties,
            "hashes": hashes(),
            **({"samples": digest} if (digest := self._position.samples) >= 0 else {}),
            **({"framework": job.loops.describe()} if job.loops.describe is not None else {}),
            **({"link": job.committed.link} if job.committed.link else {}),
            **({} if (epoch := job.loops.script_epoch) is None else {"script_epoch": dataclasses.asdict(epoch)}),
        }

    def transfer_state(self, newcomers: tuple[int, ...]) -> None:
        """Send the state to newcomers, or, as a newcomer, receive and keep it."""
        job = self._job
        if job.comm.local_ranks[0] in newcomers:
            self._received_state = receive_state(job.comm, newcomers)
            return
        first = self._initial
        state = {"now": self._state(self._trainable.shared_state()), "first": None if first is None else first.state}
        info = {"now": self._info(), "first": None if first is None else first.info}
        more = {
            "step": job.step,
            "first_step": 0 if first is None else first.step,
            "checkpoints": job.checkpoints.state(),
            "placement": self._trainable.placement(),
        }
        send_state(job.comm, newcomers, state, info | more)

    def install(self) -> None:
        """Adopt the state that this worker received, if any."""
        if self._received_state is None:
            return
        state, info = self._received_state
        self._received_state = None
        if state["first"] is not None:
            self._initial = self._loaded(info["first_step"], state["first"], info["first"])
        self._restore(self._loaded(info["step"], state["now"], info["now"]), keeps=True, joins=True)
        self._job.checkpoints.adopt(info["checkpoints"])
        self._trainable.adopt_placement(info["placement"])

    def _find(self, *, trained: bool) -> int:
        """Return the newest step that this loop can resume from, -1 for none: that of the first origin that applies."""
        job, begun, loaded = self._job, self._begun_from, self._job.loops.loaded
        origins: tuple[tuple[bool, Callable[[], int | None]], ...] = (
            (job.rebuilds.count > 0, lambda: self._newest(lambda loop: loop >= job.loop)),
            (trained, lambda: self._newest(lambda loop: loop == job.loop)),
            # a failure interrupted loading, and some workers have this state
            (begun is not None, lambda: begun),
            # an earlier loop has loaded it, and it is of a later one
            (loaded is not None, lambda: None if loaded is None else loaded.step),
            (job.loop > 0, lambda: None),
            (not job.settings.resume, job.checkpoints.check_empty),
            (True, self._newest_of_run),
        )
        step = next(step() for applies, step in origins if applies)
        return -1 if step is None else step

    def _newest(self, may_be_of: Callable[[int], bool]) -> int | None:
        """Return the newest intact step if the loop that it is of is allowed."""
        step = self._newest_of_all()
        return step if step is not None and may_be_of(self._job.checkpoints.info(step)["loop"]) else None

    def _newest_of_run(self) -> int | None:
        step = self._newest_of_all()
        if step is None and self._job.loop >= 0:
            self._log.warn(f"there is no intact checkpoint in {self._job.checkpoints.url}: training starts at step 0")
        return step

    def _newest_of_all(self) -> int | None:
        def warn(step: int, damage: CheckpointCorrupt) -> None:
            self._log.warn(f"skipped step {step}: {damage}")

        return self._job.checkpoints.newest(warn, keep=self._trainable.is_replicated)

    def _restore(self, loaded: LoadedCheckpoint, *, keeps: bool = False, joins: bool = False) -> None:
        """Load a state.

        Args:
            loaded: The state.
            keeps: Its tensors may be used without a copy, because nothing else refers to them.
            joins: It comes from workers that this one joins.
        """
        job, info = self._job, loaded.info
        self.belongs_to_later_loop = info["loop"] > job.loop
        job.loops.loaded = loaded if self.belongs_to_later_loop else None
        if job.committed.link:  # the state may have been saved without a certificate
            job.committed.link = info.get("link", GENESIS)
        if not self.belongs_to_later_loop:
            self._set_order(order_of_checkpoint(job, info["order"]))
            self._position.restore(info, loaded.state["ledger"], keep_slices=job.settings.slices > 0)
            self._compare_samples(info, joins=joins)
            self._find_data()
            self.has_stopped = info.get("stopped", False)
            if info.get("ended", False):
                self._position.end()
            if "changes" in info:
                self._live_config.go_on_from(info["changes"])
            job.loops.slices = self._position.plan.slices
            job.loops.first_step = info["first_step_of_loop"]
            job.loops.totals = SampleCounts(**info["totals"])
        self._trainable.load_state_dict(loaded.state["replica"], keeps=keeps and job.loops.loaded is None)
        if not self.belongs_to_later_loop:
            set_generator_states(loaded.state["generators"])
        job.committed.step, job.committed.metrics = loaded.step, dict(loaded.state["metrics"])
