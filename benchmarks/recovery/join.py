"""How long the other workers are blocked when one joins: a spare that takes over, a fresh process, a replica of torchft.

    python benchmarks/recovery/join.py [--workers 3] [--kills 5] [--megabytes 100] [--kinds spare,whole] [--seed 0] [--json FILE]

Real workers on the ``gloo`` fabric, one of which is killed in every job. The model and its Adam state have the given
size together, and a newcomer receives all of it.

spare  it has taken part in every step, so it has the state: from the SIGKILL to the next committed step, and the
       number of steps until then. The step in progress is recomputed.
whole  a new process is started and joins. ``join`` is the time from the last step without it to the first with it, less
       one ordinary step; ``held`` is the longest time between two steps until the second one with it, less the same.
       ``regroup`` is the shrink that admits it, ``transfer`` the state transfer, ``memory`` the setup of shared
       memory for the next all-reduce. Its start-up time is not included: the other workers train meanwhile.
       ``without`` is the median step without the dead worker.

``--kinds spare,whole,torchft`` measures torchft 0.2 on Gloo, too: a replica group a worker, its lighthouse with
``--heartbeat_timeout_ms 500 --join_timeout_ms 200``, in one job. The model and its momentum have the given size together. A
replica is killed and started again; it joins, and receives the state of another one over HTTP. Counted is the longest time
between two commits of a survivor, from the five commits before all replicas take part to the second one with all, less one
ordinary step: the quorum in which the newcomer heals comes before the one in which it takes part. ``held`` of ``whole``
begins with the last step before its newcomer joins, and ends with the same step. ``copy`` is one copy of as many bytes in
memory: the limit.

Loopback on few cores says nothing about a cluster: one memory holds as many copies of the model as there are workers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from common import check_names, command_line, listed, measure_each, spread, table, timed, told, write_json
from peers.driver import Line, Torchft, commits, installed, tuned

Row = dict[str, float]

PARTS = "HOLDFAST_BENCHMARK_PARTS"
"""Environment variable with the folder in which each worker writes its timings."""
KILL_AT = 3
STEPS_AFTER = 5
MOST_STEPS = 100_000
PEER = "torchft"
KINDS = ("spare", "whole", PEER)
COPIES = 10


def main() -> None:
    """Measure and print."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: dict[str, list[Row]] = {kind: [] for kind in options.kinds}
    for seed in range(options.kills):  # in turns
        for kind in [kind for kind in options.kinds if kind != PEER]:
            rows[kind].append(told(kind, run_once(kind, options.workers, options.megabytes, seed + options.seed)))
    if PEER in rows:
        found, _ = measure_each([PEER], lambda _: join_torchft(options))
        rows = {kind: each for kind, each in (rows | found).items() if each}
    copy_ms = time_copies(options.megabytes)
    spreads = {
        kind: {
            name: spread([row[name] for row in measured if name in row])
            for name in dict.fromkeys(name for row in measured for name in row)
        }
        for kind, measured in (rows | {"copy": [{"ms": each} for each in copy_ms]}).items()
    }
    what = f"{options.workers} workers on {os.cpu_count()} cores, {options.megabytes:g} MB of state"
    lines = [
        [f"{kind}: {name}", str(values["n"]), *(f"{values[at]:.2f}" for at in ("p50", "p90", "max"))]
        for kind, each in spreads.items()
        for name, values in each.items()
    ]
    print(table(f"Time that the other workers are blocked: {what}", ["", "jobs", "p50", "p90", "max"], lines))
    write_json(options.json, settings=vars(options), rows=rows, copy_ms=copy_ms, summary=spreads)
    sys.exit(len(rows) < len(options.kinds))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__,
        workers=3,
        kills=(5, "kills of each kind"),
        megabytes=(100.0, "size of the state, in MB"),
        seed=0,
    )
    parser.add_argument("--kinds", type=listed(), default=["spare", "whole"], help="separated by commas")
    options = parser.parse_args()
    check_names(parser, "--kinds", options.kinds, KINDS)
    options.kinds = installed(options.kinds)
    return options


