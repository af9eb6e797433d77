"""The numbers of ``report.json``, from the records of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.records.lives import JobLife, LostWorker
from holdfast.records.run_model import RunModel, model_of
from holdfast.records.types import (
    ActionRequested,
    CorruptionFound,
    CorruptionHealed,
    Finished,
    Left,
    PartRestored,
    Record,
    Reinitialised,
    RunStarted,
    SamplesLost,
    ScriptFailed,
    StragglerSeen,
    ValuesAltered,
    WorkerRefused,
)
from holdfast.summary.goodput import goodput_of

SCHEMA = 1
"""Version of ``report.json``: existing keys keep their names and meanings, new keys may be added."""

DISTRIBUTED = "torch.distributed"
"""``api`` of a run whose script uses ``torch.distributed`` and not a session."""

_HELD = ("rank", "computes", "mirrors", "backups", "computes_bytes", "mirrors_bytes", "copies_bytes")
_FILLED = ("step", "t_s", "collective", "seats", "sources", "count")
_OVERLAP = ("rank", "steps", "buckets", "undone", "copy_bytes", "copy_s", "update_s", "waited_s", "undo_s")


def build_report(
    records: Sequence[Record],
    *,
    started: Sequence[int],
    wall_s: float,
    seed: int,
    faults_not_fired: Sequence[str] = (),
    command: str = "",
    job: Mapping[str, Any] | None = None,
    nodes: int = 1,
    sinks: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the content of ``report.json``; ``docs/reference/report.md`` describes its fields.

    Args:
        records: Records of all workers and of the launcher, in any order.
        started: Ranks of the initial job, without spares.
        wall_s: Seconds from the start of the launcher to its end.
        seed: Seed of the run.
        faults_not_fired: Injected faults that never struck, in the syntax of ``--inject``.
        command: The command line that repeats the run.
        job: Provenance of the job, so that it can be repeated; see ``launch/provenance.py``.
        nodes: Number of launchers.
        sinks: What else received the records while the job ran, such as a server of metrics: ``name``, and how many
            records it has ``taken``; ``dropped`` are those that its queue had no room for, or that it failed to take.
    """
    history = model_of(records, started)
    finished, timed = _finished(history), history.timed
    ends = finished.values()
    return {
        "schema": SCHEMA,
        "outcome": _outcome(history, finished),
        "api": _api(history),
        **_configuration(history, seed),
        "workers": _workers(history, finished),
        "nodes": nodes,
        "steps": len(history.steps),
        "wall_s": _seconds(wall_s),
        "train_s": _seconds(timed[-1].t_s - timed[0].t_s) if timed else None,
        "step_s": _step_s(history),
        "goodput": _goodput(records, wall_s),
        "restarts": len(history.lives) - 1,
        **_happenings(history),
        "steps_redone": history.redone_steps,
        "faults_not_fired": list(faults_not_fired),
        "samples": _samples(history, finished),
        "lost": None if history.is_distributed else _lost(history),
        "replicas": _replicas(history, finished),
        "certificate": _certificate(history),
        "platforms": _platforms(history),
        "metrics": _metrics(history, finished),
        "checkpoints": None if history.is_distributed else history.num_saved,
        "checkpoint": None if history.is_distributed else next((r.checkpoint for r in ends if r.checkpoint), ""),
        "error": _error(history.lives[-1]),
        "sinks": [dict(sink) for sink in sinks],
        "command": command,
        "job": None if job is None else dict(job),
    }


def _workers(history: RunModel, finished: Mapping[int, Finished]) -> dict[str, Any]:
    return {
        "started": len(history.started),
        "ranks_started": sorted(history.started),
        "spares": len(history.spares),
        "ranks_spare": history.spares,
        "finished": len(finished),
        "ranks_finished": sorted(finished),
    }


def _goodput(records: Sequence[Record], wall_s: float) -> dict[str, Any] | None:
    """Return where the wall time went; None if that is unknown."""
    spent = goodput_of(records, wall_s)
    if spent is None:
        return None
    badput_s = {cause: _seconds(seconds) for cause, seconds in spent.badput_s.items()}
    return {"ratio": round(spent.ratio, 6), "useful_s": _seconds(spent.useful_s), "badput_s": badput_s}


