"""A line about the progress of a long run of the tests, every 30 s: how many are done, and about how long the rest takes.

Tests of a folder take about as long as those of it that are done; of a folder that has not begun, as long as they
usually do. The percentage that pytest prints counts tests, of which the long ones come first.

A test that fails is named at once, with a line of its reason: a run that is ended from outside has said it. A run
in which no test has ended for ``SILENT_S`` ends by itself, and names the tests that were running.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from pathlib import PurePosixPath

import pytest

EVERY_S = 30.0
SILENT_S = 600.0
"""No test takes so long: each has a limit of its own, and pytest-timeout ends it."""
USUAL_S = {"chaos": 5.0, "gpu": 5.0, "contract": 1.0, "cli": 3.0, "integrations": 2.0, "property": 1.0, "model": 1.0}
"""Seconds that a test usually takes, by folder below ``tests/``."""
OTHERS_S = 0.2
_USUAL_WEIGHT = 3
"""The usual time counts as so many tests."""


class TimeLeft:
    """The tests of a run, finished and not. Pure: no clock."""

    def __init__(self) -> None:
        self._left: Counter[str] = Counter()
        self._took_s: dict[str, list[float]] = defaultdict(list)
        self.failed = 0

    def expect(self, nodeids: list[str]) -> None:
        """Take the tests that will run."""
        self._left = Counter(map(folder_of, nodeids))

    def finish(self, nodeid: str, seconds: float) -> None:
        """Take a finished test, and how long it took with its fixtures."""
        self._left[folder_of(nodeid)] -= 1
        self._took_s[folder_of(nodeid)].append(seconds)

    def left_s(self, elapsed_s: float) -> float:
        """Return the estimated seconds until the end; several tests run at once."""
        spent_s = sum(map(sum, self._took_s.values()))
        at_once = max(1.0, spent_s / elapsed_s) if elapsed_s > 0 else 1.0
        return sum(number * self._mean_s(folder) for folder, number in self._left.items()) / at_once

    def _mean_s(self, folder: str) -> float:
        took_s, usual_s = self._took_s[folder], USUAL_S.get(folder, OTHERS_S)
        return (sum(took_s) + _USUAL_WEIGHT * usual_s) / (len(took_s) + _USUAL_WEIGHT)

    def line(self, elapsed_s: float) -> str:
        """Return the state in one line."""
        done, left = sum(map(len, self._took_s.values())), sum(self._left.values())
        minutes, seconds = divmod(round(self.left_s(elapsed_s)), 60)
        rest = f"{minutes} min" if minutes else f"{seconds} s"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{done:,} of {done + left:,} tests done{failed}, about {rest} left"


def folder_of(nodeid: str) -> str:
    """Return the folder of a test below ``tests/``."""
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else ""


def reason_of(report) -> str:
    """Return ``": <what went wrong>"`` in one short line, or nothing where pytest knows none."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (crash.message if crash else str(report.longrepr or "")).strip()
    return f": {text.splitlines()[0 if crash else -1][:200]}" if text else ""


class TimeLeftLines:
    """The plugin: it prints the lines, in the process that the terminal belongs to."""

    def __init__(self, reporter) -> None:
        self._reporter = reporter
        self._state = TimeLeft()
        self._nodes: list[str] | None = None
        self._begun_s = time.monotonic()
        self._due_s = self._begun_s + EVERY_S
        self._running: set[str] = set()
        self._last_end_s = self._begun_s
        self._over = threading.Event()
        self._stdout = os.dup(1)  # while a test runs, pytest has put a file in the place of the terminal

    def pytest_sessionstart(self) -> None:
        """Watch for silence: a process of pytest-xdist that died may leave the others waiting for good."""
        threading.Thread(target=self._watch, name="tests-silence", daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(5.0):
            if time.monotonic() - self._last_end_s > SILENT_S:
                running = ", ".join(sorted(self._running))
                text = (
                    f"\nno test has ended for {SILENT_S:g} s, the run ends here; still running: {running or 'none'}\n"
                )
                os.write(self._stdout, text.encode())
                os._exit(1)  # the main thread may be the one that waits

    def pytest_sessionfinish(self) -> None:
        self._over.set()

    def pytest_runtest_logstart(self, nodeid) -> None:
        self._running.add(nodeid)

    def pytest_collection_finish(self, session) -> None:
        """Without pytest-xdist, this process has the tests."""
        if session.items:
            self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which may be off
    def pytest_xdist_node_collection_finished(self, node, ids) -> None:
        """With it, each of its processes has all tests."""
        if self._nodes is None:
            self._nodes = ids
            self._expect(ids)

    def _expect(self, nodeids) -> None:
        self._state.expect(list(nodeids))
        self._begun_s = time.monotonic()
        self._due_s = self._begun_s + EVERY_S
        self._took_s = defaultdict(float)

    def pytest_runtest_logreport(self, report) -> None:
        """Take a part of a test, and print a line if it is time to."""
        self._took_s[report.nodeid] += report.duration
        if report.failed:
            self._state.failed += 1
            self._reporter.ensure_newline()
            self._reporter.write_line(f"failed: {report.nodeid}{reason_of(report)}")
        if report.when == "???":  # pytest-xdist: the process died with it
            self._running.discard(report.nodeid)
        if report.when != "teardown":
            return
        self._state.finish(report.nodeid, self._took_s.pop(report.nodeid))
        self._running.discard(report.nodeid)
        now_s = self._last_end_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._reporter.ensure_newline()
            self._reporter.write_line(self._state.line(now_s - self._begun_s))
