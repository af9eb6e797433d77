"""A local Indexed Job: pods of deploy/kubernetes/indexed-job.yaml, and a controller that follows its policies.

Each pod has its own network, processes and shared memory, and the launcher is its first process, as in a container.
Containers, the API server and DNS are not there: the names of the manifest are replaced by addresses and paths.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import etcd
from clusters import until
from jobs import clean_env
from manifests import command_of, environment_of, find

POD = """
unshare --mount --propagation private sh -c '
    mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && mount --bind "$0" /mnt &&
    mount -o remount,bind,ro / && cd / &&
    exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
' "$0" "$@" &
wait "$!"
"""
"""Start a pod with a folder as its volume: FOLDER COMMAND...

The root is read-only and the process has no capabilities, as the manifest says. The first child of this shell is the
first process of the pod, and the shell ends as the kubelet says it: with 137 for SIGKILL.
"""
VOLUME = Path("/mnt")
KILLED = 128 + signal.SIGKILL
PORT = 2379


@dataclass
class Pod:
    """A pod of an index; ``number`` counts those of the index."""

    index: int
    number: int
    place: object
    process: subprocess.Popen
    exit_code: int | None = None

    @property
    def launcher(self):
        """The PID of its first process, as seen from outside."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as children:
            return int(children.read().split()[0])

    def confinement(self):
        """Return the capabilities of the launcher, and whether it can write to the root of its file system."""
        status = dict(line.split(":\t") for line in Path(f"/proc/{self.launcher}/status").read_text().splitlines())
        mounts = [line.split() for line in Path(f"/proc/{self.launcher}/mounts").read_text().splitlines()]
        return int(status["CapEff"], 16), any(
            place == "/" and "rw" in how.split(",") for _, place, _, how, *_ in mounts
        )

    def output(self):
        return (self.place / "output").read_text()


@dataclass
class IndexedJob:
    """The Job controller, for as long as :meth:`poll` is called, as a context.

    Args:
        folder: Folder for all output and for checkpoints.
        hosts: A host for each index, and one more for etcd.
        count: Completions.
        script: The script and its arguments.
        options: Further options of ``holdfast run``.
    """

    folder: object
    hosts: object
    count: int
    script: tuple
    options: tuple = ()
    pods: list = field(default_factory=list)
    state: str = "running"

    def __post_init__(self):
        self.spec = find("indexed-job.yaml", "Job")["spec"]
        (self._container,) = self.spec["template"]["spec"]["containers"]

    def __enter__(self):
        self._etcd = self._start_etcd()
        for index in range(self.count):
            self._start(index)
        return self

    def __exit__(self, *_):
        for pod in self.pods:
            if pod.process.poll() is None:
                with contextlib.suppress(OSError, IndexError):
                    os.kill(pod.launcher, signal.SIGKILL)  # and with it, all processes of the pod end
                pod.process.kill()
            pod.process.wait(timeout=20)
        self._etcd.kill()
        self._etcd.wait(timeout=20)

    def newest(self, index):
        """Return the newest pod of an index."""
        return [pod for pod in self.pods if pod.index == index][-1]

    def exit_codes(self, index):
        """Return how the pods of an index have ended; None: it runs; :data:`KILLED`: by SIGKILL."""
        return [pod.exit_code for pod in self.pods if pod.index == index]

    def said(self):
        """The output of all pods, for messages."""
        return "\n".join(f"-- {pod.place.name}: {pod.exit_code}\n{pod.output()[-3000:]}" for pod in self.pods)

    def poll(self):
        """Act on pods that have ended; return whether none runs."""
        for pod in [pod for pod in self.pods if pod.exit_code is None]:
            if (code := pod.process.poll()) is not None:
                pod.exit_code = code
                self._act(pod)
        return all(pod.exit_code is not None for pod in self.pods)

    def await_that(self, ready, what):
        """Wait until a condition holds, while the controller works; return its value."""

        def now():
            self.poll()
            assert self.state != "failed", self.said()
            return ready()

        return until(now, what, every_s=0.2)  # to find the processes of a host takes a process

    def _act(self, pod):
        """What the controller does when a pod has ended."""
        if pod.exit_code == 0:  # successPolicy: succeededCount 1
            assert self.spec["successPolicy"]["rules"] == [{"succeededCount": 1}]
            self.state = "complete" if self.state == "running" else self.state
        elif self._is_fatal(pod.exit_code):
            self.state = "failed"
        elif self.state == "running" and pod.number < self.spec["backoffLimitPerIndex"]:
            assert self.spec["podReplacementPolicy"] == "Failed"
            self._start(pod.index)

    def _is_fatal(self, code):
        rules = [rule for rule in self.spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        return any(
            code in rule["onExitCodes"]["values"]
            for rule in rules
            if (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
        )

    def _start(self, index):
        number = len(self.exit_codes(index))
        place = self.folder / f"pod-{index}-{number}"
        (place / "tmp").mkdir(parents=True)
        own = environment_of(self._container, {}) | {
            "JOB_COMPLETION_INDEX": str(index),
            "TMPDIR": str(VOLUME / place.name / "tmp"),
        }
        words = [
            *self.hosts.inside(index + 1),
            *("unshare", "--pid", "sh", "-c", POD, self.folder),
            *self._command(place.name),
        ]
        with (place / "output").open("wb") as output:
            process = subprocess.Popen(
                words, cwd=place, env=clean_env(**own), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pods.append(Pod(index, number, place, process))

    def _command(self, pod):
        """Return the command of the manifest, with what only a cluster has replaced, and options for the test."""
        replaced = {
            "--nnodes": self.count,
            "--rdzv": f"etcd://{self.hosts.address(self.count + 1)}:{PORT}/train",
            "--workers": 1,
            "--checkpoint-dir": VOLUME / "runs",
        }
        program, run, *args = command_of(self._container)
        *options, _ = args
        names = [option.partition("=")[0] for option in options]
        assert (program, run) == ("holdfast", "run")
        assert replaced.keys() <= set(names)
        kept = [
            f"{name}={replaced[name]}" if name in replaced else option
            for name, option in zip(names, options, strict=True)
        ]
        extra = ["--no-page", f"--report={VOLUME / pod / 'report'}", *self.options]
        return [sys.executable, "-m", "holdfast", run, *kept, *extra, *map(str, self.script)]

    def _start_etcd(self):
        number = self.count + 1
        url = f"http://{self.hosts.address(number)}"
        command = [etcd.find_etcd(), "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync"]
        for kind, port in (("client", PORT), ("peer", PORT + 1)):
            command += [f"--listen-{kind}-urls", f"{url}:{port}"]
        command += ["--advertise-client-urls", f"{url}:{PORT}", "--initial-advertise-peer-urls", f"{url}:{PORT + 1}"]
        command += ["--initial-cluster", f"default={url}:{PORT + 1}"]
        with (self.folder / "etcd.log").open("wb") as log:
            return subprocess.Popen([*self.hosts.inside(number), *command], stdout=log, stderr=log)


def stopped(pids):
    """Return those of some processes that are stopped (SIGSTOP)."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "T":
                found.append(pid)
    return found


def go_on(pids):
    """Let stopped processes continue, and wait until they do."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    ends_s = time.monotonic() + 5
    while stopped(pids):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
