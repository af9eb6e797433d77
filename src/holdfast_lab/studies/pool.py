"""A process pool that survives the death of its processes and reports which call each of them died in.

:class:`concurrent.futures.ProcessPoolExecutor` breaks as a whole when one of its processes dies, and cannot tell which
call killed it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import TracebackType
from typing import Any, NoReturn

import torch

from holdfast.errors import ConfigError, JobError
from holdfast_lab.studies.base import Row

_END_S = 20.0
"""Seconds that a process may take to clean up after SIGTERM, before it is killed."""


@dataclass(frozen=True, slots=True)
class TrialAnswer:
    """The result of a call.

    Args:
        worker: The worker that executed the call.
        key: Key of the call.
        value: Its return value, None if it did not return.
        error: The exception it raised, None if none.
        ended: How the worker's process ended, "" if it is still running: a signal's name, or an exit status.
    """

    worker: PoolWorker
    key: Any
    value: Any = None
    error: BaseException | None = None
    ended: str = ""


class PoolWorker:
    """A worker process; when it dies, the next call starts a new one.

    Args:
        context: The multiprocessing context that starts processes.
    """

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        self._process: ForkServerProcess | None = None
        self._connection: Connection | None = None
        self.key: Any = None
        self.limit_s: float | None = None
        self.deadline_s = float("inf")

    @property
    def connection(self) -> Connection | None:
        """Return the connection that the answer will arrive on, None if the worker is idle."""
        return None if self.key is None else self._connection

    @property
    def pid(self) -> int | None:
        """Return the pid of its process, None without a process."""
        return None if self._process is None else self._process.pid

    def give(self, key: Any, limit_s: float | None, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a call of ``function`` in the worker's process; function, arguments and result must be picklable.

        Args:
            key: Identifies the call in its answer; not None.
            limit_s: The process is killed if it has not answered after so many seconds; None: never.
            function: The function to call.
            arguments: Its arguments.
        """
        assert key is not None
        assert self.key is None
        if self._process is None:
            self._start()
        assert self._connection is not None
        self.key, self.limit_s = key, limit_s
        self.deadline_s = float("inf") if limit_s is None else time.monotonic() + limit_s
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died while idle: answer() reports that
            self._connection.send((function, arguments))

    def _start(self) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs,))
        process.start()  # takes seconds the first time
        theirs.close()  # or the pipe would stay open after the process dies
        # Set last: a stop() during the start must not wait for the process, which then finds its pipe closed and ends.
        self._connection, self._process = mine, process

    def answer(self) -> TrialAnswer:
        """Return the answer; blocks until it arrives."""
        assert self._connection is not None
        key = self.key
        try:
            value, error = self._connection.recv()
        except (EOFError, OSError):  # the process died, possibly while sending the answer
            return TrialAnswer(self, key, ended=self.end())
        self.key = None
        return TrialAnswer(self, key, value, error)

    def late(self) -> TrialAnswer:
        """Kill the process, because it has exceeded its time limit, and return that as the answer."""
        assert self._process is not None
        key = self.key
        self._process.kill()
        self.end()
        return TrialAnswer(self, key, ended=f"killed after {self.limit_s:g} s without an answer")

    def stop(self) -> None:
        """Ask the process to end, even in the middle of a call."""
        if self._process is None or self._connection is None:
            return
        if self.key is None:
            self._connection.close()
        else:
            self._process.terminate()

    def end(self) -> str:
        """Wait until the process ends, kill it if it does not end in time, and return its exit status or signal."""
        if self._process is None or self._connection is None:
            return ""
        self._connection.close()
        self._process.join(_END_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        self._process = self._connection = self.key = None
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


class WorkerPool:
    """A pool of worker processes, each with one torch thread; a process starts with its first call.

    Args:
        count: Number of processes; None: one per core.
        preload: Modules that are imported once, before the processes are forked.

    Raises:
        ConfigError: if ``count`` is below 1.
    """

    def __init__(self, count: int | None = None, preload: Sequence[str] = ()) -> None:
        if count is not None and count < 1:
            raise ConfigError(f"the number of processes must be at least 1, got {count}")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *preload])
        count = len(os.sched_getaffinity(0)) if count is None else count
        self._workers = [PoolWorker(context) for _ in range(count)]
        atexit.register(self.close)  # or interpreter and workers would wait for each other at exit

    def __enter__(self) -> WorkerPool:
        """Return this pool; its processes end with the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and their current calls; a later call starts new processes."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.end()

    def free(self) -> list[PoolWorker]:
        """Return the idle workers."""
        return [worker for worker in self._workers if worker.key is None]

    def wait(self) -> list[TrialAnswer]:
        """Block until there are answers, and return them in no particular order; an empty list if all are idle."""
        busy = {worker.connection: worker for worker in self._workers if worker.connection is not None}
        if not busy:
            return []
        while True:
            first_s = min(worker.deadline_s for worker in busy.values())
            come = wait(list(busy), None if first_s == float("inf") else max(0.0, first_s - time.monotonic()))
            if come:
                return [worker.answer() for connection, worker in busy.items() if connection in come]
            late = [worker for worker in busy.values() if worker.deadline_s <= time.monotonic()]
            if late:
                return [worker.late() for worker in late]

    def rows(self, run: Callable[..., list[Row]], values: Iterable[Any]) -> list[Row]:
        """Return the rows of ``run(value)`` for each of ``values``, in order.

        Raises:
            JobError: if a process dies; and any exception of ``run``.
        """
        calls = deque(enumerate(values))
        found: dict[int, list[Row]] = {}
        try:
            while calls or len(self.free()) < len(self._workers):
                for worker in self.free()[: len(calls)]:
                    number, value = calls.popleft()
                    worker.give(number, None, run, value)
                for answer in self.wait():
                    if answer.ended:
                        raise JobError(
                            f"a process of the study died ({answer.ended}); run the study again to resume it"
                        )
                    if answer.error is not None:
                        raise answer.error
                    found[answer.key] = answer.value
        except BaseException:
            self.close()  # the remaining results would not be collected
            raise
        return [row for number in sorted(found) for row in found[number]]


# -- in a worker process


class _Terminated(BaseException):
    """SIGTERM was received. Derived from BaseException, so that it is not taken for an exception of the call."""


def _terminated(*_: object) -> NoReturn:
    raise _Terminated


def _work(connection: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and reports it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    was_terminated = False
    try:
        signal.signal(signal.SIGTERM, _terminated)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                function, arguments = connection.recv()
                connection.send_bytes(_called(function, arguments))
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        was_terminated = True
    atexit._run_exitfuncs()  # multiprocessing skips atexit handlers in workers; they clean up after the calls
    if was_terminated:
        os.kill(os.getpid(), signal.SIGTERM)


def _called(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps((function(*arguments), None))
    except (Exception, SystemExit) as error:
        error.add_note(f"in a process of the study:\n{traceback.format_exc()}")
        return pickle.dumps((None, _portable(error)))


def _portable(error: BaseException) -> BaseException:
    """Return the error, or a RuntimeError with the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """End this process when the study's process dies, because no one collects its results then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
