"""The ``Work`` handle of a collective that may still be in progress."""

from __future__ import annotations

import datetime
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from holdfast.base.torch_private import begin_event

if TYPE_CHECKING:
    from holdfast.distributed.staging import Staging


_EVENTS = {"recv from any rank": "recvAnySource"}
"""Events of torch's profiler that have another name than the collective."""


_CHAINING = tuple(
    f"torch.distributed.algorithms.ddp_comm_hooks.{each}" for each in ("powerSGD_hook", "quantization_hooks")
)
"""Hooks whose callbacks make collectives: at once, in the thread of the backward pass, as with NCCL, these are in one order."""
COMPLETES_FUTURES = "holdfast-dist-watch"
"""Name of the thread that completes futures, for which a callback in it would wait in vain."""


class PendingWork(Work):
    """A collective that the communication thread runs, or has run.

    Args:
        result: Value of the work's future: the tensors that the collective writes.
        what: Name of the collective, for messages.
        timeout_s: Default timeout of :meth:`wait`.
        give_up: Called on timeout.
        deliver: Copies the result into the caller's tensors in :meth:`wait`; a reader of the future uses it in place.
        staging: Of tensors on a device: what uses them next waits there for the results.
    """

    def __init__(
        self,
        result: Any,
        what: str,
        timeout_s: float,
        give_up: Callable[[PendingWork], None],
        deliver: Callable[[], None] | None = None,
        staging: Staging | None = None,
    ) -> None:
        super().__init__()
        self._deliver = deliver
        self._staging = staging
        self._give_up = give_up
        self._result = result
        self._what = what
        self.timeout_s = timeout_s
        self._done = threading.Event()
        self._end_event: Callable[[], None] | None = None
        self._error: Exception | None = None
        self._inner: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self._source = -1
        self._waiting = 0
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    # -- for the communication thread

    @property
    def is_awaited(self) -> bool:
        """Whether a thread is in :meth:`wait`."""
        return self._waiting > 0

    def answer_in(self, answers: queue.SimpleQueue[Callable[[], None]]) -> None:
        """Let the thread that serves ``answers`` complete the future, instead of the one that completes the work."""
        self._answers = answers

    def complete(self, source: int = -1) -> None:
        """Mark the work as successful; ``source`` is the rank that a message came from."""
        self._source = source
        self._end()

    def fail(self, error: Exception) -> None:
        """Mark the work as failed."""
        self._error = error
        self._end()

    def profile(self, inputs: Sequence[torch.Tensor]) -> None:
        """Let torch's profiler show this work from now until its end, on the names that torch's own backends use."""
        name = _EVENTS.get(self._what) or self._what.partition("(")[0].partition(" ")[0]
        self._end_event = begin_event(f"holdfast:{name}", inputs)

    def _end(self) -> None:
        if self._end_event is not None:
            self._end_event()
        with self._lock:
            self._done.set()
            inner = self._inner
        if inner is not None:
            self._answers.put(lambda: inner.set_result(None))

    # -- for torch

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the collective has completed, in host memory; the caller's stream waits for what is on a device.

        Raises:
            RanksLost: if ranks that it needs have failed.
            RuntimeError: if it takes longer than ``timeout`` (default: that of the group).
        """
        limit_s = timeout.total_seconds() if timeout else self.timeout_s
        if not self._ends_within(limit_s):
            self._give_up(self)
            raise RuntimeError(
                f"{self._what}: Timed out after {limit_s:g} s: not every rank of its group has called it, or not in the"
                " same order as the collectives of other groups; the group is unusable from now on"
            )
        if self._error is not None:
            raise self._error
        if self._deliver is not None:
            self._deliver()
        self._arrive()
        return True

    def _ends_within(self, limit_s: float) -> bool:
        with self._lock:
            self._waiting += 1
        try:
            return self._done.wait(limit_s)
        finally:
            with self._lock:
                self._waiting -= 1

    def _arrive(self) -> None:
        if self._staging is not None and self._error is None:
            self._staging.arrive()

    def synchronize(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, successfully or not; if so, the caller's stream waits for the results."""
        if not self._done.is_set():
            return False
        self._arrive()
        return True

    def is_success(self) -> bool:
        """Return whether it has ended successfully."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error, or None."""
        return self._error

    def result(self) -> Any:
        """Return the tensors that the collective writes."""
        return self._result

    def source_rank(self) -> int:
        """Return the group rank that a message came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors: a complete one, if its reader is a callback, or makes collectives in callbacks."""
        caller = sys._getframe().f_back  # None in a thread of C++, as for the backward pass of a GPU
        by_hook = caller is not None and caller.f_globals.get("__name__") in _CHAINING
        in_callback = threading.current_thread().name == COMPLETES_FUTURES
        if (by_hook or in_callback) and not self._ends_within(self.timeout_s):
            self._give_up(self)
        with self._lock:
            if self._future is None:
                # With its devices, a future makes the streams of those that read it wait for the stream that answers.
                self._inner = torch.futures.Future(devices=[] if self._staging is None else self._staging.devices)
                self._future = self._inner.then(self._answer)
                if self._done.is_set():
                    self._inner.set_result(None)  # no other callback is attached yet
            return self._future

    def _answer(self, _: torch.futures.Future[Any]) -> Any:
        # Raised here instead of set: C++ would take a set exception for a value, and crash.
        if self._error is not None:
            raise self._error
        self._arrive()
        return self._result
