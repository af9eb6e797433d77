"""A long life: 100,000 steps with checkpoints and a death every 1,000. What grows?

    python benchmarks/long/life.py [--steps 100000] [--every 1000] [--fabric gloo] [--minutes 0] [--json FILE]

Four workers train a tiny model, so that steps are short and the machinery is most of them. Every ``--every`` steps, at
a random place, a random worker receives SIGKILL. Over ``gloo`` a newcomer replaces it: one job, in which worker 1 is
never killed and lives through all deaths. Over ``ulfm`` no process can be added to a job, so a spare takes over; when
no spare is left the job is stopped and resumed, a new *life*. Trends over ``ulfm`` are within a life.

Before each death the processes of the job are sampled: resident memory, file descriptors, threads, memory mappings. The
time of a step is the median over the steps of such a period in which all workers took part, from 20 steps after a
change of the members on. The first two samples are left out: a process that has just started still grows.

A trend is the median of all slopes between two samples (Theil and Sen), over the whole run, in percent of the value at
its begin; the interval is a bootstrap over blocks of four samples. A quantity is ``flat`` if the whole interval is
within 2 %, and ``changes`` if the whole interval is beyond.

At the end the weights are compared with those of a run without failures, by their sha256. All victims must have ended
by SIGKILL, as their watchers recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import command_line, table, write_json

from holdfast.records.paths import event_files
from long.job import LongJob, reference_hash
from long.samples import Sampler
from long.trend import Trend, trend

FLAT_PERCENT = 2.0
WORKERS = 4
SPARES = 3
WARM = 2
"""Samples of each life that are left out."""
UNSETTLED_STEPS = 20
EVENTS_MAX = "8MiB"
UNITS = {"rss": ("MiB", 1 << 20), "pss": ("MiB", 1 << 20), "bytes": ("MiB", 1 << 20)}
GROWING = ("store keys", "run files", "run bytes")
"""Quantities that grow with the run: what they grow by is given, not a trend."""

Sample = dict[str, Any]


def main() -> None:
    """Run, print the tables, and exit with 1 if a quantity changes, a hash differs or a fault did not land."""
    options = parse()
    folder = Path(tempfile.mkdtemp(prefix="long-life-"))
    try:
        result = measure(options, folder)
    finally:
        if options.keep:
            print(f"the files of the run are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    write_json(options.json, settings=vars(options), result=result)
    print(show(options, result), flush=True)
    sys.exit(not is_good(result))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__,
        steps=100_000,
        every=(1000, "steps from one death to the next, at least 50"),
        minutes=(0.0, "stop after so long; hashes are then not compared"),
        seed=0,
        fabric=("gloo", None, ("gloo", "ulfm")),
        keep=(False, "keep the folder of the run, and say where it is"),
    )
    options = parser.parse_args()
    if options.every < 50 or options.steps < 8 * options.every:
        parser.error(f"--every must be at least 50, and --steps 8 times that, got {options.every} and {options.steps}")
    return options


# -- the run


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all lives of the job; return the samples, the trends and the comparison."""
    begun_s, samples, struck, landed, lives = time.monotonic(), [], 0, 0, 0
    rng = random.Random(options.seed)
    report: dict[str, Any] = {"outcome": "stopped"}
    while report["outcome"] == "stopped" and not is_late(options, begun_s):
        words = [*words_of(options, folder), *(["--resume"] if lives else [])]
        job = LongJob(folder / f"life-{lives}", options.steps, WORKERS, words, rng)
        with job:
            found = list(live(job, options, begun_s, lives))
            job.stop()
        report = json.loads((job.report / "report.json").read_text())
        add_from_records(found, job.report, options)
        samples += found
        struck, landed = struck + len(job.struck), landed + job.landed()
        lives += 1
        if report["outcome"] not in ("done", "stopped"):
            raise RuntimeError(f"the job has failed: {report['error']}\n{job.output()}")
    is_done = report["outcome"] == "done"
    return {
        "wall_s": time.monotonic() - begun_s,
        "lives": lives,
        "steps": report["steps"] if lives == 1 else max(sample["step"] for sample in samples),
        "struck": struck,
        "landed": landed,
        "samples": samples,
        "trends": {name: dataclasses.asdict(found) for name, found in trends_of(samples).items()},
        "sha256": report["replicas"]["sha256"],
        "undisturbed": reference_hash(folder / "calm", options.steps, WORKERS) if is_done else "",
    }


