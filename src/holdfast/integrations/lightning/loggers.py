"""Loggers whose lead may change: one version for the whole job, and files that the next lead continues."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger

_AGREED = "lightning-versions.jsonl"


def agree_on_versions(loggers: Sequence[Any]) -> None:
    """Give loggers that number their directories the same number in all processes of this host.

    Otherwise a process that looks after the lead has created its directory would take the next number.
    """
    for number, logger in enumerate(loggers):
        if hasattr(logger, "_get_next_version") and getattr(logger, "_version", "") is None:
            logger._version = _agreed(f"{number} {logger.root_dir}", logger._get_next_version)


def _agreed(key: str, choose: Any) -> Any:
    """Return the value that the first process of the job has chosen for ``key``."""
    run_dir = os.environ.get("HOLDFAST_RUN_DIR")
    if not run_dir:
        return choose()
    with (Path(run_dir) / _AGREED).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = dict(json.loads(line) for line in file)
        if key not in known:
            known[key] = choose()
            file.write(json.dumps([key, known[key]]) + "\n")
        return known[key]


def flush_often(loggers: Sequence[Any]) -> None:
    """Let CSV loggers write each row at once: rows in memory would be lost with the lead."""
    for logger in loggers:
        if isinstance(logger, FabricCSVLogger):
            logger._flush_logs_every_n_steps = 1


def continue_files(loggers: Sequence[Any]) -> None:
    """Continue the files of the previous lead, where a new logger would begin them again."""
    for logger in loggers:
        if isinstance(logger, FabricCSVLogger) and logger._experiment is None:
            _continue_csv(logger)


def _continue_csv(logger: FabricCSVLogger) -> None:
    path = Path(logger.log_dir) / "metrics.csv"
    aside = path.with_name(f"{path.name}.{os.getpid()}.kept")
    if path.is_file():
        path.replace(aside)
    experiment = logger.experiment  # removes metrics.csv
    if aside.is_file():
        aside.replace(path)
        header = path.read_text().partition("\n")[0].strip()
        experiment.metrics_keys = [name for name in header.split(",") if name]
