"""Goodput under real kills, beside the simulator's prediction from costs that were measured in other runs.

    python benchmarks/recovery/predicted.py [--strategies rollback,forward,restart] [--mtbf 10,20,40] [--wall 60] [--seeds 1,2,3]
                                   [--pairs 1] [--json FILE]

In about half an hour on two cores: ``--mtbf 10,30 --wall 40 --seeds 1,2``.

At each point workers are killed at random times, as in ``goodput.py``. Immediately before and after it, two calibration
runs measure the costs: in them workers are killed one after another, at a fixed number of steps, until none is left,
several times. The simulator gets the victims, the times of the kills, the duration and the costs from these two runs,
but not the result. The number of steps committed in the given time is compared.

``own pace``  error of the simulator given the step times of the run itself: the rest is not drift of the machine
floor         the first points of each strategy are run twice: the difference between two runs with the same kills
phases        seconds spent on steps that count, discarded work, recoveries and restarts, divided as in ``spent.py``
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from common import check_names, command_line, listed, table, write_json
from peers.driver import CHECKPOINT_EVERY, WAIT_S, commits
from recovery.goodput import WARM_STEPS, Holdfast, schedule, tend_until
from recovery.spent import Spent, spent

from holdfast.records.files import read_run
from holdfast.records.types import Record, RunStarted, StepCommitted
from holdfast_lab.simulate import Cluster, Costs, FailureTrace, Outcome, Scenario, SimulatedJob, simulate
from holdfast_lab.simulate.outcome import Estimate
from holdfast_lab.simulate.reading import OutageSpan

STRATEGIES = ("rollback", "forward", "restart")
WORKERS = 4
APART = 500
"""Steps between two kills in the calibration runs: as long as the measured runs, because checkpoint writes slow
steps down only after a while, and because the mean of 250 steps of 4 workers on 2 cores is sometimes off by 10 %."""
KILLS = 6
"""Kills in each of them: three have survivors, three do not."""
LOOK_S = 0.1
NEAR = 0.05
PARTS = {
    "useful": ("useful", "save"),
    "lost": ("lost",),
    "recover": ("detect", "regroup", "load"),
    "restart": ("restart", "wait"),
}
"""The simulator's phases, by the measured phases they correspond to."""

Row = dict[str, Any]


class Kill(NamedTuple):
    """One worker that was killed.

    Args:
        at_s: Seconds since the clock was started.
        rank: Rank of the worker.
    """

    at_s: float
    rank: int


class Trained(NamedTuple):
    """A run under kills.

    Args:
        kills: Kills that landed.
        records: Records of all workers and the launcher, ordered by time.
        since_s: When the clock was started, in the time of the records.
        until_s: When the last event that belongs to the run was over.
    """

    kills: tuple[Kill, ...]
    records: tuple[Record, ...]
    since_s: float
    until_s: float

    def steps(self) -> int:
        """Return the number of steps committed in time for the first time."""
        done = [one for one in self.records if isinstance(one, StepCommitted) and one.t_s <= self.until_s]
        return len({one.step for one in done} - {one.step for one in done if one.t_s < self.since_s})

    def spent(self) -> Spent:
        """Return how the time was spent."""
        return spent(self.records, self.since_s, self.until_s)


def main() -> None:
    """Measure each point between two calibration runs, and print the tables."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    failed = False
    for strategy in options.strategies:
        try:
            for row in points(strategy, options):
                rows.append(row)
                print(row, file=sys.stderr)
        except (RuntimeError, TimeoutError) as error:  # the other strategies are still worth measuring
            print(f"{strategy}: {error}", file=sys.stderr)
            failed = True
    if rows:
        show(rows, options)
        show_phases(rows)
    write_json(options.json, settings=vars(options), rows=rows)
    sys.exit(failed)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__,
        wall=(60.0, "seconds of training under kills"),
        pairs=(1, "number of points of each strategy that are run twice"),
        apart=(APART, "steps between kills in the calibration runs"),
    )
    parser.add_argument("--strategies", type=listed(), default=list(STRATEGIES))
    parser.add_argument("--mtbf", type=listed(float), default=[10.0, 20.0, 40.0])
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3])
    options = parser.parse_args()
    check_names(parser, "--strategies", options.strategies, STRATEGIES)
    return options


def points(strategy: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the result of each point."""
    before = train(strategy, lambda job, start_s: kill_regularly(job, start_s, options.apart))
    for number, (mtbf_s, seed) in enumerate(itertools.product(options.mtbf, options.seeds)):
        plan = schedule(mtbf_s, options.wall, seed)
        for turn in range(2 if number < options.pairs else 1):
            real = train(strategy, lambda job, start_s, plan=plan: kill_at(job, start_s, plan, options.wall))
            after = train(strategy, lambda job, start_s: kill_regularly(job, start_s, options.apart))
            point = {"strategy": strategy, "mtbf_s": mtbf_s, "seed": seed, "turn": turn}
            yield point | compare(strategy, real, measured_costs(before, after))
            before = after


