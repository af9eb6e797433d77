"""A real Slurm of two nodes on this machine, from Debian's packages: it is installed, started and stopped here.

Both nodes are this machine: two ``slurmd`` with names, ports and spool folders of their own. They listen on all
interfaces, as Slurm always does, with munge's authentication. It needs root, and apt where Slurm is not installed.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from jobs import clean_env

NODES = ("n1", "n2")
_PACKAGES = ("slurm-wlm", "munge")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
_READY_S = 60.0
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_CONFIG = """\
ClusterName=holdfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16827
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=30
OverTimeLimit=0
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
"""


class NoSlurm(Exception):
    """Slurm cannot be started here; the message says why, in one line."""


class Slurm:
    """A cluster, as a context: its processes, and those of its jobs, have ended when the context exits.

    Args:
        folder: For its configuration, state and logs.

    Raises:
        NoSlurm: if it cannot be started.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self._config = self.folder / "slurm.conf"
        if os.getuid() != 0:
            raise NoSlurm("a Slurm of two nodes needs root: its daemons start processes of users")
        _install()
        _name_nodes()
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={17040 + place} CPUs=4 RealMemory=4000"
            for place, node in enumerate(NODES)
        ]
        partition = f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"
        self._config.write_text("\n".join((_CONFIG.format(host=host, folder=self.folder), *nodes, partition, "")))
        (self.folder / "state").mkdir()

    def __enter__(self):
        try:
            _start_munge()
            self._run("slurmctld", "-c")
            for node in NODES:
                self.back(node)
            self.wait_for(lambda: self.states() == dict.fromkeys(NODES, "idle"), "both nodes are idle", _READY_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End all jobs, and the daemons."""
        with contextlib.suppress(NoSlurm, subprocess.TimeoutExpired):
            self._run("scancel", "--signal=KILL", "--full", "--user=root")
        for node in NODES:
            self.lose(node)
        _end(self.folder / "slurmctld.pid", signal.SIGTERM)

    @property
    def env(self):
        """The environment for its commands, and for scripts that they start."""
        return clean_env(SLURM_CONF=str(self._config))

    def _run(self, *command, timeout_s=60.0):
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise NoSlurm(
                f"{' '.join(map(str, command))} failed: {(done.stderr.strip() or done.stdout).splitlines()[-1:]}"
            )
        return done.stdout

    def states(self):
        """Return the state of each node, such as ``idle``."""
        lines = self._run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split() for line in lines)

    # -- jobs

    def submit(self, script, *options, folder):
        """Submit a batch script; return the number of its job. Its output goes to ``folder``/NUMBER.out."""
        path = Path(folder, "job.sh")
        path.write_text(script)
        words = ("sbatch", "--parsable", f"--output={folder}/%j.out", "--open-mode=append", *options, str(path))
        done = subprocess.run(words, env=self.env, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
        return int(done.stdout)

    def facts(self, job):
        """Return what Slurm knows of a job, as names and values."""
        words = self._run("scontrol", "show", "job", str(job)).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def finish(self, job, within_s):
        """Wait for the end of a job; return its state, exit code and output."""
        self.wait_for(
            lambda: self.facts(job)["JobState"] in _ENDED, f"job {job} has ended", within_s, lambda: self.output(job)
        )
        facts = self.facts(job)
        return facts["JobState"], int(facts["ExitCode"].partition(":")[0]), self.output(job)

    def cancel(self, job, *options):
        """Run ``scancel`` on a job."""
        self._run("scancel", *options, str(job))

    def start_again(self, job, within_s):
        """Wait until a job that was requeued runs again; Slurm would let it wait for two minutes."""

        def runs():
            if self.facts(job)["JobState"] == "PENDING" and int(self.facts(job)["Restarts"]):
                self._run("scontrol", "update", f"JobId={job}", "StartTime=now")
            return self.facts(job)["JobState"] == "RUNNING" and int(self.facts(job)["Restarts"])

        self.wait_for(runs, f"job {job} runs again", within_s, lambda: self.output(job))

    def output(self, job):
        """Return what a job has printed so far."""
        path = Path(self.facts(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, ready, what, within_s, said=lambda: ""):
        """Return what ``ready`` returns once that is true."""
        ends_s = time.monotonic() + within_s
        while not (found := ready()):
            assert time.monotonic() < ends_s, (
                f"within {within_s:g} s it did not come true that {what}: {said()[-3000:]}"
            )
            time.sleep(0.2)
        return found

    # -- nodes

    def lose(self, node):
        """Kill a node as a power cut would: its daemon, its steps and all their processes."""
        _end(self.folder / f"slurmd-{node}.pid", signal.SIGKILL)
        for pid in self._processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def back(self, node):
        """Start the daemon of a node."""
        self._run("slurmd", "-N", node)

    def _processes(self, node):
        """Return the processes of the jobs on a node, and the daemons of its steps."""
        tasks = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._is_of(pid, node)]
        daemons = {parent for pid in tasks if (parent := _parent(pid)) and _command(parent).startswith("slurmstepd")}
        return [*daemons, *tasks]

    def _is_of(self, pid, node):
        try:
            env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self._config}".encode()} <= set(env)


def _install():
    """Install Slurm from Debian's packages, if it is not there."""
    if all(shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin") for program in _PROGRAMS):
        return
    if shutil.which("apt-get") is None:
        raise NoSlurm(f"neither Slurm ({', '.join(_PROGRAMS)}) nor apt-get, which would install it, is on this machine")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *_PACKAGES]):
        done = subprocess.run(
            ["apt-get", "-qq", *words], env=env, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise NoSlurm(f"apt-get {' '.join(words)} failed: {done.stderr.strip().splitlines()[-1:]}")


def _name_nodes():
    """Let the names of the nodes resolve, as in a cluster."""
    hosts = Path("/etc/hosts")
    if not any(line.split()[1:3] == list(NODES) for line in hosts.read_text().splitlines()):
        with hosts.open("a") as file:
            file.write(f"127.0.0.1 {' '.join(NODES)}\n")


def _start_munge():
    for folder in ("/run/munge", "/var/lib/munge", "/var/log/munge"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.chown(folder, "munge", "munge")
    if subprocess.run(["munge", "--no-input"], capture_output=True, check=False).returncode:  # none answers
        subprocess.run(
            ["runuser", "-u", "munge", "--", "/usr/sbin/munged"], check=True, capture_output=True, timeout=60
        )


def _end(pid_file, number):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.kill(int(pid_file.read_text()), number)


def _parent(pid):
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat[stat.rindex(")") + 2 :].split()[1])
    return 0


def _command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().rpartition("/")[2]
    return ""
