"""Jobs on several nodes: the launchers of one job, on this machine or on hosts made of namespaces, and their output."""

import contextlib
import functools
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import reference
from jobs import clean_env, free_port, read_report

from holdfast.records.beacon import UNCONNECTED, Beacon
from holdfast.records.files import read_run

SCRIPT = Path(__file__).parents[1] / "chaos" / "nodes_script.py"
ALL_SAMPLES = {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}
DEADLINE_S = 200
expected_hash = functools.cache(lambda: reference.train("mlp", "sgd"))


def until(ready, what="what the test waits for", every_s=0.05):
    """Wait until ``ready`` returns a true value; return it. It is called every ``every_s`` seconds."""
    ends_s = time.monotonic() + DEADLINE_S
    while not (found := ready()):
        assert time.monotonic() < ends_s, f"{what} did not come true within {DEADLINE_S} s"
        time.sleep(every_s)
    return found


class Way:
    """A node's own route to the store, which can be lost while the routes to all workers work.

    Args:
        url: URL of the store.
    """

    def __init__(self, url):
        kind, _, there = url.partition("://")
        host, _, port = there.rpartition(":")
        self._there = (host, int(port))
        self._is_lost = False
        self.seen = bytearray()
        """All bytes of both directions."""
        self._open = [socket.create_server(("127.0.0.1", 0))]
        self.url = f"{kind}://127.0.0.1:{self._open[0].getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self):
        """Silently drop all further traffic."""
        self._is_lost = True

    def close(self):
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._open[0].accept()
                self._open.append(near)
                if self._is_lost:
                    continue
                try:
                    far = socket.create_connection(self._there)
                except OSError:  # the store is not there yet; the client will retry
                    near.close()
                    continue
                self._open.append(far)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                if not self._is_lost:
                    target.sendall(data)
            if not self._is_lost:
                target.shutdown(socket.SHUT_WR)


def is_connected(beacon):
    """Whether the worker with this beacon waits in the rendezvous, so that its imports are done."""
    position = Beacon.read(beacon)
    return position is not None and position.phase not in UNCONNECTED


class Cluster:
    """The launchers of one job, numbered from 0.

    Args:
        folder: Folder for all output.
        count: Number of launchers.
        options: Options of ``holdfast run``, for all launchers.
        hosts: Hosts, one for each launcher; None puts all launchers on this machine.
        pause: Seconds before each step.
        workers: Workers on each node.
        url: URL of the rendezvous, if it is not at the first launcher.
    """

    def __init__(self, folder, count, *options, hosts=None, pause=0.1, workers=2, url=None):
        self.folder, self.count, self.options, self.hosts, self.pause = folder, count, options, hosts, pause
        self.workers = workers
        address = "127.0.0.1" if hosts is None else hosts.address(1)
        self.url = url or f"holdfast://{address}:{free_port()}"
        self.launchers = {}
        self.starts = 0
        self.hold = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait(timeout=20)
        if self.hosts is not None:
            for number in range(1, self.count + 1):
                self.hosts.heal(number)
                self.hosts.kill(number)

    def start(self, node, *more):
        """Start the launcher of a node."""
        self.starts += 1
        place = self.folder / f"start-{self.starts}-node-{node}"
        (place / "tmp").mkdir(parents=True)
        words = [
            *([] if self.hosts is None else self.hosts.inside(node + 1)),
            *(sys.executable, "-m", "holdfast", "run", "--fabric", "gloo", "-n", self.workers, "--nnodes", self.count),
            *("--node-rank", node, "--rdzv", self.url, "--rdzv-token", "a secret", "--log-dir", place / "logs"),
            *(() if self.hosts is None else ("--order", "fold")),  # the bits of one machine, with which tests compare
            *(
                "--no-page",
                "--report",
                place / "report",
                *self.options,
                *more,
                SCRIPT,
                "--pause",
                self.pause,
                *self.hold,
            ),
        ]
        with (place / "output").open("wb") as output:
            launcher = subprocess.Popen(
                [str(word) for word in words],
                env=clean_env(TMPDIR=str(place / "tmp")),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        launcher.place = place
        self.launchers[node] = launcher
        return launcher

    def start_all(self):
        return [self.start(node) for node in range(self.count)]

    def hold_until(self, path):
        """Make training wait half-way for :meth:`come_back`."""
        self.hold = ["--hold", path]

    def come_back(self, node, rank):
        """Restart the launcher of a node; training continues once its newcomer is there."""
        back = self.start(node)
        until(lambda: any(map(is_connected, back.place.glob(f"tmp/holdfast-*/beacon-{rank}"))), f"the newcomer {rank}")
        self.hold[1].touch()
        return back

    def wait(self, *nodes):
        """Return the exit codes."""
        nodes = nodes or tuple(self.launchers)
        try:
            return {node: self.launchers[node].wait(timeout=DEADLINE_S) for node in nodes}
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None

    def output(self, node):
        return (self.launchers[node].place / "output").read_text()

    def said(self):
        """The output of launchers and workers, for messages."""
        files = sorted(self.folder.glob("start-*/output")) + sorted(self.folder.glob("start-*/logs/*"))
        return "\n".join(f"-- {path.relative_to(self.folder)}\n{path.read_text()[-2000:]}" for path in files)

    def committed(self, launcher):
        """The largest number of steps that each worker of a launcher has committed, by rank."""
        found = {}
        for log in (launcher.place / "logs").glob("rank-*.log"):
            counts = [int(count) for count in re.findall(r"^committed (\d+)$", log.read_text(), re.MULTILINE)]
            found[int(log.stem.partition("-")[2])] = max(counts, default=0)
        return found

    def until_step(self, step, node=0):
        """Wait until some worker of a node has reached the step."""
        launcher = self.launchers[node]

        def is_there():
            assert launcher.poll() is None, self.said()
            return any(count >= step for count in self.committed(launcher).values())

        until(is_there, f"step {step} at node {node}")

    def live(self, launcher, kind):
        """The records of one kind that a running launcher has written or received."""
        runs = launcher.place.glob("tmp/holdfast-*-*")
        return [record for run in runs for record in read_run(run) if type(record).__name__ == kind]

    def report(self, launcher):
        return read_report(launcher.place / "report")


def assert_complete(report):
    """Training is complete, and its result is that of one process."""
    assert report["replicas"]["state_sha256"] == expected_hash()
    assert report["replicas"]["identical"] is True
    assert report["samples"] == ALL_SAMPLES
