"""Writing records down, and the beacon that tells where a worker was when it died.

Each worker appends to a file of its own with one ``write`` a line, so that a SIGKILL loses nothing
that was written and tears no line (the page cache outlives the process); only a full disk tears one. The beacon is a small
memory-mapped file: saying "I am at slice 3 of step 20" costs a store, no system call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from holdfast.errors import ConfigError
from holdfast.events import Record, StateHashed, StepCommitted, record_from_dict, record_to_dict

_RESERVE_BYTES = 1 << 14
"""Room that each file of records keeps for lines that must not be lost; a recovery writes some 300 bytes."""
_MANY = (StepCommitted, StateHashed)
"""Records of each step."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_KEEP_SIZE = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)

_COMPUTED_STEPS = 15
"""What a worker takes to compute is the median over so many steps: one that held an evaluation does not count."""

PHASES = (
    "start",
    "forward",
    "backward",
    "allreduce",
    "optimizer",
    "recovery",
    "checkpoint",
    "gate",
    "script",
    "launch",
    "connect",
)
"""Where a worker can be. ``launch``: it imports, and runs the script, before it asks for the others. ``connect``: it waits until
they have asked for it, too. ``start``: it is connected. ``script``: outside the training loop, between two or after."""

UNCONNECTED = ("launch", "connect")
"""Phases before a worker is connected with the others."""


class Recorder(Protocol):
    """Takes records."""

    def write(self, record: Record) -> None:
        """Write one record down at once."""
        ...


class NoRecorder:
    """Writes nothing."""

    def write(self, record: Record) -> None:
        """Forget ``record``."""


class FileRecorder:
    """Appends JSON lines to ``path``. Training must not stop for a full disk: records that cannot be written are dropped.

    Room is reserved ahead of the end of the file, so that a disk that fills up costs lines about steps, of which there are many,
    and not those about failures and the end of a worker, on which the launcher acts.

    Raises:
        ConfigError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False
        self._torn = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            msg = f"cannot write records to {path}: {error.strerror}"
            raise ConfigError(msg) from error
        self._reserved = self._size = os.fstat(self._file).st_size
        with contextlib.suppress(OSError):  # the first record meets the same error, and says so
            self._reserve(0)

    def write(self, record: Record) -> None:
        """Append one line; if it cannot be written, say so once and drop it."""
        line = (json.dumps(record_to_dict(record)) + "\n").encode()
        try:
            if isinstance(record, _MANY):
                self._reserve(len(line))
            self._append(line)
        except OSError as error:
            self._warn(error)

    def _append(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        written = os.write(self._file, line)
        self._size += written
        self._torn = written < len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _reserve(self, size: int) -> None:
        """Keep :data:`_RESERVE_BYTES` for this file beyond ``size`` more bytes, without making it longer.

        Raises:
            OSError: if the disk is full.
        """
        if self._size + size + _RESERVE_BYTES <= self._reserved:
            return
        wanted = self._size + size + 2 * _RESERVE_BYTES
        if _LIBC.fallocate(self._file, _KEEP_SIZE, 0, wanted):
            error = ctypes.get_errno()
            if error in _FULL:  # after any other error writing still works, without a reserve
                raise OSError(error, os.strerror(error))
        self._reserved = wanted

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        with contextlib.suppress(OSError):  # standard error may go to the same disk
            sys.stderr.write(
                f"holdfast: cannot write records to {self._path}: {error.strerror}; training continues, "
                "and the report will lack what was not written\n"
            )
            sys.stderr.flush()


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of one file; a line that is not a record, such as half a one, is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and (record := parse_record(line)) is not None:
                yield record


def parse_record(line: bytes) -> Record | None:
    """Return the record that a line holds, None if it holds none: it was cut short by a full disk, or altered."""
    try:
        return _checked(record_from_dict(json.loads(line)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def load_events(directory: Path) -> list[Record]:
    """Return the records of the run in ``directory``, in the order of time; none if it has no ``events.jsonl``.

    Raises:
        ConfigError: if a line is not a record.
    """
    path = directory / "events.jsonl"
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            records.append(_checked(record_from_dict(json.loads(line))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"{path}, line {number}: not a record of this version of Holdfast ({error})"
            raise ConfigError(msg) from error
        except RecursionError as error:
            msg = f"{path}, line {number}: not a record of this version of Holdfast (its brackets are nested too deep)"
            raise ConfigError(msg) from error
    return sorted(records, key=lambda r: r.t_s)


def _checked(record: Record) -> Record:
    """Return a record that can be put in order; a file may have been altered."""
    for name, kinds in (("t_s", (int, float)), ("step", (int,)), ("rank", (int,))):
        value = getattr(record, name, 0)
        if not isinstance(value, kinds):
            msg = f"{name} is {value!r}, no number"
            raise TypeError(msg)
    return record


def read_run(run_dir: Path) -> list[Record]:
    """Return the records of all workers and of the launcher in ``run_dir``, in the order of time."""
    files = sorted(run_dir.glob("records-*.jsonl"))
    return sorted((r for file in files for r in read_records(file)), key=lambda r: r.t_s)


def records_path(run_dir: Path, writer: str) -> Path:
    """Return where ``writer`` (a rank, ``"launcher"``) writes its records."""
    return run_dir / f"records-{writer}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a worker is.

    Args:
        beats: Grows whenever the worker says where it is; standing still means silence.
        step: Step in progress, -1 before the first.
        slice: Slice being computed, -1 outside one.
        phase: One of :data:`PHASES`.
        pid: Its process.
        samples: Ids of the samples of the slice being computed (the first :data:`Beacon.MAX_SAMPLES`).
        pulse: Grows, in a thread of its own, for as long as the interpreter runs; 0 if there is no such thread.
        applied: Steps that this worker has applied, or begun to.
        busy: The script said that what it does may take long.
        waits: The worker waits for others.
        compute_s: What this worker takes to compute a slice, the median over its last steps; 0 before the first.
        in_vain: Recoveries in a row after which the members were the same as before, without a step applied since.
    """

    beats: int
    step: int
    slice: int
    phase: str
    pid: int
    samples: tuple[int, ...]
    pulse: int = 0
    applied: int = 0
    busy: bool = False
    waits: bool = False
    compute_s: float = 0.0
    in_vain: int = 0