# ---------------------------------------------------------------------------------------------
# Real runs


def train(strategy: str, drive: Callable[[Holdfast, float], Iterable[Kill]]) -> Trained:
    """Train with all workers, then under the kills of ``drive``, which is called with the job and the start time.

    Raises:
        RuntimeError: if a kill did not land.
    """
    with Holdfast(WORKERS, ("--strategy", strategy)) as job:
        job.wait_for("training with all workers", lambda lines: len(list(commits(lines))) >= WARM_STEPS)
        start_s = time.monotonic()
        kills = tuple(drive(job, start_s))
        end_s = time.monotonic()
        time.sleep(0.5)  # so that the end of the last victim is recorded
        job.diaries.refresh()
        if job.killed() != len(kills):
            raise RuntimeError(f"{len(kills)} workers were killed, {job.killed()} ended by that")
        records = sorted(
            (one for folder in job.folder.glob("holdfast-*") for one in read_run(folder)), key=lambda one: one.t_s
        )
        origin_s = job.diaries.origin_s
        return Trained(kills, tuple(records), start_s - origin_s, end_s - origin_s)


def kill_at(job: Holdfast, start_s: float, plan: Iterable[tuple[float, int]], wall_s: float) -> Iterator[Kill]:
    """Kill the workers chosen by the plan; yield the kills that found a worker."""
    for at_s, number in plan:
        tend_until(job, start_s + at_s)
        yield from strike(job, start_s, number)
    tend_until(job, start_s + wall_s)


def kill_regularly(job: Holdfast, start_s: float, apart: int) -> Iterator[Kill]:
    """Kill the second worker, or the last one, whenever ``apart`` more steps are committed; end after as many again.

    Raises:
        TimeoutError: if training does not continue.
    """
    for number in range(KILLS + 1):
        had, limit_s = len(list(commits(job.diaries.refresh()))), time.monotonic() + WAIT_S + apart
        while len(list(commits(job.diaries.refresh()))) < had + apart:
            if time.monotonic() > limit_s or job.is_over():
                raise TimeoutError(f"training did not continue after {number} kills:\n{job.output()[-2000:]}")
            tend_until(job, time.monotonic() + LOOK_S)  # polling takes time away from training
        if number < KILLS:
            yield from strike(job, start_s, 1)


def strike(job: Holdfast, start_s: float, number: int) -> Iterator[Kill]:
    """Kill a worker, if any is alive."""
    at_s, rank = time.monotonic() - start_s, job.strike(number)
    if rank is not None:
        yield Kill(at_s, rank)


# ---------------------------------------------------------------------------------------------
# Predictions


def measured_costs(*runs: Trained) -> Costs:
    """Return the costs measured in these runs together.

    A recovery takes the mean of all measured ones, from the last step before it until training has regained its pace;
    so does a restart. Means are used because their totals are predicted. Step times include checkpoints, so saving and
    loading cost nothing more.
    """
    steps: dict[int, list[float]] = defaultdict(list)
    breaks: dict[bool, list[float]] = defaultdict(list)
    for run in runs:
        found = run.spent()
        for _, workers, seconds in found.steady:
            steps[workers].append(seconds)
        for one in found.breaks:
            breaks[one.restarted].append(one.cost_s(found.usual()))
    recovery_s, restart_s = (max(0.0, statistics.fmean(breaks[restarted])) for restarted in (False, True))
    pace = tuple((workers, statistics.fmean(steps[workers])) for workers in sorted(steps))
    return Costs(steps_s=pace, regroup_s=recovery_s, restart_s=restart_s)


def compare(strategy: str, real: Trained, costs: Costs) -> Row:
    """Return the result of a run beside the simulator's prediction."""
    found, wall_s = real.spent(), real.until_s - real.since_s
    buckets = next(record.num_buckets for record in real.records if isinstance(record, RunStarted))
    pace = dict(costs.steps_s) | found.usual()
    told = predicted(strategy, real.kills, wall_s, costs, buckets)
    own = predicted(strategy, real.kills, wall_s, replace(costs, steps_s=tuple(sorted(pace.items()))), buckets)
    return {
        "kills": len(real.kills),
        "steps": real.steps(),
        "predicted": told.steps,
        "own_pace": own.steps,
        "calm": wall_s / dict(costs.steps_s)[WORKERS],
        "phases": found.phases(pace),
        "predicted_phases": {phase: sum(told.parts_ns[part] for part in parts) / 1e9 for phase, parts in PARTS.items()},
        "pace_s": found.usual(),
        "predicted_pace_s": dict(costs.steps_s),
        "recovery_s": costs.regroup_s,
        "restart_s": costs.restart_s,
    }


