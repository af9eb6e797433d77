"""Costs measured in a real run, from ``report.json`` and ``events.jsonl`` of ``holdfast run --report DIR``."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from holdfast.errors import ConfigError
from holdfast.records.files import load_events
from holdfast.records.types import CheckpointSaved, JobRestarted, OptimizerOverlapped, Record, RunStarted, StepCommitted

_APART = {"LoadCheckpoint": "load_s", "MoveParts": "rehome_s"}
"""Orders of a recovery that are costs of their own. The report lists rebuilding and state transfer separately."""
_MANY = {"recovery": "recoveries", "start of the job": "starts of the job"}
_NOT_MEETING = {*_APART, "Reinitialise", "SendState"}
_INSIDE = {"waited_s": "step_s", "discard_s": "regroup_s"}
"""Costs of the overlapped optimizer, and the costs that include them in a measurement."""


class Measured(NamedTuple):
    """One measured cost.

    Args:
        value: Seconds, or bytes.
        how: What it is the median of, as text.
    """

    value: float
    how: str


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The costs found in the files of one run.

    Args:
        directory: The directory of the files.
        workers: Number of workers that the run was started with.
        costs: By their names in :class:`holdfast_lab.simulate.Costs`; also ``step_s``, the whole step, and
            ``state_bytes``. With the overlapped optimizer, ``step_s`` and ``regroup_s`` include ``waited_s`` and
            ``discard_s``: waiting for updates, undoing them.
    """

    directory: Path
    workers: int
    costs: Mapping[str, Measured]

    def apart(self) -> dict[str, float]:
        """Return disjoint costs: steps and regrouping exclude the overlapped optimizer, which has its own costs."""
        return updates_apart({name: one.value for name, one in self.costs.items()})


def updates_apart(costs: Mapping[str, float]) -> dict[str, float]:
    """Subtract the overlapped optimizer's costs from those that include them, as in :attr:`MeasuredRun.costs`."""
    found = dict(costs)
    for part, whole in _INSIDE.items():
        inside = found.pop(part, 0.0)
        if whole in found:
            found[whole] = max(0.0, found[whole] - inside)
    return found


def read_measured(directory: Path) -> MeasuredRun:
    """Return the costs of the run in ``directory``, except for operations that never occurred.

    Raises:
        ConfigError: if there is no report, it is damaged, or no step was timed.
    """
    report, records = _load_report(directory / "report.json"), load_events(directory)
    try:
        costs = dict(_costs(report, records))
        workers = int(report["workers"]["started"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{directory / 'report.json'} is not the report of a run: {error!r}") from error
    if "step_s" not in costs or workers < 1:
        raise ConfigError(
            f"{directory / 'report.json'} has no duration of a step: too few steps were committed to measure one"
        )
    return MeasuredRun(directory, workers, costs)


def _costs(report: Mapping[str, Any], records: Sequence[Record]) -> Iterable[tuple[str, Measured]]:
    if step_s := report["step_s"]["p50"]:
        yield "step_s", Measured(float(step_s), f"median of {report['steps']} steps")
    groups = _recoveries(report["failures"])
    begun = sorted(record.t_s for record in records if isinstance(record, StepCommitted))
    late = [
        [_late_s(failure, begun, float(step_s or 0)) for failure in group if failure["detect_s"] is not None]
        for group in groups
    ]
    yield from _median("detect_s", "recovery", [max(group) for group in late if group])
    times = [group[0]["times_s"] for group in groups if group[0].get("times_s")]
    meetings = [sum(value for name, value in one.items() if name not in _NOT_MEETING) for one in times]
    yield from _median("regroup_s", "recovery", meetings)
    for order, name in _APART.items():
        yield from _median(name, "recovery", [one[order] for one in times if order in one])
    if eager := [record for record in records if isinstance(record, OptimizerOverlapped) and record.steps]:
        yield from _updates(eager)
        yield from _median("discard_s", "recovery", [one["DiscardStep"] for one in times if "DiscardStep" in one])
    built = [one["snapshot_s"] + one["rebuild_s"] + one["load_s"] for one in report.get("reinitialised", ())]
    yield from _median("rebuild_s", "rebuilding", built)
    yield from _median("rejoin_s", "newcomer", _known(report.get("joined", ()), "held_s"))
    saves = [record for record in records if isinstance(record, CheckpointSaved)]
    yield from _median("save_s", "checkpoint", [record.seconds for record in saves])
    yield from _median("state_bytes", "checkpoint", [record.size_bytes for record in saves])
    yield from _median("restart_s", "start of the job", _starts(records))


def _updates(workers: Sequence[OptimizerOverlapped]) -> Iterable[tuple[str, Measured]]:
    """Yield the durations of the overlapped optimizer over all buckets of a step.

    Undone steps count by their number of buckets.
    """
    buckets = [(one.buckets - one.undone) / one.steps for one in workers]
    pairs = list(zip(workers, buckets, strict=True))
    yield from _median("update_s", "worker", [one.update_s / one.buckets * number for one, number in pairs])
    yield from _median("copy_s", "worker", [one.copy_s / one.buckets * number for one, number in pairs])
    yield from _median("waited_s", "worker", [one.waited_s / one.steps for one in workers])
    yield from _median("undo_s", "worker", [one.undo_s / one.undone * number for one, number in pairs if one.undone])


def _recoveries(failures: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group the failures that survivors recovered from; failures of one recovery are in one list."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for failure in failures:
        if failure.get("recovery") is not None and failure.get("decision") != "restart":
            groups.setdefault(failure["recovery"], []).append(failure)
    return list(groups.values())


def _late_s(failure: Mapping[str, Any], begun: Sequence[float], step_s: float) -> float:
    """Return the detection time of a failure, counted from when survivors had nothing left to compute.

    Their computing until then is not a cost of detection; the simulators count it as work.

    Args:
        failure: A failure of the report.
        begun: Begin of each step, in order.
        step_s: Duration of a step.
    """
    dead_s, seen_s = float(failure["t_s"]), float(failure["t_s"]) + float(failure["detect_s"])
    before = bisect_right(begun, dead_s)
    idle_s = max(dead_s, begun[before - 1] + step_s) if before else dead_s
    return max(0.0, seen_s - idle_s)


def _starts(records: Sequence[Record]) -> list[float]:
    """Return the seconds from each start of the job by the launcher until its workers trained.

    The first start has a cold page cache, so it counts only if there was no other.
    """
    begun = sorted(record.t_s for record in records if isinstance(record, JobRestarted)) or [0.0]
    trained = sorted(record.t_s for record in records if isinstance(record, RunStarted))
    return [after[0] - at for at in begun if (after := [t_s for t_s in trained if t_s > at])]


def _known(entries: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [float(entry[key]) for entry in entries if entry.get(key) is not None]


def _median(name: str, what: str, values: Sequence[float]) -> Iterable[tuple[str, Measured]]:
    if values:
        how = f"one {what}" if len(values) == 1 else f"median of {len(values)} {_MANY.get(what, what + 's')}"
        yield name, Measured(float(median(values)), how)


def _load_report(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no {path}; run `holdfast run --report {path.parent} ...` to write it")
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: its brackets are nested too deep") from error
    if not isinstance(report, dict):
        raise ConfigError(f"{path} is not the report of a run: it must be an object")
    return report
