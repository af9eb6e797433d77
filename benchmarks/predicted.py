"""Goodput under real kills, beside what the simulator says of it with costs that were measured in other runs.

    python benchmarks/predicted.py [--strategies rollback,forward,restart] [--mtbf 10,20,40] [--wall 60] [--seeds 1,2,3]
                                   [--json FILE]

For each strategy, runs in which workers are killed at fixed steps, one after the other until nobody is left, say what
things take: a step, by the number of workers; noticing a death, regrouping, loading, starting again. Then workers train
under kills at random times, as in ``goodput.py``. The simulator is told who was killed and when, how long it lasted, and
what the first runs measured; what came of it, it is not told. Compared are the steps that are done when time is up.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import table, write_json
from goodput import CHECKPOINT_EVERY, SCRIPT, WARM_STEPS, Holdfast, schedule, tend_until
from peers.driver import commits

from holdfast.events import JobRestarted, Record, Recovered, RunStarted, StepCommitted
from holdfast.records import load_events
from holdfast.simulate import Cluster, Costs, Job, Outcome, Scenario, Trace, simulate
from holdfast.simulate.measured import read_measured
from holdfast.simulate.reading import Spell

STRATEGIES = ("rollback", "forward", "restart")
WORKERS = 4
TAKEN = ("detect_s", "regroup_s", "load_s", "restart_s")
"""Costs that are taken from the first runs as they are. A step is measured with its checkpoint, so saving costs nothing more."""
APART = 300
"""Steps from one kill to the next in the runs that measure."""
STEPS_PER_EPOCH = 11
LIMIT_S = 600.0


class Kill(NamedTuple):
    """One worker that was killed.

    Args:
        at_s: Seconds from when the clock was started.
        rank: Of the worker.
    """

    at_s: float
    rank: int


def main() -> None:
    """Measure costs, then each point, and print the table."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for strategy in options.strategies:
        costs, buckets = measured_costs(strategy, options.calibrations)
        print(f"{strategy}: {costs}", file=sys.stderr)
        for mtbf_s, seed in itertools.product(options.mtbf, options.seeds):
            kills, steps = real(strategy, schedule(mtbf_s, options.wall, seed), options.wall)
            told = predicted(strategy, kills, options.wall, costs, buckets)
            calm = options.wall / dict(costs.steps_s)[WORKERS]
            rows.append(
                {
                    "strategy": strategy,
                    "mtbf_s": mtbf_s,
                    "seed": seed,
                    "kills": len(kills),
                    "steps": steps,
                    "predicted": told.steps,
                    "calm": calm,
                }
            )
            print(rows[-1], file=sys.stderr)
    show(rows, options)
    write_json(options.json, settings=vars(options), rows=rows)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=list(STRATEGIES))
    parser.add_argument("--mtbf", type=lambda text: [float(s) for s in text.split(",")], default=[10.0, 20.0, 40.0])
    parser.add_argument("--wall", type=float, default=60.0, help="seconds of training under kills")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--calibrations", type=int, default=2, help="runs that measure costs, for each strategy")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if odd := set(options.strategies) - set(STRATEGIES):
        parser.error(f"--strategies must be of {', '.join(STRATEGIES)}, got {', '.join(sorted(odd))}")
    return options


# ---------------------------------------------------------------------------------------------
# What things take


def measured_costs(strategy: str, runs: int) -> tuple[Costs, int]:
    """Return what things take under a strategy, each the median over some runs, and how many sums a step has."""
    found: dict[str, list[float]] = defaultdict(list)
    steps: dict[int, list[float]] = defaultdict(list)
    buckets = 1
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            calibrate(strategy, Path(folder))
            for name, one in read_measured(Path(folder)).costs.items():
                found[name].append(one.value)
            records = load_events(Path(folder))
        buckets = next(record.num_buckets for record in records if isinstance(record, RunStarted))
        for workers, seconds in step_times(records).items():
            steps[workers] += seconds
    taken = {name: statistics.median(found[name]) for name in TAKEN if found[name]}
    return Costs(steps_s=tuple((n, statistics.fmean(steps[n])) for n in sorted(steps)), **taken), buckets


