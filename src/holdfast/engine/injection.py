"""Planned faults in a session: whether each one can strike, and the points of the training loop where it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.comm import Communicator, VirtualCommunicator
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.faults.names import chosen
from holdfast.faults.plan import FLIP, SCRIPT_PHASES, SPLIT_PHASES, Fault, FaultPlan
from holdfast.faults.process import Injector, ask_launcher, strike
from holdfast.models.trainable import Trainable
from holdfast.records.beacon import PHASES
from holdfast.records.logger import Logger
from holdfast.records.paths import strike_path
from holdfast.records.types import FaultFired, ValuesAltered
from holdfast.state.context import CommittedState, JobContext
from holdfast.state.run_log import RunLog


class FaultPoints:
    """The interface through which planned faults enter the training loop, which reports its phases here.

    Args:
        job: The job context with the fault plan; without planned faults nothing happens.
        log: Marks the phases that a beacon can show.
    """

    def __init__(self, job: JobContext, log: RunLog) -> None:
        self._job = job
        self._log = log

    def enter(self, phase: str, bucket: int | None = None) -> None:
        """Mark the start of a phase of the step in progress, and trigger a fault that is due there.

        Args:
            phase: The phase.
            bucket: In an all-reduce: the bucket reduced before it. In ``handover`` (forward pass): the slice.
        """
        if phase in PHASES:
            self._log.mark(phase)
        self.reach(phase, bucket=bucket)

    def reach(self, phase: str, step: int | None = None, bucket: int | None = None) -> None:
        """Trigger a fault that is due in a phase of ``step`` (default: the next one), at every rank of this process."""
        for rank in self._job.comm.local_ranks:
            self._job.faults.reach(phase, self._job.step if step is None else step, rank, bucket)

    def reach_in_sum(self, step: int, position: int) -> None:
        """Trigger a fault that is due in the all-reduce at a position of the step."""
        self.reach("allreduce", step, position - 1 if position else None)

    def alter_state(self, trainable: Trainable, step: int) -> None:
        """Flip bits in this worker's own state before the step; other workers are not affected."""
        local_ranks, faults = self._job.comm.local_ranks, self._job.faults
        for rank in local_ranks:
            for target in ("weights", "optimizer"):
                for due in faults.flips(target, step, rank):
                    faults.carry_out(due, trainable.tensors_of(target, rank, local_ranks))


def make_faults(settings: Settings, comm: Communicator, committed: CommittedState, log: Logger) -> Injector:
    """Return the injector of the settings' fault plan, which records every fault; without a plan it does nothing.

    Raises:
        ConfigError: if a fault cannot strike on this fabric.
    """
    if not settings.faults:
        return Injector()
    plan = FaultPlan.from_json(settings.faults)

    def announce(number: int, fault: Fault) -> None:
        if fault.is_of_node:
            ask_launcher(strike_path(Path(settings.run_dir), number), committed.step)
            return
        log.write(FaultFired(rank=fault.rank, fault=number, kind=fault.kind, phase=fault.phase))

    def report(number: int, fault: Fault, listed: Sequence[Mapping[str, Any]], count: int) -> None:
        assert fault.flip is not None
        log.write(
            ValuesAltered(rank=fault.rank, fault=number, target=fault.flip.target, count=count, values=tuple(listed))
        )

    def fail(fault: Fault) -> None:
        assert isinstance(comm, VirtualCommunicator)
        comm.fail(fault.rank, entered=fault.phase == "allreduce")

    if not isinstance(comm, VirtualCommunicator):
        return Injector(plan, strike, announce, report)
    if other := [fault for fault in plan.faults if fault.kind not in ("kill", FLIP)]:
        raise ConfigError(
            f"--inject {other[0].to_spec()}: with --fabric virtual all workers share one process, so a fault must be kill or flip; use another fabric for the rest"
        )
    return Injector(plan, fail, announce, report)


def check_faults(
    planned: str, trainable: Trainable, end: int, *, is_whole: bool, in_framework: bool = False
) -> list[str]:
    """Check that planned faults lie inside the run, and resolve the tensors that they alter.

    Return a line for each fault after the end of the loop, which strikes only if the script trains on.

    Args:
        planned: The plan as JSON.
        trainable: The model that is trained.
        end: Step before which the loop ends.
        is_whole: The run ends there, too.
        in_framework: A framework trains, which reaches the phases of its own.

    Raises:
        ConfigError: if a fault lies outside the run or cannot strike this model.
    """
    later = []
    for fault in FaultPlan.from_json(planned).faults:
        try:
            if fault.step >= end and not is_whole:
                later.append(
                    f"--inject {fault.to_spec()} strikes only if the script trains on after this loop, which ends before step {end}"
                )
            elif fault.step >= end:
                raise ConfigError(f"step must be between 0 and {end - 1} (the run has {end} steps), got {fault.step}")
            if fault.phase in SCRIPT_PHASES and not in_framework:
                raise ConfigError(
                    f"the phases {', '.join(SCRIPT_PHASES)} exist only for the Trainer of holdfast.integrations.transformers"
                )
            _check_phase(fault, trainable)
        except ConfigError as error:
            raise ConfigError(f"--inject {fault.to_spec()}: {error}") from error
    return later


def _check_phase(fault: Fault, trainable: Trainable) -> None:
    if fault.flip is None:
        if fault.phase in SPLIT_PHASES and trainable.is_replicated:
            raise ConfigError(
                f"the phases {', '.join(SPLIT_PHASES)} exist only for a Pipeline or Sharded model, and this model is replicated"
            )
        if fault.slice is not None and not trainable.has_stages:
            raise ConfigError(
                "slice selects a hand-over between two stages of a Pipeline, and this model is not a Pipeline: leave slice out"
            )
        if fault.phase == "mirror" and not trainable.sends_copies:
            raise ConfigError(
                "phase=mirror needs --strategy partial and --mirror-every above 1; otherwise a standby works in phase=allreduce"
            )
        return
    if fault.flip.target == "handover" and not trainable.has_stages:
        raise ConfigError(
            "target handover is the activation that a stage of a Pipeline sends to the next, and this model has no stages"
        )
    named = trainable.named(fault.flip.target)
    if named is not None:
        chosen(named, fault.flip.at)


def reach_point(job: JobContext, name: str) -> None:
    """Trigger a fault that is due at a crash point; see :mod:`holdfast.faults.points`."""
    # Only the lead completes a checkpoint, but any worker may complete a standby copy of a part, at any time.
    if name == "checkpoint.manifest" and job.is_lead and job.checkpoints.is_completing:
        job.faults.reach("checkpoint", job.checkpoints.step or 0, job.comm.members[0])
