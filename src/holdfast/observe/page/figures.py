"""The figures of a report, as inline SVG: the timeline of the run, and its learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.base.formatting import count, listing, seconds
from holdfast.observe.page.canvas import WIDTH_IN, as_csv, canvas
from holdfast.observe.page.curves import Drawing, NamedRun, curves_of
from holdfast.observe.page.timeline import draw_lanes, draw_legend, draw_zoom, first_answered, stretches
from holdfast.records.run_model import RunModel, model_of
from holdfast.records.types import Record

_LEFT_IN = 0.72
"""Room for the names of workers."""
_RIGHT_IN = 0.1
_LEGEND_IN = 0.32
_FEW = 4
"""Up to this number, lost workers are named in the title."""


def timeline(report: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Return the timeline: a lane for each worker, failures, recoveries, and the first recovery enlarged.

    Args:
        report: Report of the run.
        records: Records of the run; without them there is no figure, and the result is "".
    """
    drawing = timeline_of(report, records)
    return drawing.svg if drawing else ""


def timeline_of(report: Mapping[str, Any], records: Sequence[Record]) -> Drawing | None:
    """Return the timeline with its title and its values, None if there is no training to draw."""
    if not records:
        return None
    history = model_of(records, report["workers"].get("ranks_started", ()))
    if not history.ranks or (history.is_distributed and not history.commits):
        return None
    return Drawing(svg=_timeline(report, history), title=_seen(report, history), values=_segments(report, history))


def _timeline(report: Mapping[str, Any], history: RunModel) -> str:
    lanes_in = max(len(history.ranks) * 0.27, 0.6) if len(history.ranks) <= 32 else 8.6
    zoomed = first_answered(history)
    zoom_in = lanes_in + 1.42 if zoomed else 0.0
    width = WIDTH_IN - _LEFT_IN - _RIGHT_IN
    with canvas(lanes_in + 0.5 + _LEGEND_IN + zoom_in) as page:
        main = page.axes(_LEFT_IN, 0.5 + zoom_in, width, lanes_in)
        draw_lanes(main, history, report["wall_s"])
        draw_legend(main, _LEFT_IN, history)
        if zoomed:
            detail = page.axes(_LEFT_IN, 0.5, width, lanes_in + 0.25)
            draw_zoom(detail, _LEFT_IN, main, history, zoomed, report["step_s"]["p50"])
        return page.svg(
            f"Timeline of {count(len(history.ranks), history.worker)}, {count(len(history.failures), 'failure')}"
        )


def _seen(report: Mapping[str, Any], history: RunModel) -> str:
    """Return what the timeline shows."""
    total, finished, one = len(history.ranks), report["workers"]["finished"], history.worker
    lost = [f"{one} {failure.rank} after {seconds(failure.t_s)}" for failure in history.failures]
    named = f"Lost: {listing(lost)}" if len(lost) <= _FEW else f"{count(len(lost), one)} lost"
    if not lost:
        return f"{finished} of {count(total, one)} {'trains' if finished == 1 else 'train'} to the end"
    rest = f"; {finished} of {total} {'trains' if finished == 1 else 'train'} to the end" if finished else ""
    return f"{named}{rest}"


def _segments(report: Mapping[str, Any], history: RunModel) -> str:
    """Return the bars and the failures as CSV, in seconds since the start."""
    wall_s = report["wall_s"]
    rows = [
        {"rank": bar.rank, "what": "training", "from_s": bar.from_s + bar.waits_s, "to_s": bar.to_s}
        for bar in stretches(history, wall_s)
    ]
    rows += [
        {"rank": lost.rank, "what": lost.kind, "from_s": lost.t_s, "to_s": lost.resumed_s, "step": lost.step}
        for lost in history.failures
    ]
    return as_csv(rows)


def curves(report: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Return the logged metrics over committed steps, with failures as vertical lines; "" if nothing was logged."""
    return "".join(figure.svg for figure in curves_of([NamedRun(name="", report=report, records=records)]))
