"""Records of a ``torch.distributed`` job: its steps, failures and end. Also carries out planned faults.

A step is one backward pass in which ``DistributedDataParallel`` all-reduces gradients.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.constants import default_pg_timeout

from holdfast.base.clock import SystemClock
from holdfast.base.side_work import say
from holdfast.comm.launchers import chosen
from holdfast.config import RESPAWNS, Settings
from holdfast.errors import ConfigError
from holdfast.faults.plan import FLIP, Fault, FaultPlan
from holdfast.faults.process import Injector, strike
from holdfast.records.beacon import Beacon, NoBeacon, connected_beacon
from holdfast.records.files import FileRecorder
from holdfast.records.logger import Logger
from holdfast.records.paths import records_path
from holdfast.records.texts import RANK_0_LOST
from holdfast.records.types import (
    CollectiveAwaited,
    DeviceLost,
    FailureSeen,
    FaultFired,
    Finished,
    LeadLost,
    Recovered,
    RunStarted,
    ScriptEnded,
    SeatsFilled,
    SeatTaken,
    StepCommitted,
    WriterDeclared,
)

if TYPE_CHECKING:
    from holdfast.comm.seated import SeatedCommunicator

_USUAL_TIMEOUT_S = default_pg_timeout.total_seconds()
_PHASES = ("forward", "backward", "allreduce")
"""Phases of planned faults. All are reached at DDP's first gradient bucket, where the backend first sees a step."""


