"""Lines of text about the events of a run, as the terminal and the live view display them."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from typing import Any

from holdfast.base.formatting import clean, count, seconds
from holdfast.records.texts import RANK_0_LOST, named_ranks
from holdfast.records.types import (
    ActionRequested,
    CheckpointSaved,
    DeviceLost,
    FaultFired,
    Finished,
    JobRestarted,
    LeadLost,
    Left,
    Record,
    Recovered,
    RunStarted,
    SamplesLost,
    SeatTaken,
    SettingChanged,
    StepCommitted,
    StragglerSeen,
    ValuesAltered,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.recovery.decisions import decision_of


def cause_of_death(exit_code: int) -> str:
    """Return a phrase for how a process ended."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def decision_phrase(decision: str, step: int) -> str:
    """Return a phrase for what the survivors decided, or for a restart of the job."""
    if decision == "restart":
        return "the job is restarted"
    return decision_of(decision).sentence.format(step=step).removesuffix(",")


class EventFormatter:
    """Turns records into lines of text; an event that every survivor records is reported once."""

    def __init__(self) -> None:
        self._printed: set[tuple[object, ...]] = set()
        self._restarts = 0
        self._started: RunStarted | None = None
        self._injected: set[int] = set()
        self._left: set[int] = set()

    def format(self, record: Record) -> str | None:
        """Return the line for ``record``, None if it has none or the event was reported before."""
        if isinstance(record, JobRestarted):
            self._restarts, self._started = record.restart, None
        if isinstance(record, RunStarted):
            self._started = record
        if isinstance(record, FaultFired) and record.kind != "flip":
            self._injected.update((record.rank, *record.workers))
        if isinstance(record, Left):
            self._left.add(record.rank)
        key, line = self._line(record)
        if line is None or (self._restarts, *key) in self._printed:
            return None
        self._printed.add((self._restarts, *key))
        return line

    def _line(self, record: Record) -> tuple[tuple[object, ...], str | None]:
        match record:
            case RunStarted():
                return ("start",), None if record.is_distributed else _begin(record)
            case StepCommitted() if self._started is not None and self._started.is_distributed:
                # not earlier: a script without DistributedDataParallel "starts" when it ends
                ranks = count(record.workers, "rank")
                return ("start",), f"{ranks}: torch.distributed; all-reduces of DDP continue over the survivors"
            case ValuesAltered():
                return ("fault", record.fault), f"flip of rank {record.rank} at step {record.step}: {_altered(record)}"
            case FaultFired(kind="flip"):
                return ("flip",), None
            case FaultFired():
                victim = f"rank {record.rank}" if record.node < 0 else f"node {record.node}"
                return ("fault", record.fault), f"{record.kind} of {victim} at step {record.step}, {record.phase}"
            case DeviceLost():
                return ("device", record.rank), _device(record)
            case WorkerFenced():
                return ("fenced", record.rank), f"rank {record.rank} is killed: {record.reason}"
            case SettingChanged():
                return ("set", record.step, record.name), _changed(record)
            case ActionRequested():
                return ("action", record.t_s, record.action), action_line(record.action, json.loads(record.values))
            case StragglerSeen():
                key = ("slow", record.rank, record.step)
                return key, f"rank {record.rank} is slow: {slowness(record.score, record.policy)}"
            case Left():
                return ("left", record.rank), f"rank {record.rank} left before step {record.step}, as requested"
            case WorkerEnded() if record.exit_code < 0 and record.rank not in self._injected:
                where = f" at step {record.step}" if record.step >= 0 else ""
                how = "ended" if record.exit_code == -signal.SIGTERM else "died"  # by request, which is no failure
                return ("end", record.rank), f"rank {record.rank} {how}{where}: {cause_of_death(record.exit_code)}"
            case Recovered() if record.rank in record.joined:
                return (), None  # it did not pause the others, and does not know for how long they paused
            case LeadLost():
                return ("lead",), RANK_0_LOST
            case SeatTaken():
                return ("seat", record.worker), _seat_taken(record)
            case Recovered():
                return ("recovered", record.generation), self._recovery(record)
            case SamplesLost():
                what = f"step {record.step} continues without {len(record.ids)} samples"
                return ("lost", record.step, record.ids), what
            case CheckpointSaved():
                return ("saved", record.step), f"checkpoint before step {record.step}: {record.path}"
            case JobRestarted():
                on = named_ranks(record.workers)
                return ("restart",), f"start {record.restart + 1} of the job, on {on}: {record.reason}"
            case Finished(outcome="stopped"):
                return ("stopped",), f"stopped before step {record.step}"
        return (), None

    def _recovery(self, record: Recovered) -> str:
        parts = self._losses(record)
        if record.joined:
            parts.append(
                f"{named_ranks(record.joined)} joined at step {record.step}; the other workers paused for {seconds(record.held_s)}"
            )
        # Under torch.distributed, before the first step or without steps, no step can be named.
        has_no_step = record.decision == "continue" and self._started is None
        if has_no_step:  # whether a script continues depends on its next collective
            return "; ".join(
                [*parts, f"{named_ranks(record.survivors)} {'is' if len(record.survivors) == 1 else 'are'} left"]
            )
        if record.decision in ("redo", "grow") and not record.redone_steps:
            verb = "continues" if len(record.survivors) == 1 else "continue"
            return "; ".join([*parts, f"{named_ranks(record.survivors)} {verb}"])
        what = decision_of(record.decision).sentence.format(step=record.step)
        return "; ".join([*parts, f"{what} with {named_ranks(record.survivors)}"])

    def _losses(self, record: Recovered) -> list[str]:
        """Return the lost ranks; the record of a worker that left in order may arrive after those of the survivors."""
        lost = [rank for rank in record.lost if rank not in self._left]
        if not lost:
            return []
        if record.decision in ("redo", "grow") and not record.redone_steps and not self._injected.intersection(lost):
            return [f"{named_ranks(lost)} {'has' if len(lost) == 1 else 'have'} ended"]
        return [f"lost {named_ranks(lost)}"]


