"""How long the other workers are blocked when one joins: a spare that takes over, and a fresh process.

    python benchmarks/rejoin.py [--workers 3] [--kills 5] [--megabytes 100] [--kinds spare,whole] [--seed 0] [--json FILE]

Real workers on the ``gloo`` fabric, one of which is killed in every job. The model and its Adam state have the given
size together, and a newcomer receives all of it.

spare  it has taken part in every step, so it has the state: from the SIGKILL to the next committed step, and the
       number of steps until then. The step in progress is recomputed.
whole  a new process is started and joins. ``join`` is the time from the last step without it to the first with it, less
       one ordinary step; ``held`` is the longest time between two steps until the second one with it, less the same.
       ``regroup`` is the shrink that admits it, ``transfer`` the state transfer, ``memory`` the setup of shared
       memory for the next all-reduce. Its start-up time is not included: the other workers train meanwhile.
       ``without`` is the median step without the dead worker.

Loopback on few cores says nothing about a cluster: one memory holds as many copies of the model as there are workers.
"""

from __future__ import annotations

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

from common import command_line, spread, table, write_json

Row = dict[str, float]

PARTS = "HOLDFAST_BENCHMARK_PARTS"
"""Environment variable with the folder in which each worker writes its timings."""
KILL_AT = 3
STEPS_AFTER = 5
MOST_STEPS = 100_000


def main() -> None:
    """Measure and print."""
    parser = command_line(
        __doc__,
        workers=3,
        kills=(5, "kills of each kind"),
        megabytes=(100, "size of the state, in MB"),
        kinds=("spare,whole", "which to measure, separated by commas"),
        seed=0,
    )
    options = parser.parse_args()
    rows: dict[str, list[Row]] = {kind: [] for kind in options.kinds.split(",")}
    for seed in range(options.kills):  # in turns
        for kind, measured in rows.items():
            measured.append(told(kind, run_once(kind, options.workers, options.megabytes, seed + options.seed)))
    spreads = {
        kind: {
            name: spread([row[name] for row in measured if name in row])
            for name in dict.fromkeys(name for row in measured for name in row)
        }
        for kind, measured in rows.items()
    }
    what = f"{options.workers} workers on {os.cpu_count()} cores, {options.megabytes} MB of state"
    lines = [
        [f"{kind}: {name}", str(values["n"]), *(f"{values[at]:.2f}" for at in ("p50", "p90", "max"))]
        for kind, each in spreads.items()
        for name, values in each.items()
    ]
    print(table(f"Time that the other workers are blocked: {what}", ["", "jobs", "p50", "p90", "max"], lines))
    write_json(options.json, settings=vars(options), rows=rows, summary=spreads)


def told(kind: str, row: Row) -> Row:
    """Print the result of one job."""
    print(f"{kind}: {row}", file=sys.stderr)
    return row


def run_once(kind: str, workers: int, megabytes: int, seed: int) -> Row:
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
# The script of the workers


def train(megabytes: int, workers: int) -> None:
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
        train(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
