"""The pictures of a study: stacked bars, and lines over a number of workers."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.report import canvas as style
from holdfast.report.canvas import WIDTH_IN, canvas
from holdfast.report.study import grouped, middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PALETTE = (
    style.WORK,
    style.SEEN,
    style.DEATH,
    style.DECIDED,
    style.FAINT,
    style.RECOVERY,
    style.WORK_LIGHT,
    style.SOFT,
)
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "h")
_NAMES_IN = 1.9
_BAR_IN = 0.3
_KEY_IN = 2.1


def stacked_bars(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return horizontal bars, one a group, stacked from the medians of ``section["values"]``; "" if there is none."""
    groups = grouped(rows, section["by"])
    if not any(row.get(key) for row in rows for key, _ in section["values"]):
        return ""
    height = _BAR_IN * len(groups)
    with canvas(height + 1.0) as page:
        axes = page.axes(_NAMES_IN, 0.55, WIDTH_IN - _NAMES_IN - 0.6, height)
        ends = [0.0] * len(groups)
        for (key, name), color in zip(section["values"], _PALETTE, strict=False):
            sizes = [middle([row.get(key) for row in group]) or 0.0 for group in groups.values()]
            if any(sizes):
                axes.barh(range(len(groups)), sizes, left=ends, height=0.62, color=color, label=name)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for place, end in enumerate(ends):
            axes.annotate(
                f"{end:.2f}", (end, place), xytext=(4, 0), textcoords="offset points", va="center", color=style.SOFT
            )
        axes.set_yticks(range(len(groups)), [" ".join(key) for key in groups])
        axes.invert_yaxis()
        axes.set_xlabel(section["unit"])
        axes.tick_params(length=0)
        axes.grid(axis="x", color=style.LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["left"].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(section["values"]), frameon=False, fontsize=9)
        return page.svg(html.escape(section["title"]))


def workers_lines(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each series over ``section["x"]``, both axes logarithmic; what is not measured is hollow. "" without rows."""
    rows = [row for row in rows if row.get(section["y"][0]) is not None]
    if not rows:
        return ""
    with canvas(3.9) as page:
        axes = page.axes(0.6, 0.55, WIDTH_IN - 0.6 - _KEY_IN, 3.1)
        for place, (name, group) in enumerate(grouped(rows, section["series"]).items()):
            look = {"color": _PALETTE[place % len(_PALETTE)], "marker": _MARKS[place % len(_MARKS)], "markersize": 5.5}
            _draw_series(axes, section, " ".join(name), group, look)
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
