"""Signals to a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Have a SIGTERM do within it what Ctrl-C does, so that what this process has begun ends with it."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
