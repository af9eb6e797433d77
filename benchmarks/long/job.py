"""A job whose workers are killed and replaced, as ``benchmarks/long_life.py`` drives it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from holdfast.launch.control import RunningJob, request_changes, running_jobs
from holdfast.launch.processes import WatchedWorker, children_of, pair_path, value_of
from holdfast.records.beacon import Beacon, BeaconPosition
from holdfast.records.paths import beacon_path, records_path

SURVIVOR = 1
"""This worker is never killed. It lives through all deaths, and is the lead once worker 0 was killed."""
_START_S = 120.0
_REPLACE_S = 60.0
_ASK_AGAIN_S = 5.0
_POLL_S = 0.01
SCRIPT = Path(__file__).with_name("train.py")


class LongJob:
    """``holdfast run`` on the tiny training, as a context.

    Args:
        folder: Folder for its files; the run folder is made in ``tmp`` of it.
        steps: Steps of the training.
        workers: Workers that compute.
        words: Further options of ``holdfast run``.
        seed: Seed of the victims.
    """

    def __init__(self, folder: Path, steps: int, workers: int, words: Sequence[str], seed: int) -> None:
        self.report = folder / "report"
        self._workers, self._rng = workers, random.Random(seed)
        self._log = folder / "launcher.log"
        self._command = [
            sys.executable, "-m", "holdfast", "run", "-n", str(workers), "--slices", str(workers), "--order", "fold",
            "--max-restarts", "0", "--report", str(self.report), "--no-page", *words, str(SCRIPT), str(steps),
        ]  # fmt: skip
        self._tmp = folder / "tmp"
        self._tmp.mkdir(parents=True, exist_ok=True)
        self.struck: list[int] = []
        self._running: RunningJob | None = None

    def __enter__(self) -> Self:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        env |= {"TMPDIR": str(self._tmp), "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=env, stdout=log, stderr=log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one stops immediately
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)

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

    def wait_until_trains(self) -> None:
        """Wait until every worker has applied a step.

        Raises:
            TimeoutError: if that takes too long.
        """
        self._await("the job does not train", lambda: self._find() and len(self.training()) == self._workers, _START_S)

    def _find(self) -> bool:
        """Find the run folder, which exists once the launcher has begun; those of jobs elsewhere are not of this folder."""
        if self._running is None:
            os.environ["TMPDIR"] = str(self._tmp)
            self._running = next((job for job in _jobs_in(self._tmp) if job.pid == self.process.pid), None)
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
            TimeoutError: if the launcher does not record it.
        """
        victim = self._rng.choice(sorted(set(self.training()) - {SURVIVOR}))
        pair = self.pair(victim)
        assert pair is not None
        assert pair.worker.send(signal.SIGKILL)
        self.struck.append(victim)
        path = records_path(self.run_dir, f"watch-{victim}")
        self._await(f"the end of rank {victim} is not recorded", lambda: path.exists() and b"WorkerEnded" in path.read_bytes())
        return victim

    def replace(self) -> None:
        """Have the dead worker replaced, and wait until the newcomer trains.

        ``--respawn`` makes workers wait longer after each of several deaths in a row, up to a minute.

        Raises:
            TimeoutError: if it does not.
        """
        assert self._running is not None
        asked_s = 0.0

        def is_complete() -> bool:
            nonlocal asked_s
            assert self._running is not None
            if len(self.training()) >= self._workers:
                return True
            if time.monotonic() - asked_s > _ASK_AGAIN_S:
                asked_s = time.monotonic()
                request_changes(self._running, workers=self._workers)
            return self.is_over

        time.sleep(0.1)  # the launcher reads the record of the end, so that it knows that a worker is missing
        self._await("the dead worker is not replaced", is_complete, _REPLACE_S)

    def wait_for_step(self, step: int) -> bool:
        """Wait until the survivor reaches a step; return whether the job still runs."""
        while not self.is_over and self.step() < step:
            time.sleep(_POLL_S)
        return not self.is_over

    def _await(self, what: str, is_true, timeout_s: float = _REPLACE_S) -> None:
        ends_s = time.monotonic() + timeout_s
        while not is_true():
            if self.is_over or time.monotonic() > ends_s:
                raise TimeoutError(f"{what}: {'the job is over' if self.is_over else f'{timeout_s:g} s'}\n{self.output()}")
            time.sleep(_POLL_S)


def _jobs_in(folder: Path) -> list[RunningJob]:
    import tempfile

    tempfile.tempdir = str(folder)
    return list(running_jobs())
