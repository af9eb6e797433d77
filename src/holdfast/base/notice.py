"""SIGTERM, the notice that this process must leave: kept until a handler is installed.

Before training there is no handler. SIGTERM would kill the worker, and a preemption notice that arrives while a script loads
its data would turn into a failure. Forked child processes keep the default: they die of SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_Handler = signal.Handlers | int | Callable[[int, FrameType | None], Any]


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
    """Forwards SIGTERM to a handler.

    Attributes:
        successor: What handles SIGTERM after the context; None while it lasts.
    """

    def __init__(self, answer: Callable[[], None]) -> None:
        self.successor: _Handler | None = None
        self._answer = answer

    def __call__(self, number: int, frame: FrameType | None) -> None:
        successor = _successor_of(self)
        if self.successor is None:
            self._answer()
        elif callable(successor):
            successor(number, frame)
        elif successor == signal.SIG_DFL:
            _end()


class _Between:
    """Between two training loops: reports SIGTERM, and calls the handler that the script had installed before.

    Args:
        answer: Called with whether the script has a handler of its own, which is called next.
        before: The handler before the loop.
    """

    def __init__(self, answer: Callable[[bool], None], before: _Handler) -> None:
        self.came = False
        self.before = before
        self._answer = answer

    def __call__(self, number: int, frame: FrameType | None) -> None:
        own = self.before if callable(self.before) and not isinstance(self.before, _Remembered) else None
        self.came = True
        self._answer(own is not None or self.before is signal.SIG_IGN)
        if own is not None:
            own(number, frame)


def remember(is_idle: Callable[[], bool]) -> None:
    """Keep each SIGTERM that arrives without a handler until :func:`answered` installs one.

    Args:
        is_idle: Returns whether SIGTERM may still end this process immediately; not called after the first handler was installed.
    """
    signal.signal(signal.SIGTERM, _Remembered(is_idle))


@contextlib.contextmanager
def answered(answer: Callable[[], None], after: Callable[[bool], None] | None = None) -> Iterator[None]:
    """Call ``answer`` on SIGTERM, and immediately if one was kept. Main thread only, because Python runs signal handlers there.

    Args:
        answer: Called within the context.
        after: Called from the end of the context until the next one begins, with whether the script has a handler of
            its own, which is called next; None: SIGTERM has its former effect again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = _Answered(answer)
    replaced = _successor_of(signal.signal(signal.SIGTERM, ours))  # before it is asked whether one came until now
    came = isinstance(replaced, _Between) and replaced.came
    before = _script_handler(replaced)
    if isinstance(before, _Remembered):
        before.is_idle = lambda: False
        came, before.came = came or before.came, False
    if came:
        answer()
    try:
        yield
    finally:
        before = _script_handler(before)
        ours.successor = successor = before if after is None else _Between(after, before)
        # An abandoned loop is closed when it is collected: in another thread, or within the next loop, whose handler stays.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is ours:
            signal.signal(signal.SIGTERM, successor)


def _successor_of(handler: _Handler | None) -> _Handler:
    """Return the handler that is in force in place of one whose context may be over."""
    while isinstance(handler, _Answered) and handler.successor is not None:
        handler = handler.successor
    return signal.SIG_DFL if handler is None else handler


def _script_handler(handler: _Handler | None) -> _Handler:
    """Return the handler below those of loops that are over: the script's own one, or the initial one."""
    handler = _successor_of(handler)
    while isinstance(handler, _Between):
        handler = _successor_of(handler.before)
    return handler


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
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _Between) and not isinstance(handler.before, _Remembered):
        signal.signal(signal.SIGTERM, handler.before)
    elif isinstance(handler, (_Remembered, _Answered, _Between)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)
