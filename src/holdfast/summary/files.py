"""The files of a report: ``report.json``, ``events.jsonl``, ``results.json``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.records.encoding import record_to_dict
from holdfast.records.paths import event_files, events_path
from holdfast.records.types import Record
from holdfast.summary.build import SCHEMA, build_report

_SHAPE: dict[str, type | tuple[type, ...]] = {
    "workers": dict,
    "steps": int,
    "wall_s": (int, float),
    "step_s": dict,
    "restarts": int,
    "failures": list,
    "samples": dict,
    "replicas": dict,
    "metrics": dict,
}


def write_report(records: Sequence[Record], out_dir: Path, *, has_events: bool = False, **about: Any) -> dict[str, Any]:
    """Write ``report.json`` and ``events.jsonl`` to ``out_dir``, which is created if necessary, and return the report.

    Args:
        records: Records of all workers and of the launcher, in any order.
        out_dir: The folder.
        has_events: The records are in the folder already; only the report is written.
        about: Further arguments of :func:`~holdfast.summary.build.build_report`.

    Raises:
        ConfigError: if the files cannot be written.
    """
    report = build_report(records, **about)
    if not has_events:
        _write_events(records, out_dir)
    save_report(report, out_dir)
    return report


def _write_events(records: Sequence[Record], out_dir: Path) -> None:
    """Write all records to one file, in the order of time."""
    lines = [json.dumps(record_to_dict(record)) + "\n" for record in sorted(records, key=lambda r: (r.t_s, r.rank))]
    path = events_path(out_dir)
    full = [other for other in event_files(out_dir) if other != path]
    _write(path, "".join(lines), instead_of=full)


def save_report(report: Mapping[str, Any], out_dir: Path) -> None:
    """Write ``report.json`` to ``out_dir``.

    Raises:
        ConfigError: if the file cannot be written; an existing file stays as it was.
    """
    _write(out_dir / "report.json", json.dumps(report, indent=1) + "\n")


def write_results(results: Mapping[str, Any], out_dir: Path) -> None:
    """Write ``results.json`` to ``out_dir``.

    Raises:
        ConfigError: if the file cannot be written.
    """
    _write(out_dir / "results.json", json.dumps(results, indent=1) + "\n")


def load_report(directory: Path) -> dict[str, Any]:
    """Return the report of the run in ``directory``.

    Raises:
        ConfigError: if there is none, or if :func:`write_report` cannot have written it.
    """
    path = directory / "report.json"
    if not path.is_file():
        raise ConfigError(f"there is no report.json in {directory}; `holdfast run --report {directory} ...` writes one")
    return checked_report(read_json(path), str(path))


def check_keys(results: Mapping[str, Any], needed: Mapping[str, type | tuple[type, ...]], where: str) -> None:
    """Check that results have all keys, with values of the right types.

    Raises:
        ConfigError: if not; the message begins with ``where``.
    """
    for key, kind in needed.items():
        if not isinstance(results.get(key), kind):
            raise ConfigError(f"{where}: {key!r} is missing or of the wrong type")


def checked_report(report: Any, where: str) -> dict[str, Any]:
    """Return ``report`` if it has the shape of a run report.

    Raises:
        ConfigError: if not; the message names ``where`` and the first wrong key.
    """
    if not isinstance(report, dict):
        raise ConfigError(f"{where} is not a run report: it must be an object, got {type(report).__name__}")
    if report.get("schema") != SCHEMA:
        raise ConfigError(f"{where}: schema must be {SCHEMA}, got {report.get('schema')!r}")
    check_keys(report, _SHAPE, f"{where} is not a run report")
    return report


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ConfigError: if it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} cannot be read: it is no file")
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: its brackets are nested too deep") from error


def _write(path: Path, text: str, instead_of: Sequence[Path] = ()) -> None:
    """Write a file atomically. The files that it stands for, too, are removed first: no moment shows a record twice."""
    draft = path.with_name(f"{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_draft(draft, text)
        for other in instead_of:
            other.unlink(missing_ok=True)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _write_draft(draft: Path, text: str) -> None:
    try:
        draft.write_text(text)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
