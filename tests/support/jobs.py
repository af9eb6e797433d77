"""Starting real jobs from tests, each with a deadline."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = [
    str(Path(sys.executable).with_name("mpirun")),
    "--with-ft",
    "ulfm",
    "--oversubscribe",
    "--mca",
    "coll",
    "^han",
]
if os.getuid() == 0:
    MPIRUN.append("--allow-run-as-root")


def clean_env(**extra):
    """The environment without variables of other jobs; one thread for each worker, so that bits are comparable."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_"))}
    return env | {"OMP_NUM_THREADS": "1"} | extra


def free_port():
    """A port that no process of this machine listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def holdfast(*args, cwd=None, timeout=120, env=None):
    """Run the command line; return the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=clean_env(**(env or {})),
        check=False,
    )


def run_report(tmp_path, *args, exit_code=0, timeout=120, env=None, page=False, cwd=None):
    """Run ``holdfast run --report`` and return report.json, after checking the exit code.

    The page is drawn only if ``page`` is set: that is a fifth of what a job of a test computes.
    """
    out = Path(tmp_path) / "report"
    no_page = () if page else ("--no-page",)
    done = holdfast("run", "--report", out, *no_page, *args, cwd=cwd, timeout=timeout, env=env)
    assert done.returncode == exit_code, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    report = read_report(out)
    assert_time_adds_up(report)
    report["_stdout"], report["_stderr"] = done.stdout, done.stderr
    return report


def read_report(folder):
    """Return the report in a folder, with its records under ``_events``."""
    report = json.loads((folder / "report.json").read_text())
    report["_events"] = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return report


def of_kind(report, kind):
    """All records of a kind."""
    return [event for event in report["_events"] if event["event"] == kind]


def inject(*specs):
    """The options that inject these faults."""
    return [word for spec in specs for word in ("--inject", spec)]


def assert_time_adds_up(report):
    """Useful work and badput are the wall time, to 0.1 %."""
    spent = report["goodput"]
    if spent is not None:  # of a torch.distributed script without steps it is unknown
        total_s = spent["useful_s"] + sum(spent["badput_s"].values())
        assert abs(total_s - report["wall_s"]) <= 0.001 * report["wall_s"], spent
        assert min(spent["useful_s"], *spent["badput_s"].values()) >= 0, spent


def exit_codes(report):
    """The exit status of each worker's process by rank, as recorded by its watcher."""
    return {e["rank"]: e["exit_code"] for e in report["_events"] if e["event"] == "WorkerEnded"}


def assert_landed(report, *ranks):
    """The faults struck: SIGKILL ended these workers, and a survivor detected it."""
    codes = exit_codes(report)
    assert {rank: codes.get(rank) for rank in ranks} == dict.fromkeys(ranks, -9)
    seen = {rank for e in report["_events"] if e["event"] == "Recovered" for rank in e["lost"]}
    assert set(ranks) <= seen, f"survivors detected the failure of {seen}"


def assert_landed_for_good(report, *ranks):
    """The faults struck and ended the attempt: the plan killed these workers, and other workers detected a failure."""
    codes = exit_codes(report)
    assert {rank: codes.get(rank) for rank in ranks} == dict.fromkeys(ranks, -9)
    assert set(ranks) <= {e["rank"] for e in report["_events"] if e["event"] == "FaultFired"}
    assert {e["rank"] for e in report["_events"] if e["event"] == "FailureSeen"} - set(ranks), (
        "no worker detected their failure"
    )
