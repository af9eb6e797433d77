"""The scatter plot of a demo: accuracy lost against time lost, one point per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.report import canvas as style
from holdfast.report.canvas import WIDTH_IN, canvas
from holdfast.report.formatting import MINUS, percent, plain
from holdfast_lab.pages.words import points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT_IN = 0.38
"""Room for the tick labels of the y axis."""
_RIGHT_IN = 0.1


def trade_off(results: Mapping[str, Any]) -> str:
    """Return a scatter plot as SVG: accuracy lost against time lost of each run; "" if no run has both numbers.

    Args:
        results: As :func:`~holdfast_lab.pages.demo.demo_rows` returns them; the failure-free run is the origin.
    """
    rows = [r for r in results["rows"][1:] if r.get("overhead") is not None and r.get("accuracy_loss") is not None]
    if not rows:
        return ""
    spots = [(100 * row["overhead"], 100 * row["accuracy_loss"]) for row in rows]
    with canvas(4.3) as page:
        axes = page.axes(_LEFT_IN, 0.6, WIDTH_IN - _LEFT_IN - _RIGHT_IN, 3.35)
        _draw_plane(axes, spots)
        axes.plot(0, 0, marker="o", color=style.SOFT, markersize=8, markerfacecolor="white", zorder=4, clip_on=False)
        xs, ys = zip(*spots, strict=True)
        axes.scatter(xs, ys, s=72, color=style.WORK, zorder=5, clip_on=False)
        labels = [(results["rows"][0]["name"], "", (0.0, 0.0))]
        labels += [(row["name"], _costs(row, results), spot) for row, spot in zip(rows, spots, strict=True)]
        _label(axes, labels)
        return page.svg("Accuracy lost against time lost, one point per strategy")


def _draw_plane(axes: Axes, spots: Sequence[tuple[float, float]]) -> None:
    xs, ys = [0.0, *(x for x, _ in spots)], [0.0, *(y for _, y in spots)]
    # Differences below a few percent are noise of the machine, not effects of the strategy: do not magnify them.
    wide, high = max(max(xs) - min(xs), 5.0), max(max(ys) - min(ys), 0.5)
    axes.set_xlim(min(xs) - 0.06 * wide, min(xs) + 1.2 * wide)
    axes.set_ylim(min(ys) - 0.2 * high, min(ys) + 1.15 * high)
    axes.axhline(0, color=style.FAINT, linewidth=0.8, zorder=1)
    axes.axvline(0, color=style.FAINT, linewidth=0.8, zorder=1)
    axes.grid(color=style.LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{plain(x)} %")
    axes.yaxis.set_major_formatter(lambda y, _: plain(y))
    axes.set_xlabel("time lost: training time over that of the failure-free run")
    axes.set_title(
        "accuracy lost, percentage points below the failure-free run", loc="left", fontsize=9, color=style.SOFT
    )


def _costs(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    reference = results["rows"][0]["replicas"]["sha256"]
    same = reference is not None and row["replicas"]["sha256"] == reference
    accuracy = (
        "same bits" if same else points(row["accuracy_loss"]).replace("+", MINUS) if row["accuracy_loss"] > 0 else ""
    )
    return ", ".join(part for part in (f"{percent(row['overhead'], signed=True)} time", accuracy) if part)


def _label(axes: Axes, labels: Sequence[tuple[str, str, tuple[float, float]]]) -> None:
    """Write each label beside its point, where it covers neither a point nor another label."""
    scale_x, scale_y = _points_per_unit(axes)
    dots = [(x * scale_x, y * scale_y) for _, _, (x, y) in labels]
    right = axes.get_xlim()[1] * scale_x + 12
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    for (name, costs, spot), (x, y) in sorted(zip(labels, dots, strict=True), key=lambda item: -item[1][1]):
        width, height = 5.6 * max(len(name) * 1.1, len(costs) * 0.9), 24.0 if costs else 12.0
        places = [
            (10.0, 6.0),
            (10.0, -height / 2),
            (10.0, -height - 6),
            (-10.0 - width, 6.0),
            (-10.0 - width, -height / 2),
            (-width / 2, 10.0),
        ]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in places]
        costs_of = [sum(map(_overlap, [box] * len(taken), taken)) + max(0.0, box[2] - right) * 20 for box in boxes]
        best = costs_of.index(min(costs_of))
        taken.append(boxes[best])
        dx, dy = places[best]
        color = style.INK if costs else style.SOFT
        _write(
            axes, name, spot, (dx, dy + height - 10), color=color, fontsize=10, fontweight="bold" if costs else "normal"
        )
        if costs:
            _write(axes, costs, spot, (dx, dy + 1), color=style.SOFT, fontsize=9)


def _write(axes: Axes, text: str, spot: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    axes.annotate(text, spot, xytext=offset, textcoords="offset points", va="baseline", zorder=6, **look)


def _points_per_unit(axes: Axes) -> tuple[float, float]:
    box = axes.get_window_extent()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    per_dot = 72 / axes.figure.dpi
    return box.width * per_dot / (right - left), box.height * per_dot / (high - low)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0
