"""Speed of the simulator: one history, and a large sweep.

    python benchmarks/simulate.py [--repetitions 1000] [--workers 100000] [--days 90] [--json FILE]

========  ==================================================================================================  ==============
case      simulates                                                                                           target
========  ==================================================================================================  ==============
history   ``simulate``: 16,384 workers in nodes of 8 that fail, are repaired and rejoin, for 90 days          2 s
sweep     ``monte_carlo``: every worker fails independently, once in five years, log-normal repairs           30 s
========  ==================================================================================================  ==============

Times are processor times: both run on one core. Drawing the failures is included.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from common import table, write_json

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
HISTORY_S, SWEEP_S = 2.0, 30.0


def main() -> None:
    """Run both, print them beside their targets."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    history, sweep = time_history(), time_sweep(options)
    write_json(options.json, settings=vars(options), history=history, sweep=sweep)
    setting = f"{options.workers:,} workers x {options.days:g} d x {options.repetitions:,}"
    rows = [
        ["one history", f"{history['seconds']:.2f} s", f"< {HISTORY_S:g} s", f"{history['failures']:,.0f} failures"],
        [setting, f"{sweep['seconds']:.1f} s", f"< {SWEEP_S:g} s", f"goodput {100 * sweep['goodput']:.3f} %"],
    ]
    print(table("The simulator, one core", ["what", "took", "target", ""], rows))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=100_000)
    parser.add_argument("--days", type=float, default=90)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


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


if __name__ == "__main__":
    main()
