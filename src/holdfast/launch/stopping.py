"""Early stop of a job, or of one node's part in it: on a signal, on another launcher's request, or without a store."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from holdfast.errors import STOPPED
from holdfast.launch.fleet.nodes import FENCE_LEASES
from holdfast.launch.job_state import JobBroken, JobCompleted, NodeDeparted, Verdict
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.supervise.attempt import JobAttempt
from holdfast.records.paths import stop_path

_TOGETHER_S = 1.0
"""Launchers that are asked to stop within this time stop the job as a whole."""
_LEAST_PATIENCE_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _handled() -> list[signal.Signals]:
    """Return the signals to handle; nohup ignores SIGHUP, and a thread handles none."""
    is_main = threading.current_thread() is threading.main_thread()
    return [number for number in _SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN]


@contextlib.contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the present handlers of the signals that stop a job at the end of the context."""
    before = {number: signal.getsignal(number) for number in _handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopProcedure:
    """Makes the workers save or leave on request, and decides when their time is over."""

    def __init__(self, run: RunState, bus: RecordBus) -> None:
        self._run = run
        self._bus = bus
        self.is_requested = False
        """Whether the job, or this node's part in it, was asked to stop."""
        self._has_signal = False
        self._at_once = False
        self._by_s: float | None = None
        self._notified = False
        self._reached: set[int] = set()
        self._lost_store_by_s: float | None = None

    # -- requests

    def install_handlers(self) -> None:
        """Treat signals to this process as requests to stop, until :func:`restored_handlers` ends."""
        for number in _handled():
            signal.signal(number, self._on_signal)

    def request(self) -> None:
        """Request that the job stops; a second request is no more urgent."""
        self.is_requested = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._has_signal and number == signal.SIGINT:  # schedulers repeat SIGTERM, users Ctrl-C
            self._at_once = True  # no `|=`: another signal may be handled in the middle of it
        self._has_signal = self.is_requested = True

    # -- answers

    def advance(self, attempt: JobAttempt) -> None:
        """Notify the workers, once it is known whether the whole job stops, or this node alone."""
        if self._notified:
            self._reach(attempt)
        if not self.is_requested or self._notified:
            return
        grace_s, now_s = self._run.job.grace_s, self._run.clock.now_s()
        if self._by_s is None:
            self._by_s = now_s + grace_s
        all_stop = self._run.fleet.stop_all()
        if not all_stop and now_s < self._by_s - grace_s + min(_TOGETHER_S, grace_s / 4):
            return  # the other launchers may be asked to stop at the same time
        self._notified = self._run.state.is_stopping = True
        what = "the workers finish their step and save" if all_stop else "the workers of this node leave the job"
        if self._bus.progress.is_distributed:
            what = "the ranks receive SIGTERM"
        self._run.view.print_line(f"stopping: {what}, within {grace_s:g} s (Ctrl-C to stop immediately)")
        if all_stop:
            stop_path(self._run.paths.run_dir).touch(mode=0o600)
        self._reach(attempt)

    def timed_out(self) -> Verdict | None:
        """Return the verdict if the grace period is over, or the user asked for an immediate stop."""
        if self._at_once:
            return JobBroken("stopped immediately on a second request; nothing was saved")
        if self._by_s is not None and self._run.clock.now_s() > self._by_s:
            what = "ranks did not end" if self._bus.progress.is_distributed else "workers did not save"
            return JobBroken(f"stopped on request, but the {what} within {self._run.job.grace_s:g} s")
        return None

    def before_training(self, verdict: Verdict) -> Verdict:
        """Return how the job ended, if it was asked to stop before a worker had begun to train: then nothing was lost.

        Such workers end in any way: killed by the signal, or as a handler of the script has it. A bug that the script has
        shown would end the next start, too.
        """
        state = self._run.state
        is_early = self.is_requested and not (state.has_begun or self._bus.progress.is_distributed)
        if not is_early or isinstance(verdict, JobCompleted | NodeDeparted):
            return verdict
        if isinstance(verdict, JobBroken) and (verdict.exit_code == 2 or (verdict.is_final and verdict.traceback)):
            return verdict
        if state.last_step < 0:
            return JobBroken("stopped before training; nothing was lost", exit_code=STOPPED)
        return verdict if state.saved is None else JobBroken("stopped before training continued", exit_code=STOPPED)

    def patience_s(self) -> float:
        """Return how long the end of the job may wait for what receives its records; infinite if it was not asked to stop.

        What asked may kill this process when the grace period is over, and the report must be written by then.
        """
        if not self.is_requested:
            return math.inf
        now_s = self._run.clock.now_s()
        left_s = 0.0 if self._at_once else (now_s + self._run.job.grace_s if self._by_s is None else self._by_s) - now_s
        return max(_LEAST_PATIENCE_S, left_s / 2)

    def _reach(self, attempt: JobAttempt) -> None:
        """Send SIGTERM to all workers that have not received it, such as those that were just being started."""
        for rank in attempt.processes:
            if rank not in self._reached and attempt.send(rank, signal.SIGTERM):
                self._reached.add(rank)

    # -- loss of the store

    def without_store(self, attempt: JobAttempt, why: str) -> Verdict | None:
        """Make the workers save and stop, if the job cannot continue without this launcher; return the verdict, if any.

        Otherwise this node alone may be cut off. Its workers must then not stop the job, and must have ended before
        other nodes may restart it. If no worker of the job reaches the store, the commit vote stops them.
        """
        run = self._run
        if self._lost_store_by_s is None:
            grace_s, what = run.job.grace_s, "the workers finish their step and save"
            if run.fleet.is_needed:
                stop_path(run.paths.run_dir).touch(mode=0o600)
                self._reach(attempt)
            else:
                what += " if no node reaches the store, and are killed otherwise"
            if run.job.nnodes > 1:
                grace_s = min(grace_s, (FENCE_LEASES - 1) * run.job.node_timeout_s)
            run.view.print_line(f"stopping: {why}; {what}, within {grace_s:g} s")
            self._lost_store_by_s = run.clock.now_s() + grace_s
        if attempt.is_running() and run.clock.now_s() < self._lost_store_by_s:
            return None
        self._bus.read(attempt)
        verdict = run.state.verdict(run.clock.now_s(), running=False)
        return verdict if isinstance(verdict, JobCompleted) else self.cut_off(why)

    def cut_off(self, why: str) -> JobBroken:
        """Return the verdict if the store is lost and the workers have ended."""
        job = self._run.job
        if job.nnodes == 1:
            return JobBroken(f"the store was lost: {why}")
        return JobBroken(
            f"node {job.node_rank} can no longer take part: {why}. Its workers were killed, and results that the "
            "other nodes did not receive are discarded; to rejoin, start it again with the same command"
        )
