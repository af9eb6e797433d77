"""SIGTERM, the notice that this process must leave: kept until a handler is installed.

Outside of training there is no handler. SIGTERM would kill the worker, and a preemption notice that arrives while a script loads
its data would turn into a failure. Forked child processes keep the default: they die of SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class _Remembered:
    """Keeps a SIGTERM until a handler is installed.

    Args:
        is_idle: Returns whether the process may exit immediately, with nothing to clean up. Called until the first handler is installed.
    """

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self.came = False
        self.is_idle = is_idle

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_idle():
            _end()
        self.came = True


class _Answered:
    """Forwards SIGTERM to a handler."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._answer()


def remember(is_idle: Callable[[], bool]) -> None:
    """Keep each SIGTERM that arrives without a handler until :func:`answered` installs one.

    Args:
        is_idle: Returns whether SIGTERM may still end this process immediately; not called after the first handler was installed.
    """
    signal.signal(signal.SIGTERM, _Remembered(is_idle))


@contextlib.contextmanager
def answered(answer: Callable[[], None]) -> Iterator[None]:
    """Call ``answer`` on SIGTERM, and immediately if one was kept. Main thread only, because Python runs signal handlers there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _Answered(answer))
    if isinstance(before, _Remembered):
        before.is_idle = lambda: False
        if before.came:
            before.came = False
            answer()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def decline() -> None:
    """Restore the default, by which SIGTERM ends this process; it ends immediately if a SIGTERM was kept."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _Remembered):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if handler.came:
            _end()


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _after_fork() -> None:
    if isinstance(signal.getsignal(signal.SIGTERM), (_Remembered, _Answered)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)
