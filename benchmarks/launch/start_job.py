"""How long a job of four workers with a single step takes, beside torchrun: importing torch is most of it.

    python benchmarks/launch/start_job.py [--rounds 10] [--workers 4] [--fabrics gloo ulfm] [--json FILE]

==================  =================================================================================================
way                 what it is
==================  =================================================================================================
torchrun            ``torchrun``; ``DistributedDataParallel`` over Gloo
gloo, ulfm          ``holdfast run`` over this fabric: torch is imported once, and workers are forked from there
... no preload      the same with ``--no-preload``: each worker imports torch
==================  =================================================================================================

Each trains a small MLP for one step of 64 samples. ``job`` is from the start of the command to its end; ``first step`` is
another order each time. Ratios are ratios of medians with 95 % intervals by bootstrap over rounds.
import sys
from pathlib import Path
from the start of the command to when the first worker has the result of the step. In each round all take turns, in

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Each round also has a job over ``gloo`` with ``--respawn``, in which a worker is killed in the 20th step. ``replacement`` is
from the SIGKILL to the first committed step that its replacement takes part in; the other workers train meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import command_line, ratio, spread, table, write_json

LIMIT_S = 180.0
MODEL = """
import sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
"""
OURS = (
    MODEL
    + """
import holdfast
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(data, batch_size=64):
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
if session.is_lead:
    open(sys.argv[1], "w").write(repr(time.time()))
"""
)
RESPAWNING = (
    MODEL.replace("randn(64,", "randn(6400,").replace("(64,)", "(6400,)")
    + """
import holdfast
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(data, batch_size=64):
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
    time.sleep(0.02)
"""
)
KILLED, KILL_AT = 1, 20
THEIRS = (
    MODEL
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
x, y = data[rank :: size]
torch.nn.functional.cross_entropy(ddp(x), y).backward()
optimizer.step()
if rank == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
dist.barrier()
dist.destroy_process_group()
"""
)


def main() -> None:
    """Start each of them in turns, and print the table."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, respawning = (Path(folder, f"{name}.py") for name in ("ours", "theirs", "respawning"))
        ours.write_text(OURS)
        theirs.write_text(THEIRS)
        respawning.write_text(RESPAWNING)
        ways = commands(options.workers, options.fabrics, ours, theirs)
        replacement: list[float] = []
        job: dict[str, list[float]] = {name: [] for name in ways}
        first: dict[str, list[float]] = {name: [] for name in ways}
        rng = random.Random(0)
        for number in range(options.rounds + 1):  # the first one reads files, and is not counted
            for name in rng.sample(list(ways), len(ways)):
                whole_s, step_s = run(ways[name], Path(folder, "stepped"))
                if number:
                    job[name].append(whole_s)
                    first[name].append(step_s)
            joined_s = replace_one(options.workers, respawning, Path(folder, f"report-{number}"))
            replacement += [joined_s] * (number > 0)
    rows = []
    for name in ways:
        medians = [f"{spread(values[name])['p50']:.2f}" for values in (job, first)]
        rows.append([name, *medians, *(written(values[name], values["torchrun"]) for values in (job, first))])
    head = ["way", "job, s", "first step, s", "job / torchrun's", "first step / torchrun's"]
    print(table(f"{options.workers} workers, one step, {options.rounds} rounds", head, rows))
    for fabric in options.fabrics:
        print(f"{fabric}: first step / no preload {written(first[fabric], first[f'{fabric}, no preload'])}")
    around = spread(replacement)
    print(f"replacement: {around['p50']:.2f} s, from {around['min']:.2f} to {around['max']:.2f}")
    write_json(options.json, settings=vars(options), job_s=job, first_step_s=first, replacement_s=replacement)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__, rounds=10, workers=4)
    parser.add_argument("--fabrics", nargs="+", choices=("gloo", "ulfm"), default=["gloo", "ulfm"])
    return parser.parse_args()


def commands(workers: int, fabrics: Sequence[str], ours: Path, theirs: Path) -> dict[str, list[str]]:
    """Return the command of each way; the path of the file to write is appended to it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    ways = {"torchrun": [*torchrun, str(theirs)]}
    for fabric in fabrics:
        run_it = [sys.executable, "-m", "holdfast", "run", "--fabric", fabric, "-n", str(workers)]
        ways[fabric] = [*run_it, str(ours)]
        ways[f"{fabric}, no preload"] = [*run_it, "--no-preload", str(ours)]
    return ways


def run(command: list[str], stepped: Path) -> tuple[float, float]:
    """Run a job; return the time until its end, and until its first step was made, in seconds."""
    stepped.unlink(missing_ok=True)
    begun_s, began = time.perf_counter(), time.time()
    done = subprocess.run([*command, str(stepped)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - begun_s, float(stepped.read_text()) - began


def replace_one(workers: int, script: Path, report: Path) -> float:
    """Run a job in which a worker is killed and replaced; return the seconds until the replacement takes part in a step."""
    kill = f"kill:rank={KILLED},step={KILL_AT}"
    words = [
        "--fabric",
        "gloo",
        "-n",
        str(workers),
        "--respawn",
        "--inject",
        kill,
        "--report",
        str(report),
        str(script),
    ]
    command = [sys.executable, "-m", "holdfast", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    events = [json.loads(line) for line in Path(report, "events.jsonl").read_text().splitlines()]
    killed = next(one for one in events if one["event"] == "WorkerEnded" and one["rank"] == KILLED)
    assert killed["exit_code"] == -signal.SIGKILL
    begun_s = next(one["t_s"] for one in events if one["event"] == "FaultFired")
    steps = [one for one in events if one["event"] == "StepCommitted" and one["step"] > KILL_AT]
    whole = [one["t_s"] for one in steps if one["workers"] == workers]
    if not whole:
        sys.exit(f"no replacement joined within {len(steps)} steps")
    return min(whole) - begun_s


def written(a: list[float], b: list[float]) -> str:
    """Return the ratio of two ways with its interval."""
    found = ratio(a, b, paired=True)
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


if __name__ == "__main__":
    main()
