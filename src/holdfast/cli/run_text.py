"""The state of a run in words and rows, as ``holdfast status`` and ``holdfast top`` print it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.base.formatting import DASH, clean, percent, rough, seconds, size, speed, timer

if TYPE_CHECKING:
    from holdfast.observe.monitor.observed import ObservedWorker

WORKER_COLUMNS = ("worker", "state", "step>", "pid>", "cpu>", "memory>", "for>", "")
"""Headings of the rows of workers; ``>`` is a column of numbers."""
_MOST_CAUSES = 3
_FIRST = ("lost", "recovering", "joining", "starting", "training", "spare", "left", "done")
"""States of workers in the order in which they are shown where there is no room for all."""


def facts(state: Mapping[str, Any], waits_for: str = "") -> list[tuple[str, str]]:
    """Return what is known of a run as names with texts, the most important first.

    Args:
        state: The state, as ``docs/reference/live-view.md`` describes it.
        waits_for: What the job waits for before it trains.
    """
    rows = [("", clean(state["state"]["sentence"]))]
    if waits_for and not state["progress"]["step"]:
        rows.append(("start", clean(waits_for)))
    rows.append(("progress", _progress(state)))
    if state["progress"]["step"]:
        rows.append(("goodput", _goodput(state["goodput"])))
    rows.append(("recoveries", _recoveries(state["recoveries"])))
    if saved := state["checkpoints"]:
        rows.append(("checkpoint", f"step {saved[-1]['step']}, {size(saved[-1]['size_bytes'])}"))
    if findings := state["integrity"]["findings"]:
        rows.append(("guard", clean(findings[-1]["text"])))
    if resume := state["run"]["resume"]:
        rows.append(("resume", clean(resume)))
    return [(name, text) for name, text in rows if text]


def _progress(state: Mapping[str, Any]) -> str:
    """Return how far a run is and how fast, with its newest metrics."""
    progress, is_over = state["progress"], state["run"]["ended"]
    parts = []
    if progress["planned"]:
        parts.append(f"{100 * progress['step'] // progress['planned']} %")
    if not is_over:
        parts.append(speed(progress["steps_per_s"]))
    if progress["eta_s"] and not is_over:
        parts.append(f"about {rough(max(1.0, progress['eta_s']))} left")
    metrics = [
        f"{clean(row['id'])} {row['points'][-1][2]:.4g}"
        for row in state["series"]
        if row["id"] != "rate" and row["points"] and row["points"][-1][2] is not None
    ]
    return ", ".join(part for part in (*parts, *metrics) if part)


def _goodput(goodput: Mapping[str, Any] | None) -> str:
    if goodput is None or not goodput["wall_s"]:
        return ""
    lost = sorted(goodput["badput_s"].items(), key=lambda item: -item[1])[:_MOST_CAUSES]
    causes = [f"{cause.replace('_', ' ')} {seconds(spent_s)}" for cause, spent_s in lost if spent_s > 0]
    return "; ".join([f"{percent(goodput['ratio'])} useful", *([", ".join(causes)] if causes else [])])


def _recoveries(recoveries: list[Mapping[str, Any]]) -> str:
    if not recoveries:
        return ""
    last = recoveries[-1]
    lost = ", ".join(f"rank {row['rank']}" + (f" ({row['cause']})" if row["cause"] else "") for row in last["lost"])
    took = "" if last["duration_s"] is None else f", {seconds(last['duration_s'])}"
    what = f"lost {lost}" if lost else last["decision"]
    return clean(f"{last['id']}; the last at step {last['step']}: {what}{took}")


def shown_workers(state: Mapping[str, Any], most: int) -> list[Mapping[str, Any]]:
    """Return at most so many workers, by rank; those that train as usual are left out first."""
    rows: list[Mapping[str, Any]] = sorted(state["workers"], key=lambda row: (_FIRST.index(row["state"]), row["id"]))
    return sorted(rows[:most], key=lambda row: row["id"])


def worker_cells(
    state: Mapping[str, Any], row: Mapping[str, Any], observed: Mapping[int, ObservedWorker]
) -> tuple[str, ...]:
    """Return the cells of a worker, in the order of :data:`WORKER_COLUMNS`."""
    worker = observed.get(row["id"])
    usage = None if worker is None or row["state"] in ("lost", "left", "done") else worker.usage
    is_somewhere = row["pid"] is not None and row["pid"] >= 0
    return (
        str(row["id"]),
        row["state"],
        DASH if row["step"] is None else str(row["step"]),
        str(row["pid"]) if is_somewhere else DASH,
        DASH if usage is None else f"{100 * usage.cpu:.0f} %",
        DASH if usage is None else size(usage.memory_bytes),
        timer(max(0.0, state["now_s"] - row["since_s"])),
        clean(row["cause"]),
    )


def event_lines(state: Mapping[str, Any], most: int) -> list[str]:
    """Return the last events, at most so many, each with its time."""
    return [f"{timer(event['t_s']):>7}  {event['text']}" for event in state["events"][-most:]] if most > 0 else []
