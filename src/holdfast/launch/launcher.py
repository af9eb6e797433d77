"""The launcher: starts a job, monitors it, restarts it if it is lost, and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import Self

from holdfast.base.clock import SystemClock
from holdfast.base.side_work import run_aside
from holdfast.base.system_errors import refusal
from holdfast.config import Settings
from holdfast.errors import StoreLost
from holdfast.faults.plan import FaultPlan
from holdfast.launch.checkpoint_lock import checkpoints_locked
from holdfast.launch.control import announce, note_wait
from holdfast.launch.displays import make_displays, open_displays
from holdfast.launch.elasticity import ElasticWorkers
from holdfast.launch.exit_status import explain, unsaid, why_not_again
from holdfast.launch.fleet.base import Fleet, JobStart
from holdfast.launch.fleet.mpi_hosts import FENCE_S, MpiHosts, shared_folder
from holdfast.launch.fleet.node_faults import FaultInjector, check_node_faults
from holdfast.launch.fleet.node_health import NodeCheck
from holdfast.launch.fleet.nodes import NodeGroup
from holdfast.launch.health.monitor import HealthMonitor
from holdfast.launch.job import Job, JobOutcome
from holdfast.launch.job_rules import check, size_in_bytes
from holdfast.launch.job_state import JobBroken, JobCompleted, JobLost, JobState, NodeDeparted, Verdict
from holdfast.launch.population import WorkerPopulation
from holdfast.launch.provenance import job_provenance
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.run_view import RunStatus, RunView, SteadyView
from holdfast.launch.stopping import StopProcedure, restored_handlers
from holdfast.launch.supervise.attempt import AttemptFiles, JobAttempt, common_environment
from holdfast.launch.supervise.fork_server import ForkServer, is_useful
from holdfast.launch.supervise.gpus import check_gpus, sharing_line
from holdfast.records.event_log import EventLog
from holdfast.records.queued import SinkCount, close_all
from holdfast.records.types import JobRestarted
from holdfast.setting_choices import AUTO

_LINGER_S = 1.0
_TOUCH_EVERY_S = 3600.0


def launch(job: Job, view: RunView | None = None) -> JobOutcome:
    """Run ``job`` until it ends; without a view, nothing is displayed.

    Raises:
        ConfigError: if the job cannot be started as it is; nothing was started.
    """
    check(job)
    check_node_faults(job)
    for display in make_displays():
        display.check(job)
    check_gpus(job.gpus, elsewhere=bool(job.hosts))
    with Launcher(job, view or RunView()) as launcher:
        return launcher.run()


class Launcher:
    """Runs one job, already checked, as a context: everything that it started has ended when the context exits."""

    def __init__(self, job: Job, view: RunView) -> None:
        self._job = job
        self._provenance = job_provenance(job)
        self._view = SteadyView(view)
        self._state = JobState(
            job.script.name,
            virtual=job.is_virtual,
            all_connect=job.fabric.has_parent_process,
            stall_timeout_s=job.stall_timeout_s,
        )
        self._plan = FaultPlan.from_json(job.settings.faults) if job.settings.faults else FaultPlan()
        self._attempt: JobAttempt | None = None
        self._displays = make_displays()
        self._touched_s = 0.0
        self._begun_s = time.monotonic()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self._make_ready(undo)
            self._undo = undo.pop_all()
        return self

    def _make_ready(self, undo: contextlib.ExitStack) -> None:
        """Create the parts of a run, and register with ``undo`` how to undo each, even if a later one raises."""
        job = self._job
        undo.enter_context(restored_handlers())  # last of all: nothing else is left half done
        undo.callback(self._view.close)
        undo.enter_context(checkpoints_locked(job))
        for display in self._displays:
            undo.callback(display.close)
        for display in self._displays:
            display.prepare(job)  # before the folders of earlier starts are removed
        report_logs = None if job.report_dir is None else job.report_dir / "logs"
        self._paths = RunPaths.make(job.log_dir or report_logs, shared_folder(job))
        undo.callback(self._paths.clear)
        announce(self._paths.run_dir, job, self._begun_s)
        node_check = NodeCheck.of_job(job)
        undo.callback(node_check.close)
        self._fleet = self._open_fleet(node_check)
        undo.callback(self._fleet.close)
        self._origin_s = self._fleet.origin_s()
        self._paths.clear_logs()
        self._fork_server = self._start_fork_server()
        if self._fork_server is not None:
            undo.callback(self._fork_server.close)
        self._show_wait("checking this node" if job.nnodes == 1 else "")
        node_check.admit()  # of a single node, which imports torch in the meantime
        self._files = AttemptFiles(self._paths)
        undo.callback(self._files.close)
        self._run = run = RunState(
            job=job,
            view=self._view,
            state=self._state,
            population=WorkerPopulation(job.max_respawns, 0),
            fleet=self._fleet,
            paths=self._paths,
            files=self._files,
            clock=SystemClock(self._origin_s),
            running=announce(self._paths.run_dir, job, self._origin_s, self._paths.log_dir),
            events=self._event_log(undo),
        )
        open_displays(self._displays, run)
        undo.callback(self._close_sinks)
        if line := sharing_line(job.gpus, 0 if job.is_virtual or job.hosts else len(job.ranks) // job.nnodes):
            self._view.print_line(line)
        self._bus = RecordBus(run)
        self._health = HealthMonitor(run, self._bus)
        self._elastic = ElasticWorkers(run, self._bus)
        self._stopping = StopProcedure(run, self._bus)
        self._stopping.install_handlers()
        self._faults = FaultInjector(run, self._bus, self._plan)
        undo.callback(self._faults.close)
        undo.callback(self._end_attempt)

    def _open_fleet(self, node_check: NodeCheck) -> Fleet:
        job = self._job
        if job.fabric.starts_each:
            return NodeGroup(job, node_check if job.nnodes > 1 else None, self._show_wait)
        return MpiHosts(job, self._paths) if job.hosts else Fleet(job)

    def _event_log(self, undo: contextlib.ExitStack) -> EventLog | None:
        """Return the log of the records in the report directory; None without one."""
        if self._job.report_dir is None:
            return None
        is_first = self._job.node_rank == 0 and not self._fleet.is_late  # or its predecessor's file has earlier records
        log = EventLog(self._job.report_dir, size_in_bytes(self._job.events_max), is_first=is_first)
        undo.callback(log.close)
        return log

    def _show_wait(self, text: str) -> None:
        """Display what this launcher waits for before the run begins."""
        if text:
            run_aside("noting what the job waits for", lambda: note_wait(self._paths.run_dir, text), None)
            elapsed_s = time.monotonic() - self._begun_s
            self._view.show(RunStatus(alive={}, metrics={}, elapsed_s=elapsed_s, waits_for=text))

    def _start_fork_server(self) -> ForkServer | None:
        """Start it first: it imports torch while everything else is prepared."""
        job, paths = self._job, self._paths
        starts_several = not job.is_virtual and (job.settings.workers + job.settings.spares > 1 or job.max_respawns > 0)
        if not (job.preload and starts_several and is_useful(job.script)):
            return None
        env = common_environment(paths, job.settings)
        return ForkServer(paths.own[0].path, env, paths.mpirun_log, paths.locks, job.words)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.end()

    def run(self) -> JobOutcome:
        """Start the job, and restart it as often as necessary and allowed; return how it ended."""
        self._fleet.connect(self._show_wait)
        while True:
            try:
                verdict: Verdict | None = self._run_once()
                if isinstance(verdict, JobLost):
                    verdict = self._restart(verdict, self._fleet.restart_on(self._state))
            except StoreLost as error:
                verdict = self._stopping.cut_off(str(error))
            if verdict is not None:
                return self._finish(verdict)

    # --- one start of the job

    def _run_once(self) -> Verdict:
        start = self._fleet.begin(self._fleet.number)
        own = start.own
        self._state.begin(start.alive)
        self._health.begin()
        self._elastic.begin(start)
        self._files.follow(own, own[:1] if self._job.is_virtual else own)
        try:
            self._attempt = attempt = JobAttempt(
                self._fleet, self._settings(start), own, self._paths, self._fork_server
            )
        except OSError as error:
            return JobBroken(f"the workers cannot be started: {refusal(error) or error}")
        verdict = None
        while verdict is None:
            running = self._is_running(attempt)  # before reading: a process that has ended has written all records
            self._bus.read(attempt)
            connected = [rank for rank in self._state.unconnected() if attempt.is_connected(rank)]
            self._state.connect(connected)
            attempt.watch_connected(connected)
            verdict = self._lost_folder()
            if verdict is None:
                self._act(attempt)
                verdict = (
                    self._stopping.timed_out()
                    or self._other_nodes_report(attempt)
                    or self._state.verdict(self._run.clock.now_s(), running=running, crash=attempt.crash())
                )
            if verdict is None and not self._faults.kill_random(attempt):
                time.sleep(self._fleet.poll_s)
        self._state.close()
        if isinstance(verdict, JobCompleted):
            attempt.wait(_LINGER_S)
        attempt.end()
        self._bus.read(attempt, last=True)
        return self._examine(attempt, self._stopping.before_training(verdict))

    def _act(self, attempt: JobAttempt) -> None:
        """Act on requests, faults and findings while the job runs."""
        self._stopping.advance(attempt)
        self._faults.strike(attempt)
        for display in self._displays:
            display.answer(attempt, self._run, self._bus, self._stopping)
        if self._health.is_due():
            run_aside("keeping temporary files from being removed", self._keep_files, None)
            self._health.poll(attempt)
            self._elastic.answer_requests(attempt)
        if not self._stopping.is_requested:
            self._elastic.start_newcomers(attempt)

    def _keep_files(self) -> None:
        """Keep the system from removing the files of this run because they are old."""
        now_s = self._run.clock.now_s()
        if now_s - self._touched_s > _TOUCH_EVERY_S:
            self._touched_s = now_s
            self._paths.touch()

    def _lost_folder(self) -> Verdict | None:
        """Return the verdict if a directory of this run was removed: its workers can no longer be monitored."""
        if (path := self._paths.lost()) is None:
            return None
        return JobBroken(
            f"{path} was removed while the job was running, so its workers were killed; "
            "set TMPDIR to a directory that is not cleaned up"
        )

    def _is_running(self, attempt: JobAttempt) -> bool:
        """Return whether a process may still run, here or on another node."""
        return attempt.is_running() or not set(self._state.living()).issubset(attempt.processes)

    def _other_nodes_report(self, attempt: JobAttempt) -> Verdict | None:
        """Return the verdict that follows from the other launchers or the store."""
        fleet = self._fleet
        if why := fleet.store_lost:
            return self._stopping.without_store(attempt, why)
        if fleet.is_restarted():
            return JobLost("the job was lost, as another launcher reported")
        if self._health.all_stall(attempt):
            return self._state.stalled()
        if fleet.is_stopping():
            self._stopping.request()
        if self._job.nnodes == 1 or attempt.is_running():
            return None
        if self._stopping.is_requested and not fleet.is_stopping() and self._state.living():
            return NodeDeparted()
        return None

    # --- settings of the workers

    def _settings(self, start: JobStart) -> Settings:
        settings, ranks, store = self._job.settings, start.ranks, start.store
        again = self._fleet.number > 0
        has_begun = self._fleet.begun is not None  # checkpoints are then of this job, or of the one that it resumes
        goes_on = again and has_begun and (bool(settings.checkpoint_dir) or self._state.saved is not None)
        plan = self._plan.without(self._state.fired & set(range(len(self._plan.faults))))
        if start.own:
            plan = plan.of_node(self._job.node_rank, min(start.own))
        return dataclasses.replace(
            settings,
            workers=min(self._job.workers, len(ranks)),
            spares=max(0, len(ranks) - self._job.workers),
            ranks=",".join(map(str, ranks)) if again or store else "",
            store=store,
            token=start.token,
            slices=self._slices(start),
            order=self._order(),
            resume=settings.resume or goes_on,
            mtbf_s=self._mtbf_s(),
            faults=plan.to_json() if plan.faults else "",
            run_dir=str(self._paths.run_dir),
            origin_s=self._origin_s,
            launch_dir=self._run.running.folder,
        )

    def _slices(self, start: JobStart) -> int:
        """Return the number of slices that the job began with; 0 leaves it to the workers that begin."""
        if self._fleet.begun is not None:
            return self._fleet.begun[0]
        is_short = len(start.ranks) < len(self._job.ranks)  # an unfit node stays out
        return self._job.slices if self._fleet.number or is_short else self._job.settings.slices

    def _order(self) -> str:
        """Return the order of additions; a job that is restarted keeps the one that it began with."""
        if not self._fleet.number or self._job.settings.order != AUTO:
            return self._job.settings.order
        return AUTO if self._fleet.begun is None else self._fleet.begun[1]

    def _mtbf_s(self) -> float:
        """Return the estimated time between failures: the configured value counts as one failure, as does each restart."""
        settings = self._job.settings
        if not (self._fleet.number and settings.checkpoint_auto):
            return settings.mtbf_s
        return (settings.mtbf_s + self._run.clock.now_s()) / (1 + self._fleet.number)

    # --- restarts

    def _examine(self, attempt: JobAttempt, verdict: Verdict) -> Verdict:
        """Find out which machines are left; return the resulting verdict."""
        verdict, out_of_reach = self._fleet.examine(verdict, attempt.pairs(), attempt.started)
        self._job = self._fleet.job
        if out_of_reach:
            self._state.lose(out_of_reach)
            attempt.disown(out_of_reach)
            time.sleep(FENCE_S)
        return verdict

    def _restart(self, lost: JobLost, ranks: tuple[int, ...]) -> Verdict | None:
        """Prepare a restart on ``ranks``; return the verdict if it is not allowed."""
        stopping, distributed = self._stopping.is_requested, self._bus.progress.is_distributed
        is_blind = distributed and self._state.last_step < 0  # the script has no steps that Holdfast knows of
        refused = why_not_again(
            self._job,
            lost,
            self._fleet.number,
            len(ranks),
            in_vain=0 if is_blind else self._state.restarts_in_vain,
            stopping=stopping,
            distributed=distributed,
            could_not_connect=self._state.could_not_connect,
        )
        if refused is not None:
            return refused
        self._fleet.number += 1
        step, number = self._state.last_step, self._fleet.number
        self._bus.note(JobRestarted(step=step, restart=number, workers=ranks, reason=lost.reason))
        return None

    # --- the end

    def _close_sinks(self, end_s: float | None = None, patience_s: float = math.inf) -> list[SinkCount]:
        """End the sinks of records, if that was not done; return what became of the records."""
        return close_all(self._run.sinks, self._run.clock.now_s() if end_s is None else end_s, patience_s)

    def _finish(self, verdict: Verdict) -> JobOutcome:
        from holdfast.launch.results import records_of, write_results

        if isinstance(verdict, JobBroken) and not self._bus.is_explained:
            self._bus.note(unsaid(verdict))
        exit_code, message, traceback = explain(self._job, verdict, self._state)
        for display in self._displays:
            display.finish(exit_code, message)
        records, wall_s = records_of(self._run, has_all=self._bus.has_file()), self._run.clock.now_s()
        sinks = self._close_sinks(wall_s, self._stopping.patience_s())
        facts = {"wall_s": wall_s, "sinks": [dataclasses.asdict(sink) for sink in sinks], "job": self._provenance}
        report, unwritten = write_results(self._run, records, self._plan, self._displays, facts)
        if unwritten:
            exit_code = exit_code or 1
            message += f"{'. The' if message else 'the'} report is incomplete: {unwritten}"
        return JobOutcome(
            exit_code=exit_code,
            message=message,
            traceback=traceback,
            mpirun_output=self._paths.mpirun_output() if isinstance(verdict, JobBroken) and verdict.unexplained else "",
            report=report,
            is_reported=self._job.report_dir is not None and not unwritten,
            records=tuple(records),
            is_shown=self._bus.speaks,
        )
