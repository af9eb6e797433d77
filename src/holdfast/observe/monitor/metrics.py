"""The metrics of a run, computed from its records while it runs, as the report computes them afterwards."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.observe.time_order import SETTLED_S, TimeOrder
from holdfast.records.run_model import RunModel
from holdfast.records.types import (
    CheckpointSaved,
    CorruptionFound,
    FailureSeen,
    FaultFired,
    HistogramLogged,
    ImageLogged,
    JobRestarted,
    Left,
    Record,
    Recovered,
    RunStarted,
    SamplesLost,
    StateHashed,
    StepCommitted,
    StragglerSeen,
    WorkerEnded,
)
from holdfast.summary.goodput import RECOVERY_PARTS, TimeAccount

BUCKETS_S = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of the buckets of all histograms, in seconds."""
_MOST_SEEN = 8
"""Survivors whose detection of a failure is kept: the first ones say when it was detected first."""
_MOST_METRICS = 64
"""Values that the script logged, of which each becomes a time series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric: its name with the unit, its kind (``counter``, ``gauge`` or ``histogram``), its meaning and its label."""

    name: str
    kind: str
    help: str
    label: str = ""


METRICS = (
    Metric(name="holdfast_running", kind="gauge", help="1 while the job runs, 0 after its end"),
    Metric(name="holdfast_run_seconds", kind="gauge", help="time since the launcher started"),
    Metric(name="holdfast_step", kind="gauge", help="number of the last committed step; a rollback decreases it"),
    Metric(name="holdfast_steps_planned", kind="gauge", help="steps of the plan; 0 if unknown"),
    Metric(
        name="holdfast_steps_total", kind="counter", help="committed steps; a step that is committed again counts once"
    ),
    Metric(name="holdfast_steps_redone_total", kind="counter", help="steps computed again"),
    Metric(
        name="holdfast_samples_total", kind="counter", help="samples of the committed steps; 0 under torch.distributed"
    ),
    Metric(name="holdfast_samples_lost_total", kind="counter", help="samples that forward continued without"),
    Metric(name="holdfast_last_step_timestamp_seconds", kind="gauge", help="Unix time of the last commit"),
    Metric(name="holdfast_workers_alive", kind="gauge", help="workers that take part, spares included"),
    Metric(name="holdfast_workers_wanted", kind="gauge", help="workers that the job should have"),
    Metric(
        name="holdfast_failures_total", kind="counter", help="lost workers, by kind as in report.json", label="kind"
    ),
    Metric(name="holdfast_restarts_total", kind="counter", help="restarts of the whole job"),
    Metric(name="holdfast_joins_total", kind="counter", help="workers that joined the running job"),
    Metric(name="holdfast_leaves_total", kind="counter", help="workers that left in order, on SIGTERM"),
    Metric(name="holdfast_stragglers_total", kind="counter", help="how often a worker was reported as slow"),
    Metric(name="holdfast_corruptions_total", kind="counter", help="findings of --guard", label="what"),
    Metric(name="holdfast_goodput_ratio", kind="gauge", help="useful time as a share of the time since the start"),
    Metric(name="holdfast_useful_seconds", kind="gauge", help="useful time; a rollback decreases it"),
    Metric(
        name="holdfast_badput_seconds_total", kind="counter", help="time that was not useful, by cause", label="cause"
    ),
    Metric(
        name="holdfast_recovery_seconds",
        kind="histogram",
        help="time of each failure or change of the membership, by part: causes of badput",
        label="part",
    ),
    Metric(name="holdfast_outage_seconds", kind="histogram", help="from a failure to the next committed step"),
    Metric(name="holdfast_checkpoint_held_seconds", kind="histogram", help="how long a checkpoint held training"),
    Metric(name="holdfast_checkpoint_size_bytes", kind="gauge", help="size of the newest checkpoint"),
    Metric(name="holdfast_checkpoint_step", kind="gauge", help="step of the newest checkpoint"),
    Metric(name="holdfast_last_checkpoint_timestamp_seconds", kind="gauge", help="Unix time of the newest checkpoint"),
    Metric(name="holdfast_training_metric", kind="gauge", help="last value that the script logged", label="name"),
)
"""All metrics. A gauge of something that has not happened yet is absent."""


