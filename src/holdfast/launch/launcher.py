"""Running a job: start it, follow it, answer its end, start it again, report."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from holdfast.clock import SystemClock
from holdfast.errors import ConfigError, StoreLost
from holdfast.events import (
    FaultFired,
    JobRestarted,
    Record,
    RunStarted,
    ScriptFailed,
    StepCommitted,
    StragglerSeen,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.faults.plan import FaultPlan, mtbf_schedule
from holdfast.launch.attempt import Attempt, Files, Places
from holdfast.launch.births import Births
from holdfast.launch.control import Asked, announce, append
from holdfast.launch.control import check as check_changes
from holdfast.launch.hangs import Hangs
from holdfast.launch.job import Job, Outcome, check, resume_command
from holdfast.launch.judge import Broken, Completed, Departed, Judge, Lost, Verdict, cause_of_death
from holdfast.launch.live import NoView, Status, Story, View
from holdfast.launch.nodes import FENCE_LEASES, Nodes, Start, check_nodes
from holdfast.launch.stragglers import Stragglers
from holdfast.records import FileRecorder, Position, read_run, records_path, requests_path, stop_path
from holdfast.report.history import is_distributed
from holdfast.settings import Settings

POLL_S = 0.02
_LOOK_S = 0.25
_LINGER_S = 1.0
_TOGETHER_S = 1.0
"""Launchers that are told to stop within this time are told so as a whole."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(job: Job, view: View | None = None) -> Outcome:
    """Run ``job`` to its end, whatever that is.

    Args:
        job: What to run.
        view: Who shows it; None shows nothing.

    Raises:
        ConfigError: if the job cannot be started as it is; nothing was started.
    """
    check(job)
    check_nodes(job)
    with Launcher(job, NoView() if view is None else view) as launcher:
        return launcher.run()


