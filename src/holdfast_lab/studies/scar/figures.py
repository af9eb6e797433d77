"""Building blocks of the page of the partial recovery study: cells of trials, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast_lab.studies.base import Row
from holdfast_lab.studies.scar.policies import SCAR
from holdfast_lab.studies.scar.rows import ScarCell, TrialRows
from holdfast_lab.studies.scar.verdicts import show
from holdfast_lab.studies.sections import Section, table, text

LATE = "Failures after the first full save (T >= C). "
READ = (
    "Iterations saved compared with rollback to a full checkpoint, %, with 95 % intervals by paired bootstrap over the "
    "trials; above 100 the failure helped."
)
AXIS = "iterations saved, %"
_LIMITS = (-60, 130)
"""Limits of the plots in percent; values beyond are only in the tables."""
_FAR = 1e3
"""A finite stand-in for infinite shares, far outside any plot."""


def called(policy: str) -> str:
    """Return a policy's displayed name."""
    return "SCAR" if policy == SCAR else policy


def unbroken(text: str) -> str:
    """Return a text with non-breaking spaces."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def shown(value: float, ci: tuple[float, float]) -> str:
    """Return a reduction and its interval as a table cell."""
    return unbroken(show(value, ci))


def row_of(program: str, policy: str, cell: ScarCell) -> Row:
    """Return a row of the page; numbers for plots are in percent."""
    return {
        "program": program,
        "policy": called(policy),
        "percent": _percent(cell.reduction),
        "low": _percent(cell.ci[0]),
        "high": _percent(cell.ci[1]),
        "reduction": shown(cell.reduction, cell.ci),
        "trials": cell.trials,
        "cost_text": unbroken(f"{cell.cost:.2f} [{cell.cost_ci[0]:.2f}, {cell.cost_ci[1]:.2f}]"),
        "odd": unbroken(f"{cell.censored}, {cell.negative}"),
        "bytes": f"{cell.bytes:,.0f}",
        "error": cell.error,
        "undefined": cell.undefined,
    }


def _percent(share: float) -> float | None:
    return None if math.isnan(share) else 100 * max(-_FAR, min(_FAR, share))


def rows_of(trials: TrialRows, programs: Sequence[str], policies: Sequence[str], *, late: bool = True) -> list[Row]:
    """Return a row for each program and each policy that was tried with it."""
    return [
        row_of(program, policy, cell)
        for program in programs
        for policy in policies
        if (cell := trials.cell(program, policy, late=late))
    ]


def figure(make: Callable[..., Section], name: str, title: str, note: str, rows: Sequence[Row], **more: Any) -> Section:
    """Return a plot whose axis of reductions covers all intervals, up to :data:`_LIMITS`."""
    low, high = limits = _limits(rows)
    if any(row["low"] is not None and not low <= row["low"] <= row["high"] <= high for row in rows):
        note += " Intervals that end at the edge extend beyond it: see the tables."
    return make(name, title, note, rows, interval=["low", "high"], limits=limits, **more)


def _limits(rows: Sequence[Row]) -> list[float]:
    lows, highs = ([row[end] for row in rows if row[end] is not None] for end in ("low", "high"))
    return [max(_LIMITS[0], min([*lows, 0]) - 5), min(_LIMITS[1], max([*highs, 100]) + 5)]


def pivot(trials: TrialRows, name: str, title: str, note: str, policies: Mapping[str, str]) -> Section:
    """Return a table with a line per program and a column per policy; ``policies`` maps policies to headings."""
    lines = []
    for program in trials.stated():
        cells = {policy: cell for policy in policies if (cell := trials.cell(program, policy))}
        lines += (
            [{"program": program, **{policy: shown(cell.reduction, cell.ci) for policy, cell in cells.items()}}]
            if cells
            else []
        )
    columns = [text(policy, heading, "%") for policy, heading in policies.items()]
    return table(name, title, f"{LATE}{READ} {note}".strip(), lines, by=["program"], columns=columns)
