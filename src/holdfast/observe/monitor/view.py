"""The state of a run as live displays show it: bounded, and kept up to date record by record.

:meth:`LiveState.full` returns everything, :meth:`LiveState.changes` what has changed since a version, both as JSON
objects: ``docs/reference/live-view.md`` describes each key. Lanes, events and recoveries change when a record arrives;
goodput follows a second later, when no older record can arrive any more, and equals that of the report in the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.formatting import seconds
from holdfast.observe.monitor.checkpoints import Checkpoints
from holdfast.observe.monitor.curves import Curves
from holdfast.observe.monitor.event_list import EventList, corruption_line
from holdfast.observe.monitor.lanes import Lanes
from holdfast.observe.monitor.membership import Membership
from holdfast.observe.monitor.recoveries import Recoveries
from holdfast.observe.monitor.sentence import Ended, level_and_sentence
from holdfast.records.queued import SinkCount
from holdfast.records.types import (
    CorruptionFound,
    CorruptionHealed,
    Finished,
    Record,
    Recovered,
    RunStarted,
    SamplesLost,
    ScriptFailed,
    StateHashed,
    StepCommitted,
)
from holdfast.summary.goodput import CAUSES, SETTLED_S, Goodput, TimeAccount

MOST_FINDINGS = 100
"""The last findings of the guard that are kept."""
SERIES_S = 1.0
"""The curves are sent again after this time of the run."""
SILENT_S = 60.0
"""A run of another launcher that writes nothing for so long may have ended."""
_FEW = 64
"""Up to so many workers, each change has the rows of all workers, which show their step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is known of a run without its records.

    Args:
        id: Names the run among those of one server: letters, digits, ``-``, ``_`` and ``.``.
        script: Name of the script.
        command: The command that started it.
        resume: The command that resumes it after its end, "" if it saves nothing.
        checkpoint_dir: Where it saves, or "".
        guard: The value of ``--guard``.
        started_unix: Unix time of the records' zero.
        is_live: Whether it runs under this launcher, which can act on it.
        report: Name of its page in the report directory, or "".
        started: Ranks that compute from the start.
        spares: Ranks that wait as spares from the start.
        nodes: Name of the host of each node, as far as it is known.
        node_of: Returns the node of a rank, -1 if it is not known.
    """

    id: str
    script: str = ""
    command: str = ""
    resume: str = ""
    checkpoint_dir: str = ""
    guard: str = "off"
    started_unix: float = 0.0
    is_live: bool = False
    report: str = ""
    started: Sequence[int] = ()
    spares: Sequence[int] = ()
    nodes: Mapping[int, str] = field(default_factory=dict)
    node_of: Callable[[int], int] = lambda _: 0


class LiveState:
    """The state of one run. Its methods may be called from any thread.

    Args:
        info: What is known without records.
    """

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self.version = 0
        self._lock = threading.RLock()
        self._stamps: Counter[str] = Counter()
        self._lanes = Lanes(self._stamp, info.node_of)
        self._recoveries = Recoveries(self._stamp)
        self._events = EventList(self._stamp)
        self._members = Membership(self._lanes, self._recoveries, info.started, info.spares)
        self._progress = self._members.progress
        self._curves = Curves()
        self._account = TimeAccount()
        self._newest_s = 0.0
        self._checkpoints = Checkpoints(self._stamp)
        self._findings: deque[dict[str, Any]] = deque(maxlen=MOST_FINDINGS)
        self._samples_lost: set[tuple[int, int]] = set()
        self._checks = 0
        self._drawn_s = float("-inf")
        self._certified: tuple[int, int, str] | None = None  # first and last step, and the link of the last
        self._ended: Ended | None = None
        self._is_over = False
        self._spent: Goodput | None = None
        self._sinks: tuple[SinkCount, ...] = ()
        self.silent_s = 0.0
        """For so long no file of the run has changed; for a run of another launcher, of which it is not known that it runs."""

    def _stamp(self) -> int:
        self.version += 1
        return self.version

    def _touch(self, section: str) -> None:
        self._stamps[section] = self._stamp()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._is_over

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Let no other thread read or change the state in the context, unless one does; return whether that is so."""
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()

    # -- records

    def take(self, records: Sequence[Record]) -> None:
        """Take new records, in any order; what a record says twice counts once."""
        with self._lock:
            for record in records:
                self._apply(record)
                if not isinstance(record, StateHashed):
                    self._account.add(_slim(record))
                    self._newest_s = max(self._newest_s, record.t_s)
            self._settle(self._newest_s - SETTLED_S)

    def note_sinks(self, counts: Sequence[SinkCount]) -> None:
        """Take how many records other sinks received."""
        with self._lock:
            missed = [(count.name, count.dropped) for count in counts]
            if missed != [(count.name, count.dropped) for count in self._sinks]:
                self._sinks = tuple(counts)
                self._touch("sinks")

    def note_processes(self, pids: Mapping[int, int]) -> None:
        """Take the process IDs of workers."""
        with self._lock:
            for rank, pid in pids.items():
                self._lanes.note(rank, pid=pid)

    def without_pid(self) -> list[int]:
        """Return the live workers whose process ID is not known."""
        with self._lock:
            return [rank for rank in self._lanes.alive() if self._lanes.by_rank[rank].pid is None]

    def note_newcomers(self, ranks: Iterable[int]) -> None:
        """Take which workers are being started beside those that train."""
        with self._lock:
            for rank in ranks:
                self._lanes.lane(rank, "joining", self._newest_s)

    def unplaced(self) -> list[int]:
        """Return the live workers whose node is not known."""
        with self._lock:
            return [rank for rank in self._lanes.alive() if self._lanes.by_rank[rank].node < 0]

    def note_node(self, rank: int, node: int) -> None:
        """Take the node of a worker."""
        with self._lock:
            self._lanes.note(rank, node=node)

    def finish(self, exit_code: int | None, why: str = "", outcome: str = "") -> None:
        """Take how the run ended, see :class:`~holdfast.observe.monitor.sentence.Ended`, before :meth:`close`."""
        with self._lock:
            self._ended = Ended(end_s=0.0, exit_code=exit_code, why=why, outcome=outcome)

    def close(self, end_s: float) -> None:
        """Take the end of the run: all records have arrived. Nothing follows."""
        with self._lock:
            self._settle(float("inf"))
            self._spent = self._account.close(end_s)
            self._explain()
            self._ended = dataclasses.replace(self._ended or Ended(end_s=end_s), end_s=end_s)
            self._is_over = True
            self._lanes.close(end_s)
            self._touch("series")
            self._touch("integrity")
            self._touch("run")

    def _settle(self, until_s: float) -> None:
        for _ in self._account.settle(until_s):
            self._explain()

    def _explain(self) -> None:
        """Give the recoveries whose time is accounted for their parts."""
        for ended_s, parts in self._account.new_recoveries():
            self._recoveries.explain(ended_s, parts)

    def _apply(self, record: Record) -> None:
        is_new_step = self._members.take(record)
        self._events.take(record)
        self._checkpoints.take(record)
        match record:
            case RunStarted() if record is self._progress.first:
                self._curves.begin(record)
                self._touch("run")
            case StepCommitted() if is_new_step:
                self._commit(record)
            case CorruptionFound() | CorruptionHealed():
                self._findings.append({"t_s": round(record.t_s, 4), "text": corruption_line(record)})
                self._touch("integrity")
            case SamplesLost():
                self._samples_lost |= {(record.epoch, number) for number in record.ids}
            case ScriptFailed() | Finished():
                self._touch("run")

    def _commit(self, record: StepCommitted) -> None:
        self._curves.add(record)
        self._stamp()
        if record.t_s - self._drawn_s >= SERIES_S:
            self._drawn_s = record.t_s
            self._touch("series")
            self._touch("integrity")  # its number of checks, and the last link
        self._checks += self.info.guard != "off"
        if record.link:
            first = record.step if self._certified is None else min(self._certified[0], record.step)
            self._certified = (first, record.step, record.link)

    # -- as JSON

    def full(self, now_s: float) -> dict[str, Any]:
        """Return everything, ``now_s`` seconds after the run began."""
        with self._lock:
            return self._since(-1, now_s) | {"causes": dict(CAUSES)}

    def changes(self, since: int, now_s: float) -> dict[str, Any]:
        """Return what has changed after a version; of a section of rows, the new and the changed rows."""
        with self._lock:
            return self._since(since, now_s)

    def summary(self, now_s: float) -> dict[str, Any]:
        """Return what a list of runs shows of this one."""
        with self._lock:
            state = self._since(self.version, now_s)
        kept = {name: state[name] for name in ("state", "progress", "goodput")}
        name = self.info.script or self.info.id
        return {"id": self.info.id, "name": name, "live": self.info.is_live and not self._is_over, **kept}

    def _since(self, since: int, now_s: float) -> dict[str, Any]:
        ended = self._ended if self._is_over else None
        now_s = now_s if ended is None else ended.end_s
        if self._spent is None:
            self._settle(now_s - SETTLED_S)
        state: dict[str, Any] = {"now_s": round(now_s, 3), **self._brief(now_s, ended), **self._rows(since)}
        sections: dict[str, Callable[[], Any]] = {
            "run": self._run,
            "series": self._curves.as_rows,
            "integrity": self._integrity,
            "sinks": self._sink_rows,
        }
        state |= {name: make() for name, make in sections.items() if since < 0 or self._stamps[name] > since}
        return {"version": self.version, **state}

    def _brief(self, now_s: float, ended: Ended | None) -> dict[str, Any]:
        """Return the sections that change all the time."""
        level, sentence = level_and_sentence(self._members, ended)
        if self.silent_s > SILENT_S and not self.is_over:
            level, sentence = "warning", f"Nothing was written for {seconds(self.silent_s)}. Before: {sentence}"
        spent = self._spent or self._account.now(max(0.0, now_s))
        goodput: dict[str, Any] | None = None
        if not self._account.is_unknown:
            badput_s = {cause: round(seconds, 6) for cause, seconds in spent.badput_s.items()}
            goodput = {"wall_s": round(spent.wall_s, 6), "useful_s": round(spent.useful_s, 6)}
            goodput |= {"ratio": round(spent.ratio, 6), "badput_s": badput_s}
        run = self._progress
        rate, left_s = run.steps_per_s, run.left_s
        progress = {
            "step": run.step,
            "planned": run.planned,
            "steps_per_s": None if rate is None else round(rate, 3),
            "eta_s": None if left_s is None else round(left_s, 1),
            "samples": run.num_samples,
            "samples_lost": len(self._samples_lost),
            "steps_redone": self._members.steps_redone,
            "restarts": run.restarts,
        }
        return {"state": {"level": level, "sentence": sentence}, "progress": progress, "goodput": goodput}

    def _rows(self, since: int) -> dict[str, Any]:
        """Return the sections of rows that have new ones."""
        self._members.assign_slices()
        is_few = len(self._lanes.by_rank) <= _FEW
        is_same = self._lanes.version <= since and not is_few
        lanes = [] if is_same else [lane for _, lane in sorted(self._lanes.by_rank.items())]
        changed = [lane for lane in lanes if lane.version > since]
        shown = lanes if is_few else changed
        rows = {
            "workers": self._lanes.workers(shown, self._progress.step),
            "lanes": self._lanes.lanes(changed),
            "recoveries": self._recoveries.as_rows(since, self._members.cause_of),
            "checkpoints": self._checkpoints.as_rows(since),
            "nodes": self._members.node_rows(self.info.nodes) if changed else [],
            "events": self._events.as_rows(since),
            "dropped": [rank for version, rank in self._lanes.dropped if version > since >= 0],
        }
        return {name: section for name, section in rows.items() if section or since < 0}

    def _run(self) -> dict[str, Any]:
        info, start = self.info, self._progress.first
        of_start = {name: getattr(start, name, "") for name in ("strategy", "fabric", "order")}
        is_over, ended = self._is_over, self._ended
        return {
            "id": info.id,
            "script": info.script,
            "command": info.command,
            "resume": info.resume,
            **of_start,
            "guard": info.guard,
            "checkpoint_dir": info.checkpoint_dir,
            "started_unix": round(info.started_unix, 3),
            "live": info.is_live and not is_over,
            "ended": is_over,
            "exit_code": ended.exit_code if ended is not None and is_over else None,
            "report": info.report,
        }

    def _integrity(self) -> dict[str, Any]:
        certificate = "No certificate."
        if self._certified is not None:
            first, last, link = self._certified
            certificate = f"The hash chain covers steps {first} to {last}; its last link is {link[:16]}."
        return {
            "guard": self.info.guard,
            "checks": self._checks,
            "findings": list(self._findings),
            "certificate": certificate,
        }

    def _sink_rows(self) -> list[dict[str, Any]]:
        return [{"id": count.name, "missed": count.dropped} for count in self._sinks]


def _slim(record: Record) -> Record:
    """Return a record without what the account of time does not read: every survivor of 1,000 lists all of them."""
    return dataclasses.replace(record, survivors=(), orders={}) if isinstance(record, Recovered) else record
