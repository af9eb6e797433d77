"""Runs the real processes of a study: jobs of ``holdfast run``, and scripts that ``mpirun`` starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast_lab.studies.base import FAILED, NOT_RUN

NO_MPIRUN = "mpirun not found; install it with: pip install 'holdfast[mpi]'"
_OWN = ("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_")
_LAST_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RealJob:
    """The results of a job.

    Args:
        report: ``report.json``, empty if there is none.
        events: The records.
        failed: Why it failed, in a line; "" if it succeeded.
        code: Its exit code; negative for the signal that killed it.
    """

    report: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""
    code: int = 0

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [record for record in self.events if record["event"] == event]


def run_job(words: Sequence[object], folder: Path, limit_s: float) -> RealJob:
    """Run ``holdfast run`` with these words, and the report in ``folder/report``; end it after ``limit_s`` seconds."""
    start = [sys.executable, "-m", "holdfast", "run", "--no-page", "--report", folder / "report"]
    code, said = ended([*start, *words], folder, limit_s)
    report, events = folder / "report" / "report.json", folder / "report" / "events.jsonl"
    failed = f"ended with exit status {code}: {said}" if code else ""
    if not report.is_file():
        return RealJob(failed=failed or "it wrote no report", code=code)
    records = [json.loads(line) for line in events.read_text().splitlines()]
    return RealJob(report=json.loads(report.read_text()), events=records, failed=failed, code=code)


def run_script(
    workers: int, words: Callable[[Path], Sequence[object]], limit_s: float, *options: str, ft: bool = True
) -> dict[str, Any]:
    """Run a script as MPI workers, and return what it wrote as JSON; if it failed, the status and the reason.

    Args:
        workers: Number of workers.
        words: Returns the script and its arguments, from the file that it writes.
        limit_s: It is ended after so many seconds.
        options: Further options of ``mpirun``.
        ft: Whether ULFM is on.
    """
    if not (mpirun := mpirun_words(workers, *options, ft=ft)):
        return {"status": NOT_RUN, "why": NO_MPIRUN}
    with tempfile.TemporaryDirectory(prefix="holdfast-study-") as name:
        out = Path(name, "found.json")
        code, said = ended([*mpirun, *words(out)], Path(name), limit_s)
        if code or not out.is_file():
            return {"status": FAILED, "why": f"ended with exit status {code}: {said}"}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def mpirun_words(workers: int, *options: str, ft: bool = True) -> list[str]:
    """Return the command that starts a script as MPI workers, empty if there is no mpirun."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.is_file() else shutil.which("mpirun")
    if mpirun is None:
        return []
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    how = [*(["--with-ft", "ulfm"] if ft else []), "--oversubscribe", "--bind-to", "none", "--mca", "coll", "^han"]
    return [mpirun, *how, *options, *root, "-n", str(workers), sys.executable]


def own_environment() -> dict[str, str]:
    """Return the environment of a job's processes: no variables of another job, one thread, no accelerator."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    return own | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def ended(words: Sequence[object], folder: Path, limit_s: float) -> tuple[int, str]:
    """Run a command to its end in ``folder/here``; return its exit code and its last line of output."""
    output, here = folder / "said", folder / "here"
    here.mkdir(parents=True)
    with output.open("wb") as said:
        process = subprocess.Popen(
            list(map(str, words)), env=own_environment(), cwd=here, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, f"was not done after {limit_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # safe: the process group is the command's own session
            process.wait()
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return code, (lines or ["no output"])[-1][:_LAST_WORDS]
