"""The metrics of a run, computed from its records while it runs, as the report computes them afterwards."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.observe.monitor.thinning import Thinning
from holdfast.records.run_model import RunModel
from holdfast.records.types import (
    CheckpointSaved,
    CorruptionFound,
    Left,
    Record,
    RunStarted,
    StragglerSeen,
)
from holdfast.summary.goodput import RECOVERY_PARTS, SETTLED_S, TimeAccount

BUCKETS_S = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of the buckets of all histograms, in seconds."""
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
    """The metrics of a run so far: those of a thin model, and of the account of its time.

    Args:
        started: Ranks of the initial job, without spares.
        epoch_s: Unix time of the records' zero.
    """

    def __init__(self, started: Sequence[int], epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._account = TimeAccount()
        self._model = RunModel(started, Thinning())
        self._redone = 0
        self._held_s = Observations()
        self._recovery_s = {part: Observations() for part in RECOVERY_PARTS}
        self._counted: dict[tuple[str, str], float] = {}
        self._end_s: float | None = None

    def take(self, record: Record) -> None:
        """Take a record; it counts when no older one can arrive any more."""
        self._account.add(record)

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
            "holdfast_workers_alive": len(self._model.alive),
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
        for record in self._account.settle(until_s):
            self._model.apply(record)
            if isinstance(record, CheckpointSaved):
                self._held_s.add(record.seconds)

    def _note_recoveries(self) -> None:
        for _, parts in self._account.new_recoveries():
            for part, seconds in parts.items():
                if seconds > 0:
                    self._recovery_s[part].add(seconds)

    def _of_steps(self) -> dict[str, Value]:
        progress = self._model.progress
        values: dict[str, Value] = {
            "holdfast_steps_total": progress.num_steps,
            "holdfast_samples_total": progress.num_samples,
            "holdfast_samples_lost_total": len(self._model.samples_lost),
        }
        if progress.start is not None:
            values["holdfast_steps_planned"] = progress.planned
        if progress.commit is not None:
            values["holdfast_step"] = progress.commit.step
            values["holdfast_last_step_timestamp_seconds"] = self._epoch_s + progress.commit.t_s
            values["holdfast_training_metric"] = dict(list(progress.metrics.items())[:_MOST_METRICS])
        return values

    def _of_checkpoints(self) -> dict[str, Value]:
        values: dict[str, Value] = {"holdfast_checkpoint_held_seconds": self._held_s}
        if (saved := self._model.saved) is not None:
            values["holdfast_checkpoint_size_bytes"] = saved.size_bytes
            values["holdfast_checkpoint_step"] = saved.step
            values["holdfast_last_checkpoint_timestamp_seconds"] = self._epoch_s + saved.t_s
        return values

    def _of_history(self, now_s: float) -> dict[str, Value]:
        """Return what the report says of the same model."""
        model = self._model
        outages = {each.recovery: each.recover_s for each in model.failures if each.recover_s is not None}
        if model.lives[-1].number == 0 or model.lives[-1].of(RunStarted):  # else it is not known where it resumes
            self._redone = model.redone_steps
        return {
            "holdfast_steps_redone_total": self._redone,
            "holdfast_failures_total": Counter(failure.kind for failure in model.failures),
            "holdfast_restarts_total": len(model.lives) - 1,
            "holdfast_joins_total": len(model.joined),
            "holdfast_leaves_total": len(model.of(Left)),
            "holdfast_stragglers_total": len(model.of(StragglerSeen)),
            "holdfast_corruptions_total": Counter(finding.what for finding in model.of(CorruptionFound)),
            "holdfast_outage_seconds": Observations(outages.values()),
            "holdfast_workers_wanted": model.workers_wanted(now_s),
        }
