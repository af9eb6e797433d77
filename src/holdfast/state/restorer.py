"""The initial state of a loop, the same at every worker: from a checkpoint, or from the lowest worker.

Loading is repeated when a failure interrupts it, and under ``restart`` after every failure. Some workers may then have
finished it and others not, so the reductions here never depend on how far this worker got.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from holdfast.checkpoint import LoadedCheckpoint
from holdfast.checkpoint.writer import WriteResult
from holdfast.data.ledger import SampleCounts
from holdfast.data.position import DataPosition
from holdfast.data.seeds import generator_states, set_generator_states
from holdfast.engine.context import JobContext
from holdfast.engine.live_config import LiveConfig
from holdfast.engine.run_log import RunLog
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError
from holdfast.integrity.hash_chain import GENESIS
from holdfast.integrity.sdc_guard import HealSnapshot, SdcGuard
from holdfast.integrity.snapshots import copied
from holdfast.models.trainable import Trainable
from holdfast.models.training_state import clone
from holdfast.recovery.registry import strategy_class
from holdfast.state.platform_check import compare_kinds, compare_with_checkpoint
from holdfast.state.transfer import give_state, take_state


class StateRestorer:
    """Saves the training state, and brings all workers to the same state."""

    def __init__(
        self,
        world: JobContext,
        replica: Trainable,
        place: DataPosition,
        log: RunLog,
        requests: LiveConfig,
        watch: SdcGuard,
    ) -> None:
        self._world = world
        self._replica = replica
        self._place = place
        self._log = log
        self._requests = requests
        self._watch = watch
        self._initial: LoadedCheckpoint | None = None
        self._begun_from: int | None = None
        self._given: tuple[Any, dict[str, Any]] | None = None
        self.belongs_to_later_loop = False

    def load(self, *, trained: bool) -> bool:
        """Load the newest intact checkpoint that this loop can resume from; without one, make the replicas equal.

        If a worker's state is corrupt, roll back to the newest state known to be right, and return True. This worker is ``trained``
        once it has passed the start of this loop.

        Raises:
            ReplicasDiffer: if there is no state to roll back to.
            ConfigError: if the workers' platforms differ and that is not allowed.
        """
        compare_kinds(self._world)
        way = self._watch.share()
        if way is None:
            self._load(trained=trained)
            if not self.belongs_to_later_loop:
                self._watch.begin(self._keep)
            return False
        self._watch.went_back(way, self._keep, self._go_back(way, trained=trained))
        return True

    def _go_back(self, way: HealSnapshot, *, trained: bool) -> str:
        """Roll back to the newest state known to be right, and return the name of its source."""
        world = self._world
        world.rebuilds.snapshot = None
        world.keeper.drop()
        mine = (-1, 0)
        if world.is_lead:
            self._take_back(way.newest)  # before any worker can continue, since the lead may fail later
            mine = (self._find(trained=trained) if way.kept is None else -1, secrets.randbits(62))
        step, token = world.comm.maximum(mine)
        world.keeper.start_over(token, 0)
        if way.kept is not None:
            self._restore(way.kept)
            return "snapshot"
        if step >= 0:
            self._restore(world.keeper.load(step), keeps=True)
            return "checkpoint"
        if self._initial is None:
            raise self._watch.nothing_to_go_back_to()
        self._restore(self._initial)
        return "beginning"

    def _take_back(self, newest: int) -> None:
        try:
            self._world.keeper.take_back(newest)
        except CheckpointError as error:
            self._log.warn(f"checkpoints of steps after {newest} are corrupt and cannot be removed: {error}")

    def keep_on_joining(self) -> None:
        """Take a snapshot of the state that newcomers start from, as all workers do then."""
        self._watch.newcomers_came(self._keep)

    def keep_after_step(self) -> None:
        """Take a snapshot of the state, if one is due."""
        self._watch.applied(self._keep)

    def _keep(self, room: LoadedCheckpoint | None) -> LoadedCheckpoint:
        state = self._state(self._replica.shared_state())
        return self._loaded(self._world.step, copied(state, None if room is None else room.state), copied(self._info()))

    def _load(self, *, trained: bool) -> None:
        world = self._world
        strategy = strategy_class(world.live.strategy)
        if strategy.rebuilds and self._load_snapshot():
            return
        world.keeper.drop()
        # Only the lead searches, since two workers could find different steps. The token marks everything saved from here on.
        mine = (-1, 0, 0)
        if world.is_lead:
            mine = (self._find(trained=trained), secrets.randbits(62), world.keeper.choose_fallback())
        step, token, fallback = world.comm.maximum(mine)
        world.keeper.start_over(token, fallback)
        if step >= 0:
            self._begun_from = step
            loaded = world.keeper.load(step, self._replica.wanted(world.comm.members))
            compare_with_checkpoint(world, loaded.info.get("kind", {}))
            self._restore(loaded, keeps=True)
            return
        if self._initial is not None:
            self._restore(self._initial)
        self._replica.make_equal(world.comm)
        if strategy.needs_checkpoint or not self._replica.is_replicated:  # any strategy may lose a part of it
            self._initial = self._loaded(world.step, clone(self._state(self._replica.shared_state())), self._info())

    def take_snapshot(self, heard: int) -> None:
        """Keep the state before the step in progress for the next ``reinit``, if this worker is to keep it.

        ``heard`` are flags from commit votes that have not been acted on yet; they are restored from its ``info``.
        """
        world, source = self._world, self._world.settings.reinit_from
        if source == "checkpoint" or (source == "root" and not world.is_lead):
            return
        if self.belongs_to_later_loop:  # nothing has been computed since it was loaded
            world.rebuilds.snapshot = world.loops.loaded
            return
        state = clone(self._state(self._replica.shared_state()))
        world.rebuilds.snapshot = self._loaded(world.step, state, self._info() | {"heard": heard})

    def _load_snapshot(self) -> bool:
        """Restore the snapshot that was taken at the failure, sent by a worker that has it; return whether there is one.

        A receiver keeps its copy, and can send it in turn if the sender fails.
        """
        world, comm = self._world, self._world.comm
        if world.rebuilds.snapshot is not None and world.rebuilds.snapshot.info["loop"] < world.loop:
            world.rebuilds.snapshot = None  # of a finished loop
        mine = world.rebuilds.snapshot
        newest = -1 if mine is None else mine.step
        step, *lacks = comm.maximum((newest, *(mine is None and rank in comm.local_ranks for rank in comm.members)))
        if step < 0:
            if world.rebuilds.current is not None and world.settings.reinit_from != "checkpoint" and world.is_lead:
                self._log.warn("the workers with the snapshot of the failure have failed, too: rolling back further")
            return False
        without = tuple(rank for rank, lack in zip(comm.members, lacks, strict=True) if lack)
        if mine is None:
            mine = self._loaded(step, *take_state(comm, without))
        elif without:
            give_state(comm, without, mine.state, mine.info)
        world.rebuilds.snapshot = mine
        self._restore(mine)
        return True

    def _loaded(self, step: int, state: dict[str, Any], info: dict[str, Any]) -> LoadedCheckpoint:
        return LoadedCheckpoint(step=step, state=state, info=info, generation=self._world.comm.generation)

    def save(self) -> None:
        """Begin a checkpoint of the state before the step in progress; it does not count yet."""
        world = self._world
        if self.belongs_to_later_loop:
            return  # the loaded checkpoint contains more than this loop knows
        comm, replica = world.comm, self._replica
        self._log.mark("checkpoint")
        writers = replica.writers(comm)
        mine = replica.state_dict() if comm.local_ranks in writers else {}
        state = {"replica": mine} if not (replica.is_replicated or world.is_lead) else self._state(mine)
        world.keeper.begin(
            world.step,
            state,
            self._info(),
            writers,
            comm.local_ranks,
            comm.generation,
            distinct=not replica.is_replicated,
        )

    def save_alone(self) -> list[WriteResult]:
        """Save the state before the step in progress, unless this step or a later one is saved already; return the outcomes."""
        comm, keeper = self._world.comm, self._world.keeper
        if self.belongs_to_later_loop or keeper.has(self._world.step):
            return keeper.poll()
        attempt = (
            comm.generation + 1 + comm.local_ranks[0]
        )  # unique: another survivor may have failed during its attempt
        keeper.begin(
            self._world.step,
            self._state(self._replica.state_dict()),
            self._info(),
            (comm.local_ranks,),
            comm.local_ranks,
            attempt,
        )
        keeper.publish(self._world.step - 1, attempt, is_lead=True)
        return keeper.finish()

    def _state(self, replica: dict[str, Any]) -> dict[str, Any]:
        return {
            "replica": replica,
            "ledger": self._place.state_dict(),
            "metrics": self._world.committed.metrics,
            "generators": generator_states(),
        }

    def _info(self) -> dict[str, Any]:
        world = self._world
        return {
            **self._place.info(),
            "loop": world.loop,
            "first_step_of_loop": world.loops.first_step,
            "order": world.settings.order,
            "workers": len(world.comm.members),
            "totals": dataclasses.asdict(world.loops.totals),
            "changes": self._requests.state(),
            "kind": world.platform.kind,
            **({"link": world.committed.link} if world.committed.link else {}),
        }

    def welcome(self, newcomers: tuple[int, ...]) -> None:
        """Send the state to newcomers, or, as a newcomer, receive and keep it."""
        world = self._world
        if world.comm.local_ranks[0] in newcomers:
            self._given = take_state(world.comm, newcomers)
            return
        first = self._initial
        state = {"now": self._state(self._replica.shared_state()), "first": None if first is None else first.state}
        info = {"now": self._info(), "first": None if first is None else first.info}
        more = {
            "step": world.step,
            "first_step": 0 if first is None else first.step,
            "keeper": world.keeper.state(),
            "homes": self._replica.homes(),
        }
        give_state(world.comm, newcomers, state, info | more)

    def install(self) -> None:
        """Adopt the state that this worker received, if any."""
        if self._given is None:
            return
        state, info = self._given
        self._given = None
        if state["first"] is not None:
            self._initial = self._loaded(info["first_step"], state["first"], info["first"])
        self._restore(self._loaded(info["step"], state["now"], info["now"]), keeps=True)
        self._world.keeper.take_over(info["keeper"])
        self._replica.take_homes(info["homes"])

    def _find(self, *, trained: bool) -> int:
        """Return the newest step that this loop can resume from, -1 for none."""
        world = self._world
        if world.rebuilds.count:
            found = world.keeper.newest(self._warn, keep=self._replica.is_replicated)
            return found if found >= 0 and world.keeper.info(found)["loop"] >= world.loop else -1
        if not trained and self._begun_from is not None:  # a failure interrupted loading; some workers have it
            return self._begun_from
        if not trained and world.loops.loaded is not None:
            return world.loops.loaded.step
        if not trained and (world.loop > 0 or not world.settings.resume):
            world.keeper.check_empty(ours=world.loop > 0)
            return -1
        found = world.keeper.newest(self._warn, keep=self._replica.is_replicated)
        if found < 0 and not trained:
            self._log.warn(f"there is no intact checkpoint in {world.keeper.url}: training starts at step 0")
        of_another_loop = trained and found >= 0 and world.keeper.info(found)["loop"] != world.loop
        return -1 if of_another_loop else found

    def _warn(self, step: int, damage: CheckpointCorrupt) -> None:
        self._log.warn(f"skipped step {step}: {damage}")

    def _restore(self, loaded: LoadedCheckpoint, *, keeps: bool = False) -> None:
        """Load a state; ``keeps`` allows its tensors to be used without a copy, because nothing else refers to them."""
        world, info = self._world, loaded.info
        self.belongs_to_later_loop = info["loop"] > world.loop
        world.loops.loaded = loaded if self.belongs_to_later_loop else None
        if world.committed.link:  # the state may have been saved without a certificate
            world.committed.link = info.get("link", GENESIS)
        if not self.belongs_to_later_loop:
            if info["order"] != world.settings.order:
                raise ConfigError(
                    f"the checkpoint was made with order={info['order']}, but this run has order={world.settings.order}"
                )
            self._place.restore(info, loaded.state["ledger"], keep_slices=world.settings.slices > 0)
            if "changes" in info:
                self._requests.go_on_from(info["changes"])
            world.loops.slices = self._place.plan.slices
            world.loops.first_step = info["first_step_of_loop"]
            world.loops.totals = SampleCounts(**info["totals"])
        self._replica.load_state_dict(loaded.state["replica"], keeps=keeps and world.loops.loaded is None)
        if not self.belongs_to_later_loop:
            set_generator_states(loaded.state["generators"])
        world.committed.step, world.committed.metrics = loaded.step, dict(loaded.state["metrics"])
