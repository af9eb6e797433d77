"""A job that runs on this machine, as another process sees it: by the files in its run directory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.launch.control import RunningJob, waits_for
from holdfast.launch.supervise.processes import Process, pairs_in, this_node
from holdfast.launch.supervise.tail import RecordTail
from holdfast.observe.monitor.usage import ProcessUsage, UsageMeter
from holdfast.observe.monitor.view import LiveState, RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """The process of a worker on this machine, and what it uses; None if it has ended."""

    process: Process
    usage: ProcessUsage | None


class ObservedJob:
    """The state of a running job; :meth:`poll` brings it up to date.

    Args:
        running: The job.
    """

    def __init__(self, running: RunningJob) -> None:
        self.running = running
        computing = running.workers - running.spares
        self.live = LiveState(
            RunInfo(
                id=str(running.pid),
                script=running.script,
                command=running.command,
                checkpoint_dir=running.checkpoint_dir,
                guard=running.guard,
                started_unix=time.time() - self.now_s(),
                is_live=True,
                started=range(computing),
                spares=range(computing, running.workers),
                nodes={node: this_node() if node == running.node_rank else "" for node in range(running.nnodes)},
                node_of=running.home,
            )
        )
        self.workers: dict[int, ObservedWorker] = {}
        """Those of this machine."""
        self.waits_for = ""
        """What the job waits for before it trains, in words."""
        self._meter = UsageMeter()
        self._tails: dict[Path, RecordTail] = {}

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.running.origin_s

    def poll(self) -> None:
        """Read what is new."""
        run_dir = self.running.run_dir
        for path in run_dir.glob("records-*.jsonl"):
            self._tails.setdefault(path, RecordTail(path, far=True))  # thousands would be too many open files
        new = [record for tail in self._tails.values() for record in tail.records()]
        if new:
            self.live.take(sorted(new, key=lambda record: record.t_s))
        self.waits_for = waits_for(run_dir)
        self._look_at_processes(run_dir)

    def _look_at_processes(self, run_dir: Path) -> None:
        self.workers = {
            rank: ObservedWorker(process=pair.worker, usage=self._meter.measure(pair.worker))
            for rank, pair in pairs_in(run_dir).items()
            if pair.is_here
        }
        self.live.note_processes({rank: worker.process.pid for rank, worker in self.workers.items()})
