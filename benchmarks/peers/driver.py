"""Starts the peers' jobs, reads their workers' diaries, orders deaths, and leaves no process behind."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from common import PEERS_PYTHON, PYTHONS, ROOT, environment, free_port

from holdfast.launch.supervise.processes import children_of, value_of

HERE = Path(__file__).parent
POLL_S = 0.01
WAIT_S = 120.0
GLOO_TIMEOUT_S = 5.0
CHECKPOINT_EVERY = 10
SCRIPT = ROOT / "src" / "holdfast_lab" / "workloads" / "train.py"
TRAINING = ("--dataset", "digits", "--model", "cnn", "--optimizer", "sgd", "--epochs")
"""What Holdfast trains, like all peers: the digits CNN, 12 steps of 128 samples in an epoch."""

Line = dict[str, Any]


class Diaries:
    """The lines that the workers of a job have written so far, ordered by time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.lines: list[Line] = []

    def refresh(self) -> list[Line]:
        """Read new lines and return all lines."""
        for path in self.paths():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            self.lines += [line for text in whole.splitlines() if (line := self.parse(text)) is not None]
        self.lines.sort(key=lambda line: line["t_s"])
        return self.lines

    def paths(self) -> Iterable[Path]:
        """Return the files to read."""
        return self._folder.glob("*.jsonl")

    def parse(self, text: bytes) -> Line | None:
        """Parse a line; None if it carries no information."""
        return json.loads(text)


class Job:
    """A job of a peer, as a context.

    Args:
        workers: Number of workers.
        orders: Whether workers check for orders to die.
    """

    name = ""

    def __init__(self, workers: int, *, orders: bool = True) -> None:
        self.workers = workers
        self.struck: set[int] = set()
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        for name in ("diary", "orders"):
            (self.folder / name).mkdir()
        self.diaries = Diaries(self.folder / "diary")
        np.savez(self.folder / "data.npz", **digits())
        self.env = environment(
            PEER_DATA=str(self.folder / "data.npz"),
            PEER_DIARY=str(self.folder / "diary"),
            PEER_ORDERS=str(self.folder / "orders") if orders else "",
        )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        """Start the job."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the job."""
        raise NotImplementedError

    def tend(self) -> None:
        """Carry out the benchmark's periodic tasks for the running job."""

    def is_over(self) -> bool:
        """Return whether no process is left that could train."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restart killed workers, if the job does not do so itself."""

    def alive(self) -> dict[int, int]:
        """Return the process IDs of living workers by rank."""
        raise NotImplementedError

    def killed(self) -> int:
        """Return the number of workers known to have ended by SIGKILL."""
        raise NotImplementedError

    def wait_for(self, what: str, found: Callable[[list[Line]], bool], wait_s: float = WAIT_S) -> None:
        """Wait until ``found`` returns true for the lines.

        Raises:
            TimeoutError: if that takes too long.
        """
        end_s = time.monotonic() + wait_s
        while not found(self.diaries.refresh()):
            if time.monotonic() > end_s or self.is_over():
                why = "all processes ended" if self.is_over() else f"after {wait_s:g} s"
                raise TimeoutError(f"{self.name}: no {what}: {why}\n{self.output()[-2000:]}")
            self.tend()
            time.sleep(POLL_S)

    def strike(self, number: int) -> int | None:
        """Send SIGKILL to the living worker at this position; return its rank, None if none is alive."""
        living = self.alive()
        if not living:
            return None
        rank = sorted(living)[number % len(living)]
        self.struck.add(living[rank])
        os.kill(living[rank], signal.SIGKILL)
        return rank

    def order_death(self, rank: int, phase: str) -> None:
        """Make the worker kill itself when it reaches the phase."""
        draft = self.folder / f"order-{rank}"
        draft.write_text(phase)
        draft.replace(self.folder / "orders" / f"die-{rank}")

    def open_log(self, name: str) -> Any:
        """Return a file for the output of a process."""
        return (self.folder / f"{name}.log").open("ab")

    def output(self) -> str:
        """Return the output of the processes."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))


def tuned(join_timeout_ms: int) -> dict[str, int]:
    """Return the options of a lighthouse with shorter timeouts than torchft's defaults."""
    return {"heartbeat_timeout_ms": 500, "join_timeout_ms": join_timeout_ms}


