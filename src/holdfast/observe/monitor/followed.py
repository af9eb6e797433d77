"""A run that another launcher started, read from its directory: a finished one, or one whose files still grow."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.observe.monitor.feed import Refused
from holdfast.observe.monitor.log_lines import last_lines, open_plain
from holdfast.observe.monitor.view import LiveState, RunInfo
from holdfast.records.beacon import Beacon
from holdfast.records.files import parse_record
from holdfast.records.paths import beacon_path, event_files, events_path
from holdfast.records.types import Record

_CHUNK_BYTES = 1 << 20
_MOST_LINE = 1 << 24
"""A longer line is no record."""
_LONGEST_S = 1e9
"""No run takes longer: 30 years."""
_OF_WRONG_TYPE = (TypeError, ValueError, AttributeError, KeyError, OverflowError)


class GrowingFile:
    """Reads the records that are added to a file; notices when it was replaced or truncated.

    Args:
        path: The file; if it is renamed, it can be set anew.
        inode: Its inode; 0: that of the first read.
    """

    def __init__(self, path: Path, inode: int = 0) -> None:
        self.path, self.inode = path, inode
        self.is_at_end = False
        """Whether the last call has found nothing new."""
        self._complete_bytes = self._rest_bytes = 0

    def read(self) -> tuple[list[Record], bool]:
        """Return new records, of at most 1 MiB unless none of it is one, and whether the file is another one than before.

        An incomplete line is left for the next call, which reads it again: it is removed if the disk was full. A line
        that is no record is skipped.
        """
        try:
            with open_plain(self.path) as file:
                about = os.fstat(file.fileno())
                is_other = self.inode not in (0, about.st_ino) or about.st_size < self._complete_bytes
                if is_other:
                    self._complete_bytes = self._rest_bytes = 0
                self.inode = about.st_ino
                file.seek(self._complete_bytes)
                text = file.read(self._rest_bytes + _CHUNK_BYTES)
        except OSError:
            self.is_at_end = True
            return [], False
        self.is_at_end = len(text) <= self._rest_bytes
        *lines, rest = text.split(b"\n")
        self._rest_bytes = len(rest) if len(rest) <= _MOST_LINE else 0
        self._complete_bytes += len(text) - self._rest_bytes
        records = [record for line in lines if (record := parse_record(line)) is not None]
        return [record for record in records if 0 <= record.t_s <= _LONGEST_S], is_other


class GrowingEvents:
    """Reads the records that are added to ``events.jsonl``, and to the files that it becomes when it is full.

    The file that is read is known by its inode, which a renaming keeps.

    Args:
        directory: The report directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = GrowingFile(events_path(directory))

    def read(self) -> tuple[list[Record], bool]:
        """Return new records of one file, and whether the files are of another run than before."""
        while files := _inodes(self._directory):
            place = next((number for number, (_, inode) in enumerate(files) if inode == self._file.inode), -1)
            if place < 0 and self._file.inode:
                return [], True
            if place < 0:
                place, self._file = 0, GrowingFile(*files[0])
            self._file.path = files[place][0]
            records, is_other = self._file.read()
            if records or is_other:
                return records, is_other
            if self._file.is_at_end and place == len(files) - 1:
                break
            if self._file.is_at_end:
                self._file = GrowingFile(*files[place + 1])
        return [], False


def _inodes(directory: Path) -> list[tuple[Path, int]]:
    """Return the files of the records, oldest first, with their inodes, of one moment: none was renamed meanwhile."""
    while files := event_files(directory):
        with contextlib.suppress(FileNotFoundError):
            inodes = [(path, path.stat().st_ino) for path in files]
            if event_files(directory) == files:
                return inodes
    return []


