"""The sections of a study's page: typed builders of what ``results.json`` has under ``page``.

:mod:`holdfast_lab.pages.study` says how each kind is drawn. A section shows either rows of its own (``rows``), or those rows of
the study that have certain values (``where``). Keywords stand in the JSON in the order in which they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NotRequired, TypedDict, Unpack

from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row

Section = dict[str, Any]
Column = list[str]
Sentence = dict[str, Any]
Axis = Sequence[str]
"""The key of a column of the rows, and its name in the picture."""
Rows = Sequence[Mapping[str, Any]]


def column(
    kind: Literal["number", "text", "truth", "count", "ms", "s", "MB", "%"], key: str, heading: str = "", of: str = ""
) -> Column:
    """Return a column of a table.

    Args:
        kind: How a value is shown; a number, a time, a size or a share as the median of a line's rows.
        key: In the rows.
        heading: Over it; "" is the key.
        of: What a number or a text counts, below the heading; "" for nothing.
    """
    return [key, heading or key.replace("_", " "), kind, *([of] if of else [])]


number, text, truth = partial(column, "number"), partial(column, "text"), partial(column, "truth")
milliseconds, seconds = partial(column, "ms"), partial(column, "s")
megabytes, percent, count = partial(column, "MB"), partial(column, "%"), partial(column, "count")


class TableLook(TypedDict):
    """What a table shows: a line for rows that agree in ``by``; ``folded`` up until it is asked for."""

    by: Sequence[str]
    columns: Sequence[Column]
    folded: NotRequired[bool]


class BarsLook(TypedDict):
    """What bars show: a bar for each group in ``by``, stacked from ``values``, ``[key, name]`` each."""

    by: Sequence[str]
    values: Sequence[Axis]
    unit: str
    range: NotRequired[bool]
    whole: NotRequired[float]


class LinesLook(TypedDict):
    """What lines show: a line for each group in ``series``."""

    series: Sequence[str]
    x: Axis
    y: Axis


class PointsLook(LinesLook):
    """What points show: a point for each row; ``interval`` names its two ends, ``band`` and ``limits`` are ranges of y."""

    interval: NotRequired[Sequence[str]]
    label: NotRequired[str]
    limits: NotRequired[Sequence[float]]
    band: NotRequired[Sequence[float]]
    log: NotRequired[Sequence[Literal["x", "y"]]]
    curves: NotRequired[Sequence[Any]]


class IntervalsLook(TypedDict):
    """What intervals show: a line for each group in ``by``; ``band`` and ``limits`` are ranges of x."""

    by: Sequence[str]
    series: Sequence[str]
    x: Axis
    interval: NotRequired[Sequence[str]]
    limits: NotRequired[Sequence[float]]
    band: NotRequired[Sequence[float]]


def _section(
    kind: str,
    name: str,
    title: str,
    note: str,
    rows: Rows | None,
    where: Mapping[str, Any] | None,
    look: Mapping[str, Any],
) -> Section:
    chosen = {} if rows is None else {"rows": list(rows)}
    return {"kind": kind, "id": name, "title": title, "note": note, "where": dict(where or {}), **chosen, **look}


def table(
    name: str,
    title: str,
    note: str = "",
    rows: Rows | None = None,
    where: Mapping[str, Any] | None = None,
    **look: Unpack[TableLook],
) -> Section:
    """Return a table: see :class:`TableLook`; ``name`` is its anchor, ``note`` says how to read it."""
    return _section("table", name, title, note, rows, where, look)


def bars(
    name: str,
    title: str,
    note: str = "",
    rows: Rows | None = None,
    where: Mapping[str, Any] | None = None,
    **look: Unpack[BarsLook],
) -> Section:
    """Return stacked bars: see :class:`BarsLook`."""
    return _section("bars", name, title, note, rows, where, look)


def lines(name: str, title: str, note: str, where: Mapping[str, Any], **look: Unpack[LinesLook]) -> Section:
    """Return lines: see :class:`LinesLook`."""
    return _section("lines", name, title, note, None, where, look)


def points(name: str, title: str, note: str, rows: Rows, **look: Unpack[PointsLook]) -> Section:
    """Return points: see :class:`PointsLook`."""
    return _section("points", name, title, note, rows, None, look)


def intervals(name: str, title: str, note: str, rows: Rows, **look: Unpack[IntervalsLook]) -> Section:
    """Return intervals: see :class:`IntervalsLook`."""
    return _section("intervals", name, title, note, rows, None, look)


def sentences(name: str, title: str, items: Sequence[Sentence]) -> Section:
    """Return a list of sentences, each made by :func:`sentence`."""
    return {"kind": "list", "id": name, "title": title, "items": list(items)}


def sentence(words: str, section: str, *values: Any) -> Sentence:
    """Return a sentence that links to the line of a table that it stands on: the table's name, and the line's values."""
    return {"text": words, "section": section, "row": [str(value) for value in values]}


def not_run(
    by: Sequence[str],
    rows: Sequence[Row] | None = None,
    title: str = "Not run",
    columns: Sequence[Column] = (text("why"),),
) -> Section:
    """Return the table of what failed, and why.

    Args:
        by: A line for rows that agree in these.
        rows: To choose from, where the section brings rows of its own; None: the page chooses from all of the study.
        title: Over it.
        columns: The reason, and what else is told.
    """
    mine = None if rows is None else [row for row in rows if row["status"] == NOT_RUN]
    where = {"status": NOT_RUN} if rows is None else None
    return table("not-run", title, "", mine, where, by=by, columns=list(columns))


def measured(part: str, **values: Any) -> dict[str, Any]:
    """Return the ``where`` of a part's measured rows, of those that have certain values."""
    return {"part": part, "status": MEASURED, **values}
