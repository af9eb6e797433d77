"""The frameworks that are measured: each in its own environment, and each measurement in a process of its own."""

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
"""One thread a worker, no accelerator, and no chatter: frameworks are compared on the same footing."""


class WorkerFailed(Exception):
    """A measurement could not be made; the message says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework, and where it is installed.

    Args:
        name: On the command line, and of its script ``workers/with_NAME.py``.
        environment: Name of its virtual environment; "" is the one that runs Holdfast.
    """

    name: str
    environment: str = ""

    def python(self) -> Path | None:
        """Return its interpreter, None if it is not installed; looked for here and beside Holdfast's sources."""
        if not self.environment:
            return Path(sys.executable)
        places = (Path.cwd(), Path(__file__).parents[3])
        found = (place / self.environment / "bin" / "python" for place in places)
        return next((path for path in found if path.is_file()), None)

    def why_not(self) -> str:
        """Return why it cannot be measured here, "" if it can."""
        if self.python() is not None:
            return ""
        return f"{self.environment} is not there; make it with: make study-peers"

    def run(self, task: Mapping[str, Any], timeout_s: float) -> list[Row]:
        """Carry out a task in a process of its own.

        Raises:
            WorkerFailed: if it cannot be done.
        """
        with tempfile.TemporaryDirectory(prefix="holdfast-study-") as folder:
            return self._finish([self._start(task, Path(folder))], timeout_s)

    def run_killed(self, task: Mapping[str, Any], timeout_s: float) -> bool:
        """Carry out a task that is to die by its alarm; return whether it did, not whether it had ended before.

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
        """Carry out a task with several processes, in each of which RANK and WORLD_SIZE are set; the rows are those of rank 0.

        Args:
            task: For all alike.
            world_size: How many.
            timeout_s: For all together.

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
            raise WorkerFailed(self.why_not())
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
            raise WorkerFailed(f"was not done after {timeout_s:g} s") from error
        if code < 0:
            raise WorkerFailed(f"was ended by {signal.Signals(-code).name}", code)
        if code:
            raise WorkerFailed(_last_error(self.errors_path.read_text(errors="replace")))

    def rows(self) -> list[Row]:
        return [json.loads(line) for line in self.rows_path.read_text().splitlines()]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: nobody else is in it
            self.process.wait()


def _last_error(text: str) -> str:
    """Return the line that a traceback ends with, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return ((errors or lines or ["it said nothing"])[-1])[:300]


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(name="torch"),
        Framework(name="holdfast"),
        Framework(name="tensorflow", environment=".venv-study-tensorflow"),
        Framework(name="orbax", environment=".venv-study-orbax"),
    )
}
"""All of them, by name."""
