"""How recovery grows with the number of processes: many processes on few cores, without a model.

    python benchmarks/scale/processes.py [--fabric ulfm|gloo] [--sizes 4,8,16,32,64] [--kills 12] [--seed 0] [--json FILE]

Processes all-reduce small vectors in a loop; one kills itself, the others recover and continue; then the next. The
sequence is that of ``holdfast.recovery.protocol``, reimplemented here because ``holdfast.comm`` imports torch::

    R1  revoke, agree(0)     every survivor is notified
    R2  shrink, agree(1)     fence
    R3  share progress       one Allreduce with a slot for each process
    R4  agree(1)             all know that all have the same knowledge: the decision
        one small all-reduce over the survivors

``detect`` is from the SIGKILL until the first survivor detects it, ``agree`` until the last has passed R1, ``rebuild``
until the last has passed R4, ``sum`` until the last has completed its all-reduce. At most a quarter of a job is killed,
one by one, so that its size stays close to the table's.

``--fabric ulfm`` is Open MPI alone. ``--fabric gloo`` is the communicator of ``holdfast run --fabric gloo``: one process
imports torch, hosts the store, forks the workers and reports their deaths.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cells, command_line, environment, listed, spread, table, write_json

SIZES = (4, 8, 16, 32, 64)
ELEMENTS = 1000
CALM_S = 0.7
"""Seconds between a recovery and the next kill: Holdfast waits 30 ms more if two deaths are less than 0.5 s apart."""
LIMIT_S = 300.0
PARTS = ("detect", "agree", "rebuild", "sum", "whole")

Row = dict[str, float]


def main() -> None:
    """Measure each size and print the table."""
    options = parse()
    if options.worker:
        told = json.loads(options.worker)
        host_gloo(told) if options.fabric == "gloo" else work(told, Raw())
        return
    rows = {size: measure(options.fabric, size, options.kills, options.seed) for size in options.sizes}
    show(options.fabric, rows)
    summary = {size: {part: spread([row[part] for row in got]) for part in PARTS} for size, got in rows.items()}
    write_json(options.json, settings=vars(options), rows=rows, summary=summary)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__, kills=(12, "kills of each size, at least"), seed=0, fabric=("ulfm", None, ("ulfm", "gloo"))
    )
    parser.add_argument("--sizes", type=listed(int), default=list(SIZES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.sizes) < 2:
        parser.error(f"--sizes must be at least 2, got {min(options.sizes)}")
    return options


def measure(fabric: str, size: int, kills: int, seed: int) -> list[Row]:
    """Return a row for each kill among ``size`` processes, from as many jobs as needed."""
    rng = random.Random(f"{seed} {size}")
    rows: list[Row] = []
    while len(rows) < kills:
        victims = rng.sample(range(size), max(1, size // 4))
        rows += run_job(fabric, size, victims, rng.randrange(1 << 30))
        print(f"{size} processes: {len(rows)} of {kills} kills", file=sys.stderr)
    return rows


def run_job(fabric: str, size: int, victims: list[int], seed: int) -> list[Row]:
    """Return a row for each kill of one job."""
    from holdfast.comm.fabrics.ulfm import mpirun_command

    with tempfile.TemporaryDirectory() as folder:
        told = {"folder": folder, "victims": victims, "seed": seed, "size": size}
        with Path(folder, "job.log").open("wb") as log:
            job = subprocess.Popen(
                [*(mpirun_command(size) if fabric == "ulfm" else []), sys.executable, __file__, "--fabric", fabric, "--worker", json.dumps(told)],
                env=environment(), stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
        try:
            wait_for_results(job, Path(folder), set(range(size)) - set(victims))
        finally:
            end(job)
        return [read_kill(Path(folder), number, victims) for number in range(len(victims))]


def wait_for_results(job: subprocess.Popen[bytes], folder: Path, survivors: set[int]) -> None:
    """Wait until every survivor has written its results.

    Raises:
        RuntimeError: if the job ends without them, or takes too long.
    """
    end_s = time.monotonic() + LIMIT_S
    while lacking := {rank for rank in survivors if not (folder / f"{rank}.json").exists()}:
        if job.poll() is not None or time.monotonic() > end_s:
            said = (folder / "job.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{len(lacking)} of {len(survivors)} survivors gave no result\n{said}")
        time.sleep(0.05)


def end(job: subprocess.Popen[bytes]) -> None:
    """End the process that started the others, which ends them."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(10)
        except subprocess.TimeoutExpired:
            job.kill()
    job.wait()


