"""The time of a step with all sinks of records on, beside none: what monitoring and logging cost.

    python benchmarks/observe/sinks.py [--workers 2] [--model mlp] [--fabric gloo] [--rounds 20] [--steps 40] [--json FILE]

=======  ==============================================================================================================
variant  what runs
=======  ==============================================================================================================
none     ``holdfast run``
all      the same with ``--metrics-port`` and ``--metrics-file``, ``--dashboard`` if there is one, ``--log-to
         tensorboard`` and ``--log-to otel``; each sink needs its package, see ``make loggers``
again    ``none`` a second time, with ``--control``: how far two equal jobs are apart
=======  ==============================================================================================================

Both jobs are started first and take turns, block by block, in a different order each time. Sinks work in the launcher,
some of them once a second, so a block takes about two seconds, and is represented by its mean step. After a block the
other job waits until the sinks are done with it. The ratio is that of the medians of the blocks, with a 95 % interval by
bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cells, command_line, free_port, interval, ratio, table, take_turns, write_json
from models import JOBS
from step.step_time import WARM_UP_STEPS, Contender, SystemFailed

from holdfast.base.options import declared
from holdfast.launch.job import Job

SETTLE_S = 1.2
"""Longer than any sink waits with records in its hand."""
MOST_RATIO, MOST_HIGH = 1.01, 1.02
"""What is promised of the ratio, and of the upper end of its interval."""


def main() -> int:
    """Measure the variants in turns, print the table; return 1 if the promise does not hold."""
    options = _parse()
    with tempfile.TemporaryDirectory() as folder:
        variants = {"none": [], "all": sinks(Path(folder))} | ({"again": []} if options.control else {})
        print(f"all: {' '.join(variants['all'])}", file=sys.stderr)
        blocks = measure(variants, options)
    found = show(blocks, options)
    write_json(options.json, settings=vars(options), words=variants["all"], blocks=blocks, ratios=found)
    kept = found["all"]["ratio"] <= MOST_RATIO and found["all"]["high"] <= MOST_HIGH
    print(f"\nat most {MOST_RATIO}, and its interval under {MOST_HIGH}: {'yes' if kept else 'NO'}")
    return 0 if kept else 1


def _parse() -> argparse.Namespace:
    return command_line(
        __doc__,
        workers=2,
        fabric=("gloo", "ulfm needs Open MPI in this environment"),
        rounds=20,
        steps=40,
        model=("mlp", None, sorted(JOBS)),
        control=(False, "also measure a second job without sinks"),
    ).parse_args()


def sinks(folder: Path) -> list[str]:
    """Return the options of all sinks, and say which cannot run here."""
    flags = {each.flag for each in declared(Job)}
    wanted = {
        "prometheus_client": ["--metrics-port", "0", "--metrics-file", str(folder / "job.prom")],
        "tensorboard": ["--log-to", f"tensorboard:{folder / 'tensorboard'}"],
        "opentelemetry": ["--log-to", f"otel:http://127.0.0.1:{free_port()}"],  # it has nothing to send
    }
    words = ["--dashboard", "0"] if "--dashboard" in flags else []
    for package, options in wanted.items():
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{package} is not installed: run this with the Python of make loggers, .venv-loggers/bin/python")
        words += options
    return words


class Variant(Contender):
    """A job of the benchmark of step times, started with more options.

    Args:
        words: The options.
        options: The command line.
    """

    def __init__(self, words: Sequence[str], options: argparse.Namespace) -> None:
        self.words = ["--fabric", options.fabric, *words]
        super().__init__("holdfast", options.model, options.workers, None)

    def mean_ms(self, steps: int) -> float:
        """Train a block; return the mean time of a step, over all workers, without the first one."""
        time.sleep(SETTLE_S)
        return 1e3 * statistics.fmean(value for times in self.block(steps + 1) for value in times[1:])


def measure(variants: dict[str, list[str]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Return for each variant the mean step of each block, in milliseconds."""
    with ExitStack() as undo:
        jobs = {}
        for name, words in variants.items():
            jobs[name] = Variant(words, options)
            undo.callback(jobs[name].end)
        for job in jobs.values():
            job.wait_until_ready()
            job.block(WARM_UP_STEPS)
        blocks = take_turns(
            {name: lambda job=job: job.mean_ms(options.steps) for name, job in jobs.items()}, options.rounds, warm_up=0
        )
        for job in jobs.values():
            job.finish()
    return blocks


def show(blocks: dict[str, list[float]], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print the step times; return the ratio of each variant to none."""
    found = {name: ratio(times, blocks["none"], paired=True) for name, times in blocks.items()}
    rows = [[name, *cells(times), interval(found[name], 3)] for name, times in blocks.items()]
    title = (
        f"\n{options.model}, {options.workers} workers on {os.cpu_count()} cores, blocks of {options.steps} steps; ms"
    )
    print(table(title, ["variant", "step p50", "p10", "p90", "to none"], rows))
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SystemFailed as failure:
        sys.exit(f"a job failed: {failure}")
