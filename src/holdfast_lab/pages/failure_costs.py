"""What the failures of a demo cost: time, steps, samples and accuracy, each as bars, one for each run."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.base.formatting import listing, number, seconds
from holdfast.observe.page import canvas as style
from holdfast.observe.page.canvas import HALF_IN, as_csv, canvas
from holdfast.observe.page.comparison import held_s
from holdfast.observe.page.curves import Drawing
from holdfast_lab.pages.words import points

_BAR_IN, _NAMES_IN, _VALUES_IN = 0.34, 0.95, 0.85
_FONT = 11
"""Larger than elsewhere: the figures are as wide as a phone, where nothing enlarges them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One thing that failures cost.

    Args:
        name: Its name in the title and in the CSV file.
        unit: What the axis counts.
        of: Returns the cost from the row of a run, None if it is unknown.
        shown: Returns it as text.
        least: The length of the axis at least, so that no noise is magnified.
    """

    name: str
    unit: str
    of: Callable[[Mapping[str, Any]], float | None]
    shown: Callable[[float | None], str]
    least: float = 0.0


def _gained(row: Mapping[str, Any]) -> float | None:
    lost = row.get("accuracy_loss")
    return None if lost is None else 0.0 - lost


COSTS = (
    Cost(name="Time held", unit="seconds from the kills to the next new steps", of=held_s, shown=seconds),
    Cost(name="Steps computed again", unit="steps", of=lambda row: row.get("steps_redone"), shown=number),
    Cost(name="Samples lost", unit="samples that are not in the weights", of=lambda row: row["samples"]["lost"], shown=number),
    Cost(name="Accuracy", unit="percentage points above the undisturbed run", of=_gained, shown=points, least=2.0 / 100),
)  # fmt: skip


def failure_costs(results: Mapping[str, Any]) -> list[Drawing]:
    """Return a figure for each cost that is known for a run with failures; none if there is no such run.

    Args:
        results: As :func:`~holdfast_lab.pages.demo.demo_rows` returns them; the first run is the undisturbed one.
    """
    rows = [row for row in results["rows"][1:] if row["failures"]]
    return [_figure(cost, known) for cost in COSTS if (known := _known(cost, rows))]


def _known(cost: Cost, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {row["name"]: value for row in rows if (value := cost.of(row)) is not None}


def _figure(cost: Cost, known: Mapping[str, float]) -> Drawing:
    height = _BAR_IN * len(known)
    lowest, highest = min([*known.values(), 0.0]), max([*known.values(), cost.least, 0.0])
    with canvas(height + 0.6, HALF_IN) as page:
        axes = page.axes(_NAMES_IN, 0.55, HALF_IN - _NAMES_IN - _VALUES_IN, height)
        axes.barh(range(len(known)), list(known.values()), height=0.6, color=style.WORK)
        for place, value in enumerate(known.values()):
            axes.annotate(
                cost.shown(value), (max(value, 0.0), place), xytext=(6, 0), textcoords="offset points",
                va="center_baseline", color=style.INK, fontsize=_FONT,
            )  # fmt: skip
        axes.set_yticks(range(len(known)), list(known), fontsize=_FONT, color=style.INK)
        for name in axes.get_yticklabels():
            name.set_horizontalalignment("left")
        axes.set_ylim(len(known) - 0.5, -0.5)
        axes.set_xlim(lowest, highest or lowest + 1)
        axes.axvline(0, color=style.FAINT, linewidth=0.8)
        axes.set_xticks([])
        axes.tick_params(length=0, pad=_NAMES_IN * 72 - 4)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.annotate(
            cost.unit, (0, 0), xycoords="axes fraction", xytext=(-_NAMES_IN * 72 + 4, -14),
            textcoords="offset points", va="top", color=style.SOFT, fontsize=_FONT - 1,
        )  # fmt: skip
        svg = page.svg(html.escape(f"{cost.name} by run"))
    rows = [{"run": name, cost.name.lower(): value} for name, value in known.items()]
    return Drawing(svg=svg, title=seen(cost, known), values=as_csv(rows))


def seen(cost: Cost, known: Mapping[str, float]) -> str:
    """Return what a figure shows: the least and the most, and with which runs."""
    values = sorted({*known.values()})
    ends = dict.fromkeys((values[0], values[-1]))
    parts = [f"{_amount(cost, end)} with {listing([name for name in known if known[name] == end])}" for end in ends]
    return f"{cost.name}: {', '.join(parts)}"


def _amount(cost: Cost, value: float) -> str:
    return cost.shown(value) if value or cost.shown is points else "none"
