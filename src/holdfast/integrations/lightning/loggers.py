"""Loggers whose lead may change: one version for the whole job, and files that the next lead continues."""

from __future__ import annotations

import csv
import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger

from holdfast.integrations.lightning.agreement import agreed


def agree_on_versions(loggers: Sequence[Any]) -> None:
    """Give loggers that number their directories the same number in all processes of this host.

    Otherwise a process that looks after the lead has created its directory would take the next number.
    """
    for number, logger in enumerate(loggers):
        choose = getattr(
            logger, "_get_next_version", None
        )  # of loggers that number directories; called if none is given
        if choose is not None:
            logger._get_next_version = functools.partial(agreed, f"{number} {logger.root_dir}", choose)


class LoggerRelay:
    """Keeps what the lead logs on the other workers, too, so that the next lead can complete it.

    Args:
        is_lead: Whether this worker logs.
    """

    def __init__(self, is_lead: Callable[[], bool]) -> None:
        self._is_lead = is_lead
        self._loggers: Sequence[Any] = ()
        self._unlogged: list[tuple[Any, dict[str, Any], int | None]] = []

    def begin(self, loggers: Sequence[Any]) -> None:
        """Follow what is logged from here on."""
        self._loggers = loggers
        for logger in loggers:
            if isinstance(logger, FabricCSVLogger):
                logger._flush_logs_every_n_steps = 1  # rows in memory would be lost with the lead
            if not self._is_lead():
                logger.log_metrics = functools.partial(self._keep, logger, logger.log_metrics)

    def _keep(self, logger: Any, log_metrics: Any, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._is_lead():
            log_metrics(metrics, step)
        else:
            self._unlogged.append((logger, dict(metrics), step))

    def forget(self) -> None:
        """The lead has logged everything so far."""
        self._unlogged.clear()

    def take_over(self) -> None:
        """Continue the files of the previous lead, and log what it may not have logged."""
        rows = {id(logger): _continued_csv(logger) for logger in self._loggers if isinstance(logger, FabricCSVLogger)}
        for logger, metrics, step in self._unlogged:
            if _as_row(metrics, step) not in rows.get(id(logger), []):
                logger.log_metrics(metrics, step)
        self._unlogged.clear()


def _continued_csv(logger: FabricCSVLogger) -> list[dict[str, str]]:
    """Let a CSV logger continue its file, which it would begin again; return the rows of it."""
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return []
    aside = path.with_name(f"{path.name}.{os.getpid()}.kept")
    path.replace(aside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "previous log files will be deleted"
        experiment = logger.experiment
    aside.replace(path)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        experiment.metrics_keys = list(reader.fieldnames or ())
        return [{name: text for name, text in row.items() if text} for row in reader]


def _as_row(metrics: Mapping[str, Any], step: int | None) -> dict[str, str]:
    """Return metrics as they are read from a CSV file."""
    values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: str(value) for name, value in (values | {"step": step}).items()}
