"""One start of the job: mpirun, its workers, and the files that they write."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.base.system_errors import error_of_a_new_file, is_limit
from holdfast.config import RESPAWNS, Settings
from holdfast.engine.start_rank import CHOSEN_ALONE, LOOPBACK
from holdfast.launch.fleet.base import Fleet
from holdfast.launch.hash_seed import HASH_SEED, hash_seed
from holdfast.launch.health.deaths import KilledWorkers
from holdfast.launch.health.stacks import stack_path
from holdfast.launch.health.starting import StartupStatus
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.supervise.fork_protocol import FORK_SERVER
from holdfast.launch.supervise.fork_server import ForkServer
from holdfast.launch.supervise.gpus import for_workers
from holdfast.launch.supervise.processes import Process, WatchedWorker, end_without_files, pair_path, start
from holdfast.launch.supervise.slots import Slots
from holdfast.launch.supervise.tail import LineTail, RecordTail
from holdfast.launch.supervise.worker_context import ALL_STOP, GRACE_S, LAUNCHER, LOG_DIR
from holdfast.records.beacon import UNCONNECTED, Beacon, BeaconPosition
from holdfast.records.paths import beacon_path, records_path
from holdfast.records.types import Record, WorkerEnded
from holdfast.summary.event_lines import cause_of_death

_MEMORY_VARIABLES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_directory")
_SESSION_VARIABLE = "PRTE_MCA_prte_local_tmpdir_base"
"""Sets where mpirun creates its session directory on this machine, which remains if mpirun is killed."""
_TELL_S = 0.5
"""How long a watcher may take to record that its worker has ended, before it is killed with the job."""
_NESTED = ("PMIX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PRTE_")
"""Variables from which our mpirun would conclude that it is a worker of another mpirun."""


class JobAttempt:
    """A started job. The constructor starts it as its last action; :meth:`end` leaves no process behind.

    Raises:
        OSError: if the system cannot start a process; none is left behind.

    Args:
        fleet: The machines.
        settings: Settings of this start: ``workers``, ``ranks``, ``resume`` and ``faults`` may differ from the job's.
        ranks: Ranks that this start begins with.
        paths: Directories of the run.
        fork_server: Forks the workers of this machine; None: each starts and imports torch on its own.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        ranks: Sequence[int],
        paths: RunPaths,
        fork_server: ForkServer | None = None,
    ) -> None:
        job = fleet.job
        self._run_dir = run_dir = paths.run_dir
        self._killed = KilledWorkers(run_dir, fleet.deaths)
        self._fleet = fleet
        self.fork_server = fork_server
        self.processes = tuple(ranks[:1] if job.is_virtual else ranks)
        for rank in ranks:
            for stale in (beacon_path(run_dir, rank), pair_path(run_dir, rank), stack_path(run_dir, rank)):
                stale.unlink(missing_ok=True)
        self._log = paths.mpirun_log
        self._locks = paths.locks
        self._env = _environment(settings, paths, fleet.grace_s) | {ALL_STOP: str(int(fleet.is_needed))}
        if job.nnodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            self._env[CHOSEN_ALONE] = f"{self._env.get('MASTER_ADDR', LOOPBACK)}:{self._env['MASTER_PORT']}"
        if fork_server is not None:
            self._env |= fork_server.variables
        self._env |= for_workers(job.gpus, one_process=job.is_virtual, elsewhere=bool(job.hosts))
        self._slots = Slots(ranks, job.settings.workers + job.settings.spares)
        if job.max_respawns:
            self._env[RESPAWNS] = str(job.max_respawns)
        self._env |= fleet.variables(settings.origin_s)
        worker = [sys.executable, "-m", "holdfast.launch.supervise.starter", *job.words]
        self._command = [*job.fabric.launch_command(len(ranks), fleet.mpirun_words(self._env)), *worker]
        self._started: list[subprocess.Popen[bytes]] = []
        self._watchers: dict[int, subprocess.Popen[bytes]] = {}
        self._pairs: dict[int, WatchedWorker] = {}
        try:
            self._start_all(ranks, each=job.fabric.starts_each)
        except OSError:
            self.end()
            raise
        self._mpirun = self._started[0] if job.fabric.has_parent_process else None

    def _start_all(self, ranks: Iterable[int], *, each: bool) -> None:
        if each:
            for rank in ranks:
                self.add(rank)
        else:
            self._started.append(start(self._command, self._env, self._log, self._locks))

    def add(self, rank: int) -> None:
        """Start a single worker, if the fabric starts each; a worker that is started later is a newcomer.

        Raises:
            OSError: if the system cannot start a process; nothing has changed then.
        """
        self._forget_ended()
        env = self._env | {"HOLDFAST_RANK": str(rank)} | self._slots.variables(rank, self.is_ended)
        try:
            self._watchers[rank] = start(self._command, env, self._log, self._locks)
        except OSError:
            self._slots.release(rank)
            raise
        self._started.append(self._watchers[rank])
        if rank not in self.processes:
            self.processes = (*self.processes, rank)

    def _forget_ended(self) -> None:
        """Drop what was started for workers that are known to have ended without it; their number grows with a long run."""
        for rank, started in list(self._watchers.items()):
            if started.poll() is not None and self._has_ended_pair(rank):
                del self._watchers[rank]
                self._started.remove(started)

    def _has_ended_pair(self, rank: int) -> bool:
        pair = self._pair_here(rank)
        return pair is not None and not (pair.worker.is_alive() and pair.watcher.is_alive())

    def is_ended(self, rank: int) -> bool:
        """Return whether a worker on this machine has ended, or its watcher, with which the worker ends."""
        started = self._watchers.get(rank)
        return (started is not None and started.poll() is not None) or self._has_ended_pair(rank)

    def is_watched(self, rank: int) -> bool:
        """Return whether the watcher of a worker exists."""
        pair = self.pair(rank)
        return pair is not None and pair.watcher.is_alive()

    def untold_end(self, rank: int, exit_code: int) -> WorkerEnded:
        """Kill the watcher of an ended worker, so that MPI notifies the others; return the record that it did not write."""
        pair, position = self.pair(rank), self.position(rank)
        if pair is not None:
            pair.watcher.send(signal.SIGKILL)
        step, pid = -1 if position is None else position.step, -1 if pair is None else pair.worker.pid
        return WorkerEnded(rank=rank, step=step, exit_code=exit_code, pid=pid)

    def is_connected(self, rank: int) -> bool:
        """Return whether a worker of this launcher is connected to the other workers."""
        position = self.position(rank)
        return position is not None and position.phase not in UNCONNECTED

    def watch_connected(self, ranks: Iterable[int]) -> None:
        """From now on report it at once if one of these workers, which are connected, is killed."""
        for rank in ranks:
            if (pair := self._pair_here(rank)) is not None:
                self._killed.watch(rank, pair.worker)

    def sign(self, rank: int, position: BeaconPosition | None) -> StartupStatus:
        """Return what is observed of a worker that may not have begun yet; ``position`` is its current position."""
        pair, processes = self._pair_here(rank), []
        if pair is not None:
            processes = [pair.worker, *([pair.watcher] if position is None else [])]
        elif rank in self._watchers and self.pair(rank) is None:
            processes = _living(self._watchers[rank])
        is_stopped = any(process.is_stopped() for process in processes)
        if pair is None and self.fork_server is not None and self.fork_server.is_importing():
            pulse = time.monotonic_ns()
            return StartupStatus("launch", pulse=pulse, is_stopped=is_stopped, doing="importing torch")
        if position is None:
            return StartupStatus(is_stopped=is_stopped)
        return StartupStatus(
            position.phase, position.pulse, position.beats, position.waits, is_stopped, doing=position.doing
        )

    def fence(self, rank: int) -> bool:
        """Kill a worker, and resume its watcher, which records the death; return whether the worker's process is known."""
        pair = self.pair(rank)
        if pair is not None:
            pair.watcher.send(signal.SIGCONT)
            pair.worker.send(signal.SIGKILL)
            return True
        if rank in self._watchers:
            self._watchers[rank].kill()
            return True
        return False

    def disown(self, ranks: Iterable[int]) -> None:
        """Have the watchers of workers on hosts out of reach end them: each looks for its file in the run directory."""
        for rank in ranks:
            pair_path(self._run_dir, rank).unlink(missing_ok=True)
            self._pairs.pop(rank, None)

    def crash(self) -> str:
        """Return which signal killed mpirun, or ""."""
        code = None if self._mpirun is None else self._mpirun.poll()
        return "" if code is None or code >= 0 else f"mpirun was {cause_of_death(code)}"

    def is_mpirun_stopped(self) -> bool:
        """Return whether mpirun is stopped by a signal."""
        return self._mpirun is not None and any(process.is_stopped() for process in _living(self._mpirun))

    def is_running(self) -> bool:
        """Return whether any process started here, mpirun or worker, is running."""
        return any(process.poll() is None for process in self._started)

    def pair(self, rank: int) -> WatchedWorker | None:
        """Return the processes of ``rank``, or None if they have not started yet.

        They are remembered: programs that clean up temporary directories may remove the file, which is not written again.
        """
        pair = WatchedWorker.read(pair_path(self._run_dir, rank)) or self._pairs.get(rank)
        if pair is None:
            return None
        self._pairs[rank] = pair
        return self._fleet.reach(pair)

    def _pair_here(self, rank: int) -> WatchedWorker | None:
        """Return the processes of ``rank`` if they are on this machine."""
        pair = self.pair(rank)
        return pair if pair is not None and pair.is_here else None

    def pairs(self) -> dict[int, WatchedWorker]:
        """Return the processes of all workers that have started, by rank."""
        return {rank: pair for rank in self.processes if (pair := self.pair(rank)) is not None}

    def pids(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the PIDs of those ``ranks`` that have started."""
        return {rank: pair.worker.pid for rank in ranks if (pair := self.pair(rank)) is not None}

    def send(self, rank: int, number: signal.Signals) -> bool:
        """Send a signal to worker ``rank``; return whether the worker existed."""
        pair = self.pair(rank)
        return pair is not None and pair.worker.send(number)

    def position(self, rank: int) -> BeaconPosition | None:
        """Return the position of ``rank``, or its last position if it has died."""
        return Beacon.read(beacon_path(self._run_dir, rank))

    def wait(self, timeout_s: float) -> None:
        """Wait until every process started here has ended, for at most ``timeout_s``."""
        ends_s = time.monotonic() + timeout_s
        for process in self._started:
            try:
                process.wait(max(0.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    @property
    def started(self) -> list[int]:
        """PIDs of the processes that were started here: mpirun, if there is one."""
        return [process.pid for process in self._started]

    def end(self) -> None:
        """Kill every process that still runs."""
        self._killed.close()
        is_blind = error_of_a_new_file() is not None  # it cannot look at a process, and would take each for ended
        try:
            if not is_blind:
                self._end_all()
        except OSError as error:
            if not is_limit(error):
                raise
            is_blind = True
        if is_blind:
            end_without_files(self._started)

    def _end_all(self) -> None:
        self._hear_watchers()
        server = None if self.fork_server is None else self.fork_server.process
        forked_by = server.pid if server is not None and server.poll() is None else None
        self._fleet.end(self._started, list(self.pairs().values()), forked_by)

    def _hear_watchers(self) -> None:
        """Wait briefly for what watchers are about to record: survivors can know of a death, and fail, before they do."""
        ends_s = time.monotonic() + _TELL_S
        while time.monotonic() < ends_s and any(map(self._is_untold, self.processes)):
            time.sleep(0.002)

    def _is_untold(self, rank: int) -> bool:
        pair = self._pair_here(rank)
        if pair is None or not pair.watcher.is_alive() or not pair.worker.is_ending():
            return False
        path = records_path(self._run_dir, f"watch-{rank}")
        return not path.exists() or WorkerEnded.__name__.encode() not in path.read_bytes()


def _living(started: subprocess.Popen[bytes]) -> list[Process]:
    """Return the started process, or nothing if it has ended."""
    process = Process.of(started.pid)
    return [] if process is None else [process]


@dataclass(slots=True)
class _WorkerFiles:
    """What one worker writes: its output, its records, and those of its watcher; None if another process writes that."""

    log: LineTail | None = None
    own: RecordTail | None = None
    watch: RecordTail | None = None
    reads_left: int = -1
    """Reads until its files are closed; below 0 while it lives."""

    def close(self) -> None:
        """Close the files; what is added is still read."""
        for file in (self.log, self.own, self.watch):
            if file is not None:
                file.close()


_LAST_READS = 100
"""Reads of the files of a worker that has ended: processes that it has started may print for a while longer."""


class AttemptFiles:
    """Output and records that the workers of a run have written since the last call, over all starts of the job.

    Files of workers that have ended are closed after a while, and their output is read once more at the end.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._run_dir = paths.run_dir
        self._log_dir = paths.log_dir
        self._far = paths.is_shared
        self._warned: set[str] = set()
        self._unreadable: dict[str, str] = {}
        self._open: dict[int, _WorkerFiles] = {}
        self._closed: dict[int, _WorkerFiles] = {}

    def follow(self, workers: Iterable[int], processes: Iterable[int]) -> None:
        """Read the files of these workers and processes, too."""
        for rank in processes:
            files = self._files_of(rank)
            files.log = files.log or LineTail(self._log_dir / f"rank-{rank}.log", far=self._far)
            files.watch = files.watch or self._records_of(f"watch-{rank}")
        for rank in workers:
            files = self._files_of(rank)
            files.own = files.own or self._records_of(str(rank))

    def _files_of(self, rank: int) -> _WorkerFiles:
        """Return the files of a worker that starts; in a restart it may have the rank of one that has ended."""
        files = self._closed.pop(rank, None) or self._open.get(rank) or _WorkerFiles()
        files.reads_left = -1
        self._open[rank] = files
        return files

    def _records_of(self, writer: str) -> RecordTail:
        return RecordTail(records_path(self._run_dir, writer), far=self._far)

    def _closed_again(self) -> Iterator[tuple[int, _WorkerFiles]]:
        """Yield the closed files, and close each set before the next is read: there may be thousands."""
        for rank, files in self._closed.items():
            yield rank, files
            files.close()

    def _record_tails(self) -> list[RecordTail]:
        """Return the open files of records, those of watchers first."""
        tails = [files.watch for files in self._open.values()] + [files.own for files in self._open.values()]
        return [tail for tail in tails if tail is not None]

    def records(self, *, last: bool = False) -> list[Record]:
        """Return new records; the record of a worker's end comes after every record that the worker wrote.

        ``last`` includes those of workers whose files are closed.
        """
        new = [record for tail in self._record_tails() for record in tail.records()]
        for record in new:
            if isinstance(record, WorkerEnded) and self._is_of_this_start(record):
                self.end(record.rank)
        self._close_ended()
        if last:
            for _, files in self._closed_again():
                new += [record for tail in (files.watch, files.own) if tail is not None for record in tail.records()]
        return sorted(new, key=lambda record: (isinstance(record, WorkerEnded), record.t_s))

    def _is_of_this_start(self, ended: WorkerEnded) -> bool:
        """Return whether it is not the late record of an earlier worker with this rank, which ran on another machine."""
        pair = WatchedWorker.read(pair_path(self._run_dir, ended.rank))
        return pair is not None and pair.worker.pid == ended.pid

    def end(self, rank: int) -> None:
        """Note that a worker has ended."""
        if rank in self._open and self._open[rank].reads_left < 0:
            self._open[rank].reads_left = _LAST_READS

    def _close_ended(self) -> None:
        """Close the files of workers that ended a while ago: a long run would have too many of them open."""
        over = [rank for rank, files in self._open.items() if files.reads_left == 0]
        for files in self._open.values():
            files.reads_left -= files.reads_left > 0
        for rank in over:
            self._closed[rank] = self._open.pop(rank)
            self._closed[rank].close()

    def warnings(self) -> list[str]:
        """Return one warning for each file that cannot be read, or has lines that are not records; each file is named once."""
        what = "contains a line that is not a record; such lines are skipped"
        lines = {tail.path: f"{tail.path} {what}" for tail in self._record_tails() if tail.skipped} | self._unreadable
        new = [line for path, line in lines.items() if path not in self._warned]
        self._warned.update(lines)
        return new

    def output(self, *, last: bool = False) -> list[tuple[int, str]]:
        """Return new output lines with the rank that printed them; ``last`` includes incomplete lines."""
        lines: list[tuple[int, bytes]] = []
        for rank, files in itertools.chain(self._open.items(), self._closed_again() if last else ()):
            if files.log is not None:
                lines += [(rank, line) for line in self._lines_of(files.log)]
                if last and (rest := files.log.rest()):
                    lines.append((rank, rest))
        return [(rank, line.decode(errors="replace")) for rank, line in lines]

    def _lines_of(self, log: LineTail) -> list[bytes]:
        """Return the new lines of a worker's output, which is only shown: the job goes on where it cannot be read."""
        try:
            return log.read()
        except OSError as error:
            if is_limit(error):
                raise
            self._unreadable[log.path] = f"cannot read {log.path}: {error.strerror}; output in it is not shown"
            return []

    def close(self) -> None:
        """Close the files."""
        for files in (*self._open.values(), *self._closed.values()):
            files.close()


# Gradients are freed and reallocated in every step. If glibc returned their pages to the system in between, each page
# would cost a page fault; 32 MiB is the largest value that glibc accepts for the second variable.
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def common_environment(paths: RunPaths, settings: Settings) -> dict[str, str]:
    """Return the part of the workers' environment that is the same for all starts of a job."""
    setting_names = {f"HOLDFAST_{field.name.upper()}" for field in dataclasses.fields(Settings)} | {FORK_SERVER}
    env = {
        name: value for name, value in os.environ.items() if name not in setting_names and not name.startswith(_NESTED)
    }
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; a count derived from the workers would change bits
    env[HASH_SEED] = hash_seed(settings)
    if not any(name in env for name in _ALLOCATOR):
        env |= _ALLOCATOR
    if paths.memory_dir is not None:
        for name in _MEMORY_VARIABLES:
            env.setdefault(name, str(paths.memory_dir))
    if paths.own:  # not the run directory, which machines may share
        env[_SESSION_VARIABLE] = str(paths.own[0].path)
    return env | {LOG_DIR: str(paths.log_dir), LAUNCHER: str(Process.of(os.getpid()))}


def _environment(settings: Settings, paths: RunPaths, grace_s: float) -> dict[str, str]:
    env = common_environment(paths, settings)
    env.setdefault("MASTER_PORT", str(_free_port()))
    return env | settings.to_env() | {GRACE_S: f"{grace_s:g}"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