def words_of(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the options of ``holdfast run``."""
    saves = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", str(options.every // 2)]
    more = ["--spares", str(SPARES)] if options.fabric == "ulfm" else []
    return ["--fabric", options.fabric, "--keep-last", "2", "--events-max", EVENTS_MAX, *saves, *more]


def is_late(options: argparse.Namespace, begun_s: float) -> bool:
    """Return whether the time is over."""
    return bool(options.minutes) and time.monotonic() - begun_s > 60 * options.minutes


def live(job: LongJob, options: argparse.Namespace, begun_s: float, life: int) -> Iterator[Sample]:
    """Kill a worker in each period of the job, and yield a sample before the next death, until it is to be stopped."""
    every, jitter = options.every, random.Random(life)
    spares = SPARES if options.fabric == "ulfm" else 0
    job.wait_until_trains(WORKERS + spares)
    sampler = Sampler(job)
    try:
        period = job.step() // every + 1
        while not is_late(options, begun_s):
            if not job.wait_for_step(period * every + jitter.randrange(every // 4)):
                return
            if options.fabric == "gloo":
                job.strike()
                job.replace()
            elif len(job.struck) < spares:
                job.strike()
            if not job.wait_for_step((period + 1) * every - every // 10):
                return
            yield sampler.take() | {"life": life, "at_s": time.monotonic() - begun_s, "deaths": len(job.struck)}
            if period % 10 == 0:
                print(f"step {job.step()}, {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
            if spares and len(job.struck) == spares:
                return
            period = job.step() // every + 1
    finally:
        sampler.close()


def add_from_records(samples: list[Sample], report_dir: Path, options: argparse.Namespace) -> None:
    """Add to each sample the time of a step, and the records per step, of the period in which it was taken."""
    every = options.every
    counts: dict[int, int] = {}
    took: dict[int, list[float]] = {}
    last, settled = (-1, 0.0, 0), 0
    for path in event_files(report_dir):
        with path.open() as lines:
            for record in map(json.loads, lines):
                period = record["step"] // every
                counts[period] = counts.get(period, 0) + 1
                if record["event"] != "StepCommitted" or record["step"] == last[0]:
                    continue
                settled = settled + 1 if record["workers"] == last[2] else 0
                if settled > UNSETTLED_STEPS and record["step"] == last[0] + 1:
                    took.setdefault(period, []).append(record["t_s"] - last[1])
                last = record["step"], record["t_s"], record["workers"]
    for sample in samples:
        period = sample["step"] // every
        sample["records per step"] = counts.get(period, 0) / every
        if times := took.get(period):
            sample["step ms"] = 1e3 * statistics.median(times)


# -- what came out


def trends_of(samples: list[Sample]) -> dict[str, Trend]:
    """Return the trend of each quantity; over several lives, that within a life."""
    warm = [sample for sample in samples if sample["deaths"] > (WARM if len({s["life"] for s in samples}) == 1 else 0)]
    names = dict.fromkeys(name for sample in warm for name in sample)
    left_out = {"step", "life", "at_s", "deaths", "workers"}
    found = {}
    for name in names:
        if name not in left_out and (of_name := trend(*_centred(warm, name))) is not None:
            found[name] = of_name
    return found


def _centred(samples: list[Sample], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values; of several lives, steps since the begin of each, and values about a common median."""
    some = [sample for sample in samples if name in sample]
    lives: dict[int, list[Sample]] = {}
    for sample in some:
        lives.setdefault(sample["life"], []).append(sample)
    if len(lives) == 1:
        return [sample["step"] for sample in some], [sample[name] for sample in some]
    whole = statistics.median(sample[name] for sample in some)
    points = []
    for of_life in lives.values():
        middle = statistics.median(sample[name] for sample in of_life)
        points += [(sample["deaths"], sample[name] - middle + whole) for sample in of_life]
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


def is_good(result: dict[str, Any]) -> bool:
    """Return whether nothing changes, every fault landed, and the weights are those of the undisturbed run.

    Over several lives nothing may grow: each death leaves one process less until the job is resumed.
    """
    flat = not any(
        found["low"] > FLAT_PERCENT or (result["lives"] == 1 and found["high"] < -FLAT_PERCENT)
        for name, found in result["trends"].items()
        if name not in GROWING
    )
    return flat and result["struck"] == result["landed"] and result["undisturbed"] in ("", result["sha256"])


def show(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the tables."""
    rows = []
    for name, values in result["trends"].items():
        if name in GROWING:
            continue
        found = Trend(**values)
        unit, scale = UNITS.get(name.rpartition(" ")[2], ("", 1))
        change = f"{found.percent:+.2f} ({found.low:+.2f} to {found.high:+.2f})"
        rows.append([name, f"{found.begin / scale:.4g} {unit}".strip(), change, found.verdict(FLAT_PERCENT)])
    lives = "" if result["lives"] == 1 else f", {result['lives']} lives"
    title = (
        f"{result['steps']:,} steps over {options.fabric}, {result['landed']} of {result['struck']} deaths landed{lives}, "
        f"{result['wall_s']:.0f} s"
    )
    parts = [table(title, ["", "at begin", "change, % (95 %)", ""], rows), growth(result), comparison(result)]
    return "\n\n".join(parts)


def growth(result: dict[str, Any]) -> str:
    """Return what grows by design, for each death and each step, in the life with the most samples."""
    lives: dict[int, list[Sample]] = {}
    for sample in result["samples"]:
        lives.setdefault(sample["life"], []).append(sample)
    longest = max(lives.values(), key=len, default=[])
    if len(longest) < 2 or longest[0]["deaths"] == longest[-1]["deaths"]:
        return "There were too few deaths to say what grows by design."
    first, last = longest[0], longest[-1]
    deaths, steps = last["deaths"] - first["deaths"], last["step"] - first["step"]
    files, size = (last["run files"] - first["run files"]) / deaths, (last["run bytes"] - first["run bytes"]) / steps
    keys = (
        f"{(last['store keys'] - first['store keys']) / deaths:.2g} keys to the store and "
        if "store keys" in last
        else ""
    )
    return f"By design each death adds {keys}{files:.2g} files to the run folder, and each step {size:.0f} bytes of records."


def comparison(result: dict[str, Any]) -> str:
    """Return how the weights compare with those of the undisturbed run."""
    if not result["undisturbed"]:
        return "The run was stopped by --minutes: its weights were not compared."
    same = "equal to" if result["undisturbed"] == result["sha256"] else "DIFFERENT FROM"
    return f"The weights are {same} those of the run without failures: sha256 {result['sha256'][:16]}..."


if __name__ == "__main__":
    main()
