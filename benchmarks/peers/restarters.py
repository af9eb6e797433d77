"""Further jobs of peers: workers over torch's ``_reconfigure``, and Ray Train."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from common import PYTHONS, free_port
from peers.driver import HERE, Job, is_running

from holdfast.launch.supervise.processes import descendants_of

STOP_S = 10.0


class Reconfigure(Job):
    """Workers whose group is reconfigured when one dies or joins; this process announces the members.

    Args:
        workers: Number of workers.
    """

    name = "reconfigure"

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._joining: set[int] = set()
        self._generation = 0
        self._killed = 0
        self._stopped = False
        self._changing = threading.Lock()
        self._store: subprocess.Popen[bytes] | None = None
        self.env |= {"PEER_STORE_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}

    def start(self) -> None:
        """Start the store, then the workers; the first generation begins when all are ready."""
        self._store = self._run("store")
        for rank in range(self.workers):
            self._start_worker(rank)

    def _run(self, rank: str) -> subprocess.Popen[bytes]:
        with self.open_log(f"worker-{rank}") as log:
            return subprocess.Popen(
                [str(PYTHONS["torch"]), str(HERE / "reconfigure_worker.py")], env=self.env | {"PEER_RANK": rank},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def _start_worker(self, rank: int) -> None:
        process = self._run(str(rank))
        with self._changing:
            self._processes[rank] = process
            self._joining.add(rank)
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Announce that a worker is ready, and that it has ended, at once."""
        assert process.stdout is not None
        if process.stdout.readline().strip() == b"ready":
            with self._changing:
                self._joining.discard(rank)
                self._announce()
        code = process.wait()
        with self._changing:
            self._killed += code == -signal.SIGKILL
            self._joining.discard(rank)
            if self._processes.get(rank) is process:
                del self._processes[rank]
            self._announce()

    def _announce(self) -> None:
        """Write the members to each of them, once none of the first ones is still starting."""
        members = sorted(self._processes.keys() - self._joining)
        if self._stopped or (self._generation == 0 and len(members) < self.workers):
            return
        self._generation += 1
        line = f"{self._generation} {' '.join(map(str, members))}\n".encode()
        for rank in members:
            stdin = self._processes[rank].stdin
            assert stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died, too, and is announced next
                stdin.write(line)
                stdin.flush()

    def is_over(self) -> bool:
        """Return whether no worker is alive."""
        return not self.alive()

    def restore(self) -> None:
        """Start workers in the places of those that have ended."""
        for rank in set(range(self.workers)) - self.alive().keys():
            self._start_worker(rank)

    def alive(self) -> dict[int, int]:
        """Return the process IDs of living workers by rank."""
        with self._changing:
            return {rank: process.pid for rank, process in self._processes.items() if process.poll() is None}

    def killed(self) -> int:
        """Return how many ended by SIGKILL, as seen by their parent."""
        with self._changing:
            return self._killed

    def stop(self) -> None:
        """End all processes."""
        with self._changing:
            self._stopped = True
            processes = [*self._processes.values(), *([self._store] if self._store else [])]
        for process in processes:
            process.kill()
            process.wait()


class RayTrain(Job):
    """Ray Train's controller, which restarts all workers when one has failed, on a cluster of one node.

    Args:
        workers: Number of workers.
        health_check_s: How often the controller looks at its workers, in seconds; Ray's default is 2.
    """

    name = "ray"

    def __init__(self, workers: int, health_check_s: float = 0.1) -> None:
        super().__init__(workers)
        self._driver: subprocess.Popen[bytes] | None = None
        self.env |= {
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(health_check_s),
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(HERE),
        }

    def start(self) -> None:
        """Start the script that starts the cluster and the training."""
        with self.open_log("ray") as log:
            self._driver = subprocess.Popen(
                [str(PYTHONS["ray"]), str(HERE / "ray_driver.py"), str(self.workers), str(self.folder / "ray")],
                env=self.env, stdout=log, stderr=log,
            )  # fmt: skip

    def is_over(self) -> bool:
        """Return whether the script has ended."""
        return self._driver is not None and self._driver.poll() is not None

    def alive(self) -> dict[int, int]:
        """Return the process IDs of the newest workers by rank, of those that still run."""
        newest = {line["rank"]: line["pid"] for line in self.diaries.refresh() if line["event"] == "start"}
        return {rank: pid for rank, pid in newest.items() if is_running(pid, "ray")}

    def killed(self) -> int:
        """Return how many were sent a SIGKILL and have ended; their parent is a daemon of Ray."""
        struck = self.struck | {line["pid"] for line in self.diaries.lines if line["event"] == "fault"}
        return sum(not Path(f"/proc/{pid}").exists() for pid in struck)

    def stop(self) -> None:
        """End the script and the cluster that it started."""
        if self._driver is None:
            return
        cluster = [process.pid for process in descendants_of(self._driver.pid)]
        self._driver.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(STOP_S)
        self._driver.kill()
        self._driver.wait()
        for pid in cluster:
            if str(self.folder) in _command(pid) or "ray::" in _command(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)  # so that the folder is no longer written to


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
