"""Formats durations and percentage points for the pages of the lab."""

from __future__ import annotations

import math

from holdfast.base.formatting import DASH, percent

_DAY_S = 86_400.0
_SPANS = (
    ("y", 365.25 * _DAY_S, 2 * 365.25 * _DAY_S),
    ("d", _DAY_S, 2 * _DAY_S),
    ("h", 3600.0, 7200.0),
    ("min", 60.0, 120.0),
    ("s", 1.0, 1.0),
    ("ms", 1e-3, 1e-3),
)
"""Unit, its length in seconds, and the smallest value in seconds that is shown in it."""


def duration(value: float | None) -> str:
    """Return a duration in a suitable unit, three digits: ``"250 ms"``, ``"21.4 h"``, ``"5 y"``; a dash for None."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return "never"
    if value == 0:
        return "0 s"
    unit, one = next(((unit, one) for unit, one, least in _SPANS if value >= least * 0.9995), ("us", 1e-6))
    return f"{value / one:,.0f} {unit}" if value / one >= 999.5 else f"{value / one:.3g} {unit}"


def points(value: float | None) -> str:
    """Return a fraction in percentage points, a dash for None."""
    return percent(value, signed=True, digits=2).replace(" %", " pp")
