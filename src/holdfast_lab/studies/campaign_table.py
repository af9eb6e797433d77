"""The file of a campaign: an SQLite database with one row per trial, written by one process at a time.

=============  ==========================================================================
table          columns
=============  ==========================================================================
``settings``   ``name``, ``value`` (JSON): the settings that determine every row
``cells``      ``name``, ``settings`` (JSON)
``trials``     ``cell``, ``number`` (together the key), ``seed``, ``outcome``, ``found``
               (JSON of everything else that the trial returned), ``seconds``
=============  ==========================================================================

A row is written completely or not at all, even if the writing process is killed. Infinite and NaN values are stored as
null, because JSON has no such numbers. The file must be on a local disk: SQLite's WAL index is shared memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.studies.base import Row, differing

_APPLICATION = 0x486F6C64
"""SQLite's application id in the file header, which marks a file of a campaign."""
_TABLES = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE cells (name TEXT PRIMARY KEY, settings TEXT NOT NULL)",
    """CREATE TABLE trials (cell TEXT NOT NULL, number INTEGER NOT NULL, seed INTEGER NOT NULL, outcome TEXT NOT NULL,
    found TEXT NOT NULL, seconds REAL NOT NULL, PRIMARY KEY (cell, number)) WITHOUT ROWID""",
    f"PRAGMA application_id = {_APPLICATION}",
)
COLUMNS = ("cell", "number", "seed", "outcome", "seconds")
"""Reserved names: of these a trial may return only its outcome."""


def as_json(value: Any) -> str:
    """Return a value as JSON, with null for infinite and NaN numbers."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class CampaignTable:
    """A campaign's file, opened for writing under an exclusive lock.

    Args:
        path: Path of the file; created with its directory if missing.
        settings: The settings that determine every row, as JSON values.
        cells: The settings of each cell, by name; cells may be added later, but not changed.

    Raises:
        ConfigError: if the file belongs to another campaign, is no campaign's file, is in use, or cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]]) -> None:
        self._path = path
        with contextlib.ExitStack() as opened, _told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context(path.open("ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"{path} is in use by another process; wait for it, or give another file") from error
            # Closed before the lock file: closing any descriptor of this file drops SQLite's own POSIX locks on it.
            self._base = opened.enter_context(contextlib.closing(sqlite3.connect(path, isolation_level=None)))
            if not _is_empty(self._base):
                _check_ours(self._base, path)
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = NORMAL")
            self._begin(settings, cells)
            self._opened = opened.pop_all()

    def __enter__(self) -> CampaignTable:
        """Return this table; it is closed at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._opened.close()

    def _begin(self, settings: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]]) -> None:
        with self._transaction():
            if _is_empty(self._base):
                for statement in _TABLES:
                    self._base.execute(statement)
                pairs = [(name, json.dumps(value)) for name, value in settings.items()]
                self._base.executemany("INSERT INTO settings VALUES (?, ?)", pairs)
            old_cells = _pairs(self._base, "cells")
            known = {name: value for name, value in cells.items() if name in old_cells}
            old = _flat(_pairs(self._base, "settings"), {name: old_cells[name] for name in known})
            difference = differing(old, _flat(settings, known))
            if difference:
                raise ConfigError(f"{self._path} holds another campaign: {difference}; give another file, or remove it")
            added = [(name, json.dumps(value)) for name, value in cells.items() if name not in known]
            self._base.executemany("INSERT INTO cells VALUES (?, ?)", added)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")

    def outcomes(self, cell: str) -> dict[int, str]:
        """Return the outcomes of a cell's recorded trials, by trial number."""
        return dict(self._base.execute("SELECT number, outcome FROM trials WHERE cell = ?", (cell,)).fetchall())

    def add(self, cell: str, number: int, seed: int, outcome: str, found: str, seconds: float) -> None:
        """Write a row."""
        with _told(self._path):
            row = (cell, number, seed, outcome, found, seconds)
            self._base.execute("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?)", row)


def read_rows(path: Path) -> list[Row]:
    """Return all rows, as :func:`each_row` yields them."""
    return list(each_row(path))


def each_row(path: Path, cell: str | None = None) -> Iterator[Row]:
    """Yield the rows of a campaign by cell and number, with the settings of the cell; it may still be running.

    Args:
        path: Path of the file.
        cell: Yield only the rows of this cell; None: of all cells.

    Raises:
        ConfigError: if the file does not exist, or holds no campaign.
    """
    if not path.is_file():
        raise ConfigError(f"no file {path}; the study that fills it creates it")
    with _told(path), contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
        _check_ours(base, path)
        cells = _pairs(base, "cells")
        chosen, names = ("", ()) if cell is None else ("WHERE cell = ?", (cell,))
        wanted = f"SELECT cell, number, seed, outcome, seconds, found FROM trials {chosen} ORDER BY cell, number"  # noqa: S608
        for row in base.execute(wanted, names):
            yield cells[row[0]] | json.loads(row[-1]) | dict(zip(COLUMNS, row[:-1], strict=True))


def _flat(settings: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    inner = {f"{name} of cell {cell!r}": value for cell, values in cells.items() for name, value in values.items()}
    return {**settings, **inner}


def _is_empty(base: sqlite3.Connection) -> bool:
    return not base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def _check_ours(base: sqlite3.Connection, path: Path) -> None:
    if base.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
        raise ConfigError(f"{path} is an SQLite database, but not of a campaign; give another file")


def _pairs(base: sqlite3.Connection, table: str) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in base.execute(f"SELECT * FROM {table}")}  # noqa: S608  # our own names


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into a ConfigError of one line."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise ConfigError(
            f"cannot use {path}: {error}; all earlier rows are saved: fix the cause, and start again"
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} holds no campaign: {error}; give another file") from error
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror}; give a file that can be written") from error
