"""The beacon: a small memory-mapped file that shows what a worker was doing when it died. An update costs one store."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from holdfast.base.side_work import run_aside
from holdfast.records.activity import current_activity
from holdfast.records.life_lock import LOCK_BYTES, PeerLocks, hold_life_lock, wait_for_end
from holdfast.records.paths import beacon_path

_COMPUTED_STEPS = 15
"""Number of steps in the median of the compute time: a single step with an evaluation in it does not count."""
_START_EVERY_S = 0.5
"""Seconds between pulses, at most, before the first step."""


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
    "exit",
)
"""Phases of a worker. ``launch``: it imports and runs the script, before the rendezvous. ``connect``: it waits in the
rendezvous. ``start``: it is connected. ``script``: outside the training loop, between two loops or after the last; and of a
script that calls ``torch.distributed`` itself all but its collectives.
``exit``: the script has ended, and its exit handlers run."""


_SCRIPT = PHASES.index("script")
_NUMBER = struct.Struct("<q")
_IN_COLLECTIVE, _IN_LONG_COLLECTIVE = 2, 3


UNCONNECTED = ("launch", "connect")
"""Phases before a worker is connected to the other workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeaconPosition:
    """What a worker is doing.

    Args:
        beats: Counter that grows with every update; a worker whose counter stands still is silent.
        step: Step in progress, -1 before the first.
        slice: Slice being computed, -1 outside one.
        phase: One of :data:`PHASES`.
        pid: Its process ID.
        samples: Ids of the samples of the slice being computed (the first :data:`Beacon.MAX_SAMPLES`).
        pulse: Counter that a separate thread increments while the interpreter runs; 0 if there is no such thread.
        applied: Steps that this worker has applied, or begun to apply.
        busy: The script announced an operation that may take long.
        waits: The worker waits for other workers.
        in_collective: It does so in a collective that its script called, which has a timeout of its own.
        is_patient: That timeout is longer than PyTorch's default: the script expects that others take long.
        compute_s: Seconds that this worker takes to compute a slice, the median over its last steps; 0 before any.
        in_vain: Consecutive recoveries after which the members were unchanged, without a step applied since.
        doing: What its main thread does before its first step, such as ``importing torch``; "" if that is not known.
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
    in_collective: bool = False
    is_patient: bool = False
    compute_s: float = 0.0
    in_vain: int = 0
    doing: str = ""


class Beacon:
    """The state of a worker, which other processes can read at any time, also after its death.

    Layout, little-endian int64: beats, step, slice, phase, pid, applied, number of samples, samples; pulse, busy, waits; and
    as float64 the compute seconds; recoveries in vain; what it does, as text; the life lock. Each field is written by one
    thread, so none waits.
    """

    MAX_SAMPLES = 500
    _HEAD = struct.Struct("<7q")
    _TAIL = struct.Struct("<3qdq40s")
    _DOING_AT, _DOING_BYTES = 40, 40
    _TAIL_AT = _HEAD.size + 8 * MAX_SAMPLES
    _PHASE_AT, _PID_AT = 24, 32
    _LOCK_AT = _TAIL_AT + _TAIL.size
    _SIZE = _LOCK_AT + LOCK_BYTES

    def __init__(self, path: Path) -> None:
        draft = path.with_suffix(".draft")
        draft.touch(mode=0o600)
        draft.write_bytes(bytes(self._SIZE))
        with draft.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._SIZE)
        draft.replace(path)  # an existing file may still be written to, so it must not be truncated under its writer
        self._beats = 0
        self._applied = 0
        self._pulses = 0
        self._busy = 0
        self._in_vain = 0
        self._computed_s: deque[float] = deque(maxlen=_COMPUTED_STEPS)
        self._pid = os.getpid()
        self._marked: Any = ()

    def mark(self, phase: str, step: int, slice_: int = -1, samples: Any = ()) -> None:
        """Publish the phase of this worker."""
        self._beats += 1
        if phase == "optimizer":
            self._applied += 1
            self.publish_recovered(in_vain=False)
        count = min(len(samples), self.MAX_SAMPLES)
        if count and samples is not self._marked:
            struct.pack_into(f"<{count}q", self._map, self._HEAD.size, *samples[:count])
            self._marked = samples
        place = (self._beats, step, slice_, PHASES.index(phase), self._pid, self._applied, count)
        self._HEAD.pack_into(self._map, 0, *place)

    def hold_life_lock(self) -> None:
        """Let other processes of this machine see at once when this process ends; see :class:`PeerLocks`."""
        hold_life_lock(self._map, self._LOCK_AT)

    @classmethod
    def peer_locks(cls, run_dir: Path) -> PeerLocks:
        """Return the life locks of the workers of a run."""
        return PeerLocks(lambda rank: beacon_path(run_dir, rank), cls._LOCK_AT, cls._PID_AT)

    @classmethod
    def wait_for_end(cls, path: Path) -> bool:
        """Block until the worker that writes ``path`` begins to end; see :func:`~holdfast.records.life_lock.wait_for_end`."""
        return wait_for_end(path, cls._LOCK_AT)

    def _publish_exit(self) -> None:
        """Publish that the script has ended, after the step that was published last; unless it was never connected."""
        _, step, _, phase, *_ = self._HEAD.unpack_from(self._map, 0)
        if PHASES[phase] not in UNCONNECTED:
            self.mark("exit", step)

    @property
    def has_applied(self) -> bool:
        """Whether this worker has applied a step, or begun to."""
        return self._applied > 0

    @property
    def is_busy(self) -> bool:
        """Whether an operation that may take long is announced."""
        return self._busy > 0

    def pulse(self) -> None:
        """Increment the pulse, which shows that the interpreter runs."""
        self._pulses += 1
        struct.pack_into("<q", self._map, self._TAIL_AT, self._pulses)

    def show_doing(self, text: str) -> None:
        """Publish what the main thread does before its first step; a long text is cut."""
        data = text.encode("ascii", "replace")[: self._DOING_BYTES]
        struct.pack_into(f"{self._DOING_BYTES}s", self._map, self._TAIL_AT + self._DOING_AT, data)

    def publish_busy(self, *, busy: bool) -> None:
        """Announce the start or the end of an operation that may take long; such operations may nest."""
        self._busy += 1 if busy else -1
        struct.pack_into("<q", self._map, self._TAIL_AT + 8, self._busy)

    def publish_waits(self, waits: bool) -> None:
        """Publish whether this worker waits for other workers."""
        struct.pack_into("<q", self._map, self._TAIL_AT + 16, waits)

    def mark_collective(self, *, waits: bool, is_patient: bool = False) -> None:
        """Publish that a collective of ``torch.distributed`` has begun, so that this worker waits for others, or has ended.

        The script's own code runs after its end: it may compute the next step, evaluate or save.

        Args:
            waits: It has begun.
            is_patient: It may take longer than PyTorch's default.
        """
        how = 0 if not waits else _IN_LONG_COLLECTIVE if is_patient else _IN_COLLECTIVE
        self._beats += 1
        _NUMBER.pack_into(self._map, 0, self._beats)
        _NUMBER.pack_into(self._map, self._PHASE_AT, _SCRIPT)
        _NUMBER.pack_into(self._map, self._TAIL_AT + 16, how)

    def publish_recovered(self, *, in_vain: bool) -> None:
        """Publish that a recovery ended, and whether the members are the same as before."""
        self._in_vain = self._in_vain + 1 if in_vain else 0
        struct.pack_into("<q", self._map, self._TAIL_AT + 32, self._in_vain)

    def publish_computed(self, seconds: float) -> None:
        """Publish how long computing a slice took, as the mean over the slices of a step."""
        self._computed_s.append(seconds)
        struct.pack_into("<d", self._map, self._TAIL_AT + 24, median(self._computed_s))

    @classmethod
    def read(cls, path: Path) -> BeaconPosition | None:
        """Return the state of the worker that writes ``path``; None if it has published none, or its file was overwritten."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) < cls._SIZE:
            return None
        beats, step, slice_, phase, pid, applied, count = cls._HEAD.unpack_from(data)
        if beats == 0 or not (0 <= phase < len(PHASES) and 0 <= count <= cls.MAX_SAMPLES):
            return None
        samples = struct.unpack_from(f"<{count}q", data, cls._HEAD.size)
        pulse, busy, waits, compute_s, in_vain, doing = cls._TAIL.unpack_from(data, cls._TAIL_AT)
        return BeaconPosition(
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
            in_collective=waits >= _IN_COLLECTIVE,
            is_patient=waits == _IN_LONG_COLLECTIVE,
            compute_s=compute_s,
            in_vain=in_vain,
            doing=doing.rstrip(b"\0").decode("ascii", "replace"),
        )


