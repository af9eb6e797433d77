"""The results of ``holdfast demo``: its rows, its terminal table and its HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.base.formatting import DASH, count, listing, number, percent, seconds
from holdfast.errors import ConfigError
from holdfast.observe.page.comparison import held_s
from holdfast.observe.page.templates import environment
from holdfast.observe.report_text import headline
from holdfast.records.files import load_events
from holdfast.records.types import Record
from holdfast.summary.files import checked_report

if TYPE_CHECKING:
    from rich.table import Table


def demo_rows(
    reports: Sequence[tuple[str, Mapping[str, Any]]], *, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the contents of a demo's ``results.json``: one row per run, compared with the first.

    Each row is the run's report plus ``name``, ``overhead`` (extra ``train_s`` as a fraction of the first run's) and
    ``accuracy_loss`` (the first run's accuracy minus this run's, as a fraction of 1). Both are null for the first
    run, and where a run has no such number.

    Args:
        reports: Name and report of each run, the failure-free one first.
        settings: The settings that all runs share.
    """
    rows: list[dict[str, Any]] = []
    for name, report in reports:
        first = reports[0][1] if rows else {}
        rows.append(
            {
                **report,
                "name": name,
                "overhead": _overhead(report, first),
                "accuracy_loss": _accuracy_loss(report, first),
            }
        )
    return {"rows": rows, "settings": dict(settings or {})}


def _overhead(report: Mapping[str, Any], first: Mapping[str, Any]) -> float | None:
    ours, base = report.get("train_s"), first.get("train_s")
    return round(ours / base - 1, 6) if ours is not None and base else None


def _accuracy_loss(report: Mapping[str, Any], first: Mapping[str, Any]) -> float | None:
    ours, base = report["metrics"].get("accuracy"), first.get("metrics", {}).get("accuracy")
    return round(base - ours, 9) if ours is not None and base is not None else None


def checked_results(results: Any, path: Path) -> dict[str, Any]:
    """Return ``results``, read from ``path``, if they are the results of a demo.

    Raises:
        ConfigError: if they are not.
    """
    if not isinstance(results, dict) or not isinstance(results.get("rows"), list) or not results["rows"]:
        raise ConfigError(f"{path} does not hold the results of a demo: it must be an object with a list of rows")
    for place, row in enumerate(results["rows"]):
        if "name" not in checked_report(row, f"{path}, row {place}"):
            raise ConfigError(f"{path}, row {place}: a row of a demo must have a name")
    return results


def page_of(results: Any, path: Path) -> str:
    """Return the page of the demo in ``path``. The records of each run are beside it, in a folder of the run's name.

    Raises:
        ConfigError: if ``path`` does not hold the results of a demo.
    """
    rows = checked_results(results, path)["rows"]
    return render_demo(results, {row["name"]: load_events(path.parent / row["name"]) for row in rows})


def render_demo(results: Mapping[str, Any], records: Mapping[str, Sequence[Record]] | None = None) -> str:
    """Return the page of a demo.

    Args:
        results: As :func:`~holdfast_lab.pages.demo.demo_rows` makes them.
        records: Records by run name; a run without records has no timeline.
    """
    from holdfast.observe.page.figures import timeline_of
    from holdfast_lab.pages.failure_costs import failure_costs

    rows = results["rows"]
    runs = [
        {"report": row, "timeline": timeline_of(row, (records or {}).get(row["name"], ())), "headline": headline(row)}
        for row in rows
    ]
    return (
        environment(Path(__file__).parent)
        .get_template("demo.html")
        .render(
            title=results["settings"].get("title") or "The cost of surviving failures",
            settings={k: v for k, v in results["settings"].items() if k != "title"},
            headline=_demo_headline(results),
            cells=demo_cells(results),
            runs=runs,
            costs=failure_costs(results),
        )
    )


def _demo_headline(results: Mapping[str, Any]) -> str:
    rows = results["rows"]
    reference = rows[0]["replicas"]["sha256"]
    same = [row["name"] for row in rows[1:] if reference is not None and row["replicas"]["sha256"] == reference]
    others = [row["name"] for row in rows[1:] if row["name"] not in same]
    killed = sorted({len(row["failures"]) for row in rows[1:]})
    started = count(rows[0]["workers"]["started"], "worker")
    text = f"The same training job on {started}, once without failures"
    if len(rows) > 1:
        amount = f"{killed[0]}" if len(killed) == 1 else f"{killed[0]} to {killed[-1]}"
        text += f" and {len(rows) - 1} times with {amount} of them killed while it ran"
    text += "."
    if same:
        text += f" With {listing(same)} the final weights are bit-identical to those of the failure-free run"
        text += f"; with {listing(others)} they differ." if others else "."
    return text


def demo_table(results: Mapping[str, Any]) -> Table:
    """Return the table of a demo: one row per run."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run")
    for column in ("time held", "steps again", "samples lost", "accuracy", "killed", "finished", "steps", "detect"):
        table.add_column(column, justify="right")
    table.add_column("sha256")
    for row in demo_cells(results):
        cells = ("name", "held", "redone", "lost", "accuracy", "killed", "finished", "steps", "detect")
        mark = {"same": "[green]same bits[/]", "differs": "[yellow]other bits[/]"}.get(row["bits"], row["bits"])
        table.add_row(*(row[cell] for cell in cells), f"{row['sha256'][:12]} {mark}")
    return table


def demo_cells(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the cells of a demo's table as text, one mapping per run.

    ``bits`` is ``"reference"`` for the first run, and ``"same"`` or ``"differs"`` for every other run.
    """
    rows = results["rows"]
    reference = rows[0]["replicas"]["sha256"]
    return [_cells(row, first=row is rows[0], reference=reference) for row in rows]


def _cells(row: Mapping[str, Any], *, first: bool, reference: str | None) -> dict[str, str]:
    sha256 = row["replicas"]["sha256"]
    accuracy = row["metrics"].get("accuracy")
    same = sha256 is not None and sha256 == reference
    return {
        "name": row["name"],
        "strategy": row.get("strategy") or DASH,
        "killed": number(len(row["failures"])),
        "finished": f"{row['workers']['finished']} of {row['workers']['started']}",
        "steps": number(row["steps"]),
        "detect": _worst(row, "detect_s"),
        "held": seconds(held_s(row)) if row["failures"] else DASH,
        "redone": number(row.get("steps_redone")),
        "lost": number(row["samples"]["lost"]),
        "accuracy": percent(accuracy, digits=2),
        "sha256": sha256 or DASH,
        "bits": "reference" if first else "same" if same else "differs",
    }


def _worst(report: Mapping[str, Any], key: str) -> str:
    return seconds(max((f[key] for f in report["failures"] if f[key] is not None), default=None))
