"""Verdicts that compare the results of trials with a number, and their wording, shared by all claims of the study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from holdfast_lab.studies.base import Claim, statement
from holdfast_lab.studies.scar.policies import NODES, PARTIAL
from holdfast_lab.studies.scar.rows import TrialRows

ABSTRACT = "abstract"
PAPER = "paper"
DERIVED = "derived"
EXPECTED = "expected from a prototype"
POINTS = "points"
"""Unit of a difference of percentages."""
LEAST, MOST = 78.0, 95.0
"""The abstract's range of iterations that SCAR saves, in percent."""

Measured = tuple[float, tuple[float, float]]


def show(value: float, ci: tuple[float, float], unit: str = "") -> str:
    """Return a reduction and its interval in percent, as shown in tables and claims; an unbounded end as infinite."""
    if not math.isfinite(value):
        return "nothing to save"  # rollback cost nothing in any of the trials
    return f"{_whole(value)} [{_whole(ci[0])}, {_whole(ci[1])}] {unit}".rstrip()


def _whole(share: float) -> str:
    if math.isfinite(share):
        return str(round(100 * share))
    return "-∞" if share < 0 else "∞"


def told(found: Mapping[str, Measured], unit: str = "%") -> str:
    """Return each name with its number, as text of a claim."""
    return "; ".join(f"{name} {show(*measured, unit)}" for name, measured in found.items())


def in_percent(ci: tuple[float, float]) -> tuple[float, float]:
    """Return an interval in percent."""
    return 100 * ci[0], 100 * ci[1]


def where_it_lies(percent: float) -> str:
    """Return whether a reduction is inside the abstract's range, or how far outside."""
    if LEAST <= percent <= MOST:
        return "inside the range"
    points = max(LEAST - percent, percent - MOST)
    side = "below" if percent < LEAST else "above"
    return f"outside, {points:.{int(points < 1)}f} points {side} the range"


def partial_of(nodes: int) -> str:
    """Return the name of partial recovery alone if ``nodes`` of :data:`NODES` fail."""
    return PARTIAL if nodes == NODES // 2 else f"{PARTIAL}, {nodes}/{NODES} lost"


# -- verdicts


def at_least(words: str, source: str, least: float, found: Mapping[str, Measured], unit: str = "%") -> Claim:
    """Return a claim that a number is at least ``least`` percent, or points, for each program.

    It is refuted if an interval is below ``least``, else undecided if an interval contains it. The lowest number is
    shown.
    """
    claim = statement(words, source, least, unit)
    if not found:
        return claim
    lowest = min(found, key=lambda name: found[name][0])
    value, ci = found[lowest]
    below = [name for name, (_, (_, high)) in found.items() if 100 * high < least]
    unclear = [name for name, (_, (low, high)) in found.items() if 100 * low < least <= 100 * high]
    unsure = f"; undecided by the interval: {', '.join(unclear)}" if unclear else ""
    return claim.judged(
        100 * value,
        False if below else None if unclear else True,
        f"the lowest: {lowest}; {told(found, unit)}{unsure}",
        ci=in_percent(ci),
    )


def reductions(trials: TrialRows, programs: Sequence[str], policy: str) -> dict[str, Measured]:
    """Return the reduction of a policy for each program that has one, over failures after the first full save."""
    cells = {program: trials.cell(program, policy) for program in programs}
    return {
        program: (cell.reduction, cell.ci) for program, cell in cells.items() if cell and math.isfinite(cell.reduction)
    }


def gaps(trials: TrialRows, programs: Sequence[str], policy: str, other: str) -> dict[str, Measured]:
    """Return the paired difference of the reductions of two policies, for each program."""
    found = {program: trials.gap(program, policy, other) for program in programs}
    return {program: gap for program, gap in found.items() if gap and math.isfinite(gap[0])}


def is_above(words: str, found: Mapping[str, Measured]) -> Claim:
    """Return a claim that every difference is above 0; undecided if an interval contains 0 and none is below 0."""
    claim = statement(words, PAPER, unit=POINTS)
    if not found:
        return claim
    lowest = min(found, key=lambda name: found[name][0])
    value, ci = found[lowest]
    against = [name for name, (_, (_, high)) in found.items() if high < 0]
    unclear = [name for name, (_, (low, high)) in found.items() if low <= 0 <= high]
    text = f"the smallest of {len(found)} differences: {lowest}"
    text += f"; below 0: {', '.join(against)}" if against else ""
    text += f"; undecided by the interval: {', '.join(unclear)}" if unclear else ""
    holds = False if against else None if unclear else True
    ours, ends = 100 * value, in_percent(ci)
    return claim.judged(ours, holds, text, ci=ends)
