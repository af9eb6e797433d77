"""How long commands take to start: the package, the help, the simulator and ``holdfast plan`` do not load torch.

    python benchmarks/start.py [--repetitions 10] [--json FILE]

Each runs in its own process, in turns and in a different order each time. Targets, including the interpreter: less than
80 ms for ``holdfast --help``, less than 0.3 s for the others.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time

from common import command_line, spread, table, write_json

COMMANDS = {
    "the interpreter": ("-c", "pass"),
    "import holdfast": ("-c", "import holdfast"),
    "import holdfast_lab.simulate": ("-c", "import holdfast_lab.simulate"),
    "holdfast --help": ("-m", "holdfast", "--help"),
    "holdfast --version": ("-m", "holdfast", "--version"),
    "holdfast status --help": ("-m", "holdfast", "status", "--help"),
    "holdfast plan --help": ("-m", "holdfast", "plan", "--help"),
}
LIMIT_S = 120.0


def main() -> None:
    """Start each of them repeatedly, print the table."""
    options = parse()
    wall: dict[str, list[float]] = {name: [] for name in COMMANDS}
    processor: dict[str, list[float]] = {name: [] for name in COMMANDS}
    rng = random.Random(0)
    for _ in range(options.repetitions + 1):  # the first run reads files, and may write compiled files
        for name in rng.sample(list(COMMANDS), len(COMMANDS)):
            wall_s, processor_s = time_command(COMMANDS[name])
            wall[name].append(wall_s)
            processor[name].append(processor_s)
    rows = []
    for name in COMMANDS:
        around = spread(wall[name][1:])
        times = [around["p50"], around["min"], around["max"], spread(processor[name][1:])["p50"]]
        rows.append([name, *(f"{1e3 * seconds:.0f}" for seconds in times)])
    head = ["what", "median", "min", "max", "processor time"]
    print(table(f"From the start of a process to its end, {options.repetitions} times each; ms", head, rows))
    write_json(options.json, settings=vars(options), wall_s=wall, processor_s=processor)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__, repetitions=10)
    return parser.parse_args()


def time_command(words: tuple[str, ...]) -> tuple[float, float]:
    """Return the elapsed time and the processor time in seconds."""
    begun_s, before_s = time.perf_counter(), used_by_children_s()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    return time.perf_counter() - begun_s, used_by_children_s() - before_s


def used_by_children_s() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
