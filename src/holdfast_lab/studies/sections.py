"""Typed builders for the sections of a study's page, the list under ``page`` in ``results.json``.

:mod:`holdfast_lab.pages.study` documents how each kind is drawn. A section shows either its own ``rows``, or the rows
of the study selected by ``where``. The JSON keeps the order of the keywords.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row

Section = dict[str, Any]
Column = list[str]
Sentence = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def column(
    kind: Literal["number", "text", "truth", "count", "ms", "s", "MB", "%"], key: str, heading: str = "", of: str = ""
) -> Column:
    """Return a column of a table.

    Args:
        kind: How values are displayed; numbers, times, sizes and shares as the median of a line's rows.
        key: Key of the rows.
        heading: Column heading; "" is the key.
        of: The thing that a number or a text counts, shown below the heading; "" for none.
    """
    return [key, heading or key.replace("_", " "), kind, *([of] if of else [])]


number, text, truth = partial(column, "number"), partial(column, "text"), partial(column, "truth")
milliseconds, seconds = partial(column, "ms"), partial(column, "s")
megabytes, percent, count = partial(column, "MB"), partial(column, "%"), partial(column, "count")


def _section(
    kind: str,
    name: str,
    title: str,
    note: str = "",
    rows: Rows | None = None,
    where: Mapping[str, Any] | None = None,
    **look: Any,
) -> Section:
    """Return a section of a kind.

    Args:
        kind: How it is drawn; :mod:`holdfast_lab.pages.study` says what each kind has besides the following.
        name: Its HTML anchor.
        title: Its title.
        note: How to read it.
        rows: Its own rows.
        where: Selects from the rows of the study.
        look: What its kind has, in the order in which the page's JSON has it.
    """
    chosen = {} if rows is None else {"rows": list(rows)}
    return {"kind": kind, "id": name, "title": title, "note": note, "where": dict(where or {}), **chosen, **look}


table, bars, lines = partial(_section, "table"), partial(_section, "bars"), partial(_section, "lines")
points, intervals = partial(_section, "points"), partial(_section, "intervals")


def sentences(name: str, title: str, items: Sequence[Sentence]) -> Section:
    """Return a list of sentences, each built by :func:`sentence`."""
    return {"kind": "list", "id": name, "title": title, "items": list(items)}


def sentence(words: str, section: str, *values: Any) -> Sentence:
    """Return a sentence with a link to its evidence: a table's name, and the values that identify the line."""
    return {"text": words, "section": section, "row": [str(value) for value in values]}


def not_run(
    by: Sequence[str],
    rows: Sequence[Row] | None = None,
    title: str = "Not run",
    columns: Sequence[Column] = (text("why"),),
) -> Section:
    """Return the table of failed measurements and the reasons.

    Args:
        by: One line for all rows with the same values of these.
        rows: Rows to select from, for a section with its own rows; None: the page selects from all rows of the study.
        title: Title of the section.
        columns: The reason, and any further columns.
    """
    mine = None if rows is None else [row for row in rows if row["status"] == NOT_RUN]
    where = {"status": NOT_RUN} if rows is None else None
    return table("not-run", title, "", mine, where, by=by, columns=list(columns))


def measured(part: str, **values: Any) -> dict[str, Any]:
    """Return the ``where`` that selects a part's measured rows with the given values."""
    return {"part": part, "status": MEASURED, **values}