class Observations:
    """The observations of a histogram, counted by bucket: many take no more memory than few."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self.sum = 0.0
        """Sum of all observations."""
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        """Return the number of observations."""
        return sum(self._counts)

    def add(self, value: float) -> None:
        """Count an observation."""
        self._counts[bisect.bisect_left(BUCKETS_S, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, int]]:
        """Return how many observations each bucket and all smaller ones have."""
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True))


Value = float | Mapping[str, float] | Observations | Mapping[str, Observations]
"""Of a counter or a gauge a number, of a histogram its observations; by the value of the label if there is one."""


class RunMetrics:
    """Keeps what metrics need of the records: all about events, of steps only those beside an event.

    Args:
        started: Ranks of the initial job, without spares.
        epoch_s: Unix time of the records' zero.
    """

    def __init__(self, started: Sequence[int], epoch_s: float) -> None:
        self._started, self._epoch_s = started, epoch_s
        self._unsettled = TimeOrder()
        self._account = TimeAccount()
        self._events = _Events()
        self._history: RunModel | None = None
        self._alive: set[int] = set()
        self._run: RunStarted | None = None
        self._commit: StepCommitted | None = None
        self._saved: CheckpointSaved | None = None
        self._steps = self._samples = self._redone = 0
        self._samples_lost: set[tuple[int, int]] = set()
        self._held_s = Observations()
        self._recovery_s = {part: Observations() for part in RECOVERY_PARTS}
        self._counted: dict[tuple[str, str], float] = {}
        self._end_s: float | None = None

    def take(self, record: Record) -> None:
        """Take a record; it counts when no older one can arrive any more."""
        self._unsettled.add(record)

    def close(self, end_s: float) -> None:
        """Take the end of the run: all records have arrived."""
        self._settle(float("inf"))
        self._account.close(end_s)
        self._end_s = end_s

    def values(self, now_s: float) -> dict[str, Value]:
        """Return the values by name of the metric, ``now_s`` seconds after the run began."""
        until_s = self._end_s
        if until_s is None:
            until_s = max(0.0, now_s - SETTLED_S)
            self._settle(until_s)
        spent = self._account.now(until_s)
        self._note_recoveries()
        values: dict[str, Value] = {
            "holdfast_running": 0.0 if self._end_s is not None else 1.0,
            "holdfast_run_seconds": spent.wall_s,
            "holdfast_recovery_seconds": self._recovery_s,
            "holdfast_workers_alive": len(self._alive),
            **self._of_steps(),
            **self._of_checkpoints(),
        }
        if not self._account.is_unknown:
            values["holdfast_goodput_ratio"] = spent.ratio
            values["holdfast_useful_seconds"] = spent.useful_s
            values["holdfast_badput_seconds_total"] = spent.badput_s
        values |= self._of_history(until_s)
        return {
            metric.name: self._never_less(metric, values[metric.name]) for metric in METRICS if metric.name in values
        }

    def _never_less(self, metric: Metric, value: Value) -> Value:
        """Return the value of a counter, at least what it was: a smaller one would be taken for a new process."""
        if metric.kind != "counter":
            return value
        by_label = value if isinstance(value, Mapping) else {"": value}
        for label, number in by_label.items():
            key = metric.name, label
            self._counted[key] = max(float(number), self._counted.get(key, 0.0))  # type: ignore[arg-type]
        counts = {label: number for (name, label), number in self._counted.items() if name == metric.name}
        return counts if metric.label else counts[""]

    def _settle(self, until_s: float) -> None:
        for record in self._unsettled.until(until_s):
            self._account.take(record)
            self._apply(record)
            if self._events.add(record):
                self._history = None

    def _note_recoveries(self) -> None:
        for _, parts in self._account.new_recoveries():
            for part, seconds in parts.items():
                if seconds > 0:
                    self._recovery_s[part].add(seconds)

    def _apply(self, record: Record) -> None:
        match record:
            case RunStarted():
                self._run = record
                self._alive |= set(range(record.workers)) if record.fabric == "virtual" else {record.rank}
            case StepCommitted():
                if record.step > self._events.highest:
                    self._steps, self._samples = self._steps + 1, self._samples + record.samples
                if self._commit is None or record.t_s > self._commit.t_s:
                    self._commit = record
            case SamplesLost():
                self._samples_lost |= {(record.epoch, number) for number in record.ids}
            case CheckpointSaved():
                self._saved = record
                self._held_s.add(record.seconds)
            case Recovered():
                self._alive = set(record.survivors)
            case WorkerEnded():
                is_virtual = self._run is not None and self._run.fabric == "virtual"
                self._alive -= self._alive if is_virtual else {record.rank}
            case JobRestarted():
                self._alive = set()

    def _of_steps(self) -> dict[str, Value]:
        values: dict[str, Value] = {
            "holdfast_steps_total": self._steps,
            "holdfast_samples_total": self._samples,
            "holdfast_samples_lost_total": len(self._samples_lost),
        }
        if self._run is not None:
            values["holdfast_steps_planned"] = self._run.steps_planned
        if self._commit is not None:
            values["holdfast_step"] = self._commit.step
            values["holdfast_last_step_timestamp_seconds"] = self._epoch_s + self._commit.t_s
            values["holdfast_training_metric"] = dict(list(self._commit.metrics.items())[:_MOST_METRICS])
        return values

    def _of_checkpoints(self) -> dict[str, Value]:
        values: dict[str, Value] = {"holdfast_checkpoint_held_seconds": self._held_s}
        if self._saved is not None:
            values["holdfast_checkpoint_size_bytes"] = self._saved.size_bytes
            values["holdfast_checkpoint_step"] = self._saved.step
            values["holdfast_last_checkpoint_timestamp_seconds"] = self._epoch_s + self._saved.t_s
        return values

    def _of_history(self, now_s: float) -> dict[str, Value]:
        """Return what the report computes from all records, from those that were kept."""
        history = self._history = self._history or RunModel(self._events.kept, self._started)
        outages = {each.recovery: each.recover_s for each in history.failures if each.recover_s is not None}
        if history.lives[-1].number == 0 or history.lives[-1].of(RunStarted):  # else it is not known where it resumes
            self._redone = history.redone_steps
        return {
            "holdfast_steps_redone_total": self._redone,
            "holdfast_failures_total": Counter(failure.kind for failure in history.failures),
            "holdfast_restarts_total": len(history.lives) - 1,
            "holdfast_joins_total": len(history.joined),
            "holdfast_leaves_total": len(history.of(Left)),
            "holdfast_stragglers_total": len(history.of(StragglerSeen)),
            "holdfast_corruptions_total": Counter(finding.what for finding in history.of(CorruptionFound)),
            "holdfast_outage_seconds": Observations(outages.values()),
            "holdfast_workers_wanted": history.workers_wanted(now_s),
        }


_NO_HISTORY = (StateHashed, ImageLogged, HistogramLogged, CheckpointSaved)
"""Records of undisturbed training that a history does not need: a long run has many."""


class _Events:
    """The records that a history needs: of undisturbed steps in a row, and of what all survivors say, only a few."""

    def __init__(self) -> None:
        self.kept: list[Record] = []
        self.highest = -1
        """The highest step that was committed."""
        self._is_loose = False  # whether the last record is of a step that the next step replaces
        self._is_redoing = False
        self._seen: list[int] = []  # survivors whose detection of the last failure was kept
        self._generation = self._seen_after = -1  # of the last kept decision, and of the one before these detections
        self._awaited: set[int] = set()  # steps in progress at a failure, whose next commits end outages

    def add(self, record: Record) -> bool:
        """Add a record; return whether anything but the last undisturbed step changes."""
        if isinstance(record, _NO_HISTORY):
            return False
        if not isinstance(record, StepCommitted):
            return self._add_event(record)
        is_past = self._is_redoing and record.step > self.highest
        is_needed = is_past or record.step in self._awaited or not self._follows_step()
        self._is_redoing = record.step <= self.highest
        self.highest = max(self.highest, record.step)
        self._awaited.discard(record.step)
        if self._is_loose and not is_needed:
            self.kept[-1] = record
            return False
        self.kept.append(record)
        self._is_loose = not is_needed
        return True

    def _add_event(self, record: Record) -> bool:
        if isinstance(record, FailureSeen | FaultFired):
            self._awaited.add(record.step)
        if isinstance(record, FailureSeen):
            if self._seen_after != self._generation:  # the next failure
                self._seen, self._seen_after = [], self._generation
            if len(self._seen) >= _MOST_SEEN:
                return False
            self._seen.append(record.rank)
        elif isinstance(record, Recovered):
            is_new = (
                record.generation != self._generation or record.decision == "heal"
            )  # which needs no new communicator
            if not is_new and record.rank not in self._seen:
                return False
            self._generation = record.generation
        elif isinstance(record, JobRestarted):
            self._generation, self._seen_after, self._seen = -1, -1, []
        self.kept.append(record)
        self._is_loose = False
        return True

    def _follows_step(self) -> bool:
        return bool(self.kept) and isinstance(self.kept[-1], StepCommitted)
