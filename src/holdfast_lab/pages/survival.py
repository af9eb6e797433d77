"""The picture of lifetimes in a log: the share of machines still up by age, and the fitted distributions."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.observe.page import canvas as style
from holdfast.observe.page.canvas import WIDTH_IN, canvas

_COLORS = (style.SEEN, style.DECIDED, style.DEATH)
_UNITS = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0))
_KEY_IN = 2.1


def survival_section(log: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the section of one log: what it was taken for, and its picture."""
    used = [fit["described"] for fit in log["fits"] if fit["is_used"]]
    return {
        "kind": "survival",
        "id": f"lifetimes-{number}",
        "title": "Lifetimes in the log",
        "note": f"{'; '.join(log['said'])}. Used: {', '.join(used)}. Steps and band: the share of machines still up, "
        "by Kaplan and Meier, with its 95 % interval, of machines whose begin is in the log. Lines: the fits.",
        "where": {},
        "log": log,
    }


def survival_curves(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture as SVG."""
    log = section["log"]
    longest_s = max(fit["t_s"][-1] for fit in log["fits"])
    unit, one = next((unit for unit in _UNITS if longest_s >= 2 * unit[1]), _UNITS[-1])
    with canvas(4.2) as page:
        axes = page.axes(0.7, 0.55, WIDTH_IN - 0.7 - _KEY_IN, 3.4)
        seen = log["survival"]
        if seen["t_s"]:
            at = [time / one for time in seen["t_s"]]
            axes.fill_between(
                at, seen["low"], seen["high"], step="post", color=style.WORK_LIGHT, alpha=0.4, linewidth=0
            )
            axes.step(at, seen["alive"], where="post", color=style.WORK, linewidth=1.4, label="in the log")
        for color, dash, fit in zip(_COLORS, ("--", "-.", ":"), log["fits"], strict=False):
            name = f"{fit['family']}{' (used)' if fit['is_used'] else ''}"
            line = "-" if fit["is_used"] else dash
            axes.plot(
                [time / one for time in fit["t_s"]],
                fit["alive"],
                color=color,
                linestyle=line,
                linewidth=1.2,
                label=name,
            )
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0, longest_s / one)
        axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g} %")
        axes.set_xlabel(f"time since a machine came up, {unit}")
        axes.grid(color=style.LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
        return page.svg(html.escape(section["title"]))