def read_kill(folder: Path, number: int, victims: list[int]) -> Row:
    """Return the times of one kill in milliseconds, from the files of the victim and the survivors."""
    kill_s = float((folder / f"{victims[number]}.kill").read_text())
    told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    told += [json.loads(path.read_text()) for path in folder.glob("*.until-death")]
    marks = [each[number] for each in told if len(each) > number]
    lost = [mark["lost"] for mark in marks]
    if lost != [[victims[number]]] * len(lost):
        raise RuntimeError(f"survivors should have lost only {victims[number]}, and report {lost}")
    moments = [
        kill_s,
        min(mark["seen_s"] for mark in marks),
        *(max(mark[name] for mark in marks) for name in ("heard_s", "decided_s", "summed_s")),
    ]
    parts = [1e3 * (b - a) for a, b in itertools.pairwise(moments)]
    return dict(zip(PARTS, [*parts, 1e3 * (moments[-1] - kill_s)], strict=True))


def show(fabric: str, rows: dict[int, list[Row]]) -> None:
    """Print the table."""
    first = statistics.median(row["whole"] for row in next(iter(rows.values())))
    lines = []
    for size, got in rows.items():
        medians = [cells([row[part] for row in got], 1, keys=["p50"])[0] for part in PARTS]
        whole = [row["whole"] for row in got]
        around = cells(whole, 1, keys=("p10", "p90", "max"))
        lines.append([str(size), str(len(got)), *medians, *around, f"{statistics.median(whole) / first:.1f}"])
    head = ["processes", "kills", *PARTS, "p10", "p90", "max", f"times that at {next(iter(rows))}"]
    print(
        table(f"Recovery by size, {fabric}: {os.cpu_count()} cores; medians, ms (p10 to max of the whole)", head, lines)
    )


# ---------------------------------------------------------------------------------------------
# The processes of a job


class Raw:
    """Open MPI alone, and the sequence of Holdfast over it."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.finalize = False  # survivors never leave through MPI_Finalize
        from mpi4py import MPI

        self.failure = MPI.Exception
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._return = MPI.ERRORS_RETURN
        self.rank, self._size = self._comm.rank, self._comm.size
        self.members = list(range(self._size))

    def small_sum(self) -> None:
        """All-reduce a small vector, and check that no contribution is missing."""
        import numpy as np

        ones, result = np.ones(ELEMENTS), np.empty(ELEMENTS)
        self._comm.Allreduce(ones, result)
        if not (result == self._comm.size).all():
            raise RuntimeError(f"an all-reduce over {self._comm.size} processes gave {result.min()} to {result.max()}")

    def hear(self) -> None:
        """R1: every survivor is notified."""
        self._comm.Revoke()
        self.agree(False)

    def rebuild(self, completed: int) -> tuple[bool, list[int]]:
        """R2 to R4; return whether all agree, and the completed all-reduces of each survivor."""
        import numpy as np

        self._comm = self._comm.Shrink()
        self._comm.Set_errhandler(self._return)
        fenced = self.agree(True)
        mine, slots = np.zeros((self._size, 2), dtype=np.int64), np.empty((self._size, 2), dtype=np.int64)
        mine[self.rank] = (1, completed)
        self._comm.Allreduce(mine, slots)
        agreed = self.agree(True) and fenced
        self.members = [rank for rank in range(self._size) if slots[rank, 0]]
        return agreed, slots[self.members, 1].tolist()

    def agree(self, flag: bool) -> bool:
        """Return whether all flags are true and no process was found dead."""
        try:
            return bool(self._comm.Agree(int(flag)) == 1)
        except self.failure:
            return False


class OverGloo:
    """Holdfast's communicator over Gloo, and the same sequence with it."""

    def __init__(self, comm: Any) -> None:
        from holdfast.errors import PeerFailed

        self._comm, self.failure, self.rank, self.agree = comm, PeerFailed, comm.local_ranks[0], comm.agree

    @property
    def members(self) -> list[int]:
        """The living."""
        return list(self._comm.members)

    def small_sum(self) -> None:
        """All-reduce a small vector, and check the result."""
        highest, lowest = self._comm.maximum([self.rank, -self.rank])
        if (highest, -lowest) != (self.members[-1], self.members[0]):
            raise RuntimeError(f"an all-reduce over {self.members} gave {highest} and {-lowest}")

    def hear(self) -> None:
        """R1: every survivor is notified."""
        self._comm.revoke()
        self.agree(False)

    def rebuild(self, completed: int) -> tuple[bool, list[int]]:
        """R2 to R4; return whether all agree, and the completed all-reduces of each survivor."""
        from holdfast.recovery.messages import Progress

        self._comm.shrink()
        fenced = self._comm.has_atomic_shrink or self.agree(True)
        shared = self._comm.share_progress(Progress(completed, False))
        return self.agree(True) and fenced, [each.completed for each in shared.values()]


