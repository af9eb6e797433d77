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

from common import command_line, environment, listed, spread, table, write_json

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
        host_gloo(told) if options.fabric == "gloo" else work(told)
        return
    rows = {size: measure(options.fabric, size, options.kills, options.seed) for size in options.sizes}
    show(options.fabric, rows)
    summary = {size: {part: spread([row[part] for row in got]) for part in PARTS} for size, got in rows.items()}
    write_json(options.json, settings=vars(options), rows=rows, summary=summary)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__, kills=(12, "kills of each size, at least"), seed=0)
    parser.add_argument("--fabric", choices=("ulfm", "gloo"), default="ulfm")
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
        medians = [f"{statistics.median(row[part] for row in got):.1f}" for part in PARTS]
        whole = spread([row["whole"] for row in got])
        around = [f"{whole['p10']:.1f}", f"{whole['p90']:.1f}", f"{whole['max']:.1f}"]
        lines.append([str(size), str(len(got)), *medians, *around, f"{whole['p50'] / first:.1f}"])
    head = ["processes", "kills", *PARTS, "p10", "p90", "max", f"times that at {next(iter(rows))}"]
    print(
        table(f"Recovery by size, {fabric}: {os.cpu_count()} cores; medians, ms (p10 to max of the whole)", head, lines)
    )


# ---------------------------------------------------------------------------------------------
# The processes of a job


def work(told: dict[str, Any]) -> None:
    """All-reduce vectors, die when it is time, recover when another process died, record the times."""
    import mpi4py

    mpi4py.rc.finalize = False  # survivors never leave through MPI_Finalize
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    me, size, folder = comm.rank, comm.size, Path(told["folder"])
    rng = random.Random(told["seed"] + me)
    marks: list[dict[str, Any]] = []
    completed, die_s, members = 0, 0.0, list(range(size))
    while True:
        if len(marks) == len(told["victims"]):
            leave(comm, folder / f"{me}.json", marks)
        if told["victims"][len(marks)] == me:
            die_s = die_s or time.monotonic() + CALM_S + 0.1 * rng.random()
            if time.monotonic() > die_s:
                die(folder, me, marks)
        try:
            small_sum(comm)
            completed += 1
        except MPI.Exception:
            mark = {"seen_s": time.monotonic()}
            comm, alive, completed = recover(comm, me, size, completed, mark)
            small_sum(comm)
            mark["summed_s"] = time.monotonic()
            marks.append(mark | {"lost": sorted(set(members) - set(alive))})
            members = alive


def small_sum(comm: Any) -> None:
    """All-reduce a small vector, and check that no contribution is missing."""
    import numpy as np

    ones, result = np.ones(ELEMENTS), np.empty(ELEMENTS)
    comm.Allreduce(ones, result)
    if not (result == comm.size).all():
        raise RuntimeError(f"an all-reduce over {comm.size} processes gave {result.min()} to {result.max()}")


def recover(comm: Any, me: int, size: int, completed: int, mark: dict[str, Any]) -> tuple[Any, list[int], int]:
    """Carry out R1 to R4; return the new communicator, its members, and the number of completed all-reduces.

    One process is killed at a time, so a failure in here is an error of the benchmark and ends it.
    """
    import numpy as np
    from mpi4py import MPI

    comm.Revoke()
    agree(comm, 0)
    mark["heard_s"] = time.monotonic()
    comm = comm.Shrink()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    fenced = agree(comm, 1)
    mine, slots = np.zeros((size, 2), dtype=np.int64), np.empty((size, 2), dtype=np.int64)
    mine[me] = (1, completed)
    comm.Allreduce(mine, slots)
    if not (agree(comm, 1) and fenced):
        raise RuntimeError("a second process was lost during recovery")
    mark["decided_s"] = time.monotonic()
    alive = [rank for rank in range(size) if slots[rank, 0]]
    progress = slots[alive, 1]
    if progress.max() - progress.min() > 1:
        raise RuntimeError(f"survivors are more than one all-reduce apart: {progress.tolist()}")
    return comm, alive, int(progress.max())


def agree(comm: Any, flag: int) -> bool:
    """Return whether all flags are 1 and no process was found dead."""
    from mpi4py import MPI

    try:
        return comm.Agree(flag) == 1
    except MPI.Exception:
        return False


def die(folder: Path, me: int, marks: list[dict[str, Any]]) -> None:
    """Write the observations so far and the time of death, and die."""
    (folder / f"{me}.until-death").write_text(json.dumps(marks))
    (folder / f"{me}.kill").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def leave(comm: Any, path: Path, marks: list[dict[str, Any]]) -> None:
    """Write the results atomically, and end once all survivors are here."""
    agree(comm, 1)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(marks))
    draft.replace(path)
    os._exit(0)


# ---------------------------------------------------------------------------------------------
# The same over Gloo


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
                    work_gloo(
                        told,
                        rank,
                        C10dCommunicator(HubStore(hub.address, "benchmark", "job"), rank, range(told["size"])),
                    )
                living[pid] = rank
            store = HubStore(hub.address, "benchmark", "job")
            while living:
                pid, status = os.wait()
                store.put(f"dead/{living.pop(pid)}", f"status {status}")
        finally:
            for pid in living:
                os.kill(pid, signal.SIGKILL)


def work_gloo(told: dict[str, Any], me: int, comm: Any) -> None:
    """As :func:`work`; recovery is that of :mod:`holdfast.recovery`, with the real communicator."""
    from holdfast.errors import PeerFailed
    from holdfast.recovery.messages import Progress

    rng = random.Random(told["seed"] + me)
    marks: list[dict[str, Any]] = []
    completed, die_s = 0, 0.0
    while len(marks) < len(told["victims"]):
        if told["victims"][len(marks)] == me:
            die_s = die_s or time.monotonic() + CALM_S + 0.1 * rng.random()
            if time.monotonic() > die_s:
                die(Path(told["folder"]), me, marks)
        try:
            maximum(comm)
            completed += 1
        except PeerFailed:
            before, mark = comm.members, {"seen_s": time.monotonic()}
            comm.revoke()
            comm.agree(False)
            mark["heard_s"] = time.monotonic()
            comm.shrink()
            fenced = comm.has_atomic_shrink or comm.agree(True)
            progress = [each.completed for each in comm.share_progress(Progress(completed, False)).values()]
            if not (comm.agree(True) and fenced) or max(progress) - min(progress) > 1:
                raise RuntimeError(f"a second process was lost, or survivors are apart: {progress}") from None
            mark["decided_s"] = time.monotonic()
            completed = max(progress)
            maximum(comm)
            marks.append(mark | {"summed_s": time.monotonic(), "lost": sorted(set(before) - set(comm.members))})
    comm.agree(True)
    draft = Path(told["folder"], f"{me}.draft")
    draft.write_text(json.dumps(marks))
    draft.replace(draft.with_suffix(".json"))
    os._exit(0)


def maximum(comm: Any) -> None:
    """All-reduce a small vector, and check the result."""
    highest, lowest = comm.maximum([comm.local_ranks[0], -comm.local_ranks[0]])
    if (highest, -lowest) != (comm.members[-1], comm.members[0]):
        raise RuntimeError(f"an all-reduce over {comm.members} gave {highest} and {-lowest}")


if __name__ == "__main__":
    main()
