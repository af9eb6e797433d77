"""How long torchft's other workers are blocked when one joins; see ``rejoin.py``.

    python benchmarks/rejoin_peers.py [--workers 3] [--kills 6] [--megabytes 100] [--systems torchft] [--json FILE]

torchft 0.2 on Gloo, a replica group a worker, its lighthouse with ``--heartbeat_timeout_ms 500 --join_timeout_ms 200``.
The model and its momentum have the given size together. A replica is killed and started again; it joins, and receives the
state of another one over HTTP. Counted is the longest time between two commits of a survivor, from the five commits
before all replicas take part to the second one with all, less one ordinary step: the quorum in which the newcomer heals
comes before the one in which it takes part. ``held`` of ``rejoin.py`` begins with the last step before its newcomer
joins, and ends with the same step. The newcomer's start is not included.

``copy`` is one copy of as many bytes in memory: the limit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
from common import command_line, spread, table, write_json
from peers.driver import Line, Torchft, commits, missing

TUNED = {"heartbeat_timeout_ms": 500, "join_timeout_ms": 200}
GLOO_TIMEOUT_S = 5.0
STEPS = 5
"""Steps with all replicas before a kill, and after a join."""
COPIES = 10


def main() -> None:
    """Measure and print."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    held_ms: dict[str, list[float]] = {}
    failed = False
    for system in options.systems:
        try:
            held_ms[system] = measure(options)
        except (RuntimeError, TimeoutError) as error:
            print(f"{system}: {error}", file=sys.stderr)
            failed = True
    copy_ms = time_copies(options.megabytes)
    rows = [
        [name, str(len(values)), *(f"{spread(values)[at]:.1f}" for at in ("p50", "p90", "max"))]
        for name, values in (held_ms | {"copy": copy_ms}).items()
    ]
    what = f"{options.workers} workers, {options.megabytes:g} MB of state, ms"
    print(table(f"Time that the other workers are blocked by a newcomer: {what}", ["", "n", "p50", "p90", "max"], rows))
    write_json(options.json, settings=vars(options), held_ms=held_ms, copy_ms=copy_ms)
    sys.exit(failed)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__, workers=3, kills=6, megabytes=(100.0, "size of the state, in MB"))
    parser.add_argument("--systems", type=lambda text: text.split(","), default=["torchft"], help="torchft, or none")
    options = parser.parse_args()
    if options.systems not in (["torchft"], ["none"]):
        parser.error(f"--systems must be torchft or none, got {','.join(options.systems)}")
    options.systems = [name for name in options.systems if name != "none"]
    if options.systems and missing():
        print(missing(), file=sys.stderr)
        options.systems = []
    return options


def measure(options: argparse.Namespace) -> list[float]:
    """Return how long each newcomer held the others, in milliseconds."""
    held_ms: list[float] = []
    job = Torchft(options.workers, TUNED, gloo_timeout_s=GLOO_TIMEOUT_S, orders=False)
    job.env["PEER_STATE_BYTES"] = str(int(options.megabytes * 1e6))
    with job:
        since_s = wait_full(job, 0.0)
        for number in range(options.kills):
            victim = job.strike(number)
            struck_s = time.monotonic()
            job.wait_for("training of the survivors", lambda lines, at=struck_s: goes_on(lines, at, job.workers - 1))
            job.restore()
            wait_full(job, max(struck_s, since_s))
            held_ms.append(held(job.diaries.lines, struck_s, victim, job.workers))
            print(f"torchft: {held_ms[-1]:.1f} ms", file=sys.stderr)
            since_s = job.diaries.lines[-1]["t_s"]
        if job.killed() != options.kills:
            raise RuntimeError(f"{options.kills} kills were sent, {job.killed()} workers ended by SIGKILL")
    return held_ms


def wait_full(job: Torchft, since_s: float) -> float:
    """Wait until all replicas train together; return the time of the newest line."""

    def full(lines: list[Line]) -> bool:
        together = sum(line["t_s"] > since_s and line["workers"] == job.workers for line in commits(lines))
        return together >= STEPS * job.workers

    job.wait_for("training with all replicas", full)
    return float(job.diaries.lines[-1]["t_s"])


def goes_on(lines: list[Line], since_s: float, workers: int) -> bool:
    """Return whether the survivors have committed some steps since then."""
    return sum(line["t_s"] > since_s for line in commits(lines)) >= STEPS * workers


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
        around = steps[max(0, joined - STEPS) : joined + 2]
        longest = max([longest, *(b - a for (a, _), (b, _) in itertools.pairwise(around))])
    return 1e3 * (longest - statistics.median(usual))


def time_copies(megabytes: float) -> list[float]:
    """Return how long one copy of the state takes, in milliseconds."""
    source = np.ones(int(megabytes * 1e6) // 4, np.float32)
    target = np.zeros_like(source)
    times = []
    for _ in range(COPIES + 1):
        begun_s = time.perf_counter()
        np.copyto(target, source)
        times.append(1e3 * (time.perf_counter() - begun_s))
    return times[1:]


if __name__ == "__main__":
    main()