def _happenings(history: RunModel) -> dict[str, Any]:
    """Return events at workers and at their parts, each kind a list ordered by time; the guard's findings last."""
    return {
        "failures": [_failure(failure, history) for failure in history.failures],
        "joined": [_rounded(joining, "rank", "step", "t_s", "held_s") for joining in history.joined],
        "reinitialised": [_reinitialised(records) for records in history.reinitialised],
        "restored": [_restored(record) for record in history.restored],
        "parts_held": [_rounded(record, *_HELD) for record in history.parts_held],
        "optimizer_overlap": [_rounded(record, *_OVERLAP) for record in history.optimizer_overlapped],
        "seats_taken": [_rounded(record, "step", "t_s", "seat", "worker") for record in history.seats_taken],
        "seats_filled": [_rounded(record, *_FILLED) for record in history.seats_filled],
        "left": [_rounded(record, "rank", "step", "t_s") for record in history.of(Left)],
        "stragglers": [
            _rounded(record, "rank", "step", "t_s") | {"score": round(record.score, 2), "policy": record.policy}
            for record in history.of(StragglerSeen)
        ],
        "changed": [
            _rounded(record, "step", "t_s", "name") | {"value": json.loads(record.value)} for record in history.changes
        ],
        "actions": [
            _rounded(record, "t_s", "step", "action") | {"values": json.loads(record.values)}
            for record in history.of(ActionRequested)
        ],
        "flips": [_flip(record) for record in history.of(ValuesAltered)],
        "guard": _guard(history),
    }


def _finished(history: RunModel) -> dict[int, Finished]:
    """Return by rank the workers that passed the last gate and lived on, in the last life in which any worker did."""
    for life in reversed(history.lives):
        if finished := life.attendance.at_last_gate(any_step=history.is_distributed):
            return finished
    return {}


def _outcome(history: RunModel, finished: Mapping[int, Finished]) -> str:
    if not finished or _script_failures(history.lives[-1]):
        return "failed"
    outcomes = {record.outcome for record in finished.values()}
    return next((o for o in ("gave-up", "stopped") if o in outcomes), "done")


def _api(history: RunModel) -> str | None:
    if not history.of(RunStarted):
        return None
    return DISTRIBUTED if history.is_distributed else "session"


def _configuration(history: RunModel, seed: int) -> dict[str, Any]:
    starts = history.of(RunStarted)
    names = ("fabric", "strategy", "slices", "split", "order", "batch", "rescale", "overlap_optimizer")
    more = ("steps_planned", "num_buckets", "parameters")
    first = starts[0] if starts else None
    configuration = {name: getattr(first, name, None) for name in (*names, "seed", *more)} | {"seed": seed}
    unknown = ("slices", "split", "overlap_optimizer", "seed", *more) if history.is_distributed else ()
    if first is not None and not first.steps_planned:  # a stream ends when it ends
        unknown = (*unknown, "steps_planned")
    return configuration | dict.fromkeys(unknown)


def _failure(failure: LostWorker, history: RunModel) -> dict[str, Any]:
    return {
        **_rounded(failure, "rank", "kind"),
        "step": failure.step if failure.step >= 0 else None,
        **_rounded(failure, "phase", "injected", "t_s", "detect_s", "recover_s", "decision", "redone_steps"),
        "unnoticed_s": _unnoticed_s(failure, history),
        "lost_samples": None if history.is_distributed else failure.lost_samples,
        **_rounded(failure, "recovery", "silent_s", "why", "stack"),
        "orders": dict(failure.orders),
        "times_s": {name: _seconds(value) for name, value in failure.times_s.items()},
    }


def _unnoticed_s(failure: LostWorker, history: RunModel) -> float | None:
    """Return the seconds to the detection of a failure that was not injected: from the worker's end, if that is known.

    Otherwise, as for a lost node, they count from the last committed step: the worker has died since.
    """
    if failure.injected or failure.known_s is None:
        return None
    since_s = history.last_commit_s(failure.known_s) if failure.ended_s is None else failure.ended_s
    return None if since_s is None else _seconds(max(0.0, failure.known_s - since_s))


def _reinitialised(records: Sequence[Reinitialised]) -> dict[str, Any]:
    """Return the times of the slowest worker, for each phase."""
    slowest = {name: max(getattr(one, name) for one in records) for name in ("snapshot_s", "rebuild_s", "load_s")}
    return {
        **_rounded(records[0], "step", "t_s"),
        "workers": len(records),
        **_rounded(records[0], "form", "source"),
        **{name: _seconds(value) for name, value in slowest.items()},
    }


def _restored(record: PartRestored) -> dict[str, Any]:
    blocks = sum(record.blocks)
    total = sum(age * count for age, count in zip(record.ages, record.blocks, strict=True))
    return {
        **_rounded(record, "part", "step", "t_s"),
        "by": record.rank,
        "source": record.source,
        "blocks": blocks,
        "stale_steps": {
            "mean": round(total / blocks, 3) if blocks else 0.0,
            "max": max(record.ages, default=0),
            "blocks_of_age": {str(age): count for age, count in zip(record.ages, record.blocks, strict=True)},
        },
        "optimizer": record.optimizer,
        "optimizer_stale_steps": record.optimizer_age,
    }


def _guard(history: RunModel) -> dict[str, Any]:
    """Return the guard's findings, their outcomes, and the number of steps recomputed because of them."""
    return {
        "found": [_rounded(r, "step", "t_s", "what", "where", "ranks", "policy") for r in history.of(CorruptionFound)],
        "healed": [
            _rounded(r, "found_at", "t_s", "ranks", "went_back_to", "source", "is_training")
            for r in history.of(CorruptionHealed)
        ],
        "steps_redone": history.healed_steps,
    }


