"""A warm group of processes that trains many times from the same epoch without being restarted.

Each process is one rank. It keeps its state in memory and in an HDF5 file of its own. If one process dies, raises or
does not answer, the group ends; the next order restarts it from the files.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from holdfast.errors import InternalError, JobError
from holdfast_lab.studies.soft_errors.setup import SoftErrorSetup
from holdfast_lab.studies.soft_errors.workers.process import Disturbance
from holdfast_lab.studies.soft_errors.workers.rank import serve

_BEGIN_S = 3600.0
"""Time limit in seconds until a group is warm; a large network trains for some epochs on slow cores."""
_LEAST_S, _TIMES = 60.0, 20.0
"""A trial may take ``_TIMES`` times as long as the undisturbed run, and at least ``_LEAST_S`` seconds."""
_END_S = 5.0


class GroupFailed(JobError):
    """A process of a group raised, died or did not answer in time."""


class TrainingGroup:
    """The processes of one training.

    Args:
        setup: The training.
    """

    def __init__(self, setup: SoftErrorSetup) -> None:
        self.setup = setup
        self.undisturbed: list[dict[str, Any]] = []
        """Results of the undisturbed run, by rank; empty before that run."""
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-soft-")
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        # multiprocessing sends its children SIGTERM at exit, which these ignore; this handler runs before.
        Finalize(self, _kill, (self._processes,), exitpriority=1)
        self._made = 0
        self._limit_s = _BEGIN_S

    @property
    def pids(self) -> list[int | None]:
        """Return the process ids by rank; empty if no group is running."""
        return [process.pid for process in self._processes]

    def begin(self) -> None:
        """Start the processes and wait until they are warm, unless they already run.

        Raises:
            GroupFailed: if they fail to start, or the undisturbed training is not finite.
            InternalError: if a restarted group does not compute the same bits as before.
        """
        if self._processes:
            return
        self._made += 1
        folder = Path(self._folder.name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        for rank in range(self.setup.real):
            ours, theirs = context.Pipe()
            arguments = (theirs, self.setup, rank, folder, folder / f"store-{self._made}", _BEGIN_S)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # else the pipe would stay open after the child's death
            self._processes.append(process)
            self._connections.append(ours)
        begun_s = time.monotonic()
        found = self._answers(_BEGIN_S)
        self._limit_s = max(_LEAST_S, _TIMES * (time.monotonic() - begun_s))
        if self.undisturbed and [one["ended_with"] for one in found] != [o["ended_with"] for o in self.undisturbed]:
            self.end()
            raise InternalError(f"a group restarted from its files does not compute the same bits: {self.setup}")
        if not all(one["finite"] for one in found):
            self.end()
            raise GroupFailed(f"a loss or a weight of the undisturbed training is not finite: {self.setup}")
        self.undisturbed = found

    def ask(self, orders: Sequence[Disturbance | None]) -> list[dict[str, Any]]:
        """Resume the training from the restart epoch, and return the results by rank.

        Args:
            orders: The disturbance of each rank.

        Raises:
            GroupFailed: if a process failed; the group is ended, and the next order restarts it.
            InternalError: if the trial is invalid, which is an error of the study and no outcome.
        """
        self.begin()
        try:
            each = len(orders) // len(self._connections)
            for number, connection in enumerate(self._connections):
                connection.send(orders[number * each : (number + 1) * each])
        except (BrokenPipeError, ConnectionResetError) as error:  # a process died while idle
            ended = self._ended()
            self.end()
            raise GroupFailed(f"a process of the group died: {ended}") from error
        return self._answers(self._limit_s)

    def end(self) -> None:
        """End the processes; their files are kept until this object is closed."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        _kill(self._processes)

    def close(self) -> None:
        """End the processes and remove their files."""
        self.end()
        self._folder.cleanup()

    def _answers(self, limit_s: float) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + limit_s
        found: dict[int, list[dict[str, Any]]] = {}
        while len(found) < len(self._connections):
            missing = {c: rank for rank, c in enumerate(self._connections) if rank not in found}
            come = wait(list(missing), max(0.0, deadline_s - time.monotonic()))
            why = "" if come else f"rank {min(missing.values())} did not answer within {limit_s:g} s"
            for connection in come:
                rank = missing[connection]  # type: ignore[index]
                try:
                    found[rank] = self._connections[rank].recv()
                    why = why or found[rank][0].get("error", "")
                except (EOFError, OSError):
                    why = why or f"rank {rank} died: {self._ended()}"
            if why:
                self.end()
                is_ours = any(answer[0].get("is_ours") for answer in found.values())
                error = InternalError(why) if is_ours else GroupFailed(why)
                for answer in found.values():
                    if "trace" in answer[0]:
                        error.add_note(f"in a process of the group:\n{answer[0]['trace']}")
                raise error
        return [answer for rank in range(len(self._connections)) for answer in found[rank]]

    def _ended(self) -> str:
        for process in self._processes:
            process.join(0.2)
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        return ", ".join(f"rank {rank} with exit code {code}" for rank, code in codes.items() if code is not None)


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_END_S)
    processes.clear()


_kept: list[TrainingGroup] = []
"""The warm group of this process, at most one."""


def group_for(setup: SoftErrorSetup) -> TrainingGroup:
    """Return the warm group of a setup; a warm group of another setup is ended first."""
    if _kept and _kept[0].setup != setup:
        _kept.pop().close()
    if not _kept:
        _kept.append(TrainingGroup(setup))
    _kept[0].begin()
    return _kept[0]
