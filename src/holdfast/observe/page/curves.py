"""The logged metrics over committed steps: of one run, or of several runs in the same axes."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from holdfast.base.formatting import count, listing, number
from holdfast.observe.page import canvas as style
from holdfast.observe.page.canvas import HALF_IN, WIDTH_IN, as_csv, canvas
from holdfast.records.lives import LostWorker
from holdfast.records.run_model import RunModel, model_of
from holdfast.records.types import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECENT = 20
"""The last value of a metric is a mean over this many steps, as a single mini-batch is too noisy."""
_MOST = 2
"""Number of metrics that are drawn."""
_COLOURS = (style.WORK, style.SEEN, style.DECIDED, style.ASIDE, style.DEATH, style.SOFT, style.INK)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))
"""Runs with the same curve stay visible below each other."""
_NUMBERS_IN, _RIGHT_IN = 0.46, 0.1
_LABEL_IN = 0.85
"""Width of the label of a failure."""

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure of a page.

    Args:
        svg: The figure.
        title: What is seen in it; "" for none.
        values: The values that it shows, as CSV; "" for none.
    """

    svg: str
    title: str = ""
    values: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run as a page shows it beside others.

    Args:
        name: Its name on the page.
        report: Its report.
        records: Its records.
    """

    name: str
    report: Mapping[str, Any]
    records: Sequence[Record] = field(repr=False, default=())

    @property
    def history(self) -> RunModel:
        """The history of the run."""
        return model_of(self.records, self.report["workers"].get("ranks_started", ()))


def curves_of(runs: Sequence[NamedRun]) -> list[Drawing]:
    """Return a figure for each of at most two metrics, loss and accuracy first; none if nothing was logged."""
    histories = {run.name: run.history for run in runs}
    series = {name: _series(history) for name, history in histories.items()}
    metrics = _chosen([metric for logged in series.values() for metric in logged])
    failures = {name: history.failures for name, history in histories.items()}
    width_in = WIDTH_IN if len(metrics) == 1 else HALF_IN
    return [
        _figure(metric, {name: of[metric] for name, of in series.items() if metric in of}, failures, width_in)
        for metric in metrics
    ]


def recent_mean(values: Points) -> float:
    """Return the mean over the last steps."""
    return statistics.fmean(value for _, value in values[-RECENT:])


def _series(history: RunModel) -> dict[str, Points]:
    """Return each metric as (step, value); of a recomputed step the last value."""
    series: dict[str, Points] = {}
    for step, record in history.steps.items():
        for name, value in record.metrics.items():
            if math.isfinite(value):
                series.setdefault(name, []).append((step, value))
    return series


def _chosen(metrics: Sequence[str]) -> list[str]:
    first = [name for name in ("loss", "accuracy") if name in metrics]
    return list(dict.fromkeys([*first, *metrics]))[:_MOST]


def _figure(
    metric: str, runs: Mapping[str, Points], failures: Mapping[str, Sequence[LostWorker]], width_in: float
) -> Drawing:
    is_alone = len(failures) == 1
    legend_in = 0.0 if is_alone else 0.2 * math.ceil(len(runs) / 2) + 0.1
    with canvas(2.75 + legend_in, width_in) as page:
        axes = page.axes(_NUMBERS_IN, 0.5, width_in - _NUMBERS_IN - _RIGHT_IN, 1.85)
        _prepare(axes, metric, runs)
        for place, (name, values) in enumerate(runs.items()):
            color = style.WORK if metric == "loss" or not is_alone else style.ACCURACY
            width = 1.3 if is_alone or place else 3.0  # the first one stays visible below equal ones
            _draw(axes, name, values, color if is_alone else _COLOURS[place % len(_COLOURS)], place, width)
            if not is_alone:
                _mark_losses(axes, values, failures[name])
        if is_alone:
            _label_losses(axes, next(iter(failures.values())), _LABEL_IN / width_in)
        else:
            axes.legend(
                ncols=2, frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1.12), borderaxespad=0.0, borderpad=0.0
            )  # fmt: skip
        label = f"{metric} over committed steps"
        svg = page.svg(html.escape(label if is_alone else f"{label}, {count(len(runs), 'run')}"))
    return Drawing(svg=svg, title=_seen(metric, runs), values=_table(metric, runs))


def _prepare(axes: Axes, metric: str, runs: Mapping[str, Points]) -> None:
    heights = [value for values in runs.values() for _, value in values]
    axes.set_ylabel("")
    axes.set_xlabel("committed step")
    axes.annotate(
        metric, (0, 1), xycoords="axes fraction", xytext=(-_NUMBERS_IN * 72 + 2, 4), textcoords="offset points",
        ha="left", va="bottom", fontsize=9, color=style.SOFT,
    )  # fmt: skip
    axes.grid(axis="y", color=style.LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.tick_params(length=3)
    if metric == "loss" and min(heights) >= 0 and 0 < max(heights) < math.inf:
        axes.set_ylim(0, 1.05 * max(heights))


def _draw(axes: Axes, name: str, values: Points, color: str, place: int, width: float) -> None:
    steps, heights = zip(*values, strict=True)
    marker = "o" if len(values) <= 30 else ""
    dash = _DASHES[place % len(_DASHES)]
    axes.plot(
        steps,
        heights,
        color=color,
        linewidth=width,
        linestyle=dash,
        marker=marker,
        markersize=3.5,
        label=name,
        zorder=3,
    )


def _mark_losses(axes: Axes, values: Points, failures: Sequence[LostWorker]) -> None:
    """Mark on the curve of a run the steps at which workers were lost."""
    at = dict(values)
    spots = [(failure.step, at[failure.step]) for failure in failures if failure.step in at]
    if spots:
        steps, heights = zip(*spots, strict=True)
        axes.plot(steps, heights, "X", color=style.DEATH, markersize=7, markeredgecolor="white", zorder=5)


def _label_losses(axes: Axes, failures: Sequence[LostWorker], share: float) -> None:
    """Draw a line at each step at which workers were lost, and label those that are close together once."""
    for step in {failure.step for failure in failures}:
        axes.axvline(step, color=style.DEATH, linewidth=0.9, zorder=2)
    left, right = axes.get_xlim()
    room = share * (right - left)
    for group in _close_together(sorted(failures, key=lambda failure: failure.step), room):
        ranks = sorted({failure.rank for failure in group})
        named = f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        middle = (group[0].step + group[-1].step) / 2
        side = "right" if middle > right - room / 2 else "center"
        axes.annotate(
            named if len(ranks) <= 3 else count(len(ranks), "worker"), (middle, 1), xycoords=("data", "axes fraction"),
            xytext=(0, 4), textcoords="offset points", ha=side, va="bottom", fontsize=8, color=style.DEATH,
        )  # fmt: skip


def _close_together(failures: Sequence[LostWorker], room: float) -> list[list[LostWorker]]:
    groups: list[list[LostWorker]] = [list(failures[:1])] if failures else []
    for before, failure in pairwise(failures):
        if failure.step - before.step < room:
            groups[-1].append(failure)
        else:
            groups.append([failure])
    return groups


def _table(metric: str, runs: Mapping[str, Points]) -> str:
    rows = [{"run": name, "step": step, metric: value} for name, values in runs.items() for step, value in values]
    return as_csv([{key: row[key] for key in row if key != "run"} for row in rows] if len(runs) == 1 else rows)


def _seen(metric: str, runs: Mapping[str, Points]) -> str:
    """Return what the figure shows: how far the metric came, or where runs part from the first one."""
    if len(runs) == 1:
        (values,) = runs.values()
        last = f"{number(recent_mean(values))} on average in the last {min(RECENT, len(values))}"
        return f"{metric.capitalize()}: {number(values[0][1])} in the first mini-batch, {last}"
    (first, wanted), *other_runs = runs.items()
    same = [name for name, values in other_runs if values == wanted]
    parts = (
        [f"{listing(same)} {'has' if len(same) == 1 else 'have'} the {metric} of {first} in every step"] if same else []
    )
    parts += [f"{name} {_parts(dict(values), dict(wanted))}" for name, values in other_runs if name not in same]
    return "; ".join(parts)


def _parts(ours: Mapping[int, float], wanted: Mapping[int, float]) -> str:
    common = sorted(ours.keys() & wanted.keys())
    step = next((step for step in common if ours[step] != wanted[step]), None)
    if step is not None:
        return f"differs from step {step} on"
    return (
        f"is the same in the {count(len(common), 'step')} that both have" if common else "has no step in common with it"
    )