class FollowedFolder:
    """The run in a directory: a report directory, or the directory of a running job.

    Args:
        directory: The directory.
        name: Its name among the runs of the server.
        act: Carries out an action, for a job that runs here; None: no actions are possible.
        actions: Their names.
        log_dir: Folder of the workers' output; None: ``logs`` in the directory.

    Raises:
        ConfigError: if there is no such directory.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        act: Callable[[str, Mapping[str, Any]], str] | None = None,
        actions: tuple[str, ...] = (),
        log_dir: Path | None = None,
    ) -> None:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory; give the report directories of runs")
        self._directory, self._name, self._act = directory, name, act
        self._log_dir = log_dir or directory / "logs"
        self.actions = actions
        self._begin()
        self.poll()

    def _begin(self) -> None:
        self._report: dict[str, Any] = {}
        self._report_at = 0
        self._files: dict[Path, GrowingFile] = {}
        self._events = GrowingEvents(self._directory)
        self._newest_s = 0.0
        self._changed_s = 0.0
        self.has_records = False
        """Whether the directory has any record of a run."""
        self.live = LiveState(RunInfo(id=self._name, script=self._name, is_live=self._act is not None))

    def poll(self) -> None:
        """Read what is new."""
        self._read_report()
        while records := self._read():
            self.has_records = True
            records.sort(key=lambda record: record.t_s)
            self._take(records)
            self._newest_s = max(self._newest_s, records[-1].t_s)
        if self._act is not None:
            unknown = self.live.without_pid()
            beacons = {rank: Beacon.read(beacon_path(self._directory, rank)) for rank in unknown}
            self.live.note_processes({rank: beacon.pid for rank, beacon in beacons.items() if beacon is not None})
        self._look_at_end()

    def _take(self, records: list[Record]) -> None:
        """Take records; one with values of other types than this version of Holdfast writes is skipped."""
        try:
            self.live.take(records)
        except _OF_WRONG_TYPE:
            for record in records:  # those that were taken already count once
                with contextlib.suppress(*_OF_WRONG_TYPE):
                    self.live.take([record])

    def _read(self) -> list[Record]:
        """Return new records: of one file, or of all workers' files together, whose times must be compared."""
        new_records: list[Record] = []
        if files := event_files(self._directory):
            new_records, is_other = self._events.read()
            if is_other:
                return self._read_another()
            if new_records:
                self._note_change(files[-1])
            return new_records
        for path in sorted(self._directory.glob("records-*.jsonl")):
            file = self._files.setdefault(path, GrowingFile(path))
            before = len(new_records)
            while True:
                records, is_other = file.read()
                if is_other:
                    return self._read_another()
                new_records += records
                if not records:
                    break
            if len(new_records) > before:
                self._note_change(path)
        return new_records

    def _read_another(self) -> list[Record]:
        """Return the records of another run, which is there now."""
        self._begin()
        return self._read()

    def _note_change(self, path: Path) -> None:
        """Note when a file was written to."""
        with contextlib.suppress(OSError):
            self._changed_s = max(self._changed_s, path.stat().st_mtime)

    def _read_report(self) -> None:
        """Read the report, if there is one that was not read yet; it says what the run was."""
        path = self._directory / "report.json"
        with contextlib.suppress(OSError, ValueError, RecursionError):
            at = path.stat().st_mtime_ns
            if at == self._report_at:
                return
            with open_plain(path) as file:
                report = json.loads(file.read())
            if not isinstance(report, dict):
                return
            self._begin()
            self._report, self._report_at = report, at
            self.live = LiveState(_info(self._name, report, self._directory))

    def _look_at_end(self) -> None:
        if self.live.is_over:
            return
        wall_s = self._report.get("wall_s")
        if isinstance(wall_s, int | float) and 0 <= wall_s <= _LONGEST_S:
            outcome = self._report.get("outcome")
            error = self._report.get("error")
            why = str(error.get("message", "")) if isinstance(error, dict) else ""
            self.live.finish(None, why, outcome if outcome in ("done", "stopped", "gave-up", "failed") else "")
            self.live.close(wall_s)
        elif not self._directory.is_dir():  # that of a running job is removed with it
            self.live.close(self._newest_s)
        self.live.silent_s = max(0.0, time.time() - self._changed_s) if self._changed_s else 0.0

    def now_s(self) -> float:
        """Return the seconds since the run began, as far as its files tell."""
        return self._newest_s + (max(0.0, time.time() - self._changed_s) if self._changed_s else 0.0)

    def log(self, rank: int, lines: int) -> list[str]:
        """Return the last output lines of a worker."""
        return last_lines(self._log_dir / f"rank-{rank}.log", lines)

    def act(self, action: str, values: Mapping[str, Any]) -> str:
        """Carry out an action, if the job runs here."""
        if self._act is None:
            raise Refused("this run was started by another launcher, which alone can act on it")
        return self._act(action, values)


def _info(name: str, report: Mapping[str, Any], directory: Path) -> RunInfo:
    """Return what a report says of its run; it may have been written by any program."""

    def text(value: object) -> str:
        return value if isinstance(value, str) else ""

    def part(key: str) -> Mapping[str, Any]:
        value = report.get(key)
        return value if isinstance(value, Mapping) else {}

    def ranks(key: str) -> list[int]:
        value = part("workers").get(key)
        return [rank for rank in value if type(rank) is int and rank >= 0] if isinstance(value, list) else []

    settings = part("job").get("settings")
    settings = settings if isinstance(settings, Mapping) else {}
    page = directory / "index.html"
    return RunInfo(
        id=name,
        script=Path(text(part("job").get("script"))).name or name,
        command=text(report.get("command")),
        checkpoint_dir=text(report.get("checkpoint")) or text(settings.get("checkpoint_dir")),
        guard=text(settings.get("guard")) or "off",
        report=str(page) if page.is_file() else "",
        started=ranks("ranks_started"),
        spares=ranks("ranks_spare"),
    )
