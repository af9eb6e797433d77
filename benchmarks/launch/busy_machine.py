"""Healthy workers on a busy machine: jobs of frameworks, which import for half a minute there, and how many workers are ended.

Run, where the frameworks are installed (``make integrations`` makes the environment)::

    .venv-integrations/bin/python benchmarks/launch/busy_machine.py --jobs 60 --at-once 4 --busy 4

Prints one line a job, and at the end how many workers the launcher ended without a fault. The exit code is 1 if any was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "tests" / "integrations" / "backend_scripts"
NAMES = ("hf_trainer", "lightning_fit", "accelerate_loop", "fabric_loop")
LIMIT_S = 1200.0


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep ``count`` processes computing."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def run_job(number: int, workers: int) -> list[str]:
    """Run one job; return why each worker was ended that the launcher has ended, and what else was wrong."""
    name, began_s = NAMES[number % len(NAMES)], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": folder}
        env |= {"FRAMEWORKS_OUT": folder, "FRAMEWORKS_KILLS": "{}"}
        report = Path(folder, "report")
        command = [sys.executable, "-m", "holdfast", "run", "-n", str(workers), "--fabric", "gloo", "--no-page"]
        command += ["--max-restarts", "0", "--report", str(report), str(SCRIPTS / f"{name}.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        events = report / "events.jsonl"
        records = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    ended = [record["reason"] for record in records if record["event"] == "WorkerFenced"]
    wrong = [] if done.returncode == 0 else [f"exit code {done.returncode}: {done.stderr[-300:]}"]
    aside = sorted({line for line in done.stdout.splitlines() + done.stderr.splitlines() if "which continues" in line})
    print(f"{number:3} {name:16} {time.monotonic() - began_s:6.1f} s", *ended, *wrong, *aside, sep="  ", flush=True)
    return ended + wrong


def main() -> int:
    """Run the jobs; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=4, help="jobs at the same time")
    parser.add_argument("--busy", type=int, default=4, help="processes that compute beside them")
    parser.add_argument("--workers", type=int, default=3, help="workers of each job")
    asked = parser.parse_args()
    with busy_cores(asked.busy), ThreadPoolExecutor(asked.at_once) as pool:
        found = [why for each in pool.map(lambda n: run_job(n, asked.workers), range(asked.jobs)) for why in each]
    print(f"{asked.jobs} jobs of {asked.workers} workers: {len(found)} workers were ended, or jobs failed")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
