"""Goodput under random kills: useful samples per second, relative to the same system without kills.

    python benchmarks/recovery/goodput.py [--wall 40] [--mtbf 5,10,30] [--systems holdfast,torchrun] [--seed 1] [--json FILE]

Four workers train the digits CNN. At exponentially distributed times, the same for every system, a living worker
receives SIGKILL. A sample of a committed step is useful, and counted once. Systems differ in how they replace workers:

holdfast         ``rollback``, run here without ``--spares`` and ``--respawn``, so failed workers are not replaced: the
                 survivors continue, and when none is left the launcher starts one new worker from the newest checkpoint
                 (every ten steps)
holdfast-respawn the same over Gloo with ``--respawn``: each failed worker is replaced; measured if it is named
torchft          this benchmark restarts a killed replica immediately, and it joins; the lighthouse is at defaults
torchft-tuned    the same, with ``--heartbeat_timeout_ms 500`` and ``--join_timeout_ms`` from ``--join-timeout-ms``
torchrun         all workers are restarted; the steps since the newest checkpoint (every ten) are recomputed

``lost`` are samples that were due and are in no committed step: torchft drops the mini-batches of a failed step, of the
failed worker and of a worker that is healing. ``again`` are samples computed more than once and counted once. On two
cores three workers are as fast as four, so a worker that is not replaced costs less here than on a real machine;
and torchft's mini-batch shrinks with its workers, whereas Holdfast's keeps its size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import check_names, command_line, listed, measure_each, table, write_json
from peers.driver import (
    CHECKPOINT_EVERY,
    POLL_S,
    SCRIPT,
    TRAINING,
    Diaries,
    Job,
    Line,
    Torchft,
    Torchrun,
    commits,
    installed,
    tuned,
)

SYSTEMS = ("holdfast", "torchft", "torchft-tuned", "torchrun")
RESPAWN = "holdfast-respawn"
HOLDFAST = ("holdfast", RESPAWN)
CALM_S = 8.0
"""How long to measure the rate without kills, in seconds."""
WARM_STEPS = 30
BATCH = 128

Result = dict[str, Any]


def main() -> None:
    """Measure each system without kills and at each rate of kills, and print the table."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    found, failed = measure_each(options.systems, lambda system: measure_all(system, options))
    results = [result for each in found.values() for result in each]
    show(options, results)
    write_json(options.json, settings=vars(options), results=results)
    sys.exit(failed)


def measure_all(system: str, options: argparse.Namespace) -> list[Result]:
    """Return the result without kills, then one for each MTBF."""
    calm = measure(system, options, CALM_S, [])
    results = [{"system": system, "mtbf_s": None} | calm]
    for mtbf_s in options.mtbf:
        kills = schedule(mtbf_s, options.wall, options.seed)
        result = {"system": system, "mtbf_s": mtbf_s} | measure(system, options, options.wall, kills)
        results.append(result | {"goodput": result["useful_per_s"] / calm["useful_per_s"]})
        print(results[-1], file=sys.stderr)
    return results


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__,
        wall=(40.0, "seconds of training under kills"),
        workers=4,
        join_timeout_ms=(200, "join timeout of torchft-tuned, see kill.py"),
        seed=1,
    )
    parser.add_argument("--mtbf", type=listed(float), default=[5.0, 10.0, 30.0])
    parser.add_argument("--systems", type=listed(), default=list(SYSTEMS))
    options = parser.parse_args()
    check_names(parser, "--systems", options.systems, [*SYSTEMS, RESPAWN])
    options.systems = installed(options.systems)
    return options


def schedule(mtbf_s: float, wall_s: float, seed: int) -> list[tuple[float, int]]:
    """Return the times of kills, each with a number that selects among the workers alive at that time.

    One seed gives one pattern, scaled by the mean time between failures. The default seed's has about the expected
    number of kills in the default time (8, 5 and 2); in so short a time another seed may have none.
    """
    rng = random.Random(seed)
    kills: list[tuple[float, int]] = []
    now_s = rng.expovariate(1 / mtbf_s)
    while now_s < wall_s:
        kills.append((now_s, rng.randrange(1 << 20)))
        now_s += rng.expovariate(1 / mtbf_s)
    return kills


