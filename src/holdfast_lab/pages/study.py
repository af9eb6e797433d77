"""The page of a study: its claims, tables and plots, rendered from ``results.json`` alone.

The study's ``page`` lists the sections. The kind of a section is one of these:

* ``table``: one line for all rows with the same values of ``by``; a column is ``[key, heading, unit]``, and numbers are
  medians; a column of texts or counts has a fourth item, the thing counted: ``[key, heading, "text", "iterations"]``;
* ``bars``: a bar for each group in ``by``, labelled by the values that differ between groups, stacked from the medians
  of ``values``, ``[key, name]`` each; ``range`` adds the range of the rows' totals;
* ``lines``: a line for each group in ``series`` over ``x``; rows that are not ``measured`` have hollow markers;
* ``points``: a point for each row at ``x`` and ``y``, with its ``interval``, coloured by ``series``;
* ``intervals``: a line for each group in ``by``, on it a point for each row, at ``x``, with its ``interval``;
* ``map``: a cell for each row at ``x`` and ``y``, darker for a larger ``shade``, with ``text`` in it;
* ``list``: sentences, each linked to its evidence: the ``section`` and the ``row``.

``where`` selects the rows with the given values. A section that shows numbers derived from many rows has ``rows`` of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.base import formatting as words
from holdfast.observe.page.canvas import as_csv, keep_rows
from holdfast.observe.page.templates import environment
from holdfast.summary.files import check_keys
from holdfast_lab.pages.heat_map import winners
from holdfast_lab.pages.plots import interval_lines, scattered, stacked_bars, workers_lines
from holdfast_lab.pages.rows import as_name, grouped, middle, row_id
from holdfast_lab.pages.seen import seen_in
from holdfast_lab.pages.survival import survival_curves

_MEASURED = "measured"
_MANY = 40
"""A table with more lines than this is collapsed."""
SHARE = "share"
"""Unit of a number from 0 to 1 that is displayed in percent."""


def page_of(results: dict[str, Any], path: Path) -> str:
    """Return the page of the study in ``path``.

    Raises:
        ConfigError: if ``path`` does not hold the results of a study.
    """
    check_keys(
        results, {"settings": dict, "rows": list, "claims": list}, f"{path} does not hold the results of a study"
    )
    return render_study(results)


def render_study(results: Mapping[str, Any]) -> str:
    """Return the page of a study.

    Args:
        results: The contents of its ``results.json``.
    """
    shown = [shown_section(section, results["rows"]) for section in results.get("page", ())]
    settings = {name: text for name, value in results["settings"].items() if (text := _listed(value))}
    return (
        environment(Path(__file__).parent)
        .get_template("study.html")
        .render(
            title=results.get("title") or results["study"],
            paper=results.get("paper", ""),
            intervals=results.get("intervals", ""),
            left_out=results.get("left_out", ()),
            failed=results.get("failed", ()),
            verdicts=verdicts(results),
            claims=[_claim(claim) for claim in results["claims"]],
            sections=[section for section in shown if section],
            settings=settings,
        )
    )


def claim_lines(results: Mapping[str, Any]) -> list[str]:
    """Return how many claims hold, and each claim with its verdict, as lines for a terminal."""
    lines = [f"{said}."] if (said := verdicts(results)) else []
    for claim in results["claims"]:
        shown = _claim(claim)
        numbers = f" ({shown['numbers']})" if shown["numbers"] else ""
        lines.append(f"{shown['verdict']:<14} {claim['claim']}{numbers}. {claim.get('found', '')}".rstrip())
    return lines


def verdicts(results: Mapping[str, Any]) -> str:
    """Return how many claims hold, do not hold, are undecided, failed or were not checked, in one sentence.

    Return "" without any.
    """
    found = [_claim(claim)["verdict"] for claim in results["claims"]]
    said = [(found.count(verdict), what) for verdict, what in _VERDICTS.items()]
    parts = [f"{amount} {one if amount == 1 else many}" for amount, (one, many) in said if amount]
    return f"Of {words.count(len(found), 'claim')}, {words.listing(parts)}" if found else ""


_VERDICTS = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "undecided": ("is undecided", "are undecided"),
    "failed": ("has no result because its part failed", "have no result because their parts failed"),
    "not checked": ("was not checked", "were not checked"),
}
"""By verdict: what one claim does, and what several do."""


def _claim(claim: Mapping[str, Any]) -> dict[str, Any]:
    ours, ci, paper = claim["ours"], claim["ci"], claim["paper"]
    neither = "failed" if claim.get("failed") else "not checked" if ours is None else "undecided"
    verdict = {True: "holds", False: "does not hold", None: neither}[claim["holds"]]
    unit = claim.get("unit", "")
    parts = [_amount(ours, unit)] if ours is not None else []
    parts += (
        [f"95 % interval {_end(ci[0], '-∞', unit)} to {_end(ci[1], '∞', unit)}{' %' * (unit == SHARE)}"] if ci else []
    )
    parts += [f"expected {_amount(paper, unit)}"] if paper is not None and ours is not None else []
    mark = {True: "same", False: "bad", None: {"failed": "bad", "not checked": "dim"}.get(neither, neither)}[
        claim["holds"]
    ]
    return {**claim, "verdict": verdict, "mark": mark, "numbers": ", ".join(parts), "found": claim.get("found", "")}


def _amount(value: float, unit: str) -> str:
    """Return a number of a claim with its unit; a share in percent."""
    return f"{100 * value:.4g} %" if unit == SHARE else f"{value:.4g} {unit}".rstrip()


def _end(value: float | None, unbounded: str, unit: str) -> str:
    return unbounded if value is None else f"{value * (100 if unit == SHARE else 1):.4g}"


def shown_section(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return a section as the template takes it, None if there is nothing to show."""
    if section["kind"] == "list":
        items = [{"text": item["text"], "link": row_id(item["section"], item["row"])} for item in section["items"]]
        return {**section, "items": items} if items else None
    rows = section.get("rows", rows)
    chosen = [row for row in rows if all(row.get(key) == value for key, value in section["where"].items())]
    if not chosen:
        return None
    if section["kind"] == "table":
        return {**section, **_table(section, chosen)}
    draw = {
        "bars": stacked_bars,
        "lines": workers_lines,
        "points": scattered,
        "intervals": interval_lines,
        "map": winners,
        "survival": survival_curves,
    }[section["kind"]]
    svg = draw(section, chosen)
    if not svg:
        return None
    keep_rows(section["title"], chosen)
    return {**section, "svg": svg, "seen": seen_in(section, chosen), "csv": as_csv(_plotted(section, chosen))}


