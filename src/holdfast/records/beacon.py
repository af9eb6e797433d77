"""The beacon: a small memory-mapped file that tells where a worker was when it died. Saying where it is costs a store."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from holdfast.records.paths import beacon_path

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
