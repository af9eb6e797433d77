"""In the tree under test: a plugin of pytest that writes down what the explorer finds; as a script, it explores worlds by itself."""

import json
import sys
from pathlib import Path

import doors

_found = {}
_now = []


def pytest_addoption(parser):
    """Say where the findings go."""
    parser.addoption("--golden-out", type=Path)


def pytest_configure(config):
    """Tap the explorer before the tests import it."""
    doors.tap_explorer(
        lambda states, violation, moves: _now.append([states, kind_of(violation), moves if violation else 0])
    )


def pytest_runtest_logreport(report):
    """Keep what the test that ends has explored, and how it ended."""
    if report.when != "call":
        return
    function = report.nodeid.partition("::")[2].partition("[")[0]
    _found.setdefault(function, []).append([report.outcome, *_now])
    _now.clear()


def pytest_sessionfinish(session):
    """Write all down."""
    session.config.getoption("--golden-out").write_text(json.dumps(_found))


def kind_of(violation):
    """Return what a violation is, without the details, which name classes."""
    return violation and violation.partition(":")[0]


if __name__ == "__main__":
    made = {}
    for name, (strategy, world) in json.load(sys.stdin).items():
        if "leavers" in world:
            world["leavers"] = frozenset(world["leavers"])
        states, violation = doors.explore(strategy, **world)
        made[name] = [states, kind_of(violation)]
    print(json.dumps(made))