def run_once(kind: str, workers: int, megabytes: float, seed: int) -> Row:
    """Run one job with one kill."""
    from holdfast.config import Settings
    from holdfast.faults.plan import Fault, FaultPlan
    from holdfast.launch.job import Job
    from holdfast.launch.launcher import launch

    victim = seed % workers
    plan = FaultPlan((Fault("kill", victim, KILL_AT, "backward"),)).to_json()
    spares = int(kind == "spare")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[PARTS] = folder
        outcome = launch(
            Job(
                script=Path(__file__),
                args=("--train", str(megabytes), str(workers)),
                settings=Settings(fabric="gloo", workers=workers, spares=spares, faults=plan, seed=seed),
                max_respawns=1 - spares,
            )
        )
        if outcome.exit_code:
            raise RuntimeError(f"the job failed: {outcome.message}\n{outcome.traceback}")
        parts = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    return (row_of_spare if spares else row_of_fresh)(outcome.records, parts, victim)


def committed(records: Any) -> dict[int, tuple[float, int]]:
    """Return when each step was committed, and by how many workers."""
    return {r.step: (r.t_s, r.workers) for r in records if type(r).__name__ == "StepCommitted"}


def step_ms(done: dict[int, tuple[float, int]], steps: range) -> float:
    """Return the median time of these steps."""
    return 1e3 * statistics.median(done[b][0] - done[a][0] for a, b in itertools.pairwise(steps))


def longest_ms(done: dict[int, tuple[float, int]], steps: range) -> float:
    """Return the longest time between two of these steps; 0 if there is only one."""
    return 1e3 * max((done[b][0] - done[a][0] for a, b in itertools.pairwise(steps)), default=0.0)


def row_of_spare(records: Any, _: Any, victim: int) -> Row:
    """Return the cost of a takeover by a spare."""
    (fault_s,) = (r.t_s for r in records if type(r).__name__ == "FaultFired" and r.rank == victim)
    done = committed(records)
    usual = step_ms(done, range(KILL_AT + 2, max(done)))
    recover = 1e3 * (done[KILL_AT][0] - fault_s)
    return {"recover_ms": recover, "step_ms": usual, "steps": recover / usual, "held_steps": recover / usual - 1}


def row_of_fresh(records: Any, parts: list[dict[str, Any]], _: int) -> Row:
    """Return the cost of a fresh process joining."""
    joined = [r for r in records if type(r).__name__ == "Recovered" and r.joined]
    first, newcomers = joined[0].step, joined[0].joined
    done = committed(records)
    usual = step_ms(done, range(first + 1, max(done)))
    givers = [part for part in parts if part["rank"] not in newcomers]

    def longest(name: str) -> float:
        return 1e3 * max(
            (part["seconds"] for part in givers if part["name"] == name and part["step"] == first), default=0.0
        )

    without: Row = {"without_ms": step_ms(done, range(KILL_AT, first))} if first > KILL_AT + 1 else {}
    moved = longest("transfer")
    join_ms = longest_ms(done, range(first - 1, first + 1)) - usual
    size = max(part["bytes"] for part in parts)
    return {
        "held_ms": longest_ms(done, range(first - 1, first + 2)) - usual,
        "join_ms": join_ms,
        "recovered_held_ms": 1e3 * max(r.held_s for r in joined),
        "regroup_ms": longest("regroup"),
        "transfer_ms": moved,
        "transfer_MB_per_s": size / 1e3 / moved,
        "memory_ms": longest("memory"),
        "step_ms": usual,
        "join_steps": join_ms / usual,
        **without,
    }


# ---------------------------------------------------------------------------------------------
# torchft


def join_torchft(options: argparse.Namespace) -> list[Row]:
    """Return how long each newcomer held the others."""
    rows: list[Row] = []
    job = Torchft(options.workers, tuned(200), orders=False)
    job.env["PEER_STATE_BYTES"] = str(int(options.megabytes * 1e6))
    with job:
        since_s = wait_full(job, 0.0)
        for number in range(options.kills):
            victim = job.strike(number)
            struck_s = time.monotonic()
            job.wait_for("training of the survivors", lambda lines, at=struck_s: goes_on(lines, at, job.workers - 1))
            job.restore()
            wait_full(job, max(struck_s, since_s))
            rows.append(told(PEER, {"held_ms": held(job.diaries.lines, struck_s, victim, job.workers)}))
            since_s = job.diaries.lines[-1]["t_s"]
        if job.killed() != options.kills:
            raise RuntimeError(f"{options.kills} kills were sent, {job.killed()} workers ended by SIGKILL")
    return rows


