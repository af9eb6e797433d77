"""Records in; one JSON report, one HTML page, one table out.

``write_report`` turns the records of a run into ``report.json`` and ``events.jsonl``;
``write_page`` turns those into ``index.html``. Importing this module imports neither
matplotlib nor jinja2: every name is loaded when it is first used, and so are they.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.report.build import build_report, demo_rows
    from holdfast.report.figures import curves, timeline, trade_off
    from holdfast.report.files import load_report, load_results, save_report, write_report, write_results
    from holdfast.report.formatting import headline
    from holdfast.report.html import render_demo, render_run, write_page
    from holdfast.report.table import demo_table, summary_lines

_WHERE = {
    "build_report": "build",
    "demo_rows": "build",
    "load_report": "files",
    "load_results": "files",
    "save_report": "files",
    "write_report": "files",
    "write_results": "files",
    "curves": "figures",
    "timeline": "figures",
    "trade_off": "figures",
    "render_demo": "html",
    "render_run": "html",
    "write_page": "html",
    "demo_table": "table",
    "summary_lines": "table",
    "headline": "formatting",
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


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast.report' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"holdfast.report.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
