"""The dashboard of a running job: a server in the launcher, and the actions that its users request.

The server's threads never touch a worker: they put an action into a queue, and the launcher's own loop carries it out.
"""

from __future__ import annotations

import functools
import json
import math
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.clock import Clock
from holdfast.base.side_work import run_aside
from holdfast.errors import ConfigError, StoreLost
from holdfast.launch.command_line import command_line, resume_command
from holdfast.launch.control import RunningJob, request_changes
from holdfast.launch.fleet.node_faults import kill_worker
from holdfast.launch.job import Job
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.stopping import StopProcedure
from holdfast.launch.supervise.attempt import JobAttempt
from holdfast.observe.address import host_and_port
from holdfast.observe.monitor.feed import Feed, Refused, run_id
from holdfast.observe.monitor.log_lines import last_lines
from holdfast.observe.monitor.server import DashboardServer
from holdfast.observe.monitor.token import Token
from holdfast.observe.monitor.view import LiveState, RunInfo
from holdfast.records.queued import QueuedSink
from holdfast.records.types import ActionRequested, Record

_ANSWER_S = 5.0
"""The launcher answers an action within this time, or is too busy."""
_LOOK_S = 1.0
CHANGE_ACTIONS: dict[str, tuple[str, ...]] = {
    "scale": ("workers",),
    "set": ("lr", "batch_size", "strategy", "checkpoint_every"),
    "save": (),
}
"""Actions that are requests to the workers, each with the values that it may have."""
ACTIONS = ("kill", *CHANGE_ACTIONS, "stop")
"""All actions."""


@dataclass(slots=True)
class _Requested:
    """An action that waits for the launcher."""

    action: str
    values: Mapping[str, Any]
    is_done: threading.Event = field(default_factory=threading.Event)
    said: str = ""
    refused: str = ""
    claimed: threading.Lock = field(default_factory=threading.Lock)
    """Held for ever by the launcher, which carries the action out, or by the user's thread, which has given it up."""

    def claim(self) -> bool:
        """Return whether the caller is the first that claims it."""
        return self.claimed.acquire(blocking=False)


