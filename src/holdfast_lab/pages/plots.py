"""The plots of a study: stacked bars, lines over the number of workers, and points with intervals."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.observe.page import canvas as style
from holdfast.observe.page.canvas import WIDTH_IN, canvas
from holdfast_lab.pages.rows import grouped, middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PALETTE = (
    style.WORK,
    style.SEEN,
    style.DEATH,
    style.DECIDED,
    style.ASIDE,
    style.SOFT,
    style.RECOVERY,
    style.WORK_LIGHT,
)
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "h")
_NAMES_IN = 1.9
_BAR_IN = 0.3
_LEGEND_COLUMNS, _LEGEND_ROW_IN = 4, 0.22
_MARK_IN, _LETTER_IN = 0.6, 0.075
"""Width of a legend entry without its text, and of one character of text at most."""
_KEY_IN = 2.1


def stacked_bars(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return horizontal bars as SVG, one per group, stacked from the medians of ``section["values"]``; "" if all are 0.

    With ``range``, a line runs from the smallest to the largest total of a group's rows. With ``whole``, every bar is
    that long, and no total is written behind it.
    """
    groups = _told_apart(rows, section["by"])
    if not any(row.get(key) for row in rows for key, _ in section["values"]):
        return ""
    height, names_in = _BAR_IN * len(groups), max(_NAMES_IN, _LETTER_IN * max(map(len, groups)))
    with canvas(height + 1.0) as page:
        axes = page.axes(names_in, 0.55, WIDTH_IN - names_in - 0.6, height)
        ends = [0.0] * len(groups)
        for (key, name), color in zip(section["values"], _PALETTE, strict=False):
            sizes = [middle([row.get(key) for row in group]) or 0.0 for group in groups.values()]
            if any(sizes):
                axes.barh(range(len(groups)), sizes, left=ends, height=0.62, color=color, label=name)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for place, (end, group) in enumerate(zip(ends, groups.values(), strict=True)):
            if "whole" in section:
                continue
            sums = [sum(row.get(key) or 0.0 for key, _ in section["values"]) for row in group]
            has_range = section.get("range", False) and len(sums) > 1
            if has_range:
                axes.plot([min(sums), max(sums)], [place] * 2, color=style.INK, linewidth=1, marker="|", markersize=6)
            axes.annotate(
                f"{end:.2f}",
                (max(end, *sums) if has_range else end, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=style.SOFT,
            )
        axes.set_yticks(range(len(groups)), list(groups))
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlim(0, section.get("whole"))
        axes.set_xlabel(section["unit"])
        axes.tick_params(length=0)
        axes.grid(axis="x", color=style.LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["left"].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(section["values"]), frameon=False, fontsize=9)
        return page.svg(html.escape(section["title"]))


def workers_lines(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per series over ``section["x"]`` as SVG, on logarithmic axes; "" without rows.

    Rows that were not measured have hollow markers.
    """
    rows = [row for row in rows if row.get(section["y"][0]) is not None]
    if not rows:
        return ""
    with canvas(3.9) as page:
        axes = page.axes(0.6, 0.55, WIDTH_IN - 0.6 - _KEY_IN, 3.1)
        for place, (name, group) in enumerate(grouped(rows, section["series"]).items()):
            _draw_series(axes, section, " ".join(name), group, _look(place, 5.5))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g} %")
        axes.set_xlabel(section["x"][1])
        axes.grid(color=style.LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, which="both")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
        return page.svg(html.escape(section["title"]))


def _look(place: int, size: float) -> dict[str, Any]:
    """Return colour and marker of a series: neighbours differ in colour, and no two series share both."""
    rounds, color = divmod(place, len(_PALETTE))
    return {"color": _PALETTE[color], "marker": _MARKS[(place + rounds) % len(_MARKS)], "markersize": size}


def _draw_series(
    axes: Axes, section: Mapping[str, Any], name: str, group: Sequence[Mapping[str, Any]], look: Mapping[str, Any]
) -> None:
    (x, _), (y, _) = section["x"], section["y"]
    for is_measured, line in ((True, "-"), (False, ":")):
        of_kind = [row for row in group if (row["status"] == "measured") is is_measured]
        points = sorted(
            (row[x], value)
            for row in of_kind
            if row.get(y) is not None
            and (value := middle([other[y] for other in of_kind if other[x] == row[x]])) is not None
        )
        if points:
            xs, ys = zip(*dict.fromkeys(points), strict=True)
            fill: dict[str, Any] = {} if is_measured else {"markerfacecolor": "white"}
            axes.plot(xs, ys, linestyle=line, linewidth=1.3, label=name if is_measured else None, **look, **fill)


def scattered(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a point per row as SVG, with its interval if it has one, and its ``label`` beside it; "" without rows.

    ``interval`` names the columns of the two ends, ``band`` is a range of y to shade, ``limits`` is the range of the
    y axis, ``log`` lists the logarithmic axes, and ``curves`` are lines to draw, ``[name, xs, ys]`` each.
    """
    (x, x_name), (y, y_name) = section["x"], section["y"]
    rows = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    if not rows:
        return ""
    with canvas(4.4) as page:
        axes = page.axes(0.7, 0.55, WIDTH_IN - 0.7 - _KEY_IN, 3.6)
        if band := section.get("band"):
            axes.axhspan(*band, color=style.WORK_LIGHT, alpha=0.35, linewidth=0)
        for place, (name, group) in enumerate(grouped(rows, section["series"]).items()):
            points = [row[x] for row in group], [row[y] for row in group]
            ends, look = _ends(section, group, y), _look(place, 5)
            axes.errorbar(*points, yerr=ends, linestyle="", label=" ".join(name), linewidth=1, **look)
        for place, (name, xs, ys) in enumerate(section.get("curves", ())):
            axes.plot(xs, ys, color=style.INK, linewidth=1.2, linestyle=("-", "--", ":")[place % 3], label=name)
        for row in rows:
            if text := row.get(section.get("label", "")):
                axes.annotate(text, (row[x], row[y]), xytext=(5, 4), textcoords="offset points", fontsize=7.5)
        for axis in section.get("log", ()):
            getattr(axes, f"set_{axis}scale")("log")
            getattr(axes, f"{axis}axis").set_major_formatter(lambda value, _: f"{value:g}")
            # Matplotlib labels minor ticks in mathtext by default, which does not end up as text in the SVG.
            getattr(axes, f"{axis}axis").set_minor_formatter(
                lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""
            )
        axes.set_ylim(*section.get("limits", (None, None)))
        axes.set_xlabel(x_name)
        axes.set_ylabel(y_name)
        _finish(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
        return page.svg(html.escape(section["title"]))


def interval_lines(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per group over ``x`` as SVG, on it a point with its interval per series; "" without rows.

    ``interval`` names the columns of the two ends, ``band`` is a range of x to shade, ``limits`` the range of the axis.
    """
    x, x_name = section["x"]
    rows = [row for row in rows if row.get(x) is not None]
    if not rows:
        return ""
    groups = [" ".join(key) for key in grouped(rows, section["by"])]
    series = _told_apart(rows, section["series"])
    height = len(groups) * max(_BAR_IN, 0.13 * len(series))
    width = WIDTH_IN - _NAMES_IN - 0.2
    columns = int(width / (_MARK_IN + _LETTER_IN * max(map(len, series))))
    columns = max(1, min(columns, _LEGEND_COLUMNS))
    with canvas(height + 0.75 + _LEGEND_ROW_IN * -(-len(series) // columns)) as page:
        axes = page.axes(_NAMES_IN, 0.55, width, height)
        if band := section.get("band"):
            axes.axvspan(*band, color=style.WORK_LIGHT, alpha=0.35, linewidth=0)
        for place, (name, group) in enumerate(series.items()):
            aside = 0.7 * ((place + 0.5) / len(series) - 0.5)
            lines = [groups.index(" ".join(key)) + aside for key in (_key(row, section["by"]) for row in group)]
            points = [row[x] for row in group], lines
            ends, look = _ends(section, group, x), _look(place, 4)
            axes.errorbar(*points, xerr=ends, linestyle="", label=name, linewidth=1, **look)
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlim(*section.get("limits", (None, None)))
        axes.set_xlabel(x_name)
        _finish(axes)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize=9)
        return page.svg(html.escape(section["title"]))


def _told_apart(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows grouped by those of ``names`` whose values differ; by all of them if none does."""
    differ = [name for name in names if len(grouped(rows, [name])) > 1] or names
    return {" ".join(key): group for key, group in grouped(rows, differ).items()}


def _key(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return next(iter(grouped([row], names)))


def _ends(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], key: str) -> list[list[float]] | None:
    """Return the distances of each row's value from both ends of its interval, as matplotlib's error bars take them."""
    if "interval" not in section:
        return None
    ends = [[row[end] if row.get(end) is not None else row[key] for row in rows] for end in section["interval"]]
    values = [row[key] for row in rows]
    return [[abs(value - end) for value, end in zip(values, side, strict=True)] for side in ends]


def _finish(axes: Axes) -> None:
    axes.grid(color=style.LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")
