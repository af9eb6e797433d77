"""How long a kill interrupts training under torch's ``_reconfigure`` and under Ray Train; see ``recovery.py``.

    python benchmarks/recovery_peers.py [--kills 6] [--workers 4] [--systems reconfigure,ray] [--seed 0] [--json FILE]

The same model, the same victims at the same points of a step, and the same moments as in ``recovery.py``, whose peers
these are too; they have environments of their own (``make bench-peers``).

reconfigure  torch 2.14 or newer on Gloo: ``peers/reconfigure_worker.py`` keeps its processes and reconfigures the group.
             A parent announces a death at once. Which settings matter was tried there: the timeout of a collective does
             not, since the error of a dead neighbour runs round the ring
ray          Ray Train with ``FailureConfig(max_failures=-1)``: its controller restarts all workers, which load the newest
             checkpoint, of every ten steps. Its workers are looked at every 0.1 s; ``--health-check 2`` is its default
"""

from __future__ import annotations

import argparse
import os
import sys

from common import command_line, table, write_json
from peers.restarters import RayTrain, Reconfigure, why_missing
from recovery import Row, cells, draw, kill_peer, summary, torchft_times, torchrun_times

SYSTEMS = ("reconfigure", "ray")


def main() -> None:
    """Kill, measure, print."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: dict[str, list[Row]] = {}
    for system in options.systems:
        try:
            rows[system] = measure(system, options)
        except (RuntimeError, TimeoutError) as error:  # the other one is still worth measuring
            print(f"{system}: {error}", file=sys.stderr)
    lines = [[s, str(len(found)), *cells(summary(found)["recover_ms"])] for s, found in rows.items()]
    head = ["SIGKILL to next commit", "kills", "p50", "p90", "p99", "max"]
    print(table(f"From the SIGKILL to the next committed step: {options.workers} workers, digits CNN, ms", head, lines))
    write_json(options.json, settings=vars(options), rows=rows)
    sys.exit(len(rows) < len(options.systems))


def measure(system: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each kill of the system."""
    if missing := why_missing(system):
        raise RuntimeError(missing)
    faults = draw(options.seed, options.workers, options.kills)
    if system == "reconfigure":
        return kill_peer(system, lambda: Reconfigure(options.workers), torchft_times, faults)
    return kill_peer(system, lambda: RayTrain(options.workers, options.health_check), torchrun_times, faults)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__, kills=6, workers=4, seed=0)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--health-check", type=float, default=0.1, metavar="SECONDS", help="of Ray Train's controller")
    options = parser.parse_args()
    if odd := set(options.systems) - set(SYSTEMS):
        parser.error(f"--systems must be of {', '.join(SYSTEMS)}, got {', '.join(sorted(odd))}")
    return options


if __name__ == "__main__":
    main()