class Pulse:
    """Pulses a beacon while the interpreter runs. A stopped process does not pulse, nor does one that holds the GIL.

    Args:
        beacon: The beacon.
        every_s: Seconds between pulses.
    """

    def __init__(self, beacon: Beacon, every_s: float) -> None:
        self._beacon = beacon
        self._every_s = every_s
        beacon.pulse()
        threading.Thread(target=self._run, name="holdfast-pulse", daemon=True).start()

    def _run(self) -> None:
        while not self._beacon.has_applied:
            time.sleep(min(self._every_s, _START_EVERY_S))
            self._beacon.pulse()
            self._show_doing(current_activity)
        self._show_doing(str)
        while True:
            time.sleep(self._every_s)
            self._beacon.pulse()

    def _show_doing(self, activity: Callable[[], str]) -> None:
        run_aside("showing what the worker does", lambda: self._beacon.show_doing(activity()), None)


_of_process: dict[Path, Beacon] = {}


def show_life(path: Path, pulse_every_s: float) -> None:
    """Create the beacon of this process before anything else runs, so that a slow start can be told from a hang.

    Args:
        path: Its path, from :func:`beacon_path`.
        pulse_every_s: Seconds between pulses; 0: never.
    """
    beacon = _of_process[path] = Beacon(path)
    beacon.mark("launch", -1)
    beacon.hold_life_lock()
    if pulse_every_s:
        Pulse(beacon, pulse_every_s)


