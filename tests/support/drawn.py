"""Which of the tests that ``make test`` leaves out it runs this time: a twentieth of them, drawn with a seed.

One test function counts as one, however many parameters it has, and is run with one set of them: otherwise the campaigns
of hundreds of random plans would be most of what is drawn.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from pathlib import Path

import pytest

SHARE = 20
LONGEST_S = 300.0
"""A test whose own time limit is above this runs for minutes: ``make soak`` alone runs it."""

DRAWN = pytest.StashKey[set]()
"""In the stash of pytest's configuration: the names of the drawn tests."""


def draw(items: list, seed: int) -> list:
    """Return the drawn tests, from those that are marked soak; the same for the same tests and seed."""
    by_function = defaultdict(list)
    for item in items:
        if item.get_closest_marker("soak") and limit_s(item) <= LONGEST_S:
            by_function[item.nodeid.partition("[")[0]].append(item)
    source = random.Random(seed)
    names = source.sample(sorted(by_function), math.ceil(len(by_function) / SHARE))
    return [source.choice(sorted(by_function[name], key=lambda item: item.nodeid)) for name in sorted(names)]


def limit_s(item: object) -> float:
    """Return the time limit that a test declares, seconds; 0 for the usual one."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None and mark.args else 0.0


def run_too(config: object, items: list) -> None:
    """Take the mark from drawn tests, so that they are run, and note which they are."""
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "soak"]
    config.stash[DRAWN] = {item.nodeid for item in items}


def is_whole_suite(config: object) -> bool:
    """Return whether all tests were collected, also in a process of pytest-xdist, which gets the names of folders."""
    tests = Path(__file__).resolve().parents[1]
    return [Path(each).resolve() for each in config.args] == [tests]