class Launcher:
    """Runs one job, as a context: what it started is gone when the context is left.

    Args:
        job: What to run; it was checked.
        view: Who shows it.
    """

    def __init__(self, job: Job, view: View) -> None:
        self._job = job
        self._view = view
        self._story = Story()
        self._judge = Judge(job.script.name, virtual=job.is_virtual, stall_timeout_s=job.stall_timeout_s)
        self._plan = FaultPlan.from_json(job.settings.faults) if job.settings.faults else FaultPlan()
        self._attempt: Attempt | None = None
        self._nodes: Nodes | None = None
        self._births = Births(job.max_respawns, 0)
        self._stragglers = Stragglers(job.straggler_factor)
        self._hangs = Hangs(0.0 if job.is_virtual else job.settings.hang_timeout_s)
        self._restarts = 0
        self._signals = 0
        self._stop_at_once = False
        self._stop_by_s: float | None = None
        self._lost_store_by_s: float | None = None
        self._told_to_stop = False
        self._noted: list[tuple[Record, Position | None]] = []
        self._distributed = False
        self._tracebacks: dict[int, str] = {}
        self._kills: Kills | None = None
        self._status = Status(alive={}, metrics={})
        self._look_at_s = 0.0

    def __enter__(self) -> Self:
        job = self._job
        if job.settings.fabric == "gloo":
            self._nodes = Nodes(job)
        self._origin_s = time.monotonic() if self._nodes is None else self._nodes.origin_s()
        self._clock = SystemClock(self._origin_s)
        report_logs = None if job.report_dir is None else job.report_dir / "logs"
        self._places = places = Places.make(job.log_dir or report_logs)
        self._recorder = FileRecorder(records_path(places.run_dir, "launcher"))
        self._files = Files(places)
        self._asked = Asked(places.run_dir)
        self._running = announce(places.run_dir, job)
        self._handlers = self._take_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self._attempt is not None:
            self._attempt.end()
        if self._nodes is not None:
            self._nodes.close()
        self._view.close()
        self._files.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._places.clear()

    def run(self) -> Outcome:
        """Start the job, as often as it takes and is allowed, and return how it ended."""
        ranks = self._job.ranks
        while True:
            try:
                verdict: Verdict | None = self._run_once(ranks)
                if isinstance(verdict, Lost):
                    ranks = self._ranks_left()
                    verdict = self._restart(verdict, ranks)
            except StoreLost as error:
                verdict = self._cut_off(str(error))
            if verdict is not None:
                return self._finish(verdict)

    def _ranks_left(self) -> tuple[int, ...]:
        """Return whom to start the job again with, the same at all launchers."""
        ranks = self._judge.ranks_left(len(self._job.ranks) if self._job.max_respawns else 1)
        if self._nodes is not None and not self._nodes.store_lost and self._restarts < self._job.max_restarts:
            ranks = self._nodes.agree_on_restart(self._restarts + 1, ranks)
        return ranks

    def _others_say(self) -> Verdict | None:
        """Return what the other launchers, or their silence, mean for this one."""
        nodes, attempt = self._nodes, self._attempt
        if nodes is None or attempt is None:
            return None
        if why := nodes.store_lost:
            return self._stop_without_store(nodes, attempt, why)
        if self._job.nnodes > 1 and nodes.is_restarted():
            return Lost("the job was lost, another launcher says")
        if self._all_stall(nodes, attempt):
            return self._judge.stalled()
        if nodes.is_stopping() and not self._signals:
            self._signals = 1
        if self._job.nnodes == 1 or attempt.is_running():
            return None
        if self._signals and not nodes.is_stopping() and self._judge.living():
            return Departed()
        return None

    def _stop_without_store(self, nodes: Nodes, attempt: Attempt, why: str) -> Verdict | None:
        """Have the workers save and stop, if all are there to do so; return what has become of it.

        They must have ended before other nodes, if only this one is cut off, may start the job again.
        """
        if self._lost_store_by_s is None:
            grace_s = self._job.grace_s
            if self._job.nnodes > 1:
                grace_s = min(grace_s, (FENCE_LEASES - 1) * self._job.node_timeout_s)
            self._view.say(f"stopping: {why}; the workers finish their step and save, within {grace_s:g} s")
            self._lost_store_by_s = self._clock.now_s() + grace_s
            stop_path(self._places.run_dir).touch()
            for rank in attempt.processes:
                attempt.send(rank, signal.SIGTERM)
        if attempt.is_running() and self._clock.now_s() < self._lost_store_by_s:
            return None
        self._read()
        verdict = self._judge.verdict(self._clock.now_s(), running=False)
        return verdict if isinstance(verdict, Completed) else self._cut_off(why)

    def _cut_off(self, why: str) -> Broken:
        if self._job.nnodes == 1:
            return Broken(f"the store was lost: {why}")
        return Broken(
            f"node {self._job.node_rank} can no longer take part: {why}. Its workers were ended, and nothing counts that "
            "the others do not know of; to come back, start it again with the same command"
        )

    # --- one start of the job

    def _run_once(self, ranks: tuple[int, ...]) -> Verdict:
        start = self._begin(ranks)
        own = start.own
        self._judge.begin(start.living)
        self._births.begin_again(max(self._judge.highest, *start.ranks) + 1)
        self._hangs.begin()
        self._stragglers.begin()
        self._come_late()
        self._files.follow(own, own[:1] if self._job.is_virtual else own)
        self._attempt = attempt = Attempt(
            self._watched_job(),
            self._settings(start.ranks, start.store),
            own,
            self._places,
            all_stop=self._job.nnodes == 1 or (self._nodes is not None and self._nodes.is_host),
        )
        verdict = None
        while verdict is None:
            running = self._is_running(attempt)  # before the records are read: who is gone has written everything
            self._read()
            self._answer_signals(attempt)
            self._look(attempt)
            self._start_newcomers(attempt)
            verdict = (
                self._timed_out() or self._others_say() or self._judge.verdict(self._clock.now_s(), running=running)
            )
            if verdict is None and not self._inject(attempt):
                time.sleep(POLL_S)
        self._judge.close()
        if isinstance(verdict, Completed):
            attempt.wait(_LINGER_S)
        attempt.end()
        self._read(last=True)
        return verdict

    def _watched_job(self) -> Job:
        """Return the job as the watchers shall know it: without this launcher the node is lost when its lease runs out."""
        if self._job.nnodes == 1 or (self._nodes is not None and self._nodes.is_host):
            return self._job
        return dataclasses.replace(self._job, grace_s=min(self._job.grace_s, self._job.node_timeout_s))

    def _begin(self, ranks: tuple[int, ...]) -> Start:
        nodes = self._nodes
        if nodes is None:
            return Start("", ranks, ranks, ranks)
        if nodes.is_late:
            self._restarts = nodes.number
        return nodes.begin(self._restarts)

    def _come_late(self) -> None:
        """If the job has begun without this node, offer it as many workers as it would have had."""
        if self._nodes is not None and self._nodes.is_late:
            self._nodes.is_late = False
            settings = self._job.settings
            self._births.ask(settings.workers + settings.spares, self._clock.now_s())
            self._view.say(f"node {self._job.node_rank} comes back: its workers join as newcomers")

    def _is_running(self, attempt: Attempt) -> bool:
        """Return whether anything may still happen, here or on another node."""
        remote = set(self._judge.living()).difference(attempt.processes)
        return attempt.is_running() or bool(remote)

    def _settings(self, ranks: tuple[int, ...], store: str) -> Settings:
        given = self._job.settings
        again = self._restarts > 0
        goes_on = again and self._has_begun() and (bool(given.checkpoint_dir) or self._judge.saved is not None)
        fired = self._judge.fired & set(range(len(self._plan.faults)))
        return dataclasses.replace(
            given,
            workers=min(self._job.workers, len(ranks)),
            spares=max(0, len(ranks) - self._job.workers),
            ranks=",".join(map(str, ranks)) if again or store else "",
            store=store,
            token="" if self._nodes is None else self._nodes.token,
            slices=self._slices(),
            resume=given.resume or goes_on,
            mtbf_s=self._mtbf_s(),
            faults=self._plan.without(fired).to_json() if self._plan.faults else "",
            run_dir=str(self._places.run_dir),
            origin_s=self._origin_s,
        )

    def _start_newcomers(self, attempt: Attempt) -> None:
        for due in self._births.due(self._clock.now_s()) if not self._signals else ():
            try:
                rank = due if self._nodes is None else self._nodes.free_number(due)
            except StoreLost:  # found at the next look
                return
            self._files.follow([rank], [rank])
            self._judge.wait_for(rank)
            attempt.add(rank)

    def _began(self) -> list[RunStarted]:
        return [record for record in read_run(self._places.run_dir) if isinstance(record, RunStarted)]

    def _has_begun(self) -> bool:
        """Return whether training has begun: then the checkpoints that are there are this job's, or it was to resume."""
        return bool(self._began()) or (self._nodes is not None and self._nodes.slices > 0)

    def _slices(self) -> int:
        """Return the slices of the job: what it began with, once it has begun."""
        if self._nodes is not None and self._nodes.slices:
            return self._nodes.slices
        return next((record.slices for record in self._began()), self._job.slices)

    def _mtbf_s(self) -> float:
        """Return the time between failures to believe in: what was given counts as one failure, each start anew as one."""
        given = self._job.settings
        if not (self._restarts and given.checkpoint_auto):
            return given.mtbf_s
        return (given.mtbf_s + self._clock.now_s()) / (1 + self._restarts)

    def _restart(self, lost: Lost, ranks: tuple[int, ...]) -> Verdict | None:
        """Get ready to start again on ``ranks``; the verdict if that is not allowed."""
        if self._signals and self._distributed:
            return Broken(f"stopped on request: {lost.reason}")
        if self._signals:
            return Broken(f"stopped on request, but the workers were gone before they could save: {lost.reason}")
        if self._restarts >= self._job.max_restarts:
            return Broken(
                f"the job was lost {_times(self._restarts + 1)}, and --max-restarts is {self._job.max_restarts}: "
                f"{lost.reason}",
                unexplained=True,
            )
        if len(ranks) < self._job.settings.min_workers:
            return Broken(
                f"{len(ranks)} of the workers are left, fewer than --min-workers {self._job.settings.min_workers}: "
                f"{lost.reason}"
            )
        self._restarts += 1
        self._note(
            JobRestarted(
                t_s=self._clock.now_s(),
                rank=-1,
                step=self._judge.last_step,
                restart=self._restarts,
                workers=ranks,
                reason=lost.reason,
            )
        )
        return None

    # --- following it

    def _read(self, *, last: bool = False) -> None:
        """Take in what is new. Output first: a traceback's record is written before its output, so it is known."""
        output = self._files.output(last=last)
        own, self._noted = self._noted, []
        for record in self._files.records():
            own.append((record, position := self._end_of(record)))
            self._hear(record, position)
        self._exchange(own)
        for rank, line in output:
            if not self._is_kept_for_later(rank, line):
                self._view.output(rank, line)

    def _end_of(self, record: Record) -> Position | None:
        """Answer the end of a worker of this node; return where it was."""
        if not isinstance(record, WorkerEnded) or self._attempt is None:
            return None
        if record.exit_code:
            self._births.died(record.rank, self._clock.now_s())
        if self._nodes is not None and not self._nodes.store_lost:
            with contextlib.suppress(StoreLost):  # found at the next look
                if record.exit_code:
                    self._nodes.died(record.rank, cause_of_death(record.exit_code))
                self._nodes.ended(record.rank)
        return self._attempt.position(record.rank)

    def _exchange(self, own: Sequence[tuple[Record, Position | None]]) -> None:
        """Tell the other launchers what is new here, and hear them."""
        if self._nodes is None or self._job.nnodes == 1 or self._nodes.store_lost:
            return
        with contextlib.suppress(StoreLost):  # found at the next look
            self._nodes.tell(own)
            self._hear_others(self._nodes)

    def _hear_others(self, nodes: Nodes) -> None:
        changes = nodes.look()
        for rank in changes.newcomers:
            self._judge.wait_for(rank)
        for told in nodes.hear():
            self._recorder.write(told.record)
            if told.start == nodes.number and told.record.rank not in nodes.given_up:
                self._hear(told.record, told.position)
        self._judge.lose(changes.parted)
        for node, ranks in changes.lost.items():
            self._judge.lose(ranks)
            what = f", and with it {', '.join(f'rank {rank}' for rank in ranks)}" if ranks else ""
            self._view.say(f"node {node} is lost{what}")

    def _hear(self, record: Record, position: Position | None = None) -> None:
        self._judge.hear(record, position)
        match record:
            case RunStarted():
                self._status = dataclasses.replace(self._status, planned=record.steps_planned)
                self._distributed = is_distributed(record)
                if self._nodes is not None:
                    self._nodes.note_slices(record.slices)
            case StepCommitted():
                self._status = dataclasses.replace(self._status, step=record.step + 1, metrics=record.metrics)
                self._start_kills()
            case ScriptFailed():
                self._tracebacks[record.rank] = record.traceback or record.message
        if (line := self._story.tell(record)) is not None:
            self._view.say(line)

    def _note(self, record: Record) -> None:
        """Write down what the launcher itself did; what it did to a worker is told to the other launchers."""
        self._recorder.write(record)
        self._hear(record)
        if isinstance(record, FaultFired | WorkerFenced | StragglerSeen):
            self._noted.append((record, None))

    def _is_kept_for_later(self, rank: int, line: str) -> bool:
        """Return whether the line belongs to a traceback: one of them is shown, last."""
        if rank not in self._tracebacks:
            return False
        return line in self._tracebacks[rank].splitlines()

    def _look(self, attempt: Attempt) -> None:
        """Look now and then where the workers are."""
        now_s = self._clock.now_s()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + min(_LOOK_S, self._hangs.look_every_s or _LOOK_S)
        living = [rank for rank in self._judge.living() if rank in attempt.processes]
        watched = {*living, *self._judge.waiting} & set(attempt.processes)
        positions = {rank: p for rank in watched if (p := attempt.position(rank)) is not None}
        self._judge.watch(positions, now_s)
        self._end_stuck(attempt, positions, now_s)
        self._say_how_it_goes(living, now_s)
        self._look_for_stragglers(attempt, positions, now_s)
        self._look_for_changes(attempt, now_s)
        self._status = dataclasses.replace(self._status, alive=attempt.pids(living))
        self._view.show(self._status)

    def _says_elsewhere(self, what: str) -> bool:
        return self._nodes is not None and self._nodes.any_says(what)

    def _say_how_it_goes(self, living: Sequence[int], now_s: float) -> None:
        """Tell the other launchers what decides, for all workers together, whether some are stuck."""
        if self._nodes is not None and not self._nodes.store_lost:
            with contextlib.suppress(StoreLost):  # found at the next look
                self._nodes.say("waits", true=self._hangs.keep_us_waiting)
                self._nodes.say("stalls", true=self._judge.stand_still(living, now_s))

    def _all_stall(self, nodes: Nodes, attempt: Attempt) -> bool:
        """Return whether the workers of all nodes wait for each other; of this node alone the judge knows."""
        living = set(self._judge.living())
        remote = living.difference(attempt.processes)
        if not remote or not nodes.all_say("stalls", nodes.homes_of(sorted(remote))):
            return False
        return self._judge.stand_still(living - remote, self._clock.now_s())

    def _end_stuck(self, attempt: Attempt, positions: Mapping[int, Position], now_s: float) -> None:
        for stuck in self._hangs.look(positions, now_s, elsewhere=self._says_elsewhere("waits")):
            pair = attempt.pair(stuck.rank)
            if pair is not None:
                pair.watcher.send(signal.SIGCONT)  # if it is what was stopped, it cannot tell how its worker ended
            if pair is None or not pair.worker.is_alive():
                continue
            position = positions[stuck.rank]
            self._note(
                WorkerFenced(
                    t_s=now_s, rank=stuck.rank, step=position.step, silent_s=stuck.silent_s, reason=stuck.reason
                )
            )
            pair.worker.send(signal.SIGKILL)

    def _look_for_stragglers(self, attempt: Attempt, positions: Mapping[int, Position], now_s: float) -> None:
        policy = self._job.stragglers
        if policy == "ignore" or self._job.is_virtual:
            return
        for rank, score in self._stragglers.look(positions).items():
            step = positions[rank].step
            self._note(StragglerSeen(t_s=now_s, rank=rank, step=step, score=score, policy=policy))
            if policy == "replace":  # it leaves in order, so that nothing of its work is lost
                attempt.send(rank, signal.SIGTERM)
                self._births.died(rank, now_s)
        if policy == "rebalance" and (speeds := self._stragglers.new_speeds(positions)) is not None:
            append(requests_path(self._places.run_dir), {"speeds": speeds})

    # --- changes on request

    def _look_for_changes(self, attempt: Attempt, now_s: float) -> None:
        nodes = self._nodes
        if nodes is None or self._job.nnodes == 1:
            for changes in self._asked.new():
                self._change(attempt, changes, now_s)
            return
        with contextlib.suppress(StoreLost):  # found at the next look
            for changes in self._asked.new():
                nodes.ask(changes | {"node": self._job.node_rank})
            for changes in nodes.asked():
                self._change(attempt, changes, now_s)
            for rank in nodes.told_to_leave():
                attempt.send(rank, signal.SIGTERM)

    def _change(self, attempt: Attempt, changes: dict[str, Any], now_s: float) -> None:
        node = changes.pop("node", self._job.node_rank)
        try:
            check_changes(changes, self._running)
        except ConfigError as error:
            self._view.say(f"not changed: {error}")
            return
        if "workers" in changes and node == self._job.node_rank:
            self._scale(attempt, changes["workers"], now_s)
        append(requests_path(self._places.run_dir), changes)

    def _scale(self, attempt: Attempt, wanted: int, now_s: float) -> None:
        """Start workers that are missing, on this node; tell those with the highest numbers to leave that are too many."""
        there = {*self._judge.living(), *self._judge.waiting}
        for rank in self._births.scale(sorted(there), wanted + self._job.nnodes * self._job.settings.spares, now_s):
            if rank in attempt.processes:
                attempt.send(rank, signal.SIGTERM)
            elif self._nodes is not None:
                self._nodes.ask_to_leave(rank)

    # --- stopping on request

    def _take_signals(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        wanted = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        return {number: signal.signal(number, self._on_signal) for number in wanted}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_at_once = self._signals > 0 and number == signal.SIGINT  # schedulers repeat SIGTERM, people do not
        self._signals += 1

    def _answer_signals(self, attempt: Attempt) -> None:
        if not self._signals or self._told_to_stop:
            return
        now_s = self._clock.now_s()
        if self._stop_by_s is None:
            self._stop_by_s = now_s + self._job.grace_s
        all_stop = self._all_are_to_stop()
        if not all_stop and now_s < self._stop_by_s - self._job.grace_s + min(_TOGETHER_S, self._job.grace_s / 4):
            return  # the others may be told to stop just now, too
        self._told_to_stop = True
        what = "the workers finish their step and save" if all_stop else "the workers of this node leave the others"
        if self._distributed:
            what = "the ranks are sent a SIGTERM"
        self._view.say(f"stopping: {what}, within {self._job.grace_s:g} s (Ctrl-C to stop at once)")
        if all_stop:
            stop_path(self._places.run_dir).touch()
        for rank in attempt.processes:
            attempt.send(rank, signal.SIGTERM)

    def _all_are_to_stop(self) -> bool:
        """Return whether the whole job is to stop, not this node alone, as far as is known by now."""
        nodes = self._nodes
        if nodes is None or self._job.nnodes == 1 or nodes.store_lost:
            return True
        with contextlib.suppress(StoreLost):  # found at the next look
            nodes.say("stops", true=True)
            if not nodes.is_stopping() and (nodes.is_host or nodes.all_say("stops")):
                nodes.ask_all_to_stop()
        return nodes.is_stopping()

    def _timed_out(self) -> Verdict | None:
        if self._stop_at_once:
            return Broken("stopped at once on a second request; nothing was saved for it")
        if self._stop_by_s is not None and self._clock.now_s() > self._stop_by_s:
            what = "ranks did not end" if self._distributed else "workers did not save"
            return Broken(f"stopped on request, but the {what} within {self._job.grace_s:g} s")
        return None

    # --- random kills

    def _start_kills(self) -> None:
        if self._job.mtbf_s and self._kills is None:
            settings = self._job.settings
            schedule = mtbf_schedule(self._job.mtbf_s, settings.seed, range(self._job.workers))
            self._kills = Kills(schedule, self._clock.now_s())

    def _inject(self, attempt: Attempt) -> bool:
        """Kill the worker whose time has come, if there is one."""
        victim = None if self._kills is None else self._kills.due(self._clock.now_s())
        if victim is None or victim not in self._judge.living():
            return False
        position = attempt.position(victim)
        pair = attempt.pair(victim)
        if position is None or pair is None or not pair.worker.is_alive():
            return False
        number = len(self._plan.faults) + sum(fault >= len(self._plan.faults) for fault in self._judge.fired)
        self._note(
            FaultFired(
                t_s=self._clock.now_s(),
                rank=victim,
                step=position.step,
                fault=number,
                kind="kill",
                phase=position.phase,
            )
        )
        pair.worker.send(signal.SIGKILL)
        return True

    # --- the end

    def _finish(self, verdict: Verdict) -> Outcome:
        from holdfast.launch.results import write_results

        if isinstance(verdict, Broken) and not self._tracebacks:
            self._note(_unsaid(verdict, self._clock.now_s()))
        exit_code, message, traceback = self._explain(verdict)
        records = read_run(self._places.run_dir)
        report = write_results(
            self._job,
            records,
            self._plan,
            fired=self._judge.fired,
            wall_s=self._clock.now_s(),
        )
        return Outcome(
            exit_code=exit_code,
            message=message,
            traceback=traceback,
            mpirun_says=self._mpirun_says() if isinstance(verdict, Broken) and verdict.unexplained else "",
            report=report,
            records=tuple(records),
        )

    def _explain(self, verdict: Verdict) -> tuple[int, str, str]:
        match verdict:
            case Completed(finished=finished) if finished.outcome == "done":
                return 0, "", ""
            case Departed():
                return (
                    0,
                    f"the workers of node {self._job.node_rank} have left, as they were told to; the job goes on",
                    "",
                )
            case Completed(finished=finished):
                return self._explain_early_end(finished.outcome, finished.checkpoint, finished.step)
            case Broken(exit_code=2):
                return 2, verdict.message, verdict.traceback
            case Broken():
                return verdict.exit_code, f"{verdict.message}{self._saved()}", verdict.traceback
        raise AssertionError(verdict)

    def _explain_early_end(self, outcome: str, checkpoint: str, step: int) -> tuple[int, str, str]:
        if outcome == "stopped":
            why = f"stopped on request before step {step}"
        else:
            why = f"too few workers are left to go on at step {step} (--min-workers {self._job.settings.min_workers})"
        if not checkpoint:
            return 1, f"{why}; nothing was saved, for want of a --checkpoint-dir", ""
        code = 4 if outcome == "stopped" else 1
        return code, f"{why}. {self._go_on(step, checkpoint)}", ""

    def _saved(self) -> str:
        """Return a sentence to add about the newest checkpoint, "" if there is none."""
        saved = self._judge.saved
        return "" if saved is None else f". {self._go_on(saved.step, saved.path)}"

    def _go_on(self, step: int, checkpoint: str) -> str:
        parent, _, name = checkpoint.rpartition("/")
        folder = self._job.settings.checkpoint_dir or (parent if name.startswith("step-") else checkpoint)
        workers = len(self._judge.workers_alive()) or 1
        return f"The state before step {step} is saved in {checkpoint}; go on with: {resume_command(self._job, workers, folder)}"

    def _mpirun_says(self) -> str:
        try:
            return (self._places.log_dir / "mpirun.log").read_text(errors="replace").strip()
        except OSError:
            return ""


class Kills:
    """When to kill whom, counted from ``begin_s``."""

    def __init__(self, schedule: Iterator[tuple[float, int]], begin_s: float) -> None:
        self._schedule = schedule
        self._begin_s = begin_s
        self._next = next(schedule, None)

    def due(self, now_s: float) -> int | None:
        """Return whose time has come, None if nobody's has; each victim is named once."""
        if self._next is None or now_s - self._begin_s < self._next[0]:
            return None
        _, victim = self._next
        self._next = next(self._schedule, None)
        return victim


def _unsaid(broken: Broken, now_s: float) -> ScriptFailed:
    """Return the record of why the run broke, where no worker has written one."""
    return ScriptFailed(
        t_s=now_s, rank=broken.rank, step=broken.step, exit_code=1, message=broken.message, traceback=""
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
