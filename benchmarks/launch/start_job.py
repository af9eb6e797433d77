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
from the start of the command to when the first worker has the result of the step. In each round all take turns, in
another order each time. Ratios are ratios of medians with 95 % intervals by bootstrap over rounds.

Each round also has a job over ``gloo`` with ``--respawn``, in which a worker is killed in the 20th step. ``replacement`` is
from the SIGKILL to the first committed step that its replacement takes part in; the other workers train meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cells, command_line, table, take_turns, times, write_json

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
        reports = (Path(folder, f"report-{number}") for number in itertools.count())
        runs: dict[str, Callable[[], Any]] = {
            name: lambda words=words: run(words, Path(folder, "stepped")) for name, words in ways.items()
        }
        runs["replacement"] = lambda: replace_one(options.workers, respawning, next(reports))
        found = take_turns(runs, options.rounds)  # the first round reads files, and is not counted
    replacement = found.pop("replacement")
    job, first = ({name: [pair[i] for pair in pairs] for name, pairs in found.items()} for i in (0, 1))
    rows = []
    for name in ways:
        medians = [cells(values[name], keys=["p50"])[0] for values in (job, first)]
        rows.append([name, *medians, *(times(values[name], values["torchrun"]) for values in (job, first))])
    head = ["way", "job, s", "first step, s", "job / torchrun's", "first step / torchrun's"]
    print(table(f"{options.workers} workers, one step, {options.rounds} rounds", head, rows))
    for fabric in options.fabrics:
        print(f"{fabric}: first step / no preload {times(first[fabric], first[f'{fabric}, no preload'])}")
    median, least, most = cells(replacement, keys=("p50", "min", "max"))
    print(f"replacement: {median} s, from {least} to {most}")
    write_json(options.json, settings=vars(options), job_s=job, first_step_s=first, replacement_s=replacement)


def parse() -> argparse.Namespace:
    """Read the command line."""
    fabrics = ["gloo", "ulfm"]
    return command_line(__doc__, rounds=10, workers=4, fabrics=(fabrics, None, fabrics)).parse_args()


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


if __name__ == "__main__":
    main()
