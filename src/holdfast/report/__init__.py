"""Reports: from the records of a run to a JSON report, an HTML page and a table on the terminal.

``write_report`` turns the records of a run into ``report.json`` and ``events.jsonl``;
``write_page`` turns those into ``index.html``. Importing this module imports neither
matplotlib nor jinja2: every name is imported on first use, and so are they.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast.report.build import build_report
    from holdfast.report.figures import curves, timeline
    from holdfast.report.files import load_report, save_report, write_report, write_results
    from holdfast.report.formatting import headline
    from holdfast.report.html import render_run, write_page
    from holdfast.report.table import summary_lines

_WHERE = {
    "build_report": "holdfast.report.build",
    "headline": "holdfast.report.formatting",
    "summary_lines": "holdfast.report.table",
    **dict.fromkeys(("curves", "timeline"), "holdfast.report.figures"),
    **dict.fromkeys(("load_report", "save_report", "write_report", "write_results"), "holdfast.report.files"),
    **dict.fromkeys(("render_run", "write_page"), "holdfast.report.html"),
    **dict.fromkeys(("demo_rows", "demo_table", "load_results", "render_demo"), "holdfast_lab.pages.demo"),
    "trade_off": "holdfast_lab.pages.failure_costs",
}

__all__ = [
    "build_report",
    "curves",
    "demo_rows",
    "demo_table",
    "headline",
    "load_report",
    "load_results",
    "render_demo",
    "render_run",
    "save_report",
    "summary_lines",
    "timeline",
    "trade_off",
    "write_page",
    "write_report",
    "write_results",
]

__getattr__ = lazy(__name__, _WHERE)


def __dir__() -> list[str]:
    return __all__