def _plotted(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns of the rows that a figure shows."""
    axes = [section[axis][0] for axis in ("x", "y") if axis in section]
    named = [key for name in ("by", "series", "interval") for key in section.get(name, ())]
    parts = [key for key, _ in section.get("values", ())]
    single = [section[name] for name in ("label", "text", "shade") if name in section]
    wanted = dict.fromkeys([*named, *axes, *parts, *single])
    return [{key: row.get(key) for key in wanted} for row in rows]


def _table(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by = [name for name in section["by"] if any(row.get(name) is not None for row in rows)]
    groups = grouped(rows, section["by"])
    columns = [
        column
        for column in section["columns"]
        if column[2] == "count" or any(row.get(column[0]) not in (None, 0) for row in rows)
    ]
    lines = [
        {
            "id": row_id(section["id"], key),
            "names": [as_name(group[0].get(name)) for name in by],
            "cells": [_cell([row.get(column[0]) for row in group], column[2]) for column in columns],
        }
        for key, group in groups.items()
    ]
    heads = [(column[1], column[2], _shown_unit(*column[2:])) for column in columns]
    return {
        "names": [name.replace("_", " ") for name in by],
        "heads": heads,
        "lines": lines,
        "folded": section.get("folded") or len(lines) > _MANY,
    }


def _shown_unit(kind: str, unit: str = "") -> str:
    """Return the unit below a column's heading; "" for percentages, which have their sign in every cell."""
    return unit or (kind if kind in ("ms", "s", "MB") else "")


def _listed(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else as_name(value)


def _cell(values: Sequence[Any], unit: str) -> str:
    known = [value for value in values if value is not None]
    if unit == "count":
        return str(len(values))
    if not known:
        return ""
    if unit == "truth":
        return "yes" if all(known) else "no"
    if unit == "text":
        return "; ".join(dict.fromkeys(map(str, known)))
    number = middle(known)
    assert number is not None
    if unit == "MB":
        return f"{number / 1e6:,.2f}"
    if unit == "ms":
        return f"{1000 * number:,.0f}" if number >= 0.1 else f"{1000 * number:.3g}"
    if unit == "s":
        return f"{number:.3f}" if number < 10 else f"{number:.1f}"
    if unit == "%":
        return words.percent(number, digits=2)
    return f"{number:,.0f}" if number.is_integer() else f"{number:.4g}"
