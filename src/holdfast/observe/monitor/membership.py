"""The membership of a run, as its records tell: moves the workers of a live view from state to state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.observe.monitor.lanes import GONE, Lanes
from holdfast.observe.monitor.recoveries import Recoveries
from holdfast.observe.monitor.slices import SliceShares
from holdfast.records.progress import RunProgress
from holdfast.records.types import (
    CorruptionFound,
    DeviceLost,
    FailureSeen,
    FaultFired,
    Finished,
    JobRestarted,
    Left,
    Record,
    Recovered,
    RunStarted,
    ScriptFailed,
    SettingChanged,
    StepCommitted,
    StragglerSeen,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary.event_lines import cause_of_death, slowness


class Membership:
    """Reads the records about workers.

    Args:
        lanes: The workers, which it changes.
        recoveries: The recoveries, which it changes.
        started: Ranks that compute from the start; may be empty if they are not known.
        spares: Ranks that wait as spares from the start.
    """

    def __init__(self, lanes: Lanes, recoveries: Recoveries, started: Sequence[int], spares: Sequence[int]) -> None:
        self.lanes, self.recoveries, self.progress = lanes, recoveries, RunProgress()
        self.wanted = len(started)
        """Workers that should share the work."""
        self.steps_redone = 0
        self.is_recovering = False
        """A failure was detected, and no step was committed since."""
        self.outcome = ""
        self.error = ""
        self._causes: dict[int, str] = {}
        self._left: set[int] = set()
        self._redone: dict[int, int] = {}  # by number of the recovery
        self._resumes_after: int | None = None  # the last step before a restart
        self._restarted_s = float("-inf")
        self._is_virtual = False
        self._shares: SliceShares | None = None
        self._shared_among: tuple[int, ...] = ()
        self._shared_at = -1  # version of the lanes then
        for rank in (*started, *spares):
            lanes.lane(rank, "starting", 0.0)

    def cause_of(self, rank: int) -> str:
        """Return why a worker was lost, "" if it is not known."""
        return self._causes.get(rank, "")

    def take(self, record: Record) -> bool:
        """Take a record; return whether it commits a step that was not known."""
        match record:
            case StepCommitted():
                self.is_recovering = False
                self.recoveries.resume()
                self._find_at_work((record.rank,), record.t_s)
            case RunStarted():
                self._begin(record)
            case FailureSeen():
                self._detect(record)
            case Recovered():
                self._decide(record)
            case WorkerEnded():
                self._end(record)
            case Left():
                self._left.add(record.rank)
                self.lanes.note(record.rank, step=record.step)
                self.lanes.enter(record.rank, "left", record.t_s)
            case Finished():
                self._finish(record)
            case JobRestarted():
                self._restart(record)
            case ScriptFailed():
                self.error = record.message
                self._explain(record.rank, f"exception: {record.message}")
            case _:
                self._note(record)
        return self.progress.apply(record)  # last: what restarts also means depends on the steps before it

    def _note(self, record: Record) -> None:
        """Take a record that changes no membership."""
        match record:
            case FaultFired():
                for rank in record.workers or (record.rank,):
                    self.lanes.mark(rank, record.t_s, "fault", f"injected: {record.kind} ({record.phase})")
            case DeviceLost():
                self._explain(record.rank, f"its device was lost: {record.message}")
            case WorkerFenced():
                self._explain(record.rank, f"killed by the launcher: {record.reason}")
            case StragglerSeen():
                self.lanes.mark(record.rank, record.t_s, "straggler", slowness(record.score, record.policy))
            case CorruptionFound():
                for rank in record.ranks:
                    self.lanes.mark(rank, record.t_s, "corruption", f"wrong bits found in step {record.step}")
            case SettingChanged(name="workers") if record.value.isdecimal():
                self.wanted = int(record.value)
                self._share(record.t_s)
            case SettingChanged(name="speeds") if self._shares is not None:
                self._shares.change(record)
                self._shared_among, self._shared_at = (), -1

    def assign_slices(self) -> None:
        """Note which slices each worker computes, if the workers that compute have changed."""
        if self._shares is None or self._shared_at == self.lanes.version:
            return
        self._shared_at = self.lanes.version
        active = tuple(self.lanes.ranks("training", "recovering"))
        if active == self._shared_among:
            return
        self._shared_among = active
        slices = self._shares.of(active)
        for rank in self.lanes.by_rank:
            self.lanes.note(rank, slices=tuple(slices.get(rank, ())))

    # -- begin and end

    def _begin(self, record: RunStarted) -> None:
        self._is_virtual = record.fabric == "virtual"
        self.wanted = self.wanted or record.workers
        if self._resumes_after is not None:
            self.steps_redone += max(0, self._resumes_after - record.step + 1)
            self._resumes_after = None
        is_starting = not self.progress.is_training
        if not is_starting and record.rank not in self.lanes.by_rank:
            self.lanes.lane(record.rank, "joining", record.t_s)
            return  # it trains once the others have admitted it
        if is_starting:  # all workers of this start are known before its first step
            initial = sorted({*self.lanes.alive(), record.rank})[: record.workers]
            self._shares, self._shared_among = SliceShares(record, initial), ()
        ranks = range(record.workers) if self._is_virtual else (record.rank,)
        alive = sorted({*self.lanes.alive(), *ranks})
        for rank in ranks:
            self.lanes.lane(rank, "starting", min(self._restarted_s, record.t_s) if self.progress.restarts else 0.0)
            place = alive.index(rank)
            self.lanes.enter(rank, "training" if place < self.wanted else "spare", record.t_s)

    def _end(self, record: WorkerEnded) -> None:
        lane = self.lanes.lane(record.rank, "starting", record.t_s)
        if record.pid >= 0:
            self.lanes.note(record.rank, pid=record.pid)
        if record.exit_code == 0:
            if lane.state not in GONE:
                self.lanes.enter(record.rank, "left" if record.rank in self._left else "done", record.t_s)
            return
        if record.rank in self._left or lane.state == "done":
            return
        if record.rank not in self._causes:
            self._explain(record.rank, cause_of_death(record.exit_code))
        self._lose(record.rank, record.t_s, record.step)

    def _lose(self, rank: int, t_s: float, step: int) -> None:
        if self.lanes.by_rank[rank].step is None and step >= 0:
            self.lanes.note(rank, step=step)
        if self.lanes.enter(rank, "lost", t_s):
            self.lanes.mark(rank, t_s, "lost", self.cause_of(rank) or "lost")

    def _finish(self, record: Finished) -> None:
        self.outcome = record.outcome
        for rank in self.lanes.ranks("training", "recovering", "spare") if self._is_virtual else (record.rank,):
            self.lanes.note(rank, step=record.step)
            self.lanes.enter(rank, "done", record.t_s)

    def _explain(self, rank: int, cause: str) -> None:
        self._causes[rank] = cause
        self.lanes.note(rank, cause=cause)
        self.recoveries.refresh(rank)

    # -- recoveries

    def _detect(self, record: FailureSeen) -> None:
        self.recoveries.detect(record)
        lane = self.lanes.by_rank.get(record.rank)
        if lane is not None and lane.state == "training":
            self.is_recovering |= self.lanes.enter(record.rank, "recovering", record.t_s)

    def _decide(self, record: Recovered) -> None:
        row = self.recoveries.decide(record)
        self._count_redone(record)
        for rank in record.lost:
            self.lanes.lane(rank, "starting", record.t_s)
            if rank in self._left:
                self.lanes.enter(rank, "left", record.t_s)
            elif self.lanes.by_rank[rank].state not in GONE:
                self._lose(rank, record.t_s, record.step)
        if row is None:  # another survivor has said it before
            lane = self.lanes.by_rank.get(record.rank)
            if lane is not None and lane.state == "recovering":
                self.lanes.enter(record.rank, self._role(record), record.t_s)
            return
        self.is_recovering = row.decision not in ("grow",)
        self._find_at_work([rank for rank in record.survivors if rank not in record.joined], record.t_s)
        for rank in record.joined:
            self._join(rank, record)
        self._share(record.t_s, record.survivors if self._is_virtual or not record.joined else ())
        self.lanes.enter(record.rank, self._role(record), record.t_s)

    def _find_at_work(self, ranks: Sequence[int], t_s: float) -> None:
        """Let workers train whose start was not seen: a launcher that came back receives the records since."""
        for rank in ranks:
            lane = self.lanes.by_rank.get(rank)
            if lane is None or lane.state == "starting":
                self.lanes.enter(rank, "training", t_s)

    def _role(self, record: Recovered) -> str:
        return "training" if record.rank in sorted(record.survivors)[: self.wanted] else "spare"

    def _join(self, rank: int, record: Recovered) -> None:
        self.lanes.lane(rank, "joining", record.t_s)
        self.lanes.note(rank, joined=True, cause="")
        self.lanes.mark(rank, record.t_s, "join", f"joined at step {record.step}")
        self.lanes.enter(rank, "training", record.t_s)

    def _share(self, t_s: float, among: Sequence[int] = ()) -> None:
        """Let the lowest ranks train; a worker that recovers or joins changes when it says so itself."""
        alive = sorted(among) or [r for r in self.lanes.alive() if self.lanes.by_rank[r].state != "joining"]
        for place, rank in enumerate(alive):
            state = "training" if place < self.wanted else "spare"
            lane = self.lanes.by_rank.get(rank)
            if lane is not None and lane.state in ("training", "spare") and lane.state != state:
                self.lanes.enter(rank, state, t_s)

    def _count_redone(self, record: Recovered) -> None:
        """Count the steps that a recovery computes again: the most that any survivor says."""
        if not self.recoveries.rows or (record.decision != "heal" and set(record.lost) <= self._left):
            return
        number = self.recoveries.rows[-1].number
        before = self._redone.get(number, 0)
        if record.redone_steps > before:
            self._redone = {number: record.redone_steps}
            self.steps_redone += record.redone_steps - before

    def _restart(self, record: JobRestarted) -> None:
        if record.restart <= self.progress.restarts:
            return
        self._restarted_s = record.t_s
        gone = [rank for rank in self.lanes.alive() if rank not in record.workers]
        self.recoveries.restart(record, tuple(gone))
        self._resumes_after = self.progress.highest + 1
        self.is_recovering, self.outcome = False, ""
        self._shares = None
        for rank in gone:
            self._lose(rank, record.t_s, record.step)
        for rank in record.workers:
            self._causes.pop(rank, None)
            self._left.discard(rank)
            self.lanes.lane(rank, "starting", record.t_s)
            self.lanes.note(rank, cause="", step=None, pid=None)
            self.lanes.enter(rank, "starting", record.t_s)

    # -- as JSON

    def node_rows(self, hosts: Mapping[int, str]) -> list[dict[str, Any]]:
        """Return a row for each node."""
        rows: dict[int, dict[str, Any]] = {
            node: {"id": node, "host": host, "alive": 0, "workers": 0, "state": "present"}
            for node, host in hosts.items()
        }
        for lane in self.lanes.by_rank.values():
            if lane.node < 0:
                continue
            row = rows.setdefault(lane.node, {"id": lane.node, "host": "", "alive": 0, "workers": 0, "state": ""})
            row["workers"] += 1
            row["alive"] += lane.state not in GONE
        return [
            row | {"state": "lost" if row["workers"] and not row["alive"] and not self.outcome else "present"}
            for _, row in sorted(rows.items())
        ]
