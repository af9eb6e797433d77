"""Signal handling of commands."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from holdfast.cli import INTERRUPTED


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it ends a command as Ctrl-C does."""


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within the context, raise KeyboardInterrupt on Ctrl-C and SIGTERM, so that what this process started ends with it."""
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        with _on_interrupt(signal.default_int_handler):
            yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def ended_by_interrupt(line: str) -> Iterator[None]:
    """Within the context, Ctrl-C prints ``line`` and ends this process, which has nothing to undo yet.

    KeyboardInterrupt would not do: an import or a callback in which it is raised may drop it.
    """

    def end(*_: object) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())
        os._exit(INTERRUPTED)

    with _on_interrupt(end):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C within the context: what is left to do takes moments."""
    with _on_interrupt(signal.SIG_IGN):
        yield


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as in any Python, until the contexts above end."""
    _handle_interrupt(signal.default_int_handler)


@contextlib.contextmanager
def _on_interrupt(handler: Any) -> Iterator[None]:
    previous = _handle_interrupt(handler)
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)


def _handle_interrupt(handler: Any) -> Any:
    """Set the handler of SIGINT; return the one before, None if it stays: shells have background jobs ignore SIGINT."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        return None
    return signal.signal(signal.SIGINT, handler)


def _terminate(*_: object) -> NoReturn:
    raise Terminated
