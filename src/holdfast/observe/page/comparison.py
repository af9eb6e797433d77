"""The page of several runs beside each other: one table, and their metrics in the same axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.base import formatting as words
from holdfast.errors import ConfigError
from holdfast.observe import report_text
from holdfast.observe.page.curves import NamedRun, curves_of
from holdfast.observe.page.templates import environment
from holdfast.records.files import load_events
from holdfast.summary.files import load_report

MOST_RUNS = 8
"""Runs on one page; more curves in the same axes cannot be told apart."""


def write_comparison(directories: Sequence[Path], out: Path) -> Path:
    """Write the page that compares runs to the file ``out``, and return its path.

    Args:
        directories: The folders of the runs, 2 to 8; the others are compared with the first.
        out: The file of the page; its folder must exist.

    Raises:
        ConfigError: if there are too few or too many runs, one has no report, or the page cannot be written.
    """
    if not 2 <= len(directories) <= MOST_RUNS:
        raise ConfigError(f"a comparison takes 2 to {MOST_RUNS} runs, got {len(directories)}")
    environment()  # raises the error about missing packages
    names = _names(directories)
    runs = [
        NamedRun(name=name, report=load_report(folder), records=load_events(folder))
        for name, folder in zip(names, directories, strict=True)
    ]
    try:
        out.write_text(render_comparison(runs))
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    return out


def render_comparison(runs: Sequence[NamedRun]) -> str:
    """Return the page that compares runs, the others with the first.

    Args:
        runs: The runs, at least two.
    """
    return (
        environment()
        .get_template("comparison.html")
        .render(
            title=f"{words.count(len(runs), 'run')} compared",
            message=_message(runs),
            runs=[_row(run, runs[0]) for run in runs],
            metrics=_metrics(runs),
            curves=curves_of(runs),
        )
    )


def held_s(report: Mapping[str, Any]) -> float | None:
    """Return the seconds from each failure to the next new step, over all recoveries; None if one has no next step."""
    held = [[failure["recover_s"] for failure in group] for group in report_text.recoveries(report)]
    maxima = [max(times) for times in held if None not in times]
    return sum(maxima) if len(maxima) == len(held) else None


def _names(directories: Sequence[Path]) -> list[str]:
    """Return the names of the folders, or the paths as given if two names are equal."""
    names = [folder.resolve().name for folder in directories]
    names = names if len({*names}) == len(names) else [str(folder) for folder in directories]
    if len({*names}) < len(names):
        raise ConfigError(f"a run was given twice: {', '.join(names)}")
    return names


def _message(runs: Sequence[NamedRun]) -> str:
    first, *other_runs = runs
    sha256 = first.report["replicas"]["sha256"]
    if sha256 is None:
        return f"Whether the runs ended with the bits of {first.name} is unknown"
    same = [run.name for run in other_runs if run.report["replicas"]["sha256"] == sha256]
    rest = [run.name for run in other_runs if run.name not in same]
    parts = [f"{words.listing(same)} ended with the bits of {first.name}"] if same else []
    parts += [f"{words.listing(rest)} did not{'' if same else f' end with the bits of {first.name}'}"] if rest else []
    return "; ".join(parts)


def _metrics(runs: Sequence[NamedRun]) -> list[str]:
    """Return the names of the last metrics that any run has, at most two, loss and accuracy first."""
    names = dict.fromkeys(name for run in runs for name in run.report["metrics"])
    first = [name for name in ("loss", "accuracy") if name in names]
    return list(dict.fromkeys([*first, *names]))[:2]


def _row(run: NamedRun, first: NamedRun) -> dict[str, Any]:
    report = run.report
    sha256, wanted = report["replicas"]["sha256"], first.report["replicas"]["sha256"]
    bits = "unknown" if None in (sha256, wanted) else "same" if sha256 == wanted else "differs"
    goodput = report.get("goodput")
    return {
        "name": run.name,
        "strategy": report.get("strategy") or words.DASH,
        "outcome": report.get("outcome") or words.DASH,
        "bits": "reference" if run is first else bits,
        "held": words.seconds(held_s(report)) if report["failures"] else words.DASH,
        "redone": words.number(report.get("steps_redone")),
        "lost": words.number(report["samples"]["lost"]),
        "failures": words.number(len(report["failures"])),
        "steps": words.number(report["steps"]),
        "useful": words.percent(goodput["ratio"] if goodput else None),
        "metrics": {name: words.number(value) for name, value in report["metrics"].items()},
        "sha256": sha256 or words.DASH,
    }