def measure(system: str, options: argparse.Namespace, wall_s: float, kills: Iterable[tuple[float, int]]) -> Result:
    """Train for a while under kills and return the result."""
    with make_job(system, options) as job:
        full = WARM_STEPS * (1 if system in HOLDFAST else options.workers)
        job.wait_for(
            "training with all workers",
            lambda lines: sum(line["workers"] == options.workers for line in commits(lines)) >= full,
        )
        start_s, missed = time.monotonic(), 0
        for at_s, number in kills:
            tend_until(job, start_s + at_s)
            missed += job.strike(number) is None
        tend_until(job, start_s + wall_s)
        lines = [line for line in job.diaries.refresh() if line["t_s"] <= start_s + wall_s]
        time.sleep(0.5)  # so that the end of the last victim is recorded
        job.diaries.refresh()
        return count(lines, job.struck, start_s, wall_s) | {
            "kills": len(job.struck),
            "landed": job.killed(),
            "nobody_to_kill": missed,
            "workers_at_end": next(line["workers"] for line in reversed(list(commits(lines)))),
        }


def make_job(system: str, options: argparse.Namespace) -> Job:
    """Return the system's job, not yet started."""
    if system == "holdfast":
        return Holdfast(options.workers)
    if system == RESPAWN:
        return Holdfast(options.workers, ("--fabric", "gloo", "--respawn"))
    if system == "torchrun":
        return Torchrun(options.workers, orders=False)
    chosen = tuned(options.join_timeout_ms) if system == "torchft-tuned" else {}
    return Torchft(options.workers, chosen, orders=False, replace=True)


def tend_until(job: Job, end_s: float) -> None:
    """Let the job train until ``end_s``."""
    while time.monotonic() < end_s:
        job.tend()
        time.sleep(POLL_S)


def count(lines: list[Line], struck: set[int], start_s: float, wall_s: float) -> Result:
    """Return the numbers of useful, lost and recomputed samples since ``start_s``."""
    done: dict[int, Line] = {}
    seen: set[tuple[int, int]] = set()
    again = 0
    for line in commits(lines):
        done.setdefault(line["step"], line)
        mine = (line["rank"], line["step"])
        again += line["own"] if mine in seen and line["t_s"] >= start_s else 0
        seen.add(mine)
    useful = sum(line["samples"] for line in done.values() if line["t_s"] >= start_s)
    later = [line for line in lines if line["t_s"] >= start_s]
    again += sum(line["own"] for line in later if line["event"] == "redone")
    steps = [line for line in later if line["event"] == "step"]
    wasted = [line for line in steps if not (line["committed"] and line.get("took_part", True))]
    return {
        "useful": useful,
        "useful_per_s": useful / wall_s,
        "lost": sum(line["own"] for line in wasted) + in_flight(steps, struck),
        "again": again,
    }


def in_flight(steps: list[Line], struck: set[int]) -> int:
    """Return the samples of mini-batches lost with their workers and not reassigned: torchft's."""
    last = {line["pid"]: line["own"] for line in steps if "took_part" in line}
    return sum(own for pid, own in last.items() if pid in struck)


