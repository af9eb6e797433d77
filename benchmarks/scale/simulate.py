"""Speed of the simulator: one history, and large sweeps.

    python benchmarks/scale/simulate.py [--repetitions 1000] [--workers 100000] [--days 90] [--compiled] [--json FILE]

========  ==================================================================================================  ==============
case      simulates                                                                                           target
========  ==================================================================================================  ==============
history   ``simulate``: 16,384 workers in nodes of 8 that fail, are repaired and rejoin, for 90 days          2 s
sweep     ``monte_carlo``: every worker fails independently, once in five years, log-normal repairs           30 s
nodes     nodes of 8 fail, each once in 5,000 hours, under ``rollback`` and under ``restart``                  60 s
both      the same, and as many failures of single workers                                                    60 s
========  ==================================================================================================  ==============

Times are processor times: all run on one core. Drawing the failures is included, and so is compiling, in the first case
that needs it; with ``--compiled`` what was compiled by an earlier run is loaded instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import command_line, table, write_json

from holdfast_lab.simulate import (
    Cluster,
    Costs,
    Exponential,
    Failures,
    LogNormal,
    Scenario,
    SimulatedJob,
    Source,
    monte_carlo,
    simulate,
)

DAY_S = 86_400.0
COSTS = Costs(
    slice_s=8, sum_s=2, detect_s=1, regroup_s=1, regroup_hop_s=0.1, save_s=5, save_background_s=60, load_s=60, restart_s=120,
    spawn_s=120, rejoin_s=3,
)  # fmt: skip
REPAIR = LogNormal(4 * 3600, 1.0)
NODE, ALONE = Source("node", Exponential(5000 * 3600), REPAIR), Source("worker", Exponential(8 * 5000 * 3600), REPAIR)
STRATEGIES = ("rollback", "restart")
HISTORY_S, SWEEP_S, STRATEGIES_S = 2.0, 30.0, 60.0


def main() -> None:
    """Run all, print them beside their targets."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        if not options.compiled:
            os.environ["NUMBA_CACHE_DIR"] = folder
        found = {
            "both": time_strategies(options, NODE, ALONE),
            "nodes": time_strategies(options, NODE),
            "sweep": time_sweep(options),
            "history": time_history(),
        }
    write_json(options.json, settings=vars(options), **found)
    setting = f"{options.workers:,} workers x {options.days:g} d x {options.repetitions:,}"
    targets = {"both": STRATEGIES_S, "nodes": STRATEGIES_S, "sweep": SWEEP_S, "history": HISTORY_S}
    whats = {
        "both": f"nodes of 8 and single workers, {setting}, two strategies",
        "nodes": f"nodes of 8, {setting}, two strategies",
        "sweep": f"single workers, {setting}",
        "history": "one history",
    }
    rows = [
        [whats[name], f"{one['seconds']:.2f} s", f"< {targets[name]:g} s", f"{one['failures']:,.0f} failures a history"]
        for name, one in found.items()
    ]
    print(table("The simulator, one core", ["what", "took", "target", ""], rows))


def parse() -> argparse.Namespace:
    """Read the command line."""
    compiled = (False, "load what an earlier run compiled")
    return command_line(__doc__, repetitions=1000, workers=100_000, days=90.0, compiled=compiled).parse_args()


def time_history() -> dict[str, Any]:
    """Return how long one history takes: the mean of five."""
    cluster = Cluster(workers=16_384, spares=64, workers_per_node=8)
    failures = Failures((Source("node", Exponential(180 * DAY_S), REPAIR),))
    job = SimulatedJob(strategy="restart", horizon_s=90 * DAY_S, save_every=200, split="even")
    scenario = Scenario(cluster, job, COSTS, failures)
    begun_s = time.process_time()
    histories = [simulate(scenario, repetition=repetition) for repetition in range(5)]
    seconds = (time.process_time() - begun_s) / len(histories)
    return {"seconds": seconds, "failures": sum(one.failures for one in histories) / len(histories)}


def time_sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Return how long many histories of one scenario take."""
    failures = Failures((Source("worker", Exponential(5 * 365 * DAY_S), REPAIR),))
    job = SimulatedJob(strategy="rollback", horizon_s=options.days * DAY_S, save_every=200, split="even")
    scenario = Scenario(Cluster(workers=options.workers), job, COSTS, failures)
    begun_s = time.process_time()
    sweep = monte_carlo(scenario, options.repetitions)
    seconds = time.process_time() - begun_s
    return {"seconds": seconds, "goodput": sweep.estimate("goodput").mean, "failures": float(sweep.failures.mean())}


def time_strategies(options: argparse.Namespace, *sources: Source) -> dict[str, Any]:
    """Return how long many histories take under each of two strategies, one after the other."""
    begun_s = time.process_time()
    for strategy in STRATEGIES:
        job = SimulatedJob(strategy=strategy, horizon_s=options.days * DAY_S, save_every=200, split="even")
        cluster = Cluster(workers=options.workers, workers_per_node=8)
        sweep = monte_carlo(Scenario(cluster, job, COSTS, Failures(sources)), options.repetitions)
    return {"seconds": time.process_time() - begun_s, "failures": float(sweep.failures.mean())}


if __name__ == "__main__":
    main()