class GroupRecorder:
    """Writes the records of worker ``rank``, for a job whose seats the workers ``holders`` have at the start.

    ``ConfigError`` if the settings hold a fault that cannot be injected here.
    """

    def __init__(self, settings: Settings, rank: int, holders: Sequence[int]) -> None:
        self.settings = settings
        self._numbers = list(holders)  # the last worker of each seat
        self._rank = rank
        self._is_seated = rank in holders
        self._seen = FailureSeen(phase="allreduce")
        self._is_seen_written = False
        self._clock = SystemClock(settings.origin_s)
        self._log = Logger(self._clock, lambda: (self._rank, self._step))
        self._beacon: Beacon | NoBeacon = NoBeacon()
        if settings.run_dir:
            self._log.subscribe(FileRecorder(records_path(Path(settings.run_dir), str(self._rank))))
            self._beacon = connected_beacon(Path(settings.run_dir), self._rank)
        self._alive = tuple(range(len(holders)))
        self._task = -1
        self._step = -1
        self._bucket = 0
        self._announced = False
        self._answers: set[bool] = set()
        self._lead_lost = False
        self._filled: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        self._scaled_for: set[tuple[int, ...]] = set()
        self.faults: Injector = self._plan_faults() if settings.faults else Injector()

    @property
    def is_watched(self) -> bool:
        """Whether a launcher watches how this process ends."""
        return bool(self.settings.run_dir)

    def publish_waits(self, waits: bool, timeout_s: float) -> None:
        """Publish whether this rank is in a collective, or in the wait for a message; unless a session says what it does."""
        if not has_session():
            self._beacon.mark_collective(waits=waits, is_patient=timeout_s > _USUAL_TIMEOUT_S)

    def asked_lead(self, answer: bool) -> None:
        """Note that the script has asked whether this rank is the lead."""
        if answer not in self._answers:
            self._answers.add(answer)
            self._log.write(WriterDeclared(how="is_lead", is_lead=answer))

    def note_wait(self, wait: CollectiveAwaited, seats: Sequence[int]) -> None:
        """Record a wait for the ranks ``seats``, or its end."""
        if not has_session():
            self._log.write(dataclasses.replace(wait, members=tuple(self._numbers[seat] for seat in seats)))

    # -- steps

    def begin_sum(self, task: int) -> tuple[int, int]:
        """Note that DDP all-reduces a bucket in the backward pass ``task``; return the step and the bucket."""
        if task != self._task:
            if self._step >= 0:
                self._beacon.mark("optimizer", self._step)
            self._commit()
            self._announce()
            self._task, self._step, self._bucket = task, self._step + 1, 0
            self._beacon.mark("backward", self._step)
            self.faults.reach("forward", self._step, self._rank)
            self.faults.reach("backward", self._step, self._rank)
        else:
            self._bucket += 1
        return self._step, self._bucket

    def reach_in_sum(self, step: int, bucket: int) -> None:
        """Note that this rank has contributed its part of a bucket."""
        self.faults.reach("allreduce", step, self._rank, bucket - 1 if bucket else None)

    def _commit(self) -> None:
        """Record the previous step: its optimizer has run, because the next one has begun."""
        if self._step >= 0 and self._is_lead() and not has_session():
            self._log.write(StepCommitted(epoch=0, samples=0, workers=len(self._alive), metrics={}))

    # -- failures

    def failure_seen(self, *, is_known: bool) -> None:
        """Record that a collective has failed.

        Args:
            is_known: A failed rank is known. Otherwise it may be a newcomer that has woken the others, and
                :meth:`recovered` records the failure if it was one.
        """
        self._seen = self._log.stamped(FailureSeen(step=max(0, self._step), phase="allreduce"))
        self._is_seen_written = is_known and self._is_seated
        if self._is_seen_written:
            self._log.write(self._seen)

    def recovered(
        self,
        lost: tuple[int, ...],
        world: SeatedCommunicator,
        joined: tuple[int, ...] = (),
        seated: tuple[int, ...] = (),
        *,
        is_news: bool = False,
    ) -> None:
        """Record a recovery.

        Args:
            lost: Workers that have failed.
            world: The survivors, by seat.
            joined: Workers that are members from now on.
            seated: Workers that have taken an empty seat.
            is_news: It was about newcomers, or about the end of the job, if no worker was lost.
        """
        self._alive = world.members
        self._write_filled()
        for seat, worker in world.holders.items():
            self._numbers[seat] = worker
        if lost or joined or not is_news:
            self._note_recovered(lost, joined, tuple(sorted(world.base.members)), world.generation)
        was_seated, self._is_seated = self._is_seated, bool(world.local_ranks)
        for seat, worker in world.holders.items():
            if worker in seated and was_seated:
                self._log.write(SeatTaken(step=self._step + 1, seat=seat, worker=worker))
        if self._is_lead() and lost and not self.is_watched:  # otherwise the launcher does
            gone = ", ".join(map(str, lost))
            say(f"lost ranks [{gone}]; continuing with {len(self._alive)} ranks")
        self._check_rank_0(world)

    def _check_rank_0(self, world: SeatedCommunicator) -> None:
        """Say once that rank 0 is lost, if the script may have left duties to it."""
        can_be_taken = self.settings.spares or RESPAWNS in os.environ
        if (
            0 in world.holders
            or not self._is_lead()
            or self._lead_lost
            or self._answers
            or can_be_taken
            or has_session()
        ):
            return
        self._lead_lost = True
        self._log.write(LeadLost())
        if not self.is_watched:  # otherwise the launcher does
            say(RANK_0_LOST)

    def _note_recovered(
        self, lost: tuple[int, ...], joined: tuple[int, ...], alive: tuple[int, ...], generation: int
    ) -> None:
        if self._is_seated:  # one without a seat knows no step
            grows = bool(joined) and not lost
            if not grows and not self._is_seen_written:
                self._log.write(self._seen)
            how: dict[str, Any] = {"decision": "grow" if grows else "continue", "redone_steps": 0, "joined": joined}
            how["held_s"] = self._clock.now_s() - self._seen.t_s if joined else 0.0
            self._log.write(
                Recovered(step=max(0, self._step), lost=lost, survivors=alive, generation=generation, **how)
            )

    def begin_at(self, step: int) -> None:
        """Begin at ``step``, as the worker that takes the seat of another."""
        self._step = step

    @property
    def step(self) -> int:
        """The step of the last backward pass, -1 before the first."""
        return self._step

    def _is_lead(self) -> bool:
        """Return whether this worker holds the lowest seat that is taken."""
        return bool(self._alive) and self._numbers[self._alive[0]] == self._rank

    def filled(self, collective: str, sources: Mapping[int, int]) -> None:
        """Record that survivors' values stood in for failed ranks, by the failed rank; -1 if it was a scaled sum."""
        seats = tuple(self._numbers[place] for place in sources)
        by = tuple(place if place < 0 else self._numbers[place] for place in sources.values())
        key = (collective, seats, by)
        self._filled[key] = self._filled.get(key, 0) + 1
        if self._filled[key] == 1:
            self._log.write(SeatsFilled(collective=collective, seats=seats, sources=by, count=1))

    def scaled(self, collective: str, place: str, dead: tuple[int, ...], size: int) -> None:
        """Record that the sum of a collective was scaled for failed ranks, of ``size`` at the start; say it once for them."""
        self.filled(collective, dict.fromkeys(dead, -1))
        if dead in self._scaled_for:
            return
        self._scaled_for.add(dead)
        alive = size - len(dead)
        say(
            f"{collective} ({place}) is over {alive} of {size} ranks: the script's sums are multiplied by"
            f" {size}/{alive} from now on, so that sum / world_size stays a mean; --empty-seats survivors leaves them as they"
            " are, --empty-seats raise raises RanksLost"
        )

    def _write_filled(self) -> None:
        """Record the numbers of filled collectives so far."""
        for (collective, seats, by), count in self._filled.items():
            if count > 1:
                self._log.write(SeatsFilled(collective=collective, seats=seats, sources=by, count=count))

    def device_lost(self, error: BaseException) -> None:
        """Record that this process can no longer use its device."""
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._log.write(DeviceLost(what="lost", message=message, gpu=os.environ.get("CUDA_VISIBLE_DEVICES", "")))

    # -- start and end

    def _announce(self) -> None:
        if self._announced or has_session():
            return
        self._announced = True
        count = len(self._alive)
        how = {"order": "fold", "split": "slices", "batch": "local", "rescale": "survivors"}
        unknown = dict.fromkeys(("seed", "steps_planned", "samples_planned", "num_buckets", "parameters"), 0)
        details: dict[str, Any] = how | unknown
        fabric = chosen(self.settings.fabric)
        self._log.write(RunStarted(step=0, fabric=fabric, strategy="forward", workers=count, slices=count, **details))

    def script_ended(self, completed: Mapping[int, int]) -> None:
        """Record that the script calls no further collective; ``completed`` is their number in each group, by its key."""
        if not has_session():
            ended = ScriptEnded(steps=self._step + 1, groups=tuple(completed), completed=tuple(completed.values()))
            self._log.write(ended)
        self._lead_lost |= self.is_watched  # the launcher knows whether rank 0's script had ended, too

    def finished(self) -> None:
        """Record the end of the job: no other rank needs this one any more."""
        self._write_filled()
        if has_session():
            return
        self._announce()
        self._commit()
        unknown = dict.fromkeys(("planned", "committed", "lost", "repeated"), 0)
        unsaid = dict.fromkeys(("sha256", "state_sha256", "checkpoint"), "")
        details: dict[str, Any] = unknown | unsaid
        self._log.write(Finished(step=self._step + 1, outcome="done", metrics={}, **details))

    # -- faults

    def _plan_faults(self) -> Injector:
        plan = FaultPlan.from_json(self.settings.faults)
        for fault in plan.faults:
            if fault.kind == FLIP:
                raise ConfigError(
                    f"--inject {fault.to_spec()}: a flip needs a holdfast.Session, because the torch.distributed"
                    " backend does not know the model whose values are to be altered"
                )
            if fault.phase not in _PHASES:
                raise ConfigError(
                    f"--inject {fault.to_spec()}: under torch.distributed the phase must be one of {', '.join(_PHASES)}"
                )

        def announce(number: int, fault: Fault) -> None:
            self._log.write(FaultFired(rank=fault.rank, fault=number, kind=fault.kind, phase=fault.phase))

        return Injector(plan, strike, announce)


def has_session() -> bool:
    """Return whether a session writes the records of this process."""
    reinit_context = sys.modules.get("holdfast.engine.reinit_context")
    return reinit_context is not None and reinit_context.application.makes_sessions