def wait_full(job: Torchft, since_s: float) -> float:
    """Wait until all replicas train together; return the time of the newest line."""

    def full(lines: list[Line]) -> bool:
        together = sum(line["t_s"] > since_s and line["workers"] == job.workers for line in commits(lines))
        return together >= STEPS_AFTER * job.workers

    job.wait_for("training with all replicas", full)
    return float(job.diaries.lines[-1]["t_s"])


def goes_on(lines: list[Line], since_s: float, workers: int) -> bool:
    """Return whether the survivors have committed some steps since then."""
    return sum(line["t_s"] > since_s for line in commits(lines)) >= STEPS_AFTER * workers


def held(lines: list[Line], struck_s: float, victim: Any, workers: int) -> float:
    """Return the longest pause of a survivor around the join, less one ordinary step, in milliseconds."""
    times = {}
    for line in commits(lines):
        if line["t_s"] > struck_s and line["rank"] != victim:
            times.setdefault(line["rank"], []).append((line["t_s"], line["workers"]))
    longest, usual = 0.0, []
    for steps in times.values():
        joined = next(number for number, (_, together) in enumerate(steps) if together == workers)
        usual += [b - a for (a, _), (b, _) in itertools.pairwise(steps[joined + 1 :])]
        # The quorum in which it heals comes before the one in which it takes part.
        around = steps[max(0, joined - STEPS_AFTER) : joined + 2]
        longest = max([longest, *(b - a for (a, _), (b, _) in itertools.pairwise(around))])
    return 1e3 * (longest - statistics.median(usual))


def time_copies(megabytes: float) -> list[float]:
    """Return how long one copy of the state takes, in milliseconds."""
    source = np.ones(int(megabytes * 1e6) // 4, np.float32)
    target = np.zeros_like(source)
    return [1e3 * timed(lambda: np.copyto(target, source)) for _ in range(COPIES + 1)][1:]


# ---------------------------------------------------------------------------------------------
# The script of the workers


def train(megabytes: float, workers: int) -> None:
    """Train until the failed workers are replaced, and a little longer."""
    import torch
    from torch import nn

    import holdfast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = round((megabytes * 1e6 / 12 / 4) ** 0.5)  # Adam keeps two numbers for each weight
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    session = holdfast.Session(model, torch.optim.Adam(model.parameters(), lr=1e-4), total_steps=MOST_STEPS)
    measure_parts(session, 12 * sum(p.numel() for p in model.parameters()))
    data = torch.utils.data.TensorDataset(torch.randn(64 * workers, width))
    full = 0
    for step in session.steps(data, batch_size=8 * workers, epochs=MOST_STEPS // 8):
        for (x,) in step:
            step.backward(model(x).square().mean())
        full += step.number > KILL_AT and session.world_size >= workers
        if full == STEPS_AFTER:
            step.stop()


def measure_parts(session: Any, size_bytes: int) -> None:
    """Write down how long each part of a join takes in this worker."""
    from holdfast.comm import OrderedAllReduce
    from holdfast.comm.c10d import C10dCommunicator
    from holdfast.engine.restorer import StateRestorer

    file = Path(os.environ[PARTS], str(os.getpid())).open("a")  # noqa: SIM115 - open until this process ends

    def timed(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begun_s = time.perf_counter()
        result = call(*args, **kwargs)
        seconds = time.perf_counter() - begun_s
        what = {"name": name, "step": session.step, "rank": session.rank, "seconds": seconds, "bytes": size_bytes}
        file.write(json.dumps(what) + "\n")
        file.flush()
        return result

    for name, owner, method in (
        ("regroup", C10dCommunicator, "shrink"),
        ("transfer", StateRestorer, "transfer_state"),
        ("memory", OrderedAllReduce, "_make_path"),
    ):
        call = getattr(owner, method)
        setattr(owner, method, lambda self, *args, _c=call, _n=name, **kw: timed(_n, partial(_c, self), *args, **kw))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(float(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
