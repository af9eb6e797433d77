"""The state of a run that has ended, from its report directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.monitor.view import LiveRun, RunInfo
from holdfast.records.files import load_events
from holdfast.report.files import load_report

_PAGE = "index.html"


def read_folder(directory: Path) -> LiveRun:
    """Return the state of the run in ``directory``.

    Raises:
        ConfigError: if the directory does not exist or has no report, or lacks the records.
    """
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}; give the report directory of a run (--report)")
    report = load_report(directory)
    records = load_events(directory)
    if not records:
        raise ConfigError(f"there is no events.jsonl with records in {directory}, which holdfast run --report writes")
    live = LiveRun(_info(report, directory))
    live.take(records)
    live.finish(_exit_code(report), (report.get("error") or {}).get("message", ""))
    live.close(float(report["wall_s"]))
    return live


def _exit_code(report: dict[str, Any]) -> int:
    """Return the exit code of ``holdfast run`` as far as the report tells: 1 stands for every failure."""
    if report.get("outcome") == "stopped":
        return 4 if report.get("checkpoint") else 1
    return 0 if report.get("outcome") == "done" else 1


def _info(report: dict[str, Any], directory: Path) -> RunInfo:
    job = report.get("job") or {}
    settings, workers = job.get("settings") or {}, report["workers"]
    return RunInfo(
        id=directory.resolve().name,
        script=Path(job.get("script", "")).name,
        command=report.get("command", ""),
        checkpoint_dir=settings.get("checkpoint_dir", ""),
        guard=settings.get("guard", "off"),
        report=_PAGE if (directory / _PAGE).is_file() else "",
        started=workers.get("ranks_started", ()),
        spares=workers.get("ranks_spare", ()),
    )
