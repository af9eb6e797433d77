"""Several hosts under one mpirun: checks whether they can take part, and which are left after a failure.

Open MPI's runtime ends the whole job when it loses a host, so this launcher restarts the job on the remaining hosts.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ConfigError, refuse
from holdfast.launch.fleet.base import Fleet
from holdfast.launch.job import Job
from holdfast.launch.job_state import JobBroken, JobLost, JobState, Verdict
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.supervise.processes import Process, WatchedWorker, this_node
from holdfast.launch.supervise.worker_context import LAUNCHER_NODE

SSH = ("ssh", "-o", "BatchMode=yes")
"""Never prompts: the launcher has no terminal input."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Output and exit code of a command on another host; the code is None if the command did not end in time."""

    exit_code: int | None
    output: str


class RemoteAgent:
    """Starts commands on other hosts, as ``WORDS HOST COMMAND``; on this machine for the hosts in ``here``."""

    def __init__(self, words: Sequence[str], here: Collection[str] = ()) -> None:
        self._words = tuple(words)
        self._here = frozenset(here)
        self._running: list[subprocess.Popen[bytes]] = []

    def request(self, commands: Mapping[str, str], timeout_s: float) -> dict[str, CommandResult]:
        """Run a ``sh`` command on each host, concurrently and within ``timeout_s``; return the answers by host."""
        ends_s = time.monotonic() + timeout_s
        started = {host: self._start(host, command, subprocess.PIPE) for host, command in commands.items()}
        return {host: _answer(process, ends_s) for host, process in started.items()}

    def send(self, host: str, command: str) -> None:
        """Run a command on a host without waiting for it."""
        self._running = [process for process in self._running if process.poll() is None]
        self._running.append(self._start(host, command, subprocess.DEVNULL))

    def close(self) -> None:
        """Kill commands that have not ended."""
        for process in self._running:
            _end(process)

    def _start(self, host: str, command: str, output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # the login shell of the host is unknown
            ["sh", "-c", command] if host in self._here else [*self._words, host, f"sh -c {shlex.quote(command)}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _answer(process: subprocess.Popen[bytes], ends_s: float) -> CommandResult:
    try:
        output, _ = process.communicate(timeout=max(0.0, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        return CommandResult(None, "")
    return CommandResult(process.returncode, output.decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session, and its PID is not reused before it is reaped
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def kill_command(process: Process, number: signal.Signals) -> str:
    """Return a command that signals a process of the host where it is run, but no later process with its PID."""
    started = f'"$(sed "s/.*) //" /proc/{process.pid}/stat 2>/dev/null | cut -d" " -f20)"'
    return f"test {started} = {process.started} && kill -s {number.name.removeprefix('SIG')} {process.pid}"


@dataclass(frozen=True, slots=True)
class RemoteProcess(Process):
    """A process on another host, reached through the agent."""

    host: str
    agent: RemoteAgent

    def is_alive(self) -> bool:
        """Return True: until its watcher records how it ended, its state is unknown here."""
        return True

    def send(self, number: int) -> bool:
        """Send a signal, which takes a while and may not arrive."""
        self.agent.send(self.host, kill_command(self, signal.Signals(number)))
        return True


FENCE_S = 3.0
"""How long a restart waits after a host was lost: its workers may live, and their watchers look once a second whether they
still belong to the job, see :mod:`holdfast.launch.supervise.watcher`."""
_NO_DAEMON = "A daemon failed to report back after being spawned"
"""Printed by mpirun if a daemon does not start, which also happens temporarily on crowded hosts."""
_MARK = "holdfast-node"
_FIRST_CODE = 91
_PROBES = 3
_END_S = 5.0
_HANDED_ON = ("HOLDFAST_", "OMP_", "MKL_", "MALLOC_", "MASTER_", "PYTHON", "CUDA_", "CUBLAS_", "NCCL_", "TORCH")
"""Prefixes of the variables that workers on all hosts receive; mpirun itself passes those that begin with OMPI_."""


def check_hosts(job: Job) -> None:
    """Raise a ConfigError if the hosts cannot be reached from here, or have no directory in common."""
    if job.hosts:
        _agent_words(job)
        shared_folder(job)


def _agent_words(job: Job) -> list[str]:
    words = shlex.split(job.launch_agent) or list(SSH)
    if shutil.which(words[0]) is None:
        where = f"--launch-agent {words[0]}" if job.launch_agent else "ssh"
        refuse(f"{where} cannot be run; --launch-agent names a program that reaches the other hosts, as ssh does")
    return words


def shared_folder(job: Job) -> Path | None:
    """Return the directory that all hosts share; None without ``--hosts``. Raise a ConfigError if it is missing."""
    place = job.settings.checkpoint_dir.removeprefix("file://")
    if not job.hosts:
        return None
    if job.run_dir is None and (not place or "://" in place):
        refuse("--hosts needs a directory that all hosts share: --checkpoint-dir, or --run-dir if that is not one")
    folder = Path(job.run_dir or place).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--{'run' if job.run_dir else 'checkpoint'}-dir {folder} cannot be created: {error.strerror}"
        ) from error
    return folder


# -- the hosts of a job


class MpiHosts(Fleet):
    """The remaining hosts of a job, and how to reach them. All must share the directories of the run."""

    poll_s = 0.2

    def __init__(self, job: Job, paths: RunPaths) -> None:
        super().__init__(job)
        self.left = job.hosts
        self._paths = paths
        self._agent = RemoteAgent(_agent_words(job), [host.name for host in job.hosts if _is_here(host.name)])
        self._needs = (
            (f"test -d {shlex.quote(str(paths.run_dir))}", f"does not see {paths.run_dir.parent}: it must be shared"),
            (f"test -d {shlex.quote(str(paths.log_dir))}", f"does not see {paths.log_dir}: it must be shared"),
            (f"cd {shlex.quote(os.getcwd())}", f"has no directory {os.getcwd()}, where the job was started"),
            (f"test -r {shlex.quote(str(job.script))}", f"has no script {job.script} in {os.getcwd()}"),
            (f"test -x {shlex.quote(sys.executable)}", f"has no {sys.executable}; install the same environment there"),
        )
        self._names: dict[str, str] = {}

    # -- checks

    def connect(self, tell: Callable[[str], None]) -> None:
        tell("waiting for the hosts")
        answers, missing = self._check({})
        if missing:
            refuse("; ".join(f"host {name} {why}" for name, why in missing.items()))
        for name, answer in answers.items():
            node = _node(answer)
            if node in self._names:
                refuse(f"hosts {self._names[node]} and {name} are the same machine, {node}; name it once, HOST:WORKERS")
            self._names[node] = name

    def restart_on(self, state: JobState) -> tuple[int, ...]:
        """See :meth:`Fleet.restart_on`: mpirun ends all workers when it loses a host, so exit codes are not informative."""
        wanted = min(sum(host.slots for host in self.left), len(self.job.ranks))
        self._next_ranks = state.ranks_left(wanted)[:wanted]
        return self._next_ranks

    def examine(
        self, verdict: Verdict, pairs: Mapping[int, WatchedWorker], mpiruns: Sequence[int]
    ) -> tuple[Verdict, list[int]]:
        """See :meth:`Fleet.examine`: find out which hosts are left if the job is lost, or failed while it began."""
        if not (isinstance(verdict, JobLost) or (isinstance(verdict, JobBroken) and verdict.unexplained)):
            return verdict, []
        lost = self.poll(pairs.values(), mpiruns)
        if lost:
            reasons = "; ".join(f"host {name} is lost: it {why}" for name, why in lost.items())
            return JobLost(reasons), [rank for rank, pair in pairs.items() if self._names.get(pair.node) in lost]
        is_unbegun = not pairs and _NO_DAEMON in self._paths.mpirun_output()
        why = "no worker began: one of mpirun's daemons failed to report back"
        return (JobLost(why) if is_unbegun else verdict), []

    def poll(self, pairs: Iterable[WatchedWorker], mpiruns: Iterable[int]) -> dict[str, str]:
        """After mpirun has ended, end what is left of it and check the hosts; return the lost ones with reasons.

        Args:
            pairs: The workers, which are killed.
            mpiruns: PIDs of the processes that were mpirun; the folders of their daemons are removed.
        """
        ends, removals = self._kills(pairs), [_remove_daemon_folder(pid) for pid in mpiruns]
        for host in self.left:
            ends.setdefault(host.name, []).extend(removals)
        _, missing = self._check(ends)
        self.left = tuple(host for host in self.left if host.name not in missing)
        if self.left:
            self.job = dataclasses.replace(self.job, hosts=self.left)
        return missing

    def _check(self, ends: Mapping[str, Sequence[str]]) -> tuple[dict[str, CommandResult], dict[str, str]]:
        checks = [f"{need} || exit {_FIRST_CODE + number}" for number, (need, _) in enumerate(self._needs)]
        look = "; ".join([*checks, f"echo {_MARK} $(uname -n)"])
        commands = {host.name: "; ".join([*ends.get(host.name, ()), look]) for host in self.left}
        answers = self._agent.request(commands, self.job.node_timeout_s)
        return answers, {name: why for name, answer in answers.items() if (why := self._why_not(answer))}

    def _why_not(self, answer: CommandResult) -> str:
        """Return why a host cannot take part, or ""."""
        if answer.exit_code is None:
            return f"did not answer within {self.job.node_timeout_s:g} s"
        number = answer.exit_code - _FIRST_CODE
        if 0 <= number < len(self._needs):
            return self._needs[number][1]
        if answer.exit_code or _node(answer) == "":
            lines = answer.output.strip().splitlines()
            return f"could not be reached: {lines[-1] if lines else f'exit code {answer.exit_code}'}"
        return ""

    # -- use

    def variables(self, origin_s: float) -> dict[str, str]:
        began_s = time.time() - time.monotonic() + origin_s
        return {
            LAUNCHER_NODE: f"{this_node()} {began_s}",
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", self.left[0].name),
        }

    def mpirun_words(self, env: Mapping[str, str]) -> list[str]:
        patience_s = self.job.node_timeout_s
        mca = {
            "plm": "ssh",  # the same inside and outside of Slurm
            "oob_tcp_keepalive_time": max(1, round(patience_s / 2)),
            "oob_tcp_keepalive_intvl": max(1, round(patience_s / 2 / _PROBES)),
            "oob_tcp_keepalive_probes": _PROBES,
        }
        if self.job.launch_agent:
            mca["plm_ssh_agent"] = self.job.launch_agent
        if self.job.network:
            mca["prte_if_include"] = self.job.network
        words = ["--host", ",".join(map(str, self.left))]
        words += [word for name, value in mca.items() for word in ("--prtemca", name, str(value))]
        words += ["--mca", "btl_tcp_if_include", self.job.network] if self.job.network else []
        for name in sorted(env):
            words += ["-x", name] if name.startswith(_HANDED_ON) else []
        return words

    def reach(self, pair: WatchedWorker) -> WatchedWorker:
        name = self._names.get(pair.node)
        if name is None or pair.node == this_node():
            return pair
        worker, watcher = (RemoteProcess(p.pid, p.started, name, self._agent) for p in (pair.worker, pair.watcher))
        return WatchedWorker(worker, watcher, pair.node)

    def end(
        self, processes: Sequence[subprocess.Popen[bytes]], pairs: Sequence[WatchedWorker], forked_by: int | None
    ) -> None:
        """See :meth:`Fleet.end`; on hosts that do not answer, it is left to Open MPI."""
        local_pairs = [pair for pair in pairs if pair.node == this_node()]
        if any(process.poll() is None for process in processes):
            kills = self._kills(pair for pair in pairs if pair not in local_pairs)
            self._agent.request({name: "; ".join(words) for name, words in kills.items()}, _END_S)
        super().end(processes, local_pairs, forked_by)

    def _kills(self, pairs: Iterable[WatchedWorker]) -> dict[str, list[str]]:
        """Return, by host, the commands that kill these processes there."""
        kills: dict[str, list[str]] = {}
        for pair in pairs:
            if pair.node in self._names:
                ends = (kill_command(process, signal.SIGKILL) for process in (pair.watcher, pair.worker))
                kills.setdefault(self._names[pair.node], []).extend(ends)
        return kills

    def close(self) -> None:
        """Kill commands that are still running on other hosts."""
        self._agent.close()


def _remove_daemon_folder(mpirun: int) -> str:
    """Return the command that removes the session folder of mpirun's daemon: one that is killed, or cannot begin, leaves it.

    A file in it names the mpirun that the daemon belongs to. The folder of a daemon that ended before it wrote such a file,
    as on a full disk, is known by the PID of the daemon, after which it is named.
    """
    name = this_node().partition(".")[0]
    is_ours = f'ls "$folder"/pmix.*.tool.prterun-{shlex.quote(name)}*-{mpirun}@0'
    has_begun_or_lives = 'ls "$folder"/pmix.*.tool.* || kill -0 "${folder##*.}"'
    is_left = f"{{ {is_ours} || ! {{ {has_begun_or_lives}; }}; }} > /dev/null 2>&1"
    return f'for folder in "${{TMPDIR:-/tmp}}"/prted.*; do test -O "$folder" && {is_left} && rm -rf "$folder"; done'


def _is_here(name: str) -> bool:
    """Return whether a name is that of this machine, which is reached without an agent."""
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as probe:
            probe.bind((address, 0))  # addresses of other machines cannot be bound
    except OSError:
        return False
    return True


def _node(answer: CommandResult) -> str:
    """Return the node name that a host reported, or ""."""
    lines = answer.output.splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{_MARK} ")), "")
