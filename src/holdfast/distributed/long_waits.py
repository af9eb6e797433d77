"""Publishes a collective in which this rank has waited for some seconds, so that the launcher sees which rank never calls it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from holdfast.records.types import CollectiveAwaited

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.distributed.tasks import Collective

_FIRST_S = 3.0
_LONGEST_S = 10.0
_TIMES = 3.0
"""Factor on the last wait that was published and ended by itself: a job whose steps are long does not fill its log."""


class LongWaits:
    """Publishes long waits, and their ends; for one thread.

    Args:
        publish: Is called with what to record, and the ranks of the group that are alive.
    """

    def __init__(self, publish: Callable[[CollectiveAwaited, Sequence[int]], None]) -> None:
        self._publish = publish
        self._limit_s = _FIRST_S
        self._shown: Collective | None = None

    def look(self, current: Collective | None) -> None:
        """Publish what has changed; ``current`` is the collective in progress."""
        now_s = time.monotonic()
        if self._shown is not None and current is not self._shown:
            self._limit_s = min(_LONGEST_S, max(self._limit_s, _TIMES * (now_s - self._shown.begun_s)))
            self._shown = None
            self._publish(CollectiveAwaited(what=""), ())
        if current is None or self._shown is not None or now_s - current.begun_s <= self._limit_s:
            return
        self._shown, group = current, current.group
        wait = CollectiveAwaited(
            what=current.what,
            signature=current.call.signature or current.what,
            where=_line_of_script(),
            group=group.key,
            number=current.number,
        )
        self._publish(wait, group.alive)


def _line_of_script() -> str:
    """Return the line of the script at which the main thread is, as ``train.py, line 33``; "" if that is not known."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
