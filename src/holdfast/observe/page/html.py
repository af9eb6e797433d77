"""The page of a run as one self-contained HTML file; :mod:`holdfast.observe.page.pages` draws other results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.base import formatting as words
from holdfast.errors import ConfigError
from holdfast.observe import report_text
from holdfast.observe.page.canvas import canvas
from holdfast.observe.page.pages import draw_results
from holdfast.observe.page.templates import environment
from holdfast.records.files import load_events
from holdfast.records.types import Record, StepCommitted
from holdfast.summary.build import DISTRIBUTED
from holdfast.summary.files import load_report

_FEW = 6
"""Up to this number, workers are listed by rank below a count."""
_RECENT = 20
"""The key number for learning is a mean over this many steps, as a single mini-batch is too noisy."""


def render_run(report: Mapping[str, Any], records: Sequence[Record] = (), title: str = "") -> str:
    """Return the page of one run.

    Args:
        report: A report made by :func:`~holdfast.summary.build.build_report`.
        records: Records of the run; without them the page has no figures.
        title: Title of the page; "" names the strategy and the fabric.
    """
    from holdfast.observe.page.curves import NamedRun, curves_of
    from holdfast.observe.page.figures import timeline_of

    message, _, lead = report_text.headline(report).partition(". ")
    return (
        environment()
        .get_template("run.html")
        .render(
            title=title or _title(report),
            message=message.removesuffix("."),
            lead=lead,
            report=report,
            tiles=[*_tiles(report), *_learned(report, records)],
            timeline=timeline_of(report, records),
            curves=curves_of([NamedRun(name="", report=report, records=records)]),
            spent=_spent(report.get("goodput")),
            lost_ids=report.get("lost") or (),
            happenings=report_text.happenings(report),
            distributed=report_text.is_distributed(report),
            worker=report_text.worker(report),
        )
    )


def check_folder(directory: Path) -> None:
    """Check that a page and its files can be written to ``directory``, which is created if necessary.

    Called before a long computation, which would otherwise be lost.

    Raises:
        ConfigError: if it is a file or cannot be written, or if a package that draws pages is not installed.
    """
    environment()
    with canvas(1.0):  # both raise the error about missing packages
        pass
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file: results need a directory or a new path")
    draft = directory / ".holdfast.draft"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error


def write_page(directory: Path) -> Path:
    """Write ``index.html`` for the run, the demo, the study or the simulation in ``directory``, and return its path.

    The records of a demo's runs are read from the folder in ``directory`` with the name of the run. The figures of a
    study and of a simulation are also written to a folder ``figures``: SVG, PNG, and CSV of the rows that they show.

    Raises:
        ConfigError: if ``directory`` holds none of these, or damaged files.
    """
    environment()  # raises the error about missing packages
    from jinja2 import UndefinedError

    try:
        page = draw_results(directory) or render_run(load_report(directory), load_events(directory))
    except ConfigError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, UndefinedError) as error:
        raise ConfigError(
            f"the files in {directory} are not in the form that Holdfast writes, {type(error).__name__}: {str(error).partition(chr(10))[0]}; was one of them edited, or cut?"
        ) from error
    path = directory / "index.html"
    try:
        path.write_text(page, encoding="utf-8", errors="backslashreplace")  # an argument may be any bytes
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def _title(report: Mapping[str, Any]) -> str:
    what = DISTRIBUTED if report_text.is_distributed(report) else report.get("strategy")
    parts = [what, report.get("fabric")]
    return " on ".join(part for part in parts if part) or "A run"


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the key numbers: value, its name, and a note about it."""
    failures, samples = report["failures"], report["samples"]
    tiles = [(words.number(report["steps"]), "steps committed", f"in {words.seconds(report['wall_s'])}")]
    steps_matter = report["steps"] > 0 or not report_text.is_distributed(report)
    if steps_matter:
        pace = report["step_s"]
        tiles.append((words.seconds(pace["p50"]), "a step", f"99 % within {words.seconds(pace['p99'])}"))
    if failures and steps_matter:
        tiles += [
            _slowest(failures, "detect_s", "until detected"),
            _slowest(failures, "recover_s", "until the next commit"),
        ]
    if held := [joining["held_s"] for joining in report.get("joined", ())]:
        note = "all other workers" if len(held) == 1 else f"the longest of {len(held)}"
        tiles.append((words.seconds(max(held)), "waiting for newcomers", note))
    if report_text.is_distributed(report):
        tiles.append(_finished(report))
    else:
        note = f"{words.number(samples['lost'])} lost, {words.number(samples['repeated'])} repeated"
        tiles.append((words.number(samples["committed"]), "samples in the weights", note))
    return tiles


def _learned(report: Mapping[str, Any], records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Return the key number for learning: a metric logged after the last step, else a mean over the last steps."""
    metrics = report["metrics"]
    by_number = {r.step: r for r in sorted(records, key=lambda r: r.t_s) if isinstance(r, StepCommitted)}
    steps = [step for _, step in sorted(by_number.items())]
    of_steps: dict[str, float | None] = {}
    for step in steps:
        of_steps |= {name: value if math.isfinite(value) else None for name, value in step.metrics.items()}
    at_end = [name for name in metrics if steps and (name not in of_steps or of_steps[name] != metrics[name])]
    measured = [name for name in at_end if "accuracy" in name.lower() and 0 <= (metrics[name] or 0) <= 1]
    for name in (*measured, "accuracy", "loss"):
        if name not in metrics:
            continue
        value, note = metrics[name], "of the last mini-batch"
        recent = [step for step in steps if name in step.metrics][-_RECENT:]
        if name in at_end:
            note = "logged at the end"
        elif len(recent) > 1:
            value, note = _mean(name, recent), f"mean of the last {len(recent)} mini-batches"
        shown = words.number(value) if name == "loss" else words.percent(value, digits=2)
        return [(shown, name.replace("_", " "), note)]
    return []


def _mean(name: str, steps: Sequence[StepCommitted]) -> float | None:
    """Return the mean of a metric over the samples of some steps, None if it is not a number."""
    weights = [max(step.samples, 1) for step in steps]  # all samples of a step may be lost
    mean = statistics.fmean([step.metrics[name] for step in steps], weights)
    return mean if math.isfinite(mean) else None


def _spent(goodput: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return where the time of the run went: useful work first, then the causes of at least 0.1 % of the time."""
    if goodput is None:
        return []
    wall_s = goodput["useful_s"] + sum(goodput["badput_s"].values())
    causes = sorted(goodput["badput_s"].items(), key=lambda item: -item[1])
    shown = [("useful", goodput["useful_s"]), *((name, s) for name, s in causes if s >= 0.001 * wall_s > 0)]
    return [(name.replace("_", " "), f"{words.seconds(s)}, {words.percent(s / wall_s)}") for name, s in shown if wall_s]


def _slowest(failures: Sequence[Mapping[str, Any]], key: str, what: str) -> tuple[str, str, str]:
    values = [f[key] for f in failures if f[key] is not None]
    note = "from the fault" if len(values) < 2 else f"the slowest of {len(values)}"
    return words.seconds(max(values, default=None)), what, note


def _finished(report: Mapping[str, Any]) -> tuple[str, str, str]:
    workers, one = report["workers"], report_text.worker(report)
    ranks = workers["ranks_finished"]
    note = f"{one if len(ranks) == 1 else f'{one}s'} {words.listing(ranks)}" if 0 < len(ranks) <= _FEW else ""
    return f"{workers['finished']} of {report_text.total_workers(report)}", f"{one}s finished", note
