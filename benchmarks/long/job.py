"""A job whose workers are killed and replaced, as ``benchmarks/long/life.py`` drives it."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from common import environment

from holdfast.launch.control import RunningJob, request_changes
from holdfast.launch.supervise.processes import WatchedWorker, children_of, pair_path, value_of
from holdfast.records.beacon import Beacon, BeaconPosition
from holdfast.records.paths import beacon_path, event_files, records_path

SURVIVOR = 1
"""This worker is never killed. It lives through all deaths, and is the lead once worker 0 was killed."""
SCRIPT = Path(__file__).with_name("train.py")
_START_S = 600.0
"""Time in which a job begins; on a busy machine seven imports of torch take minutes."""
_LIMIT_S = 120.0
_ASK_AGAIN_S = 5.0
_POLL_S = 0.01


class LongJob:
    """``holdfast run`` on the tiny training, as a context.

    Args:
        folder: Folder for its files.
        steps: Steps of the training.
        workers: Workers that compute.
        words: Further options of ``holdfast run``.
        rng: Draws the victims.
    """

    def __init__(self, folder: Path, steps: int, workers: int, words: Sequence[str], rng: random.Random) -> None:
        self.report = folder / "report"
        self.struck: list[int] = []
        self._workers, self._rng = workers, rng
        self._log, self._tmp = folder / "launcher.log", folder / "tmp"
        self._tmp.mkdir(parents=True)
        self._command = _command(steps, workers, ["--report", str(self.report), *words])
        self._running: RunningJob | None = None
        self.num_first = workers
        """Processes that the job begins with; newcomers have higher ranks."""

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=environment(TMPDIR=str(self._tmp)), stdout=log, stderr=log
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Let the job save and stop, if it still runs."""
        for number, patience_s in ((signal.SIGTERM, 300.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            if self.is_over:
                return
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        assert self._running is not None
        return self._running.run_dir

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def output(self) -> str:
        """Return the end of the launcher's output."""
        return self._log.read_text(errors="replace")[-3000:]

    def landed(self) -> int:
        """Return how many victims ended by SIGKILL, as their watchers recorded."""
        found = set()
        for path in event_files(self.report):
            with path.open() as lines:
                ends = (json.loads(line) for line in lines if '"WorkerEnded"' in line)
                found |= {end["rank"] for end in ends if end["exit_code"] == -signal.SIGKILL}
        return len(found.intersection(self.struck))

    def wait_until_trains(self, processes: int) -> None:
        """Wait until so many processes have applied a step.

        Raises:
            TimeoutError: if that takes too long.
        """
        self._await("the job does not train", lambda: self._is_found() and len(self.training()) >= processes, _START_S)
        self.num_first = max(self.training()) + 1

    def _is_found(self) -> bool:
        """Find the run folder, which exists once the launcher has begun."""
        about = next(self._tmp.glob("holdfast-*/job.json"), None)
        if self._running is None and about is not None:
            with contextlib.suppress(ValueError, TypeError):  # it is just being written
                self._running = RunningJob(**json.loads(about.read_text()) | {"run_dir": about.parent})
        return self._running is not None

    def training(self) -> dict[int, BeaconPosition]:
        """Return the positions of the living workers that have applied a step, by rank."""
        found = {}
        for path in self.run_dir.glob("process-*"):
            pair, rank = WatchedWorker.read(path), path.name.rpartition("-")[2]
            if pair is not None and rank.isdecimal() and pair.worker.is_alive():
                position = Beacon.read(beacon_path(self.run_dir, int(rank)))
                if position is not None and position.applied:
                    found[int(rank)] = position
        return found

    def step(self) -> int:
        """Return the step that the survivor is in."""
        position = Beacon.read(beacon_path(self.run_dir, SURVIVOR))
        return -1 if position is None else position.step

    def pair(self, rank: int) -> WatchedWorker | None:
        """Return the processes of a worker."""
        return WatchedWorker.read(pair_path(self.run_dir, rank))

    def store(self) -> tuple[str, str]:
        """Return the URL and the token of the workers' store; "" if the fabric has none."""
        for pid in children_of(self.process.pid):
            if url := value_of(pid, "HOLDFAST_STORE"):
                return url, value_of(pid, "HOLDFAST_TOKEN") or ""
        return "", ""

    def strike(self) -> int:
        """Kill a random worker that trains, but not the survivor; return its rank once its end is recorded.

        Raises:
            TimeoutError: if it is not.
        """
        victim = self._rng.choice(sorted(set(self.training()) - {SURVIVOR}))
        pair = self.pair(victim)
        assert pair is not None
        if pair.worker.send(signal.SIGKILL):
            self.struck.append(victim)
        path = records_path(self.run_dir, f"watch-{victim}")
        self._await(f"no end of rank {victim}", lambda: path.exists() and b"WorkerEnded" in path.read_bytes(), _LIMIT_S)
        return victim

    def replace(self) -> None:
        """Have the dead worker replaced, and wait until the newcomer trains.

        ``--respawn`` would wait longer after each of several deaths in a row, up to a minute.

        Raises:
            TimeoutError: if it is not replaced.
        """
        running, asked_s = self._running, 0.0
        assert running is not None

        def is_complete() -> bool:
            nonlocal asked_s
            if len(self.training()) >= self._workers:
                return True
            if time.monotonic() - asked_s > _ASK_AGAIN_S:
                asked_s = time.monotonic()
                request_changes(running, workers=self._workers)
            return self.is_over

        time.sleep(0.1)  # the launcher reads the record of the end, and knows that a worker is missing
        self._await("the dead worker is not replaced", is_complete, _LIMIT_S)

    def wait_for_step(self, step: int) -> bool:
        """Wait until the survivor reaches a step; return whether the job still runs."""
        while not self.is_over and self.step() < step:
            time.sleep(_POLL_S)
        return not self.is_over

    def _await(self, what: str, is_true: Callable[[], bool], limit_s: float) -> None:
        ends_s = time.monotonic() + limit_s
        while not is_true():
            if self.is_over or time.monotonic() > ends_s:
                why = "the job is over" if self.is_over else f"after {limit_s:g} s"
                raise TimeoutError(f"{what}: {why}\n{self.output()}")
            time.sleep(_POLL_S)


def reference_hash(folder: Path, steps: int, slices: int) -> str:
    """Return the sha256 of the weights after a training without failures, of one worker with all slices."""
    (folder / "tmp").mkdir(parents=True)
    command = _command(steps, 1, ["--fabric", "gloo", "--report", str(folder / "report")], slices)
    subprocess.run(command, env=environment(TMPDIR=str(folder / "tmp")), check=True, capture_output=True)
    digest: str = json.loads((folder / "report" / "report.json").read_text())["replicas"]["sha256"]
    return digest


def _command(steps: int, workers: int, words: Sequence[str], slices: int = 0) -> list[str]:
    return [
        sys.executable, "-m", "holdfast", "run", "-n", str(workers), "--slices", str(slices or workers), "--order", "fold",
        "--max-restarts", "0", "--no-page", *words, str(SCRIPT), str(steps),
    ]  # fmt: skip