def publish_connecting() -> None:
    """Mark in the beacon, if there is one, that this process waits in the rendezvous."""
    for beacon in _of_process.values():
        beacon.mark("connect", -1)


def publish_exit() -> None:
    """Mark in the beacon, if there is one, that the script of this process has ended, if it was connected before."""
    for beacon in _of_process.values():
        beacon._publish_exit()


def is_busy() -> bool:
    """Return whether this process has announced an operation that may take long."""
    return any(beacon.is_busy for beacon in _of_process.values())


def connected_beacon(run_dir: Path, rank: int) -> Beacon:
    """Return the beacon of a connected worker: the one that :func:`show_life` made, or a new one."""
    path = beacon_path(run_dir, rank)
    beacon = _of_process.get(path) or Beacon(path)
    beacon.mark("start", -1)
    return beacon


def end_notes(run_dir: str) -> PeerLocks | None:
    """Return what says whether and where the workers of a run end, if there is a run."""
    return Beacon.peer_locks(Path(run_dir)) if run_dir else None


class NoBeacon:
    """Publishes nothing."""

    def publish_busy(self, *, busy: bool) -> None:
        """Do nothing."""

    def publish_waits(self, waits: bool) -> None:
        """Do nothing."""

    def publish_recovered(self, *, in_vain: bool) -> None:
        """Do nothing."""

    def publish_computed(self, seconds: float) -> None:
        """Do nothing."""

    def mark(self, phase: str, step: int, slice_: int = -1, samples: Any = ()) -> None:
        """Do nothing."""

    def mark_collective(self, *, waits: bool, is_patient: bool = False) -> None:
        """Do nothing."""
