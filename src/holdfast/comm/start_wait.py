"""The wait of processes that another launcher started for each other: said after 10 s, and limited.

A process that has died before it joined is only known by its absence. So the time is limited; once it is over, the job
ends, or begins without those that are missing.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from holdfast.base.phases import Phase
from holdfast.base.side_work import say
from holdfast.comm.launchers import LaunchedGroup
from holdfast.errors import StoreLost

LIMIT_S = Phase.JOINING.value.fixed_s
"""How long processes wait for each other at the start, unless ``HOLDFAST_START_TIMEOUT_S`` is set."""
_FIRST_LINE_S, _LINE_EVERY_S = 10.0, 30.0
_SHORTEST_NAP_S, LONGEST_NAP_S = 0.02, 0.5
_MOST_NAMED = 8
_PROBE_S = 5.0


@dataclass(frozen=True, slots=True)
class StartLimit:
    """How long processes wait for each other, and what happens then.

    Args:
        limit_s: Seconds; 0: no limit.
        least: With so many processes, or more, the job begins once the time is over; 0: it ends.
    """

    limit_s: float = LIMIT_S
    least: int = 0


USUAL = StartLimit()


class NotStarted(StoreLost):
    """Raised when processes have not joined in time; if nothing catches it, the process ends with one line."""


class StartWait:
    """The time since this process began to wait for the others.

    Args:
        group: The processes.
        limit: For how long.
    """

    def __init__(self, group: LaunchedGroup, limit: StartLimit) -> None:
        self.limit = limit
        self._group = group
        self._began_s = time.monotonic()
        self._limit_s = limit.limit_s
        self._due_s = _FIRST_LINE_S

    def restart(self, least_s: float) -> None:
        """Let the time that is left be ``least_s`` at least: what follows needs some, however late it begins."""
        if self._limit_s:
            self._limit_s = max(self._limit_s, time.monotonic() - self._began_s + least_s)

    def is_left(self) -> bool:
        """Return whether the time is not over."""
        return not 0 < self._limit_s <= time.monotonic() - self._began_s

    def until(self, ready: Callable[[], bool], awaited: Callable[[], str], *, says: bool = True) -> bool:
        """Wait until ``ready`` returns True; return False if the time is over before.

        Args:
            ready: Called again and again.
            awaited: Names the processes that have not joined.
            says: Whether this process says for which ones it waits, after 10 s, and every 30 s.
        """
        while not ready():
            waited_s = time.monotonic() - self._began_s
            if 0 < self._limit_s <= waited_s:
                return False
            if says and waited_s >= self._due_s:
                self._due_s = _LINE_EVERY_S * (waited_s // _LINE_EVERY_S + 1)
                say(self._line(waited_s, awaited()))
            time.sleep(min(max(waited_s / 20, _SHORTEST_NAP_S), LONGEST_NAP_S))
        return True

    def _line(self, waited_s: float, awaited: str) -> str:
        may_begin = self.limit.least and self._group.leaves_survivors
        then = "the job begins without those that are missing" if may_begin else "the job ends"
        limit = (
            f"; after {self._limit_s:.0f} s (HOLDFAST_START_TIMEOUT_S) {then}"
            if self._limit_s == self.limit.limit_s > 0
            else ""
        )
        return f"for {waited_s:.0f} s rank {self._group.rank} waits for {awaited}{self._whose}{limit}"

    @property
    def _whose(self) -> str:
        return f" of {self._group.size} processes of {self._group.launcher}"

    def not_started(self, missing: Sequence[int], why: str = "") -> NotStarted:
        """Return the error of a job that ends because processes have not joined in time."""
        hint = ""
        if self._group.leaves_survivors and missing and missing[0]:
            hint = "; HOLDFAST_MIN_WORKERS=N begins without those that are missing, if N processes are there"
        because = f": {why}" if why else ""
        return self.ended(
            f"{named(missing)}{self._whose} did not join within {self.limit.limit_s:g} s"
            f" (HOLDFAST_START_TIMEOUT_S){because}{hint}"
        )

    def ended(self, why: str) -> NotStarted:
        """Return the error of a job that ends before it has begun."""
        error = NotStarted(why)
        _end_with_one_line(error, self._group.rank)
        return error

    def reach(self, host: str, port: int) -> None:
        """Wait until something listens at the place where all meet.

        Torch's own store would wait, too, and print stacks.

        Raises:
            NotStarted: if nothing does in time.
        """
        why = ""

        def is_there() -> bool:
            nonlocal why
            try:
                socket.create_connection((host, port), _PROBE_S).close()
            except OSError as error:
                why = f"{host}:{port}: {error.strerror or error}"
                return False
            return True

        if not self.until(is_there, lambda: f"rank 0 at {host}:{port}"):
            raise self.not_started([0], why)


def named(ranks: Sequence[int]) -> str:
    """Return the names of processes: ``"rank 1"``, or ``"ranks 1, 2 and 30 more"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rest = len(ranks) - _MOST_NAMED
    first = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"ranks {first} and {rest} more" if rest > 0 else f"ranks {first}"


def _end_with_one_line(error: NotStarted, rank: int) -> None:
    """Let Python show ``error`` in one line if nothing catches it: its traceback says nothing of the script."""
    show = sys.excepthook

    def on_exception(kind: type[BaseException], raised: BaseException, traceback: TracebackType | None) -> None:
        if raised is error:
            say(f"rank {rank} ends: {error}")
        else:
            show(kind, raised, traceback)

    sys.excepthook = on_exception
