"""The measured frameworks: each in its own virtual environment, each measurement in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_lab.studies.base import Row

WORKERS = Path(__file__).parent / "checkpoint_cost" / "workers"

_CALM = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "KERAS_BACKEND": "tensorflow",
    "PYTHONWARNINGS": "ignore",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Same conditions for all frameworks: one thread per worker, no accelerator, no log output."""


class WorkerFailed(Exception):
    """A measurement failed; the message gives the reason in one line."""


class NotInstalled(WorkerFailed):
    """A framework is not on this machine; the message says how to install it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework and its virtual environment.

    Args:
        name: Its name on the command line and in its script ``workers/with_NAME.py``.
        environment: Name of its virtual environment; "" is the one that runs Holdfast.
    """

    name: str
    environment: str = ""

    def python(self) -> Path | None:
        """Return its interpreter, below the current directory or Holdfast's repository; None if it is not installed."""
        if not self.environment:
            return Path(sys.executable)
        places = (Path.cwd(), Path(__file__).parents[3])
        found = (place / self.environment / "bin" / "python" for place in places)
        return next((path for path in found if path.is_file()), None)

    def why_not(self) -> str:
        """Return why the framework cannot be measured on this machine, "" if it can."""
        if self.python() is not None:
            return ""
        return f"{self.environment} does not exist; create it with: make study-peers"

    def run(self, task: Mapping[str, Any], timeout_s: float) -> list[Row]:
        """Run a task in a new process and return its rows.

        Raises:
            NotInstalled: if the framework is not on this machine.
            WorkerFailed: if the task fails.
        """
        with tempfile.TemporaryDirectory(prefix="holdfast-study-") as folder:
            return self._finish([self._start(task, Path(folder))], timeout_s)

    def run_killed(self, task: Mapping[str, Any], timeout_s: float) -> bool:
        """Run a task that kills itself by SIGALRM; return True if it was killed, False if it had ended before.

        Raises:
            WorkerFailed: if it failed in another way.
        """
        with tempfile.TemporaryDirectory(prefix="holdfast-study-") as folder:
            try:
                self._finish([self._start(task, Path(folder))], timeout_s)
            except WorkerFailed as error:
                if error.args[1:] == (-signal.SIGALRM,):
                    return True
                raise
            return False

    def run_ranks(self, task: Mapping[str, Any], world_size: int, timeout_s: float) -> list[Row]:
        """Run a task in several processes with RANK and WORLD_SIZE set in each, and return the rows of rank 0.

        Args:
            task: The task of every process.
            world_size: Number of processes.
            timeout_s: Seconds to wait for each process, in turn.

        Raises:
            WorkerFailed: if a process failed.
        """
        with tempfile.TemporaryDirectory(prefix="holdfast-study-") as folder:
            path = Path(folder)
            task = {**task, "rendezvous": str(path / "rendezvous")}
            started = [
                self._start(task, path, rank=rank, RANK=str(rank), WORLD_SIZE=str(world_size))
                for rank in range(world_size)
            ]
            return self._finish(started, timeout_s)

    def _start(self, task: Mapping[str, Any], folder: Path, rank: int = 0, **more: str) -> _Started:
        python = self.python()
        if python is None:
            raise NotInstalled(self.why_not())
        task_path, rows_path = folder / "task.json", folder / f"rows-{rank}.jsonl"
        errors_path = folder / f"errors-{rank}.txt"
        task_path.write_text(json.dumps(task))
        words = [str(python), str(WORKERS / "measure.py"), self.name, str(task_path), str(rows_path)]
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOLDFAST", "OMPI"))}
        with errors_path.open("wb") as errors:
            process = subprocess.Popen(
                words,
                env=own | _CALM | more,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        return _Started(process, rows_path, errors_path)

    def _finish(self, started: list[_Started], timeout_s: float) -> list[Row]:
        try:
            for one in started:
                one.wait(timeout_s)
        finally:
            for one in started:
                one.end()
        return started[0].rows()


@dataclass(frozen=True, slots=True)
class _Started:
    process: subprocess.Popen[bytes]
    rows_path: Path
    errors_path: Path

    def wait(self, timeout_s: float) -> None:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise WorkerFailed(f"did not finish within {timeout_s:g} s") from error
        if code < 0:
            raise WorkerFailed(f"was killed by {signal.Signals(-code).name}", code)
        if code:
            raise WorkerFailed(_last_error(self.errors_path.read_text(errors="replace")))

    def rows(self) -> list[Row]:
        return [json.loads(line) for line in self.rows_path.read_text().splitlines()]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(
                self.process.pid, signal.SIGKILL
            )  # started in its own session, so the group holds no other process
            self.process.wait()


def _last_error(text: str) -> str:
    """Return the last exception line of the output, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return ((errors or lines or ["no output"])[-1])[:300]


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(name="torch"),
        Framework(name="holdfast"),
        Framework(name="tensorflow", environment=".venv-study-tensorflow"),
        Framework(name="orbax", environment=".venv-study-orbax"),
    )
}
"""All frameworks by name."""
