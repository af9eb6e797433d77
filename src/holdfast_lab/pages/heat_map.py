"""Draws a heat map over two quantities: the best strategy in each cell."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.observe.page import canvas as style
from holdfast.observe.page.canvas import WIDTH_IN, canvas

_NAMES_IN = 1.9
_FIELD_IN = 0.62


def winners(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the map as SVG: a cell for each row, with the text in column ``text``, darker for a larger ``shade``.

    ``x`` and ``y`` are ``[key, name]`` of the two axes. Their values keep the order of the rows, from left to right and
    from top to bottom. ``rows`` must not be empty.
    """
    (x, x_name), (y, y_name) = section["x"], section["y"]
    across, down = list(dict.fromkeys(row[x] for row in rows)), list(dict.fromkeys(row[y] for row in rows))
    height = _FIELD_IN * len(down)
    with canvas(height + 0.75) as page:
        axes = page.axes(_NAMES_IN, 0.6, WIDTH_IN - _NAMES_IN - 0.2, height)
        darkest = max(*(row[section["shade"]] for row in rows), 1e-9)
        for row in rows:
            left, top = across.index(row[x]), down.index(row[y])
            depth = 0.06 + 0.5 * max(row[section["shade"]], 0) / darkest
            axes.barh(top, 1, left=left, height=1, color=style.WORK, alpha=depth, edgecolor="white", linewidth=2)
            axes.text(left + 0.5, top, row[section["text"]], ha="center", va="center", fontsize=8.5, color=style.INK)
        axes.set_xticks([place + 0.5 for place in range(len(across))], [str(value) for value in across])
        axes.set_yticks(range(len(down)), [str(value) for value in down])
        axes.set_xlim(0, len(across))
        axes.set_ylim(len(down) - 0.5, -0.5)
        axes.set_xlabel(x_name)
        axes.set_ylabel(y_name)
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        return page.svg(html.escape(section["title"]))