class Dashboard:
    """Serves one job; also a sink of its records (:class:`~holdfast.records.queued.SlowSink`).

    Args:
        job: The job, with ``dashboard``.
        paths: Its directories.
        running: The job as requests to it need it.
        clock: Its zero is when the run began.
        say: Displays a line: the URL, with the token.

    Raises:
        ConfigError: if the port cannot be opened, or the file of the token cannot be used.
    """

    name = "dashboard"
    trouble = "the dashboard does not show all events"
    pause_s = 0.05
    longest_s = math.inf
    actions = ACTIONS

    def __init__(
        self, job: Job, paths: RunPaths, running: RunningJob, clock: Clock, say: Callable[[str], None]
    ) -> None:
        self._paths, self._running, self._clock, self._say = paths, running, clock, say
        self.live = LiveState(_info(job, clock))
        self._requested: queue.Queue[_Requested] = queue.Queue(maxsize=16)
        self._look_s = 0.0
        self._ending: tuple[int, str] | None = None
        self._has_failed = False
        self._sinks: tuple[QueuedSink, ...] = ()
        self._token = Token.in_folder(job.report_dir or paths.run_dir)
        try:
            self._server = DashboardServer(*host_and_port(job.dashboard, "--dashboard"), self._token)
        except ConfigError:
            if self._token.is_new:
                self._token.remove()
            raise
        self._server.feeds[self.live.info.id] = Feed(self)
        say(f"dashboard at {self._server.url}")

    # -- records, on the thread of the queue

    def watch(self, sinks: Sequence[QueuedSink]) -> None:
        """Show how many records these sinks miss; one of them is the dashboard itself."""
        self._sinks = tuple(sinks)

    def take(self, records: Sequence[Record]) -> None:
        """Take new records."""
        self.live.take(records)
        self.live.note_sinks([sink.count() for sink in self._sinks])

    def close(self, end_s: float) -> None:
        """Show the end, and close the port. The token is of no use after it."""
        if self._ending is not None:
            self.live.finish(*self._ending)
        self.live.close(end_s)
        self._server.close()
        self._token.remove()

    def finish(self, exit_code: int, message: str) -> None:
        """Take how the job ends, before :meth:`close`."""
        self._ending = exit_code, message.partition("\n")[0]

    # -- requests, on the threads of the server

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        return self._clock.now_s()

    def log(self, rank: int, lines: int) -> list[str]:
        """Return the last output lines of a worker."""
        return last_lines(self._paths.log_dir / f"rank-{rank}.log", lines)

    def act(self, action: str, values: Mapping[str, Any]) -> str:
        """Have the launcher carry out an action; return what was done."""
        requested = _Requested(action, values)
        try:
            self._requested.put_nowait(requested)
        except queue.Full:
            raise Refused("the launcher is busy with other actions; try again") from None
        if not requested.is_done.wait(_ANSWER_S):
            if requested.claim():
                raise Refused(f"the launcher did not answer within {_ANSWER_S:g} s, so nothing was done; try again")
            if not requested.is_done.wait(_ANSWER_S):
                raise Refused("the launcher has not completed the action yet; see the events for what happened")
        if requested.refused:
            raise Refused(requested.refused)
        return requested.said

    # -- on the launcher's own thread

    def answer(self, attempt: JobAttempt, run: RunState, bus: RecordBus, stopping: StopProcedure) -> None:
        """Carry out the requested actions; those that their users have given up are left out."""
        if time.monotonic() >= self._look_s:
            with self.live.if_free() as is_free:  # else at the next call: the launcher waits for no reader
                if is_free:
                    self._look_s = time.monotonic() + _LOOK_S
                    run_aside("updating the dashboard", lambda: self._look(attempt, run), None)
        while not self._requested.empty():
            requested = self._requested.get_nowait()
            if not requested.claim():
                continue
            try:
                requested.said = self._carry_out(requested, attempt, run, bus, stopping)
            except (ConfigError, Refused) as error:
                requested.refused = str(error)
            except StoreLost as error:  # the launcher acts on it
                requested.refused = str(error)
                raise
            except Exception as error:  # training must not end for a defect of the dashboard
                requested.refused = f"{requested.action} failed: {type(error).__name__}: {error}".partition("\n")[0]
                self._complain(requested.refused)
            finally:
                requested.is_done.set()

    def _complain(self, why: str) -> None:
        """Display the traceback of the exception that is handled, the first time."""
        if not self._has_failed:
            self._has_failed = True
            for line in (f"the dashboard: {why}; training is not affected", *traceback.format_exc().splitlines()):
                self._say(line)

    def _look(self, attempt: JobAttempt, run: RunState) -> None:
        """Show what no record says: newcomers that start, process IDs, and the nodes of newcomers."""
        self.live.note_newcomers(run.state.waiting)
        self.live.note_processes(attempt.pids(set(self.live.without_pid()) & set(attempt.processes)))
        for rank in self.live.unplaced():
            own_nodes = (run.job.node_rank,) if rank in attempt.processes else ()
            if places := (*own_nodes, *run.fleet.ranks_of([rank])):
                self.live.note_node(rank, places[0])

    def _carry_out(
        self, asked: _Requested, attempt: JobAttempt, run: RunState, bus: RecordBus, stopping: StopProcedure
    ) -> str:
        note = ActionRequested(action=asked.action, values=json.dumps(dict(asked.values)))
        if asked.action == "kill":
            return self._kill(asked.values, attempt, run, bus, functools.partial(bus.note, note))
        if asked.action == "stop":
            check_names(asked.action, asked.values, ())
            bus.note(note)
            stopping.request()
            return "the job stops; its workers finish their step and save"
        check_names(asked.action, asked.values, CHANGE_ACTIONS[asked.action])
        if bus.progress.is_distributed and asked.action != "scale":
            raise Refused("a script of torch.distributed sets its own learning rate, batches and checkpoints")
        changes = {"save": True} if asked.action == "save" else dict(asked.values)
        request_changes(self._running, from_dashboard=True, **changes)
        return f"requested: {', '.join(f'{name}={value}' for name, value in changes.items())}"

    def _kill(
        self,
        values: Mapping[str, Any],
        attempt: JobAttempt,
        run: RunState,
        bus: RecordBus,
        note: Callable[[], object],
    ) -> str:
        rank = values.get("rank")
        if type(rank) is not int or set(values) != {"rank"}:
            raise Refused(f"kill needs the rank of a worker, a whole number, got {json.dumps(dict(values))[:100]}")
        if run.job.is_virtual:
            raise Refused(f"with --fabric {run.job.settings.fabric} all workers are in one process")
        if rank not in run.state.living():
            raise Refused(f"no worker {rank} is alive")
        if rank not in attempt.processes:
            raise Refused(f"worker {rank} is on another node, and only the launcher there can kill it")
        if not kill_worker(run, bus, attempt, rank, before=note):
            raise Refused(f"worker {rank} is not connected to the others yet; kill it once it trains")
        return f"worker {rank} is killed"


def check_names(action: str, values: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise Refused if an action has values that it must not have, or lacks all that it may have."""
    wrong = [name for name in values if name not in allowed]
    if wrong or (allowed and not values):
        may = f"one or more of {', '.join(allowed)}" if allowed else "no values"
        raise Refused(f"{action} takes {may}, got {', '.join(wrong)[:100] or 'none'}")


def _info(job: Job, clock: Clock) -> RunInfo:
    settings = job.settings
    saves = settings.checkpoint_dir
    page = job.report_dir / "index.html" if job.report_dir is not None and job.page else ""
    return RunInfo(
        id=run_id(job.script.stem, {}),
        script=job.script.name,
        command=command_line(job),
        resume=resume_command(job, len(job.ranks), saves) if saves else "",
        checkpoint_dir=saves,
        guard=settings.guard,
        started_unix=time.time() - clock.now_s(),
        is_live=True,
        report=str(page),
        started=range(job.workers),
        spares=job.ranks[job.workers :],
        nodes={node: socket.gethostname() if node == job.node_rank else "" for node in range(job.nnodes)},
        node_of=lambda rank: job.home(rank) if job.nnodes == 1 or rank in job.ranks else -1,
    )
