"""SIGTERM, the notice that this process is to leave: remembered until somebody can answer it.

Outside of training nobody can: the worker would die of it, and a script that loads its data for a minute would make a
failure of a notice. A process that is forked is none of ours, and dies of SIGTERM as any other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class _Remembered:
    """Takes SIGTERM until somebody answers it.

    Args:
        is_idle: Whether there is nothing that could be left in order; asked as long as nobody has ever answered.
    """

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self.came = False
        self.is_idle = is_idle

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_idle():
            _end()
        self.came = True


class _Answered:
    """Takes SIGTERM as long as somebody answers it."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._answer()


def remember(is_idle: Callable[[], bool]) -> None:
    """From now on, keep a SIGTERM that nobody answers for the first who can.

    Args:
        is_idle: Whether it may end this process at once all the same; not asked any more once somebody has answered.
    """
    signal.signal(signal.SIGTERM, _Remembered(is_idle))


@contextlib.contextmanager
def answered(answer: Callable[[], None]) -> Iterator[None]:
    """Call ``answer`` on SIGTERM, at once if one is remembered; in the main thread only, the only one that can."""
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
    """Let SIGTERM end this process, as it does by itself; at once if one is remembered."""
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
