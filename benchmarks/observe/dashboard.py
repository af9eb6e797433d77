"""What the dashboard of a large job costs: processor time and memory, with one connected reader.

The records are generated: ``--workers`` workers, of which one dies every ``--mtbf`` seconds of the run and is replaced,
and ``--steps`` steps. First all records are taken as fast as possible, which shows the cost of the state; then the run
goes on in real time for ``--seconds``, with a reader of the stream in a process of its own, which shows that of the
server; one worker dies meanwhile. The sum is what a core spends while such a job runs.

    python benchmarks/observe/dashboard.py --workers 1000 --steps 100000
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import command_line, write_json

from holdfast.observe.monitor.feed import Feed
from holdfast.observe.monitor.server import DashboardServer
from holdfast.observe.monitor.token import Token
from holdfast.observe.monitor.view import LiveState, RunInfo
from holdfast.records.queued import QueuedSink
from holdfast.records.types import (
    CheckpointSaved,
    FailureSeen,
    Record,
    Recovered,
    RunStarted,
    StepCommitted,
    WorkerEnded,
)

_READER = """
import sys, urllib.request
total = 0
with urllib.request.urlopen(sys.argv[1]) as stream:
    for line in stream:
        total += len(line)
        print(total, flush=True)
"""
_START = {
    "fabric": "gloo", "strategy": "rollback", "seed": 0, "order": "fold", "split": "slices", "batch": "global",
    "rescale": "survivors", "samples_planned": 0, "num_buckets": 8, "parameters": 1 << 20,
}  # fmt: skip


class GeneratedRun:
    """A run that never was: its records in the order of time.

    Args:
        workers: Workers that compute.
        steps: Steps of the plan.
        step_s: Seconds of a step.
        mtbf_s: Seconds between two deaths.
    """

    def __init__(self, workers: int, steps: int, step_s: float, mtbf_s: float) -> None:
        self._workers, self._steps, self._step_s, self._mtbf_s = workers, steps, step_s, mtbf_s
        self._alive = list(range(workers))
        self._luck = random.Random(0)
        self.recoveries = 0
        self.dies_s = 0.0
        """When the next worker dies; may be set to bring a death forward."""

    def records(self) -> Iterator[list[Record]]:
        """Yield the records of each step."""
        start = _START | {"workers": self._workers, "slices": self._workers, "steps_planned": self._steps}
        yield [RunStarted(t_s=20.0 + rank / 1e4, rank=rank, step=0, **start) for rank in self._alive]
        now_s, self.dies_s = 21.0, 21.0 + self._luck.expovariate(1 / self._mtbf_s)
        for step in range(self._steps):
            found: list[Record] = []
            if now_s >= self.dies_s:
                found += self._recovery(now_s, step)
                now_s, self.dies_s = now_s + 1.0, now_s + self._luck.expovariate(1 / self._mtbf_s)
            now_s += self._step_s
            metrics = {"loss": 1 / (1 + step) + self._luck.random() / 100, "accuracy": self._luck.random()}
            found.append(
                StepCommitted(t_s=now_s, rank=self._alive[0], step=step, epoch=0, samples=self._workers * 8,
                              workers=len(self._alive), metrics=metrics, link=f"{step:064x}")
            )  # fmt: skip
            if step and step % 500 == 0:
                found.append(CheckpointSaved(t_s=now_s, rank=0, step=step, path="ck", size_bytes=1 << 30, seconds=0.1))
            yield found

    def _recovery(self, now_s: float, step: int) -> list[Record]:
        """Return the records of the death of one worker, whose replacement joins in the same decision."""
        self.recoveries += 1
        victim = self._luck.choice(self._alive[1:])
        new = self._alive[-1] + 1
        survivors = [rank for rank in self._alive if rank != victim]
        self._alive = [*survivors, new]
        how = {
            "lost": (victim,), "survivors": tuple(self._alive), "joined": (new,), "decision": "redo", "redone_steps": 1,
            "generation": self.recoveries, "orders": {"Revoke": 1, "Agree": 2, "Shrink": 1},
            "times_s": {"Revoke": 0.01, "Agree": 0.1, "Shrink": 0.2},
        }  # fmt: skip
        died: list[Record] = [WorkerEnded(t_s=now_s, rank=victim, step=step, exit_code=-9, pid=10_000 + victim)]
        seen = [
            FailureSeen(t_s=now_s + 0.1 + self._luck.random() / 10, rank=r, step=step, phase="allreduce")
            for r in survivors
        ]
        said = [Recovered(t_s=now_s + 0.6 + self._luck.random() / 10, rank=r, step=step, **how) for r in survivors]
        return [*died, *sorted([*seen, *said], key=lambda record: record.t_s)]


class Source:
    """The run for the server; also the sink of its records."""

    name, trouble, pause_s, longest_s = "dashboard", "the dashboard does not show all events", 0.05, float("inf")
    actions = ()

    def __init__(self, live: LiveState) -> None:
        self.live = live
        self.at_s = 0.0
        self.since_s: float | None = None

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        return self.at_s + (0.0 if self.since_s is None else time.monotonic() - self.since_s)

    def take(self, records: list[Record]) -> None:
        """Take new records."""
        self.live.take(records)

    def close(self, end_s: float) -> None:
        """Do nothing: the run goes on."""


def rss_mb() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def as_parsed(record: Record) -> Record:
    """Return a record that shares nothing with others, like one that the launcher has parsed from a line."""
    if not isinstance(record, Recovered):
        return record
    return dataclasses.replace(record, survivors=tuple(int(str(rank)) for rank in record.survivors))


def take_all(live: LiveState, run: GeneratedRun, keep_s: float, step_s: float) -> tuple[float, Iterator[list[Record]]]:
    """Take the records of all but the last steps; return the processor time without that for generating them, and the rest."""
    batches, spent_s = run.records(), 0.0
    for records in itertools.islice(batches, run._steps - int(keep_s / step_s)):
        parsed = [as_parsed(record) for record in records]
        began_s = time.thread_time()
        live.take(parsed)
        spent_s += time.thread_time() - began_s
    return spent_s, batches


def main() -> None:
    """Measure, and print one JSON object."""
    given = command_line(
        __doc__,
        workers=1000,
        steps=100_000,
        step_s=0.1,
        mtbf=(100.0, "seconds between two deaths"),
        seconds=(60.0, "seconds in real time, with a reader"),
    ).parse_args()
    before_mb = rss_mb()
    live = LiveState(RunInfo(id="run", started=range(given.workers), nodes={n: f"node-{n}" for n in range(given.workers // 8 or 1)}, node_of=lambda rank: rank // 8))  # fmt: skip
    run = GeneratedRun(given.workers, given.steps, given.step_s, given.mtbf)
    source = Source(live)
    spent_s, rest = take_all(live, run, given.seconds, given.step_s)
    run_s = given.steps * given.step_s + run.recoveries
    taken_mb = rss_mb()
    with tempfile.TemporaryDirectory() as folder:
        server = DashboardServer("127.0.0.1", 0, Token.in_folder(Path(folder)))
        server.feeds["run"] = Feed(source)
        sink = QueuedSink(source, print)
        reader = subprocess.Popen(
            [sys.executable, "-c", _READER, f"{server.address}api/runs/run/stream"], stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None
        full_bytes = [int(reader.stdout.readline()) for _ in range(2)][-1]  # of the event's name, and of its data
        run.dies_s = 0.0
        serving = serve(source, sink, rest, given.seconds)
        reader.kill()
        sent_bytes = int(reader.communicate()[0].split()[-1])
        server.close()
    result = {
        "workers": given.workers,
        "steps": given.steps,
        "recoveries": run.recoveries,
        "state_percent_of_a_core": round(100 * spent_s / run_s, 3),
        "server_percent_of_a_core": round(100 * serving["cpu_s"] / serving["wall_s"], 3),
        "recoveries_while_serving": serving["recoveries"],
        "rss_mb": round(max(taken_mb, rss_mb()), 1),
        "rss_before_mb": round(before_mb, 1),
        "full_bytes": full_bytes,
        "sent_bytes_per_s": round((sent_bytes - full_bytes) / serving["wall_s"]),
    }
    print(json.dumps(result, indent=1))
    write_json(given.json, settings=vars(given), result=result)


def serve(source: Source, sink: QueuedSink, rest: Iterator[list[Record]], seconds: float) -> dict[str, float]:
    """Go on in real time; return the processor time of the server, of the queue and of taking records."""
    batches = [[as_parsed(record) for record in batch] for batch in rest]
    source.at_s, source.since_s = batches[0][-1].t_s, time.monotonic()
    wall_s, cpu_s, own_s = time.monotonic(), time.process_time(), time.thread_time()
    deaths = 0
    for batch in batches:
        if not batch or time.monotonic() - wall_s > seconds:
            break
        time.sleep(max(0.0, batch[-1].t_s - source.now_s()))
        deaths += isinstance(batch[0], WorkerEnded)
        for record in batch:
            sink.write(record)
    spent_s = time.process_time() - cpu_s - (time.thread_time() - own_s)
    return {"cpu_s": spent_s, "wall_s": time.monotonic() - wall_s, "recoveries": deaths}


if __name__ == "__main__":
    main()
