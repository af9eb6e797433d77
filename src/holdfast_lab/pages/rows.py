"""Grouping of result rows, for tables and plots."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def grouped(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Return the rows grouped by their values of ``names`` (as text), in the order of first appearance."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(as_name(row.get(name)) for name in names), []).append(row)
    return groups


def as_name(value: Any) -> str:
    """Return a value as the label of a line; "" for None."""
    return "" if value is None else str(value)


def middle(values: Sequence[Any]) -> float | None:
    """Return the median of the numbers among the values, None if there is none."""
    numbers = [value for value in values if isinstance(value, int | float)]
    return float(statistics.median(numbers)) if numbers else None


def row_id(section: str, values: Sequence[str]) -> str:
    """Return the HTML anchor of a table line."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join((section, *values)).lower()).strip("-")
