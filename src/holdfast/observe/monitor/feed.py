"""What the server of a dashboard serves: runs, their streams of changes, log lines and actions."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from holdfast.observe.monitor.view import LiveState

CHANGE_S = 0.25
"""A stream has at most one change in this time."""
IDLE_S = 1.0
"""A stream of a run in which nothing happens has a change this often: time goes on."""
KEEP_ALIVE_S = 5.0
"""A stream of a run that has ended has a comment this often."""
_CACHED = 8


class Refused(Exception):
    """Raised by an action that is not possible; the message says why, in one line."""


class RunSource(Protocol):
    """A run that can be looked at.

    Args:
        live: Its state.
        actions: Names of the actions that are possible; empty for a run of another launcher.
    """

    live: LiveState
    actions: tuple[str, ...]

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        ...

    def log(self, rank: int, lines: int) -> list[str]:
        """Return the last output lines of a worker; raise Refused if there is none."""
        ...

    def act(self, action: str, values: Mapping[str, Any]) -> str:
        """Carry out an action; return what was done. Refused says why it cannot be done."""
        ...


class Feed:
    """The JSON of one run, encoded once for all readers.

    Args:
        source: The run.
    """

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._of = source.live
        self._cached: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    def full(self) -> bytes:
        """Return everything."""
        state = self.source.live.full(self.source.now_s())
        state["run"]["actions"] = list(self.source.actions) if state["run"]["live"] else []
        return encoded(state)

    def summary(self) -> dict[str, Any]:
        """Return the entry of a list of runs."""
        return self.source.live.summary(self.source.now_s())

    def changes(self, since: int) -> tuple[int, bytes]:
        """Return the version, and what has changed since an older one."""
        with self._lock:
            live = self.source.live
            if live is not self._of:
                self._of = live
                self._cached.clear()
            key = since, live.version
            if key not in self._cached or since == live.version:
                delta = live.changes(since, self.source.now_s())
                if "run" in delta:
                    delta["run"]["actions"] = list(self.source.actions) if delta["run"]["live"] else []
                self._cached[key] = encoded(delta)
                self._cached.move_to_end(key)
                while len(self._cached) > _CACHED:
                    self._cached.popitem(last=False)
            return key[1], self._cached[key]

    def stream(self, sleep: Callable[[float], bool]) -> Iterator[bytes]:
        """Yield server-sent events: the whole state, then its changes.

        Args:
            sleep: Waits for some seconds; returns whether the server ends.
        """
        live = self.source.live
        version, full = live.version, self.full()
        yield _event("full", full)
        sent_s = time.monotonic()
        while not sleep(CHANGE_S):
            if self.source.live is not live:  # the files were replaced: another run is there now
                live = self.source.live
                version, full = live.version, self.full()
                yield _event("full", full)
            now_s, is_over = time.monotonic(), self.source.live.is_over
            if self.source.live.version == version:
                if is_over and now_s - sent_s >= KEEP_ALIVE_S:
                    yield b": keep-alive\n\n"
                    sent_s = now_s
                if is_over or now_s - sent_s < IDLE_S:
                    continue
            version, change = self.changes(version)
            yield _event("change", change)
            sent_s = now_s
        if self.source.live.version != version:  # such as the end of the run
            yield _event("change", self.changes(version)[1])


def encoded(value: Any) -> bytes:
    """Return JSON as browsers read it: numbers that are not finite are null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def run_id(name: str, taken: Mapping[str, object]) -> str:
    """Return a name for a run that is safe in a URL and not among those that are taken."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    candidate, number = plain, 1
    while candidate in taken:
        number += 1
        candidate = f"{plain}-{number}"
    return candidate
