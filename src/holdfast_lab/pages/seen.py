"""What a figure of a study or a simulation shows, in one line above it, computed from the rows that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.base.formatting import listing, percent
from holdfast_lab.pages.rows import grouped, middle
from holdfast_lab.pages.words import duration

Rows = Sequence[Mapping[str, Any]]

_UNIT = 3
"""Units such as ``MB`` are no longer than this."""


def seen_in(section: Mapping[str, Any], rows: Rows) -> str:
    """Return the title of a section's figure: the lowest and the highest value, and of what; "" if there is none.

    Args:
        section: The section, of a kind with a figure.
        rows: The rows that the figure shows.
    """
    kind = section["kind"]
    if kind == "bars":
        return _bars(section, rows)
    if kind in ("lines", "points"):
        scale = 100.0 if kind == "lines" else 1.0  # the axis of lines counts in percent
        return _ends(section["y"][1], _named(rows, section["series"], section["y"][0], scale), percent=kind == "lines")
    if kind == "intervals":
        return _ends(section["x"][1], _named(rows, [*section["by"], *section["series"]], section["x"][0]))
    if kind == "map":
        return _map(section, rows)
    if kind == "survival":
        return _survival(section["log"]["survival"])
    return ""


def _bars(section: Mapping[str, Any], rows: Rows) -> str:
    """Return the ends of the first part where bars are of equal length, of the totals otherwise."""
    keys = [key for key, _ in section["values"]]
    if "whole" in section:
        keys, what = keys[:1], f"{section['values'][0][1]} in {section['unit']}"
    else:
        what = section["unit"]
    totals = {
        name: sum(middle([row.get(key) for row in group]) or 0.0 for key in keys)
        for name, group in _groups(rows, section["by"]).items()
    }
    return _ends(what, totals)


def _named(rows: Rows, names: Sequence[str], key: str, scale: float = 1.0) -> dict[str, list[float]]:
    """Return the values of each group of rows."""
    groups = _groups(rows, names)
    return {
        name: [scale * row[key] for row in group if row.get(key) is not None]
        for name, group in groups.items()
    }  # fmt: skip


def _groups(rows: Rows, names: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows grouped by those of ``names`` that differ between them."""
    differ = [name for name in names if len(grouped(rows, [name])) > 1]
    return {" ".join(key): group for key, group in grouped(rows, differ).items()}


def _ends(label: str, values: Mapping[str, Any], *, percent: bool = False) -> str:
    pairs = [(value, name) for name, of in values.items() for value in (of if isinstance(of, list) else [of])]
    if not pairs:
        return ""
    (low, lowest), (high, highest) = min(pairs), max(pairs)
    what, unit, of = _parted(label)
    unit = " %" if percent else unit
    name = f"{what[0].upper()}{what[1:]}" if what else ""
    if low == high:
        return f"{name or 'Everywhere'}: {low:.3g}{unit}{of}"
    first, last = (
        f"{end:.3g}{unit}{f' ({group})' if group else ''}" for end, group in ((low, lowest), (high, highest))
    )
    return f"{name}: from {first} to {last}{of}" if name else f"From {first} to {last}{of}"


def _parted(label: str) -> tuple[str, str, str]:
    """Return the quantity, the unit, and of what it is, of an axis label such as ``"goodput, %"`` or ``"% of trainings"``."""
    if label.startswith("%"):
        return "", " %", label[1:]
    what, comma, unit = label.rpartition(", ")
    if comma and len(unit) <= _UNIT:
        return what, f" {unit}", ""
    return ("", f" {label}", "") if len(label) <= _UNIT else (label, "", "")


def _survival(seen: Mapping[str, Sequence[float]]) -> str:
    """Return when half of the machines had failed, or how many were still up at the end of the log."""
    points = list(zip(seen["t_s"], seen["alive"], strict=True))
    if not points:
        return ""
    half_s = next((t_s for t_s, alive in points if alive <= 0.5), None)
    if half_s is not None:
        return f"Half of the machines failed within {duration(half_s)}"
    last_s, alive = points[-1]
    return f"{percent(alive, digits=0)} of the machines are still up after {duration(last_s)}"


def _map(section: Mapping[str, Any], rows: Rows) -> str:
    """Return how often each text begins a cell."""
    best: dict[str, int] = {}
    for row in rows:
        name = str(row[section["text"]]).split("\n")[0]
        best[name] = best.get(name, 0) + 1
    return f"Of {len(rows)} cells: {listing([f'{name} in {times}' for name, times in best.items()])}"