def work(told: dict[str, Any], comm: Raw | OverGloo) -> None:
    """All-reduce vectors, die when it is time, recover when another process died, record the times.

    One process is killed at a time, so a failure in a recovery is an error of the benchmark and ends it.
    """
    rng, marks, completed, die_s = random.Random(told["seed"] + comm.rank), [], 0, 0.0
    while len(marks) < len(told["victims"]):
        if told["victims"][len(marks)] == comm.rank:
            die_s = die_s or time.monotonic() + CALM_S + 0.1 * rng.random()
            if time.monotonic() > die_s:
                die(Path(told["folder"]), comm.rank, marks)
        try:
            comm.small_sum()
            completed += 1
        except comm.failure:
            before, mark = comm.members, {"seen_s": time.monotonic()}
            comm.hear()
            mark["heard_s"] = time.monotonic()
            agreed, progress = comm.rebuild(completed)
            mark["decided_s"] = time.monotonic()
            if not agreed or max(progress) - min(progress) > 1:
                raise RuntimeError(f"a second process was lost, or survivors are apart: {progress}") from None
            completed = max(progress)
            comm.small_sum()
            marks.append(mark | {"summed_s": time.monotonic(), "lost": sorted(set(before) - set(comm.members))})
    comm.agree(True)
    draft = Path(told["folder"], f"{comm.rank}.draft")  # complete, or not at all
    draft.write_text(json.dumps(marks))
    draft.replace(draft.with_suffix(".json"))
    os._exit(0)


def die(folder: Path, me: int, marks: list[dict[str, Any]]) -> None:
    """Write the observations so far and the time of death, and die."""
    (folder / f"{me}.until-death").write_text(json.dumps(marks))
    (folder / f"{me}.kill").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def host_gloo(told: dict[str, Any]) -> None:
    """Host the store, fork the workers, report deaths, until all workers have ended."""
    from holdfast.comm.c10d import C10dCommunicator  # imports torch, once for all workers
    from holdfast.membership import Hub, HubStore

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with Hub("benchmark") as hub:
        living: dict[int, int] = {}
        try:
            for rank in range(told["size"]):
                if not (pid := os.fork()):
                    hub.forget()
                    store = HubStore(hub.address, "benchmark", "job")
                    work(told, OverGloo(C10dCommunicator(store, rank, range(told["size"]))))
                living[pid] = rank
            store = HubStore(hub.address, "benchmark", "job")
            while living:
                pid, status = os.wait()
                store.put(f"dead/{living.pop(pid)}", f"status {status}")
        finally:
            for pid in living:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
