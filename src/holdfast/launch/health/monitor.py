"""Health monitor: kills hung workers, reports stragglers, and detects when all workers wait for each other."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence, Set

from holdfast.base.phases import Phase
from holdfast.base.side_work import run_aside
from holdfast.launch.control import append
from holdfast.launch.health.hangs import HangDetector, StuckWorker
from holdfast.launch.health.stacks import OFF, LastStacks, innermost
from holdfast.launch.health.starting import StartupFinding, StartupMonitor, StartupStatus, what_workers_wait_for
from holdfast.launch.health.stragglers import StragglerDetector
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.supervise.attempt import JobAttempt
from holdfast.launch.supervise.processes import WatchedWorker, this_node
from holdfast.records.beacon import UNCONNECTED, BeaconPosition
from holdfast.records.paths import requests_path
from holdfast.records.types import StragglerSeen, WorkerFenced

_LOOK_S = 0.25
_BEFORE_TRAINING = (*UNCONNECTED, "start")
_TELL_WITHIN_S = 10.0
"""Time that a watcher may take to record how its worker ended: on a busy machine it may still be importing."""


class HealthMonitor:
    """Monitors the workers of this node, and reports to ``bus``, the record bus."""

    def __init__(self, run: RunState, bus: RecordBus) -> None:
        self._run = run
        self._bus = bus
        self._hangs = HangDetector(0.0 if run.job.is_virtual else run.job.settings.hang_timeout_s)
        self._stragglers = StragglerDetector(run.job.straggler_factor)
        self._starting = StartupMonitor(
            0.0 if run.job.is_virtual else run.job.settings.start_timeout_s, run.job.script.name
        )
        is_off = run.job.debug_bundles == OFF or bool(run.job.hosts)  # with hosts a signal takes a remote shell
        self._stacks = LastStacks(run.paths.run_dir, is_off=is_off)
        self._poll_at_s = 0.0
        self._ended: dict[int, float] = {}

    def begin(self) -> None:
        """Reset for a start of the job."""
        self._ended = {}
        self._hangs.begin()
        self._starting.begin()
        self._stragglers.begin()

    def is_due(self) -> bool:
        """Return whether the next check is due."""
        return self._run.clock.now_s() >= self._poll_at_s

    def poll(self, attempt: JobAttempt) -> None:
        """Check all workers, and act on the findings."""
        now_s = self._run.clock.now_s()
        self._poll_at_s = now_s + min(_LOOK_S, self._hangs.poll_every_s or _LOOK_S)
        living = [rank for rank in self._run.state.living() if rank in attempt.processes]
        watched = {*living, *self._run.state.waiting} & set(attempt.processes)
        lost = self._run.state.lost_without_end() & set(attempt.processes)
        self._note_untold_ends(attempt, watched | lost, now_s)
        positions = {rank: p for rank in watched if (p := attempt.position(rank)) is not None}
        self._run.state.observe(positions, now_s)
        signs = self._startup_signs(attempt, watched, positions)
        self._check_fork_server(attempt, now_s)
        self._check_startup(attempt, signs, now_s)
        self._end_stuck(attempt, positions, now_s)
        self._print_progress(living, now_s)
        run_aside("the search for stragglers", lambda: self._check_stragglers(attempt, positions, now_s), None)
        run_aside("showing the workers", lambda: self._show(attempt, living, signs or {}), None)

    def _show(self, attempt: JobAttempt, living: Sequence[int], signs: Mapping[int, StartupStatus]) -> None:
        self._bus.show(attempt.pids(living), "" if self._bus.progress.is_training else self._waits_for(living, signs))

    def all_stall(self, attempt: JobAttempt) -> bool:
        """Return whether the workers of all nodes wait for each other; the job state knows only those of this node."""
        living, fleet = set(self._run.state.living()), self._run.fleet
        remote = living.difference(attempt.processes)
        if not remote or not fleet.all_posted("stalls", fleet.ranks_of(sorted(remote))):
            return False
        return self._run.state.stand_still(living - remote, self._run.clock.now_s())

    def _print_progress(self, living: Sequence[int], now_s: float) -> None:
        """Publish to the other launchers what decides, for all workers together, whether some are hung."""
        fleet = self._run.fleet
        fleet.post("waits", true=self._hangs.keep_us_waiting)
        fleet.post("loads", true=self._hangs.load_too_long)
        fleet.post("stalls", true=self._run.state.stand_still(living, now_s))

    def _note_untold_ends(self, attempt: JobAttempt, watched: Set[int], now_s: float) -> None:
        """Record the end of workers whose watcher did not: it was killed, is stopped, or could not write."""
        before = self._ended
        self._ended = {rank: before.get(rank, now_s) for rank in watched if attempt.is_ended(rank)}
        for rank, since_s in self._ended.items():
            if attempt.is_watched(rank):
                attempt.fence(rank)
                is_over = now_s - since_s > _TELL_WITHIN_S
            else:
                is_over = rank in before  # a record of the watcher would have been read since
            if is_over:
                exit_code = 0 if self._run.state.has_finished(rank) else -signal.SIGKILL
                self._bus.note_end(attempt.untold_end(rank, exit_code), attempt)

    def _startup_signs(
        self, attempt: JobAttempt, watched: Set[int], positions: Mapping[int, BeaconPosition]
    ) -> dict[int, StartupStatus] | None:
        """Return what is observed of each worker; None once all train and a step was committed."""
        all_train = all(rank in positions and positions[rank].phase not in _BEFORE_TRAINING for rank in watched)
        if all_train and self._run.state.has_begun and self._bus.progress.is_training:
            return None
        return {rank: attempt.sign(rank, positions.get(rank)) for rank in watched}

    def _check_startup(self, attempt: JobAttempt, signs: Mapping[int, StartupStatus] | None, now_s: float) -> None:
        """Give up workers that keep the job from beginning."""
        fleet, state = self._run.fleet, self._run.state
        finding = StartupFinding()
        if signs is not None and (not state.has_begun or any(map(_is_before_training, signs.values()))):
            elsewhere = fleet.any_posted("starts")
            finding = self._starting.poll(signs, now_s, has_begun=state.has_begun, elsewhere=elsewhere)
        fleet.post("starts", true=self._starting.keeps_waiting and not state.has_begun)
        if finding.warning:
            self._run.view.print_line(finding.warning)
        for stuck in finding.stuck:
            pair = attempt.pair(stuck.rank)
            self._note_fenced(stuck, -1, pair)
        unknown = [stuck for stuck in finding.stuck if not attempt.fence(stuck.rank)]  # over Gloo there is none
        if finding.lost or unknown:
            why = finding.lost or f"rank {unknown[0].rank} {unknown[0].reason}"
            state.give_up("mpirun is stopped" if attempt.is_mpirun_stopped() else why)

    def _check_fork_server(self, attempt: JobAttempt, now_s: float) -> None:
        """End a fork server that is stopped: workers that are being started would wait for it."""
        server, settings = attempt.fork_server, self._run.job.settings
        limit_s = Phase.FORK.limit_s({"--start-timeout": settings.start_timeout_s})
        if server is None or not limit_s or (stopped_s := server.stopped_s(now_s)) <= limit_s:
            return
        server.kill()
        where = f" on node {self._run.job.node_rank}, {this_node()}" if self._run.job.nnodes > 1 else ""
        self._run.view.print_line(
            f"the fork server{where} is stopped for {stopped_s:.1f} s and was ended; workers now import torch themselves"
        )

    def _waits_for(self, living: Sequence[int], signs: Mapping[int, StartupStatus]) -> str:
        """Return which workers of this node the first step waits for, in words; newcomers are not waited for."""
        job = self._run.job
        return what_workers_wait_for(
            {rank: signs[rank] for rank in living if rank in signs},
            script=job.script.name,
            connecting=job.fabric.connecting,
            node=" of this node" if job.nnodes > 1 else "",
        )

    def _end_stuck(self, attempt: JobAttempt, positions: Mapping[int, BeaconPosition], now_s: float) -> None:
        stuck_workers = self._hangs.poll(
            positions,
            now_s,
            newcomers=self._run.state.waiting,
            elsewhere=self._run.fleet.any_posted("waits"),
            load_elsewhere=self._run.fleet.any_posted("loads"),
        )
        for stuck in stuck_workers:
            pair = attempt.pair(stuck.rank)
            if pair is None:
                continue
            if pair.worker.is_alive():
                self._note_fenced(stuck, positions[stuck.rank].step, pair)
            attempt.fence(stuck.rank)

    def _note_fenced(self, stuck: StuckWorker, step: int, pair: WatchedWorker | None) -> None:
        stack, where = run_aside(
            "taking the stacks of a stuck worker", lambda: self._stack_of(stuck.rank, pair), ("", "")
        )
        reason = f"{stuck.reason}; it was in {where}" if where else stuck.reason
        reason += self._on_node(pair)
        self._bus.note(WorkerFenced(rank=stuck.rank, step=step, silent_s=stuck.silent_s, reason=reason, stack=stack))

    def _stack_of(self, rank: int, pair: WatchedWorker | None) -> tuple[str, str]:
        stack = "" if pair is None else self._stacks.take(rank, pair.worker)
        return stack, innermost(stack, str(self._run.job.script))

    def _on_node(self, pair: WatchedWorker | None) -> str:
        """Return on which machine a worker is, in words, if the job has several."""
        job = self._run.job
        if job.nnodes > 1:
            return f"; on node {job.node_rank}, {this_node()}"
        return f"; on {pair.node}" if job.hosts and pair is not None and pair.node else ""

    def _check_stragglers(self, attempt: JobAttempt, positions: Mapping[int, BeaconPosition], now_s: float) -> None:
        policy = self._run.job.stragglers
        if policy == "ignore" or self._run.job.is_virtual:
            return
        stragglers = self._stragglers.poll(positions)
        can_go = policy == "replace" and self._can_replace()
        goes = self._stragglers.next_to_go(positions, now_s) if can_go else None
        for rank in sorted({*stragglers, *([] if goes is None else [goes])}):
            score, step = self._stragglers.scores(positions)[rank], positions[rank].step
            done = "warn" if policy == "replace" and rank != goes else policy
            self._bus.note(StragglerSeen(rank=rank, step=step, score=score, policy=done))
        if goes is not None:  # it leaves in order, so that none of its work is lost
            attempt.send(goes, signal.SIGTERM)
            self._run.population.died(goes, now_s)
        if policy == "rebalance" and (speeds := self._stragglers.new_speeds(positions, now_s)) is not None:
            append(requests_path(self._run.paths.run_dir), {"speeds": speeds})

    def _can_replace(self) -> bool:
        """Return whether a replacement is available: a spare, or a newcomer that may be started."""
        return self._run.population.limit > 0 or len(self._run.state.workers_alive()) > self._run.job.workers


def _is_before_training(sign: StartupStatus) -> bool:
    return sign.phase in ("", *_BEFORE_TRAINING)
