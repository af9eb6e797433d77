"""Processes side by side, each at one call at a time; one that dies is noticed, and so is the call it was at.

:class:`concurrent.futures.ProcessPoolExecutor` gives up as a whole when one of its processes dies, and cannot say which
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
"""How long a process that was told to end may take to clean up, before it is killed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call.

    Args:
        worker: Whose call it was.
        key: Of the call.
        value: What it returned, None if it did not.
        error: What it raised, None if nothing.
        ended: How the process ended that was at it, "" if it did not end: a signal's name, or an exit status.
    """

    worker: Worker
    key: Any
    value: Any = None
    error: BaseException | None = None
    ended: str = ""


class Worker:
    """One of the processes; when it dies, another takes its place.

    Args:
        context: Starts processes.
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
        """Return where answers come, None if it is at nothing."""
        return None if self.key is None else self._connection

    @property
    def pid(self) -> int | None:
        """Return that of its process, None if there is none."""
        return None if self._process is None else self._process.pid

    def give(self, key: Any, limit_s: float | None, function: Callable[..., Any], *arguments: Any) -> None:
        """Let it call ``function``, which must be importable, as must be what it gets and returns.

        Args:
            key: Stands in the answer; not None.
            limit_s: It is killed when it has not answered so long after; None: never.
            function: To be called.
            arguments: Of the call.
        """
        assert key is not None
        assert self.key is None
        if self._process is None:
            self._start()
        assert self._connection is not None
        self.key, self.limit_s = key, limit_s
        self.deadline_s = float("inf") if limit_s is None else time.monotonic() + limit_s
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died idle: that is the answer, then
            self._connection.send((function, arguments))

    def _start(self) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs,))
        process.start()  # takes seconds, the first time
        theirs.close()  # or its death would not end the pipe
        # Not before: who is told to stop meanwhile has no process to wait for, and what was started finds its pipe closed.
        self._connection, self._process = mine, process

    def answer(self) -> Answer:
        """Return what came; blocks until something does."""
        assert self._connection is not None
        key = self.key
        try:
            value, error = self._connection.recv()
        except (EOFError, OSError):  # its end of the pipe went with it, maybe in the middle of an answer
            return Answer(self, key, ended=self.end())
        self.key = None
        return Answer(self, key, value, error)

    def late(self) -> Answer:
        """Kill it, because it has not answered in time."""
        assert self._process is not None
        key = self.key
        self._process.kill()
        self.end()
        return Answer(self, key, ended=f"killed because it had not answered for {self.limit_s:g} s")

    def stop(self) -> None:
        """Tell the process to end, whatever it is at."""
        if self._process is None or self._connection is None:
            return
        if self.key is None:
            self._connection.close()
        else:
            self._process.terminate()

    def end(self) -> str:
        """Wait until the process has ended, and return how it did; one that does not is killed."""
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


class Workers:
    """Processes that carry out trials, each with one thread of torch; started when they are first needed.

    Args:
        count: How many; None: as many as there are cores.
        preload: Modules that are imported once, before the processes are forked off.

    Raises:
        ConfigError: if there are none.
    """

    def __init__(self, count: int | None = None, preload: Sequence[str] = ()) -> None:
        if count is not None and count < 1:
            raise ConfigError(f"there must be at least 1 process, got {count}")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *preload])
        count = len(os.sched_getaffinity(0)) if count is None else count
        self._workers = [Worker(context) for _ in range(count)]
        atexit.register(self.close)  # or the interpreter would wait for processes that wait for it

    def __enter__(self) -> Workers:
        """Return these; they end with the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, and what they are at; when they are given something again, others are started."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.end()

    def free(self) -> list[Worker]:
        """Return those that can be given something."""
        return [worker for worker in self._workers if worker.key is None]

    def wait(self) -> list[Answer]:
        """Return what came since the last time, at least one answer, in no order; nothing if nobody is at anything."""
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
        """Return the rows that ``run`` gives for each of ``values``, in their order.

        Raises:
            JobError: if a process dies of it; and whatever ``run`` raises.
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
                            f"a process of the study died ({answer.ended}); start it again, it goes on where it was"
                        )
                    if answer.error is not None:
                        raise answer.error
                    found[answer.key] = answer.value
        except BaseException:
            self.close()  # nobody would take what the others find
            raise
        return [row for number in sorted(found) for row in found[number]]


# ---------------------------------------------------------------------------------------------
# In such a process


class _Terminated(BaseException):
    """SIGTERM came. No call catches it, or it would be taken for something that the call raised."""


def _terminated(*_: object) -> NoReturn:
    raise _Terminated


def _work(connection: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked for the study is told that it was stopped, by its parent
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
    atexit._run_exitfuncs()  # nobody else would, in such a process: what calls have left open is closed, or removed
    if was_terminated:
        os.kill(os.getpid(), signal.SIGTERM)


def _called(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps((function(*arguments), None))
    except (Exception, SystemExit) as error:
        error.add_note(f"in a process of the study:\n{traceback.format_exc()}")
        return pickle.dumps((None, _portable(error)))


def _portable(error: BaseException) -> BaseException:
    """Return the error, or one that says the same, if it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """End when the study is killed: nobody would take what this process finds."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