class Torchft(Job):
    """Replica groups of one worker each, and a lighthouse.

    Args:
        workers: Number of workers.
        options: Options of ``torchft_lighthouse``; empty for its defaults.
        orders: Whether workers check for orders to die.
        replace: Restart a killed replica immediately; otherwise :meth:`restore` does.
    """

    name = "torchft"

    def __init__(
        self,
        workers: int,
        options: Mapping[str, int],
        *,
        orders: bool = True,
        replace: bool = False,
    ) -> None:
        super().__init__(workers, orders=orders)
        self._options = options
        self._replace = replace
        self._replicas: dict[int, subprocess.Popen[bytes]] = {}
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._killed = 0
        self.env |= {"NUM_REPLICA_GROUPS": str(workers), "PEER_GLOO_TIMEOUT_S": str(GLOO_TIMEOUT_S)}

    def start(self) -> None:
        """Start the lighthouse, then the replicas."""
        port = free_port()
        words = [word for name, value in self._options.items() for word in (f"--{name}", str(value))]
        program = str(PEERS_PYTHON.with_name("torchft_lighthouse"))
        with self.open_log("lighthouse") as log:
            self._lighthouse = subprocess.Popen(
                [program, "--min_replicas", "1", "--bind", f"[::]:{port}", *words],
                env=self.env, stdout=log, stderr=log,
            )  # fmt: skip
        self.env["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
        for rank in range(self.workers):
            self._start_replica(rank)

    def _start_replica(self, rank: int) -> None:
        with self.open_log(f"replica-{rank}") as log:
            self._replicas[rank] = subprocess.Popen(
                [str(PEERS_PYTHON), str(HERE / "torchft_worker.py")],
                env=self.env | {"REPLICA_GROUP_ID": str(rank)}, stdout=log, stderr=log,
            )  # fmt: skip

    def is_over(self) -> bool:
        """Return whether all replicas have ended."""
        return not self._replace and not self.alive()

    def restore(self) -> None:
        """Restart killed replicas."""
        for rank, process in list(self._replicas.items()):
            if process.poll() is not None:
                self._killed += process.returncode == -signal.SIGKILL
                self._start_replica(rank)

    def tend(self) -> None:
        """Restart killed replicas, if requested."""
        if self._replace:
            self.restore()

    def alive(self) -> dict[int, int]:
        """Return the process IDs of living replicas by rank."""
        return {rank: process.pid for rank, process in self._replicas.items() if process.poll() is None}

    def killed(self) -> int:
        """Return how many ended by SIGKILL, as seen by their parent."""
        return self._killed + sum(p.poll() == -signal.SIGKILL for p in self._replicas.values())

    def stop(self) -> None:
        """End all processes."""
        for process in [*self._replicas.values(), *([self._lighthouse] if self._lighthouse else [])]:
            if process.poll() is None:
                process.kill()
            process.wait()


class Torchrun(Job):
    """One agent, which restarts all workers when one has failed.

    Args:
        workers: Number of workers.
        orders: Whether workers check for orders to die.
    """

    name = "torchrun"

    def __init__(self, workers: int, *, orders: bool = True) -> None:
        super().__init__(workers, orders=orders)
        self._agent: subprocess.Popen[bytes] | None = None
        # Without this the workers of the next round find the addresses of the previous one in the agent's store
        # and hang, or fail with "Connection refused" (torch 2.13; pytorch#135712).
        self.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(self) -> None:
        """Start the agent."""
        with self.open_log("torchrun") as log:
            self._agent = subprocess.Popen(
                [
                    str(PEERS_PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                    str(self.workers), "--max-restarts", "1000", str(HERE / "torchrun_worker.py"),
                ],
                env=self.env, stdout=log, stderr=log,
            )  # fmt: skip

    def is_over(self) -> bool:
        """Return whether the agent has ended."""
        return self._agent is not None and self._agent.poll() is not None

    def alive(self) -> dict[int, int]:
        """Return the process IDs of living workers by rank."""
        agent = -1 if self._agent is None else self._agent.pid
        return {int(rank): pid for pid in children_of(agent) if (rank := value_of(pid, "RANK"))}

    def killed(self) -> int:
        """Return how many were sent a SIGKILL and have ended.

        Their parent is the agent, which reports one process in each round, often a survivor that raised meanwhile.
        """
        struck = self.struck | {line["pid"] for line in self.diaries.lines if line["event"] == "fault"}
        return sum(not is_running(pid, "torchrun_worker.py") for pid in struck)

    def stop(self) -> None:
        """End the agent; its workers end with it."""
        if self._agent is None:
            return
        workers = self.alive().values()
        if self._agent.poll() is None:
            self._agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(5)
            self._agent.kill()
        self._agent.wait()
        for pid in workers:  # they end with the agent; this is for a worker that has not set that up yet
            if is_running(pid, "torchrun_worker.py"):
                os.kill(pid, signal.SIGKILL)


def is_running(pid: int, script: str) -> bool:
    """Return whether the process exists and runs this script."""
    try:
        return script in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def digits() -> dict[str, np.ndarray]:
    """Return scikit-learn's digits as ``x`` and ``y``; without scikit-learn, noise of the same shapes."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        rng = np.random.default_rng(0)
        return {"x": rng.random((1497, 1, 8, 8), np.float32), "y": rng.integers(10, size=1497)}
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz") as file:
        rows = np.loadtxt(file, delimiter=",")[:1497]
    return {"x": (rows[:, :-1] / 16).astype(np.float32).reshape(-1, 1, 8, 8), "y": rows[:, -1].astype(np.int64)}


def commits(lines: list[Line]) -> Iterator[Line]:
    """Yield the lines of steps that were committed."""
    return (line for line in lines if line["event"] == "step" and line["committed"])


ENVIRONMENTS = {"torchft": "peers", "torchft-tuned": "peers", "torchrun": "peers", "reconfigure": "torch", "ray": "ray"}
"""The environment of each system that is a peer; all others are Holdfast's."""


def installed(systems: Sequence[str]) -> list[str]:
    """Return the systems that can run here; say of each other one that it cannot."""
    pythons = {system: PYTHONS[ENVIRONMENTS.get(system, "own")] for system in systems}
    for system, python in pythons.items():
        if not python.exists():
            print(f"{system} needs {python.parents[1].name}, which is missing: run make bench-peers", file=sys.stderr)
    return [system for system, python in pythons.items() if python.exists()]