def _seat_taken(record: SeatTaken) -> str:
    return f"rank {record.worker} takes the place of rank {record.seat} from step {record.step} on"


def _altered(record: ValuesAltered) -> str:
    values = count(record.count, "value")
    if not record.values:
        return f"{values} of {record.target} altered"
    first = record.values[0]
    place = f"{first['path']}[{first['index']}]"
    return f"{values} of {record.target} altered, {place} from {_short(first['before'])} to {_short(first['after'])}"


def _short(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _changed(record: SettingChanged) -> str:
    if record.name == "workers":
        wanted = int(record.value)
        return f"the job should have {count(wanted, 'worker')} from step {record.step} on"
    if record.name == "save":
        return f"a checkpoint is saved after step {record.step}"
    if record.name == "speeds":
        return f"from step {record.step} on, slices are assigned by worker speed"
    return f"from step {record.step} on, {record.name} is {record.value}"


def _device(record: DeviceLost) -> str:
    gpu = f"its GPU ({record.gpu})" if record.gpu else "its device"
    what = f"lost {gpu}" if record.what == "lost" else f"took over slices, and {gpu} has too little memory"
    return f"rank {record.rank} {what}: {clean(record.message)}"


def _begin(record: RunStarted) -> str:
    at = f", from step {record.step}" if record.step > 0 else ""
    workers = f"{record.workers} {'worker' if record.workers == 1 else 'workers'}"
    steps = f"{record.steps_planned} steps" if record.steps_planned else "a stream"
    order = "" if record.order == "fold" else f", order {record.order}"
    return f"{workers}, {steps}{at}: {record.fabric}, {record.strategy}{order}"


def action_line(action: str, values: Mapping[str, Any]) -> str:
    """Return a description of an action that was requested through the dashboard."""
    match action:
        case "kill":
            what = f"kill rank {values.get('rank')}"
        case "scale":
            what = f"scale to {count(values.get('workers', 0), 'worker')}"
        case "set":
            what = "set " + ", ".join(f"{name}={value}" for name, value in values.items())
        case "save":
            what = "save a checkpoint"
        case _:
            what = f"{action} the job"
    return f"requested through the dashboard: {what}"


def slowness(score: float, policy: str) -> str:
    """Return how slow a worker is, and the response."""
    done = {"rebalance": "; it gets fewer slices", "replace": "; it is replaced"}.get(policy, "")
    return f"it takes {score:.1f} times as long as the other workers{done}"