class Records(Diaries):
    """The records of Holdfast's workers, as diary lines."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.origin_s = 0.0
        self._commits: set[tuple[float, ...]] = set()
        self._recoveries: set[tuple[float, ...]] = set()

    def paths(self) -> Iterable[Path]:
        """Return the files to read."""
        return self._folder.glob("holdfast-*/records-*.jsonl") if self.origin_s else ()

    def parse(self, text: bytes) -> Line | None:
        """Parse a record; None if it carries no new information."""
        record = json.loads(text)
        t_s, step = record["t_s"] + self.origin_s, record["step"]
        match record["event"]:
            case "StepCommitted" if (step, t_s) not in self._commits:
                self._commits.add((step, t_s))  # a new lead repeats the last commit
                samples, workers = record["samples"], record["workers"]
                line = {"event": "step", "t_s": t_s, "step": step, "committed": True, "rank": 0, "pid": 0}
                return line | {"workers": workers, "samples": samples, "own": samples}
            case "Recovered" if (record["generation"], *record["lost"]) not in self._recoveries:
                self._recoveries.add((record["generation"], *record["lost"]))
                return {"event": "redone", "t_s": t_s, "own": BATCH * record["redone_steps"]}
            case "WorkerEnded":
                return {"event": "ended", "t_s": t_s, "pid": record["pid"], "exit_code": record["exit_code"]}
        return None


class Holdfast(Job):
    """``holdfast run``, as a user would start it.

    Args:
        workers: Number of workers.
        words: Further options.
    """

    name = "holdfast"

    def __init__(self, workers: int, words: tuple[str, ...] = ()) -> None:
        super().__init__(workers, orders=False)
        self._words = words
        self.diaries: Records = Records(self.folder)
        self._launcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the launcher; its run folder is created in this job's folder."""
        command = [
            sys.executable, "-m", "holdfast", "run", "-n", str(self.workers), "--max-restarts", "1000",
            "--checkpoint-dir", str(self.folder / "checkpoints"), "--checkpoint-every", str(CHECKPOINT_EVERY),
            *self._words, str(SCRIPT), *TRAINING, "100000",
        ]  # fmt: skip
        with self.open_log("holdfast") as log:
            env = self.env | {"TMPDIR": str(self.folder)}
            self._launcher = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def tend(self) -> None:
        """Find the origin of the records' clock, which the launcher writes down."""
        if self.diaries.origin_s:
            return
        for path in self.folder.glob("holdfast-*/job.json"):
            with contextlib.suppress(ValueError):  # it is just being written
                self.diaries.origin_s = float(json.loads(path.read_text())["origin_s"])

    def is_over(self) -> bool:
        """Return whether the launcher has ended."""
        return self._launcher is not None and self._launcher.poll() is not None

    def alive(self) -> dict[int, int]:
        """Return the process IDs of living workers by rank, as noted by their watchers."""
        from holdfast.launch.supervise.processes import WatchedWorker

        paths = [path for path in self.folder.glob("holdfast-*/process-*") if not path.suffix]  # drafts have one
        noted = {int(path.name.rpartition("-")[2]): WatchedWorker.read(path) for path in paths}
        return {rank: pair.worker.pid for rank, pair in noted.items() if pair is not None and pair.worker.is_alive()}

    def killed(self) -> int:
        """Return how many victims ended by SIGKILL, as recorded by their watchers."""
        ended = {line["pid"] for line in self.diaries.lines if line["event"] == "ended" and line["exit_code"] == -9}
        return len(ended & self.struck)

    def stop(self) -> None:
        """End the launcher, which ends its workers."""
        if self._launcher is None:
            return
        for _ in range(2):  # the second signal stops immediately
            if self._launcher.poll() is None:
                self._launcher.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._launcher.wait(5)
        self._launcher.kill()
        self._launcher.wait()


def show(options: argparse.Namespace, results: list[Result]) -> None:
    """Print the table."""
    lines = []
    for result in results:
        calm = result["mtbf_s"] is None
        lines.append(
            [
                result["system"],
                "none" if calm else f"{result['mtbf_s']:g}",
                f"{result['landed']} of {result['kills']}",
                f"{result['useful_per_s']:.0f}",
                "" if calm else f"{100 * result['goodput']:.0f} %",
                str(result["lost"]),
                str(result["again"]),
                str(result["workers_at_end"]),
            ]
        )
    head = ["", "MTBF s", "kills landed", "useful / s", "of calm", "lost", "again", "workers at end"]
    what = f"{options.workers} workers on {os.cpu_count()} cores, digits CNN, {options.wall:g} s each; samples"
    print(table(f"Goodput under kills: {what}", head, lines))
    if any(result["system"] == "holdfast" for result in results):
        print(
            "\nholdfast ran without --spares and --respawn: failed workers were not replaced. All others replaced them."
        )


if __name__ == "__main__":
    main()
