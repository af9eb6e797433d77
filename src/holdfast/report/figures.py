"""The figures of a report, as inline SVG: the timeline of the run, and its learning curves."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.records.types import Record
from holdfast.report import canvas as style
from holdfast.report.canvas import WIDTH_IN, canvas
from holdfast.report.formatting import count
from holdfast.report.history import History
from holdfast.report.lives import LostWorker
from holdfast.report.timeline import draw_lanes, draw_legend, draw_zoom, first_answered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT_IN = 0.72
"""Room for the names of workers; figures without them have ``_NUMBERS_IN`` for the numbers of their axis."""
_NUMBERS_IN = 0.38
_RIGHT_IN = 0.1
_LEGEND_IN = 0.32


def timeline(report: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Return the timeline: a lane for each worker, failures, recoveries, and the first recovery enlarged.

    Args:
        report: Report of the run.
        records: Records of the run; without them there is no figure, and the result is "".
    """
    if not records:
        return ""
    history = History(records, report["workers"].get("ranks_started", ()))
    if not history.ranks or (history.is_distributed and not history.commits):
        return ""  # no training to draw
    lanes_in = max(len(history.ranks) * 0.27, 0.6) if len(history.ranks) <= 32 else 8.6
    zoomed = first_answered(history)
    zoom_in = lanes_in + 1.42 if zoomed else 0.0
    width = WIDTH_IN - _LEFT_IN - _RIGHT_IN
    with canvas(lanes_in + 0.5 + _LEGEND_IN + zoom_in) as page:
        main = page.axes(_LEFT_IN, 0.5 + zoom_in, width, lanes_in)
        draw_lanes(main, history, report["wall_s"])
        draw_legend(main, _LEFT_IN, history)
        if zoomed:
            detail = page.axes(_LEFT_IN, 0.5, width, lanes_in + 0.25)
            draw_zoom(detail, _LEFT_IN, main, history, zoomed, report["step_s"]["p50"])
        return page.svg(
            f"Timeline of {count(len(history.ranks), history.worker)}, {count(len(history.failures), 'failure')}"
        )


def curves(report: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Return the logged metrics over committed steps, with failures as vertical lines; "" if nothing was logged."""
    history = History(records, report["workers"].get("ranks_started", ()))
    series = _series(history)
    if not series:
        return ""
    gap = 0.75
    width = (WIDTH_IN - _NUMBERS_IN - _RIGHT_IN - gap * (len(series) - 1)) / len(series)
    with canvas(2.75) as page:
        for place, (name, values) in enumerate(series.items()):
            axes = page.axes(_NUMBERS_IN + place * (width + gap), 0.5, width, 1.85)
            _draw_curve(axes, name, values, history.failures, first=place == 0)
        return page.svg(html.escape(f"{' and '.join(series)} over committed steps"))


def _series(history: History) -> dict[str, list[tuple[int, float]]]:
    """Return at most two metrics, loss and accuracy first, as (step, value)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, record in history.steps.items():
        for name, value in record.metrics.items():
            if math.isfinite(value):
                found.setdefault(name, []).append((step, value))
    first = [name for name in ("loss", "accuracy") if name in found]
    chosen = (first + [name for name in found if name not in first])[:2]
    return {name: found[name] for name in chosen}


def _draw_curve(
    axes: Axes, name: str, values: Sequence[tuple[int, float]], failures: Sequence[LostWorker], *, first: bool
) -> None:
    steps, heights = zip(*values, strict=True)
    color = style.WORK if name == "loss" else style.ACCURACY
    sparse = len(values) <= 30
    axes.plot(steps, heights, color=color, linewidth=1.3, marker="o" if sparse else "", markersize=3.5, zorder=3)
    axes.set_title(name, loc="left", fontsize=10, fontweight="bold", color=color, pad=14)
    axes.set_xlabel("committed step")
    axes.grid(axis="y", color=style.LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.tick_params(length=3)
    if name == "loss" and min(heights) >= 0 and 0 < max(heights) < math.inf:
        axes.set_ylim(0, 1.05 * max(heights))
    for step, ranks in _by_step(failures).items():
        axes.axvline(step, color=style.DEATH, linewidth=0.9, zorder=2)
        if first or len(ranks) <= 4:
            one = "worker" if len(ranks) == 1 else "workers"
            text = f"{one} {', '.join(map(str, ranks))}" if len(ranks) <= 4 else count(len(ranks), "worker")
            axes.annotate(
                text, (step, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
                ha="center", va="bottom", fontsize=8, color=style.DEATH,
            )  # fmt: skip


def _by_step(failures: Sequence[LostWorker]) -> dict[int, list[int]]:
    by_step: dict[int, list[int]] = {}
    for failure in failures:
        by_step.setdefault(failure.step, []).append(failure.rank)
    return by_step
