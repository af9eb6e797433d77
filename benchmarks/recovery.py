"""How long a kill keeps training waiting: real workers, really killed, one kill a job.

    python benchmarks/recovery.py [--kills 20] [--workers 4] [--strategy rollback] [--seed 0] [--json FILE]

For each kill: ``detect``, from the SIGKILL to the first survivor that knows; ``recover``, from the SIGKILL to the next
committed step; and ``recover - step``, the same less one step of the survivors, which does the lost work again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

PHASES = ("forward", "backward", "allreduce", "optimizer")


def main() -> None:
    """Kill, measure, print."""
    options = parse()
    rng = random.Random(options.seed)
    rows = []
    for number in range(options.kills):
        fault = {
            "rank": rng.randrange(options.workers),
            "step": rng.randrange(20, 60),
            "phase": rng.choice(PHASES),
        }
        rows.append(fault | kill_once(options, fault))
        print(f"{number + 1:3} of {options.kills}: {rows[-1]}", file=sys.stderr)
    summary = {
        name: spread([row[name] for row in rows])
        for name in ("detect_ms", "recover_ms", "recover_less_step_ms", "step_ms")
    }
    show(options, summary)
    if options.json:
        Path(options.json).write_text(
            json.dumps({"settings": settings(options), "rows": rows, "summary": summary}, indent=1)
        )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--strategy", default="rollback")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def kill_once(options: argparse.Namespace, fault: dict[str, int | str]) -> dict[str, float]:
    """Run one job with one kill, and return what it cost in milliseconds."""
    spec = ",".join(f"{key}={value}" for key, value in fault.items())
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "holdfast", "run", "-n", str(options.workers), "--strategy", options.strategy,
            "--inject", f"kill:{spec}", "--report", folder,
            str(Path(__file__).with_name("digits_cnn.py")),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
        report = json.loads(Path(folder, "report.json").read_text())
        commits = read_commits(Path(folder, "events.jsonl"))
    (failure,) = report["failures"]
    after = max(int(fault["step"]), failure["step"]) + 1
    step_ms = 1e3 * statistics.median(commits[s + 1] - commits[s] for s in range(after, min(after + 5, max(commits))))
    recover_ms = 1e3 * failure["recover_s"]
    return {
        "detect_ms": round(1e3 * failure["detect_s"], 2),
        "recover_ms": round(recover_ms, 2),
        "recover_less_step_ms": round(recover_ms - step_ms, 2),
        "step_ms": round(step_ms, 2),
    }


def read_commits(path: Path) -> dict[int, float]:
    """Return when each step was committed, seconds."""
    events = map(json.loads, path.read_text().splitlines())
    return {e["step"]: e["t_s"] for e in events if e["event"] == "StepCommitted"}


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and what lies around it."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "min": ordered[0],
        "max": ordered[-1],
    }


def settings(options: argparse.Namespace) -> dict[str, object]:
    """Return what a reader needs to repeat the measurement."""
    return {
        "command": " ".join(sys.argv),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **vars(options),
    }


def show(options: argparse.Namespace, summary: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    print(
        f"{options.kills} kills, {options.workers} workers on {os.cpu_count()} cores, {options.strategy}, digits CNN; ms"
    )
    print(f"{'':22}{'p50':>8}{'p90':>8}{'min':>8}{'max':>8}")
    for name, row in summary.items():
        print(f"{name:22}" + "".join(f"{row[key]:8.1f}" for key in ("p50", "p90", "min", "max")))


if __name__ == "__main__":
    main()
