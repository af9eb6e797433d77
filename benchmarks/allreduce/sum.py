"""How long the all-reduce alone takes: vectors of float32 over the workers of one host.

    python benchmarks/allreduce/sum.py [--workers 2 4] [--numbers 100000 8500000] [--ways gloo shared memcpy] [--json FILE]

=========  ========================================================================================================
way        what runs
=========  ========================================================================================================
gloo       ``torch.distributed.all_reduce`` on Gloo, in place, over the loopback interface
openmpi    Open MPI's Allreduce through mpi4py, in the fault-tolerant mode in which Holdfast starts it
messages   Holdfast's deterministic all-reduce between hosts: Alltoall, add in order, Allgather
shared     Holdfast's deterministic all-reduce on one host, through shared memory
memcpy     no all-reduce: all workers copy a vector in parallel; up to about a megabyte it stays in the cache
=========  ========================================================================================================

One job of Open MPI for each number of workers. The variants take turns: in each of ``--rounds`` rounds every variant
runs a few times in a row, in a different order each time. Before the clock starts all workers rewrite their vectors and
pass a barrier; the time of a block is that of its slowest worker. Before the first round every variant runs once and
its result is checked; the vectors hold small integers, whose sums are exact in any order.

The defaults take a few minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import cells, command_line, environment, table, times, turned, write_json

WAYS = ("gloo", "openmpi", "messages", "shared", "memcpy")
NUMBERS = (100_000, 1_000_000, 8_500_000, 25_000_000)
BLOCK_NUMBERS = 25_000_000
"""Elements reduced in a block, over all its repetitions, so that blocks of short vectors are long enough to time."""
JOB_S = 900.0
"""Time limit of a job, in seconds."""


# ---------------------------------------------------------------------------------------------
# The workers


@dataclass(frozen=True, slots=True)
class Way:
    """One variant of the all-reduce, with its memory allocated.

    Args:
        given: Input vector of this worker.
        run: Runs it once.
        result: Returns the result of the last run.
    """

    given: torch.Tensor
    run: Callable[[], object]
    result: Callable[[], torch.Tensor]


class Worker:
    """One process of the job."""

    def __init__(self, ways: Sequence[str]) -> None:
        from holdfast.comm import connect

        torch.set_num_threads(1)
        self.comm = connect("ulfm")
        from mpi4py import MPI  # after the fabric, which configures MPI

        self.mpi = MPI
        self.world = MPI.COMM_WORLD
        self._ways = ways
        if "gloo" in ways:
            self._connect_gloo()

    def _connect_gloo(self) -> None:
        import torch.distributed as dist

        rank, size = self.world.rank, self.world.size
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
        port = self.world.bcast(store.port if store else 0)
        dist.init_process_group(
            "gloo", store=store or dist.TCPStore("127.0.0.1", port, size), rank=rank, world_size=size
        )

    def measure(self, numbers: int, rounds: int) -> dict[str, list[float]]:
        """Return how long an all-reduce took in each round, in milliseconds, by variant."""
        mine = torch.arange(numbers).remainder_(7).add_(self.world.rank).float()
        right = torch.arange(numbers).remainder_(7).mul_(self.world.size).float()
        right += sum(range(self.world.size))
        ways = {name: getattr(self, f"_{name}")(numbers) for name in self._ways}
        for name, way in ways.items():
            way.given.copy_(mine)
            way.run()
            if not torch.equal(way.result(), mine if name == "memcpy" else right):
                sys.exit(f"{name} gave a wrong all-reduce of {numbers} elements")
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in turned([*ways], number):
                times[name].append(self._time(ways[name], mine))
        return times

    def _time(self, way: Way, mine: torch.Tensor) -> float:
        sums = min(20, max(2, BLOCK_NUMBERS // len(mine)))
        way.given.copy_(mine)
        way.run()  # synchronises the workers, and brings the code back into the caches
        way.given.copy_(mine)
        self.world.Barrier()
        start_s = time.perf_counter()
        for _ in range(sums):
            way.run()
        taken_s = time.perf_counter() - start_s
        return 1e3 * self.world.allreduce(taken_s, self.mpi.MAX) / sums

    def _gloo(self, numbers: int) -> Way:
        import torch.distributed as dist

        vector = torch.empty(numbers)
        return Way(vector, lambda: dist.all_reduce(vector), lambda: vector)

    def _openmpi(self, numbers: int) -> Way:
        vector, result = torch.empty(numbers), torch.zeros(numbers)
        return Way(vector, lambda: self.world.Allreduce(vector.numpy(), result.numpy()), lambda: result)

    def _messages(self, numbers: int) -> Way:
        return self._ordered(numbers, shared_bytes=0)

    def _shared(self, numbers: int) -> Way:
        return self._ordered(numbers, shared_bytes=-1)

    def _ordered(self, numbers: int, *, shared_bytes: int) -> Way:
        from holdfast.comm import OrderedAllReduce, SlotSpan

        span = SlotSpan(0, numbers, torch.float32)
        ordered = OrderedAllReduce(self.comm, "fold", span.end, shared_bytes=shared_bytes)
        owners = {rank: rank for rank in self.comm.members}
        last: list[torch.Tensor] = []

        def run() -> None:
            last[:] = [ordered(span, owners)]

        return Way(span.of(ordered.room(0)), run, lambda: last[0])

    def _memcpy(self, numbers: int) -> Way:
        vector, copy = torch.empty(numbers), torch.zeros(numbers)
        return Way(vector, lambda: copy.copy_(vector), lambda: copy)


def work(ways: Sequence[str], numbers: Sequence[int], rounds: int) -> None:
    """Be one worker; the first one prints what was measured."""
    warnings.filterwarnings("error", message="all-reduce uses messages")  # or shared would be another name for messages
    worker = Worker(ways)
    for length in numbers:
        times = worker.measure(length, rounds)
        if worker.world.rank == 0:
            print(json.dumps({"numbers": length, "times_ms": times}), flush=True)
    worker.world.Barrier()
    os._exit(0)  # threads of Gloo may still run, and MPI is not finalized


# ---------------------------------------------------------------------------------------------
# The benchmark


def run_job(options: argparse.Namespace, workers: int) -> list[dict[str, Any]]:
    """Run one job and return the measurements of its workers, by vector length."""
    from holdfast.comm.fabrics.ulfm import mpirun_command

    asked = json.dumps({"ways": options.ways, "numbers": options.numbers, "rounds": options.rounds})
    done = subprocess.run(
        [*mpirun_command(workers), sys.executable, __file__, "work", asked],
        env=environment(GLOO_SOCKET_IFNAME="lo"), capture_output=True, text=True, timeout=JOB_S, check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(found) < len(options.numbers):
        sys.exit(f"the job of {workers} workers failed:\n{done.stderr[-2000:]}")
    return found


def show(workers: int, numbers: int, taken: dict[str, list[float]]) -> str:
    """Return a table of the results."""
    head = ["way", "p50", "p10", "p90", "to gloo", "GB/s", "of memcpy"]
    rows = []
    for way, values in taken.items():
        p50 = statistics.median(values)
        to = times(values, taken["gloo"], 3) if "gloo" in taken else "-"
        share = f"{statistics.median(taken['memcpy']) / p50:.0%}" if "memcpy" in taken else "-"
        rows.append([way, *cells(values), to, f"{4e-6 * numbers / p50:.2f}", share])
    return table(f"{numbers:,} elements, {workers} workers on {os.cpu_count()} cores; ms", head, rows)


def parse() -> argparse.Namespace:
    """Read the command line."""
    return command_line(
        __doc__,
        workers=[2, 4],
        numbers=[*NUMBERS],
        rounds=(15, "number of blocks of each variant"),
        ways=([*WAYS], None, WAYS),
    ).parse_args()


def main() -> None:
    """Measure everything and print a table for each number of workers and each vector length."""
    options = parse()
    results = []
    for workers in options.workers:
        for found in run_job(options, workers):
            print(f"{show(workers, found['numbers'], found['times_ms'])}\n", flush=True)
            results.append({"workers": workers, **found})
    write_json(options.json, rounds=options.rounds, results=results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(**json.loads(sys.argv[2]))
    else:
        main()