def _flip(record: ValuesAltered) -> dict[str, Any]:
    fields = _rounded(record, "fault", "rank", "step", "target", "count", "t_s")
    return fields | {"values": [dict(value) for value in record.values]}


def _samples(history: RunModel, finished: Mapping[int, Finished]) -> dict[str, int | None]:
    if history.is_distributed:
        return dict.fromkeys(("planned", "committed", "lost", "repeated"))
    for record in finished.values():
        return _rounded(record, "planned", "committed", "lost", "repeated")
    starts = history.of(RunStarted)
    return {
        "planned": (starts[0].samples_planned or None) if starts else None,  # unknown of a stream
        "committed": sum(record.samples for record in history.steps.values()),
        "lost": len(history.samples_lost),
        "repeated": None,  # known only from the ledger, which is written at the end
    }


def _lost(history: RunModel) -> list[dict[str, Any]]:
    losses = ((r.step, r.epoch, r.ids, r.buckets) for r in history.of(SamplesLost))
    return [
        {"step": step, "epoch": epoch, "ids": list(ids), "buckets": list(buckets)}
        for step, epoch, ids, buckets in dict.fromkeys(losses)  # a new lead writes it again
    ]


def _replicas(history: RunModel, finished: Mapping[int, Finished]) -> dict[str, Any]:
    records = list(finished.values())
    if not records or history.is_distributed:
        return {"identical": None, "sha256": None, "state_sha256": None}
    return {
        "identical": len({(record.sha256, record.state_sha256) for record in records}) == 1,
        "sha256": records[0].sha256,
        "state_sha256": records[0].state_sha256,
    }


def _certificate(history: RunModel) -> dict[str, Any] | None:
    """Return the last link and the steps it covers; None without a certificate."""
    steps = [record for record in history.steps.values() if record.link]
    if not steps:
        return None
    return {"link": steps[-1].link, "first_step": steps[0].step, "steps": len(steps)}


def _platforms(history: RunModel) -> dict[str, Any] | None:
    """Return the platforms, their workers, what differing ones gave up, and refused workers; None if not recorded.

    ``promise`` is only there if GPUs were used: what holds of the bits, and why. ``given_up`` is "" for a single platform, or an inexact strategy. The last platform of a worker counts.
    """
    starts = [record for record in history.of(RunStarted) if record.platform]
    if not starts:
        return None
    platforms = {record.rank: dict(record.platform) for record in starts}
    groups: list[dict[str, Any]] = []
    for rank, platform in sorted(platforms.items()):
        group = next((group for group in groups if group["platform"] == platform), None)
        if group is None:
            groups.append(group := {"ranks": [], "platform": platform})
        group["ranks"].append(rank)
    promises = sorted({platform["promise"] for platform in platforms.values() if "promise" in platform})
    return {
        "of": groups,
        **({"promise": "; ".join(promises)} if promises else {}),
        "given_up": next((record.given_up for record in starts if record.given_up), ""),
        "refused": [{"rank": r.rank, "t_s": round(r.t_s, 6), "why": r.why} for r in history.of(WorkerRefused)],
    }


def _metrics(history: RunModel, finished: Mapping[int, Finished]) -> dict[str, float | None]:
    last: dict[str, float] = {}
    for record in history.steps.values():
        last |= record.metrics
    for final in finished.values():
        last |= final.metrics
    return {name: value if math.isfinite(value) else None for name, value in last.items()}


def _script_failures(life: JobLife) -> list[ScriptFailed]:
    """Return the failures that ended the job: not that of a newcomer that never took part, if others failed."""
    took_part = life.attendance.begun_s
    return [record for record in life.attendance.failed if not took_part or record.rank in took_part or record.rank < 0]


def _error(life: JobLife) -> dict[str, Any] | None:
    for record in _script_failures(life):
        return _rounded(record, "rank", "step", "exit_code", "message")
    return None


def _step_s(history: RunModel) -> dict[str, float | None]:
    times = sorted(history.step_times_s())
    return {"p50": _quantile(times, 0.50), "p99": _quantile(times, 0.99)}


def _quantile(times: Sequence[float], share: float) -> float | None:
    """Return the value at quantile ``share`` of the sorted ``times``, by linear interpolation."""
    if not times:
        return None
    place = share * (len(times) - 1)
    low, part = int(place), place - int(place)
    high = min(low + 1, len(times) - 1)
    return _seconds(times[low] * (1 - part) + times[high] * part)


def _rounded(one: object, *names: str) -> dict[str, Any]:
    """Return some fields in the form of the report: seconds are rounded, tuples are lists."""
    return {name: _plain(name, getattr(one, name)) for name in names}


def _plain(name: str, value: Any) -> Any:
    if name.endswith("_s"):
        return _seconds(value)
    return list(value) if isinstance(value, tuple) else value


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
