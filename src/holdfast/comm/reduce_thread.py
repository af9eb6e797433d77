"""A thread that makes all-reduces while the thread that owns the communicator computes.

All-reduces still run one at a time and in the same order on every worker: those that are begun early first, then the
others, in the owner's thread. So what :class:`~holdfast.comm.base.Communicator` guarantees is unchanged. An all-reduce
counts as completed only when the owner has waited for it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from holdfast.comm.base import ThreadChange
from holdfast.comm.waiting import waiting
from holdfast.errors import InternalError


class AllReduceThread:
    """Runs what is begun, one after another, until one of them fails; those behind it then fail without being run.

    From the first :meth:`begin` until the last :meth:`finish` or a failure, the communicator belongs to this thread.

    Args:
        comm: The communicator.
    """

    def __init__(self, comm: ThreadChange) -> None:
        self._comm = comm
        self._begun: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._tickets: deque[Future[Any]] = deque()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def num_begun(self) -> int:
        """Number of those that were begun and not waited for."""
        return len(self._tickets)

    def begin(self, act: Callable[[], Any]) -> None:
        """Let the thread run ``act`` after everything that was begun before; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-allreduce", daemon=True)
            self._thread.start()
        if not self._tickets:
            self._comm.change_thread(self._thread)  # before an act is put, which the thread runs at once
        self._tickets.append(Future())
        self._begun.put((act, self._tickets[-1]))

    def finish(self) -> Any:
        """Wait for the oldest that was begun, and return its result, or raise its failure; then nothing is under way."""
        ticket = self._tickets.popleft()
        try:
            with waiting:
                return ticket.result()
        except BaseException:
            if ticket.done():  # else this wait itself was interrupted
                self._forget()
            raise
        finally:
            if not self._tickets:
                self._comm.change_thread(threading.current_thread())

    def close(self) -> None:
        """Let the thread end, after what it is running; nothing else that was begun is run."""
        if self._tickets:
            self._failure = InternalError("the training loop was left before the all-reduce")
        self._begun.put(None)
        self._thread = None

    def _forget(self) -> None:
        """Drop everything behind a failure: the thread does not run it."""
        while self._tickets:
            self._tickets.popleft().exception()
        self._failure = None  # last: those behind have failed with it; it would keep alive what its frames refer to

    def _run(self) -> None:
        waiting.ignore_this_thread()  # the process waits only when its owner does
        while (begun := self._begun.get()) is not None:
            act, ticket = begun
            if self._failure is not None:
                ticket.set_exception(self._failure)
            else:
                self._run_one(act, ticket)
            del begun, act, ticket

    def _run_one(self, act: Callable[[], Any], ticket: Future[Any]) -> None:
        try:
            result = act()
        except BaseException as error:  # raised again in finish()
            self._failure = error
            ticket.set_exception(error)
        else:
            ticket.set_result(result)
