"""Record bus: reads new records from the workers' files and the other launchers, and passes them on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.base.clock import Clock
from holdfast.base.side_work import run_aside
from holdfast.base.slurm import read_step
from holdfast.launch.control import RunningJob, note_wait
from holdfast.launch.fleet.base import Fleet
from holdfast.launch.job import Job
from holdfast.launch.job_state import JobState
from holdfast.launch.population import WorkerPopulation
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.run_view import RunStatus, RunView
from holdfast.launch.supervise.attempt import AttemptFiles, JobAttempt
from holdfast.records.beacon import BeaconPosition
from holdfast.records.event_log import EventLog
from holdfast.records.files import FileRecorder
from holdfast.records.logger import Logger
from holdfast.records.paths import records_path
from holdfast.records.progress import RunProgress
from holdfast.records.queued import QueuedSink
from holdfast.records.texts import named_ranks
from holdfast.records.types import (
    FaultFired,
    Record,
    RunStarted,
    ScriptFailed,
    StragglerSeen,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary.event_lines import EventFormatter, cause_of_death


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One run of a job, over all its starts.

    ``running`` is what commands know of it. ``sinks`` receive every record once, each in its own thread; ``events`` is
    that of the report directory, None if there is none. The clock's zero is the time when the run began, on the first node.
    """

    job: Job
    view: RunView
    state: JobState
    population: WorkerPopulation
    fleet: Fleet
    paths: RunPaths
    files: AttemptFiles
    clock: Clock
    running: RunningJob
    sinks: list[QueuedSink] = field(default_factory=list)
    events: EventLog | None = None


class RecordBus:
    """Takes every record of a run once, and passes it to the job state, the view and the other launchers."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._story = EventFormatter()
        self._file = FileRecorder(records_path(run.paths.run_dir, "launcher"))
        self._log = Logger(run.clock, lambda: (-1, -1), self._file)
        self.progress = RunProgress()
        self._waits_for = ""
        self._noted: list[tuple[Record, BeaconPosition | None]] = []
        self._tracebacks: dict[int, str] = {}
        self._is_merged = read_step(os.environ) is not None
        self.speaks = run.fleet.is_first() or not self._is_merged
        """Whether this launcher displays what concerns the whole job. ``srun`` merges the output of all: the first does."""

    @property
    def is_explained(self) -> bool:
        """Whether a script has recorded why it failed."""
        return bool(self._tracebacks)

    def has_file(self) -> bool:
        """Return whether the launcher's own file of records, the oldest of all, was not removed."""
        return self._file.is_there()

    def read(self, attempt: JobAttempt, *, last: bool = False) -> None:
        """Read new records and output; ``last`` includes incomplete lines of output.

        Output is read first: the record of a traceback is written before the traceback, so it is known.
        """
        output = self._run.files.output(last=last)
        own, self._noted = self._noted, []
        records = self._run.files.records(last=last)
        self._report(records)
        for record in records:
            own.append((record, position := self._end_of(record, attempt)))
            self.poll(record, position)
        for warning in self._run.files.warnings():
            self._run.view.print_line(warning)
        self._exchange(own)
        for rank, line in output:
            if not self._is_kept_for_later(rank, line):
                self._run.view.output(rank, line)

    def poll(self, record: Record, position: BeaconPosition | None = None) -> None:
        """Take one record; ``position`` is the last position of a worker that has ended."""
        self._run.state.apply(record, position)
        self.progress.apply(record)
        for sink in self._run.sinks:
            sink.write(record)
        match record:
            case RunStarted():
                self._run.fleet.note_start(record.slices, record.order)
            case ScriptFailed():
                self._tracebacks[record.rank] = record.traceback or record.message
        if (line := run_aside("describing a record", lambda: self._story.format(record), None)) is not None:
            self._print(line)

    def _print(self, line: str) -> None:
        """Display a line about the job, which all launchers know of."""
        if self.speaks:
            self._run.view.print_line(line)

    def note(self, record: Record) -> None:
        """Write a record of the launcher itself; records about workers are published to the other launchers."""
        record = self._log.write(record)
        self._report((record,))
        self.poll(record)
        if isinstance(record, FaultFired | WorkerFenced | StragglerSeen):
            self._noted.append((record, None))

    def note_end(self, ended: WorkerEnded, attempt: JobAttempt) -> None:
        """Write how a worker ended, instead of its watcher, and handle it."""
        ended = self._log.write(ended)
        self._report((ended,))
        self._run.files.end(ended.rank)
        position = self._end_of(ended, attempt)
        self.poll(ended, position)
        self._noted.append((ended, position))

    def show(self, alive: Mapping[int, int], waits_for: str = "") -> None:
        """Display the progress, with the PIDs of the workers, and what a job that does not train yet waits for."""
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            note_wait(self._run.paths.run_dir, waits_for)
        progress = self.progress
        status = RunStatus(
            step=progress.step,
            planned=progress.planned,
            alive=alive,
            metrics=progress.metrics,
            workers=len(self._run.job.ranks),
            workers_alive=len(self._run.state.workers_alive()),
            elapsed_s=self._run.clock.now_s(),
            steps_per_s=progress.steps_per_s,
            left_s=progress.left_s,
            waits_for=waits_for,
        )
        self._run.view.show(status)

    def _report(self, records: Sequence[Record]) -> None:
        """Write records to the report directory, all at once: it may be on a slow network file system."""
        if (events := self._run.events) is not None:
            run_aside("writing events.jsonl", lambda: events.write_all(records), None)

    def _end_of(self, record: Record, attempt: JobAttempt) -> BeaconPosition | None:
        """Handle the end of a worker of this node; return its last position."""
        if not isinstance(record, WorkerEnded) or self._run.state.has_ended(record.rank):
            return None
        if record.exit_code:
            self._run.population.died(record.rank, self._run.clock.now_s())
        if not self._run.fleet.store_lost:
            self._run.fleet.deaths.note_end(record.rank, cause_of_death(record.exit_code) if record.exit_code else "")
        return attempt.position(record.rank)

    def _exchange(self, own: Sequence[tuple[Record, BeaconPosition | None]]) -> None:
        """Publish new records to the other launchers, and read theirs."""
        state, fleet = self._run.state, self._run.fleet
        changes = fleet.exchange(own)
        self.speaks = fleet.is_first() or not self._is_merged
        for rank in changes.newcomers:
            state.wait_for(rank)
        self._report([self._log.write(entry.record) for entry in changes.records])
        for entry in changes.records:
            if entry.start == fleet.number and entry.record.rank not in fleet.given_up:
                self.poll(entry.record, entry.position)
        state.lose(changes.parted)
        for node, ranks in changes.lost.items():
            state.lose(ranks)
            what = f", with {named_ranks(ranks)}" if ranks else ""
            self._print(f"node {node} is lost{what}")

    def _is_kept_for_later(self, rank: int, line: str) -> bool:
        """Return whether the line belongs to a traceback: only one traceback is displayed, at the end."""
        return rank in self._tracebacks and line in self._tracebacks[rank].splitlines()