def calibrate(strategy: str, folder: Path) -> None:
    """Let workers die one after another at fixed steps, until one that was started anew goes on alone."""
    kills = [f"kill:rank={(n + 1) % WORKERS},step={APART * (n + 1)}" for n in range(WORKERS)]
    epochs = APART * (WORKERS + 1) // STEPS_PER_EPOCH
    command = [
        sys.executable, "-m", "holdfast", "run", "-n", str(WORKERS), "--strategy", strategy, "--report", str(folder),
        "--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", str(CHECKPOINT_EVERY),
        *(word for kill in kills for word in ("--inject", kill)),
        str(SCRIPT), "--dataset", "digits", "--model", "cnn", "--optimizer", "sgd", "--epochs", str(epochs),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        msg = f"the run that was to measure {strategy} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        raise RuntimeError(msg)


def step_times(records: Iterable[Record]) -> Mapping[int, list[float]]:
    """Return how long steps took, by the number of workers; those in which somebody was lost, or begun anew, are not among them."""
    times: dict[int, list[float]] = defaultdict(list)
    before: StepCommitted | None = None
    for record in records:
        match record:
            case StepCommitted():
                if before is not None and (record.step, record.workers) == (before.step + 1, before.workers):
                    times[record.workers].append(record.t_s - before.t_s)
                before = record
            case Recovered() | JobRestarted() | RunStarted():
                before = None
    return times


# ---------------------------------------------------------------------------------------------
# What happens, and what is said to happen


def real(strategy: str, kills: Sequence[tuple[float, int]], wall_s: float) -> tuple[list[Kill], int]:
    """Train under kills; return who was killed and when, and how many steps were done in time.

    Raises:
        RuntimeError: if a kill did not land.
    """
    with Holdfast(WORKERS, ("--strategy", strategy)) as job:
        job.wait_for("training with all workers", lambda lines: len(list(commits(lines))) >= WARM_STEPS)
        start_s, landed = time.monotonic(), []
        for at_s, number in kills:
            tend_until(job, start_s + at_s)
            struck_s, rank = time.monotonic() - start_s, job.strike(number)
            if rank is not None:
                landed.append(Kill(struck_s, rank))
        tend_until(job, start_s + wall_s)
        time.sleep(0.5)  # the last victim is to be seen gone
        lines = [line for line in commits(job.diaries.refresh()) if line["t_s"] <= start_s + wall_s]
        if job.killed() != len(landed):
            msg = f"{len(landed)} workers were killed, {job.killed()} ended by that"
            raise RuntimeError(msg)
        before = {line["step"] for line in lines if line["t_s"] < start_s}
        return landed, len({line["step"] for line in lines} - before)


def predicted(strategy: str, kills: Sequence[Kill], wall_s: float, costs: Costs, buckets: int) -> Outcome:
    """Return what the simulator makes of it."""
    job = Job(strategy=strategy, horizon_s=wall_s, save_every=CHECKPOINT_EVERY, buckets=buckets, start_workers=1)
    trace = Trace(tuple(spells(kills)), WORKERS, 2 * wall_s, "worker", replayed=True)
    return simulate(Scenario(Cluster(workers=WORKERS), job, costs, trace))


def spells(kills: Sequence[Kill]) -> Iterable[Spell]:
    """Yield who is down and when: for good, except where nobody is left, and the launcher starts one worker in the last one's place."""
    alive = {rank: rank for rank in range(WORKERS)}
    for at_s, rank in kills:
        unit = alive.pop(rank) if rank in alive else alive.pop(next(iter(alive)))
        if alive:
            yield Spell(unit, at_s, 1e6)
        else:
            yield Spell(unit, at_s, at_s)
            alive = {-1: unit}


def show(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Print a line for each point, and how far off they are."""
    lines, off = [], []
    for row in rows:
        off.append(row["predicted"] / row["steps"] - 1)
        shares = [f"{100 * row[name] / row['calm']:.1f}" for name in ("steps", "predicted")]
        lines.append(
            [
                row["strategy"],
                f"{row['mtbf_s']:g}",
                str(row["seed"]),
                str(row["kills"]),
                str(row["steps"]),
                str(row["predicted"]),
                *shares,
                f"{100 * off[-1]:+.1f}",
            ]
        )
    head = ["strategy", "MTBF s", "seed", "kills", "steps", "simulated", "goodput %", "simulated %", "off by %"]
    what = f"{WORKERS} workers on {os.cpu_count()} cores, digits CNN, {options.wall:g} s each"
    print(table(f"Goodput under kills, real and simulated: {what}", head, lines))
    print(
        f"off by: median {100 * statistics.median(map(abs, off)):.1f} %, at most {100 * max(map(abs, off)):.1f} %; within 5 %: {sum(abs(one) <= 0.05 for one in off)} of {len(off)}"
    )


if __name__ == "__main__":
    main()