def predicted(strategy: str, kills: Sequence[Kill], wall_s: float, costs: Costs, buckets: int) -> Outcome:
    """Return the simulator's prediction."""
    job = SimulatedJob(
        strategy=strategy, horizon_s=wall_s, save_every=CHECKPOINT_EVERY, buckets=buckets, start_workers=1
    )
    trace = FailureTrace(tuple(spells(kills)), WORKERS, 2 * wall_s, "worker", replayed=True)
    return simulate(Scenario(Cluster(workers=WORKERS), job, costs, trace))


def spells(kills: Sequence[Kill]) -> Iterable[OutageSpan]:
    """Yield outages: permanent, except after the last worker, which the launcher replaces by a new one."""
    alive = {rank: rank for rank in range(WORKERS)}
    for at_s, rank in kills:
        unit = alive.pop(rank) if rank in alive else alive.pop(next(iter(alive)))
        if alive:
            yield OutageSpan(unit, at_s, 1e6)
        else:
            yield OutageSpan(unit, at_s, at_s)
            alive = {-1: unit}


# ---------------------------------------------------------------------------------------------
# Tables


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print a line for each run, a line for each point, and the difference between runs with the same kills."""
    lines = []
    for row in rows:
        shares = [f"{100 * row[name] / row['calm']:.1f}" for name in ("steps", "predicted")]
        seed = f"{row['seed']}{' again' if row['turn'] else ''}"
        counts = [str(row[name]) for name in ("kills", "steps", "predicted")]
        off = [f"{off_by(row, name):+.1f}" for name in ("predicted", "own_pace")]
        lines.append([row["strategy"], f"{row['mtbf_s']:g}", seed, *counts, *shares, *off])
    what = f"{WORKERS} workers on {os.cpu_count()} cores, digits CNN, {options.wall:g} s each"
    head = [
        "strategy",
        "MTBF s",
        "seed",
        "kills",
        "steps",
        "simulated",
        "goodput %",
        "simulated %",
        "off %",
        "own pace",
    ]
    print(table(f"Goodput under kills, real and simulated: {what}", head, lines))
    lines = []
    for (strategy, mtbf_s), group in grouped(rows, "strategy", "mtbf_s"):
        values = np.array([off_by(row, "predicted") for row in group])
        interval = "one run" if len(values) < 2 else "{1:+.1f} to {2:+.1f}".format(*Estimate.of(values))
        near = "yes" if abs(values.mean()) <= 100 * NEAR else "no"
        lines.append([strategy, f"{mtbf_s:g}", str(len(values)), f"{values.mean():+.1f}", interval, near])
    head = ["strategy", "MTBF s", "runs", "off by %", "95 %", f"within {100 * NEAR:g} %"]
    print(table("\nEach point: mean error", head, lines))
    apart = [
        f"{point[0]} {100 * abs(one['steps'] - other['steps']) / statistics.fmean((one['steps'], other['steps'])):.1f} %"
        for point, (one, *others) in grouped(rows, "strategy", "mtbf_s", "seed")
        for other in others
    ]
    print(f"\nfloor, difference between two runs with the same kills: {', '.join(apart) or 'no run was repeated'}")


def show_phases(rows: Sequence[Row]) -> None:
    """Print real and simulated time by phase: means of a point."""
    lines = []
    for (strategy, mtbf_s), group in grouped(rows, "strategy", "mtbf_s"):
        cells = []
        for phase in PARTS:
            pair = (statistics.fmean(row[name][phase] for row in group) for name in ("phases", "predicted_phases"))
            cells.append(" / ".join(f"{seconds:.2f}" for seconds in pair))
        for workers in range(WORKERS, 0, -1):
            both = [row for row in group if workers in row["pace_s"]]
            pair = (1e3 * statistics.fmean(r[n][workers] for r in both) for n in ("pace_s", "predicted_pace_s") if both)
            cells.append(" / ".join(f"{ms:.2f}" for ms in pair))
        lines.append([strategy, f"{mtbf_s:g}", *cells])
    head = [
        "strategy",
        "MTBF s",
        *(f"{phase} s" for phase in PARTS),
        *(f"step of {n} ms" for n in range(WORKERS, 0, -1)),
    ]
    print(table("\nTime by phase, real / simulated", head, lines))


def off_by(row: Row, name: str) -> float:
    """Return the error of the simulator, in percent."""
    return 100 * (row[name] / row["steps"] - 1)


def grouped(rows: Iterable[Row], *names: str) -> Iterable[tuple[tuple[Any, ...], list[Row]]]:
    """Group rows with the same values under these names."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups.items()


if __name__ == "__main__":
    main()
