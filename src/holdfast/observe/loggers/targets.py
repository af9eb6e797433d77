"""The targets of ``--log-to``: which logger, and where it logs to."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from holdfast.errors import ConfigError
from holdfast.launch.command_line import HIDDEN

LOGGERS = {
    "tensorboard": ("tensorboard", "DIR"),
    "wandb": ("wandb", "[PROJECT]"),
    "mlflow": ("mlflow", "[URI]"),
    "otel": ("opentelemetry.exporter.otlp.proto.http", "[ENDPOINT]"),
}
"""Each kind of target, which is also the name of the extra that installs it: the module that it needs, and its place."""

_DATABASES = ("", "sqlite", "postgresql", "mysql", "mssql")
"""Schemes of tracking URIs for which MLflow needs SQLAlchemy; "" is its default."""

EVENT_FILES = "events.out.tfevents.*"
"""The files that TensorBoard reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTarget:
    """One ``--log-to``.

    Args:
        kind: One of :data:`LOGGERS`.
        place: A folder, a project, a URI or an endpoint; "" for the default of the kind.
    """

    kind: str
    place: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the target of a text such as ``tensorboard:runs/first`` or ``wandb``.

        Raises:
            ConfigError: if there is no such kind, or it needs a place.
        """
        kind, _, place = text.partition(":")
        if kind not in LOGGERS:
            raise ConfigError(f"--log-to must be one of {_forms()}, got {text!r}")
        if not place and not LOGGERS[kind][1].startswith("["):
            raise ConfigError(f"--log-to {kind} needs a folder: --log-to {kind}:DIR")
        if f"{HIDDEN}@" in place:
            raise ConfigError(
                f"--log-to {text}: {HIDDEN} stands for a password, which is kept nowhere; give the password"
            )
        return cls(kind=kind, place=place)

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" if self.place else self.kind

    def check(self) -> None:
        """Check that what the target needs is installed.

        Raises:
            ConfigError: that says what to do.
        """
        if not _is_installed(LOGGERS[self.kind][0]):
            raise ConfigError(f"--log-to {self.kind} needs a package: pip install 'holdfast[{self.kind}]'")
        if self.kind == "mlflow":
            self._check_database()
        if self.kind == "otel" and self.place and "://" not in self.place:
            raise ConfigError(f"--log-to {self}: the endpoint must be a URL, such as otel:http://localhost:4318")

    def check_new(self) -> None:
        """Check that the target does not have the steps of another run, for a job that does not resume.

        Raises:
            ConfigError: that says what to do.
        """
        if self.kind == "tensorboard" and any(Path(self.place).glob(EVENT_FILES)):
            raise ConfigError(
                f"--log-to {self}: the folder has the event files of an earlier run; continue that run with --resume,"
                " or choose another folder"
            )

    def _check_database(self) -> None:
        uri = self.place or os.environ.get("MLFLOW_TRACKING_URI", "")
        if uri.partition(":")[0].partition("+")[0] in _DATABASES and not _is_installed("sqlalchemy"):
            place = f"{uri} is a database" if uri else "MLflow's default place is a database"
            raise ConfigError(
                f"--log-to {self}: {place}, which needs the full package: pip install mlflow; or name a folder or a server,"
                " such as mlflow:mlruns or mlflow:http://host:5000"
            )


def parse_targets(texts: Sequence[str]) -> tuple[LogTarget, ...]:
    """Return the targets of all ``--log-to``.

    Raises:
        ConfigError: if a text is not a target, or one is given twice.
    """
    targets = tuple(map(LogTarget.parse, texts))
    for number, target in enumerate(targets):
        if target in targets[:number]:
            raise ConfigError(f"--log-to {target} is given twice")
    return targets


def _forms() -> str:
    optional = {kind: place.removesuffix("]") for kind, (_, place) in LOGGERS.items()}
    forms = [
        f"{kind}[:{place[1:]}]" if place.startswith("[") else f"{kind}:{place}" for kind, place in optional.items()
    ]
    return f"{', '.join(forms[:-1])} or {forms[-1]}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False