class Beacon:
    """A worker's place in the run, readable by others at any moment, also after its death.

    Layout, little-endian int64: beats, step, slice, phase, pid, applied, number of samples, samples; pulse, busy, waits; and
    as float64 the seconds of computing; recoveries in vain. Each has one thread that writes it, so that none waits for another.
    """

    MAX_SAMPLES = 500
    _HEAD = struct.Struct("<7q")
    _TAIL = struct.Struct("<3qdq")
    _TAIL_AT = _HEAD.size + 8 * MAX_SAMPLES
    _SIZE = _TAIL_AT + _TAIL.size

    def __init__(self, path: Path) -> None:
        draft = path.with_suffix(".draft")
        draft.write_bytes(bytes(self._SIZE))
        with draft.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._SIZE)
        draft.replace(
            path
        )  # one that was there before may still be written to: it must not be cut off under its writer
        self._beats = 0
        self._applied = 0
        self._pulses = 0
        self._busy = 0
        self._in_vain = 0
        self._computed_s: deque[float] = deque(maxlen=_COMPUTED_STEPS)
        self._pid = os.getpid()

    def mark(self, phase: str, step: int, slice_: int = -1, samples: Any = ()) -> None:
        """Say where this worker is."""
        self._beats += 1
        if phase == "optimizer":
            self._applied += 1
            self.say_recovered(in_vain=False)
        count = min(len(samples), self.MAX_SAMPLES)
        if count:
            struct.pack_into(f"<{count}q", self._map, self._HEAD.size, *samples[:count])
        place = (self._beats, step, slice_, PHASES.index(phase), self._pid, self._applied, count)
        self._HEAD.pack_into(self._map, 0, *place)

    def pulse(self) -> None:
        """Show that the interpreter runs."""
        self._pulses += 1
        struct.pack_into("<q", self._map, self._TAIL_AT, self._pulses)

    def say_busy(self, *, busy: bool) -> None:
        """Say that something begins that may take long, or that it is over; one may lie within another."""
        self._busy += 1 if busy else -1
        struct.pack_into("<q", self._map, self._TAIL_AT + 8, self._busy)

    def say_waits(self, waits: bool) -> None:
        """Say whether this worker waits for others."""
        struct.pack_into("<q", self._map, self._TAIL_AT + 16, waits)

    def say_recovered(self, *, in_vain: bool) -> None:
        """Say that the members have met anew, and whether they are the same as before."""
        self._in_vain = self._in_vain + 1 if in_vain else 0
        struct.pack_into("<q", self._map, self._TAIL_AT + 32, self._in_vain)

    def say_computed(self, seconds: float) -> None:
        """Say how long computing a slice took, as a mean over those of a step."""
        self._computed_s.append(seconds)
        struct.pack_into("<d", self._map, self._TAIL_AT + 24, median(self._computed_s))

    @classmethod
    def read(cls, path: Path) -> Position | None:
        """Return where the worker that writes ``path`` is; None if it has not said so yet."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) < cls._SIZE:
            return None
        beats, step, slice_, phase, pid, applied, count = cls._HEAD.unpack_from(data)
        if beats == 0:
            return None
        samples = struct.unpack_from(f"<{count}q", data, cls._HEAD.size)
        pulse, busy, waits, compute_s, in_vain = cls._TAIL.unpack_from(data, cls._TAIL_AT)
        return Position(
            beats=beats,
            step=step,
            slice=slice_,
            phase=PHASES[phase],
            pid=pid,
            samples=samples,
            pulse=pulse,
            applied=applied,
            busy=bool(busy),
            waits=bool(waits),
            compute_s=compute_s,
            in_vain=in_vain,
        )


class Pulse:
    """Lets a beacon pulse for as long as the interpreter runs: a stopped process does not, nor one that keeps Python's lock.

    Args:
        beacon: Whose.
        every_s: How often.
    """

    def __init__(self, beacon: Beacon, every_s: float) -> None:
        self._beacon = beacon
        self._every_s = every_s
        beacon.pulse()
        threading.Thread(target=self._run, name="holdfast-pulse", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)
            self._beacon.pulse()


_of_process: dict[Path, Beacon] = {}


def show_life(path: Path, pulse_every_s: float) -> None:
    """Make the beacon of this process before anything else runs, so that a starting worker can be told from a stuck one.

    Args:
        path: Where it goes, as of :func:`beacon_path`.
        pulse_every_s: How often it pulses, seconds; 0: never.
    """
    beacon = _of_process[path] = Beacon(path)
    beacon.mark("launch", -1)
    if pulse_every_s:
        Pulse(beacon, pulse_every_s)


def say_connecting() -> None:
    """Mark in the beacon, if there is one, that this process waits to be connected with the others."""
    for beacon in _of_process.values():
        beacon.mark("connect", -1)


def connected_beacon(run_dir: Path, rank: int) -> Beacon:
    """Return the beacon of a worker that is connected: the one that :func:`show_life` made, or a new one."""
    path = beacon_path(run_dir, rank)
    beacon = _of_process.get(path) or Beacon(path)
    beacon.mark("start", -1)
    return beacon


class NoBeacon:
    """Says nothing."""

    def say_busy(self, *, busy: bool) -> None:
        """Forget it."""

    def say_waits(self, waits: bool) -> None:
        """Forget it."""

    def say_recovered(self, *, in_vain: bool) -> None:
        """Forget it."""

    def say_computed(self, seconds: float) -> None:
        """Forget it."""

    def mark(self, phase: str, step: int, slice_: int = -1, samples: Any = ()) -> None:
        """Forget it."""


def beacon_path(run_dir: Path, rank: int) -> Path:
    """Return where ``rank`` keeps its beacon."""
    return run_dir / f"beacon-{rank}"


def stop_path(run_dir: Path) -> Path:
    """Return the file that is there when the whole job was told to stop, not only the worker that is sent a SIGTERM."""
    return run_dir / "stop"


def gone_path(run_dir: Path) -> Path:
    """Return the file that is there when the launcher is gone, and the whole job stops for that."""
    return run_dir / "gone"


def strike_path(run_dir: Path, fault: int) -> Path:
    """Return the file in which a worker asks the launcher for a fault that strikes the node; its number is in the plan.

    It holds the step in progress. The launcher removes it when it has struck.
    """
    return run_dir / f"strike-{fault}"


def requests_path(run_dir: Path) -> Path:
    """Return the file whose lines ask for changes to the running job: JSON objects, see ``engine/live_config.py``."""
    return run_dir / "requests.jsonl"
