"""The explorer: how many states small jobs have, and what goes wrong in them. In the tree under test, it reads worlds and explores them."""

import json
import sys

import doors

SMALL = {
    # Worlds of docs/explanation/protocol-*.md that its tests leave out, or that the longest tests hold: workers, deaths, and what else.
    "newcomer": {"workers": 3, "deaths": 2, "newcomers": 1},
    "leaver": {"workers": 3, "deaths": 2, "leavers": [0, 1]},
    "change": {"workers": 3, "deaths": 2, "changes": ["Restart"]},
    "flips": {"workers": 3, "deaths": 2, "flips": 2},
    "altered": {"workers": 3, "deaths": 1, "flips": 1, "transient": True},
}
SPLIT = {
    "mirrors": {"workers": 3, "deaths": 3, "split": [2, 1, 2]},
    "lost": {"workers": 3, "deaths": 3, "split": [2, 1, 1]},
    "chains": {"workers": 4, "deaths": 2, "split": [2, 2, 2]},
    "gathers": {"workers": 4, "deaths": 2, "split": [2, 2, 2, 0, 2]},
    "newcomer": {"workers": 3, "deaths": 1, "newcomers": 1, "split": [2, 2, 2]},
}


def cases():
    """Return the worlds that are explored here, with the strategy, by name."""
    named = {
        f"{name} {s}": (s, world | {"lossy": s == "Forward"})
        for name, world in SMALL.items()
        for s in ("Rollback", "Forward", "Restart")
    }
    return named | {f"split {name} {s}": (s, world) for name, world in SPLIT.items() for s in ("Rollback", "Restart")}


def record(tree, work):
    """Return states and violations of each case."""
    return tree.script("explored.py", given=json.dumps(cases()))


def explored(strategy, world):
    """Return the states of a world, and what a violation is, without the details, which name classes."""
    if "leavers" in world:
        world["leavers"] = frozenset(world["leavers"])
    states, violation = doors.explore(strategy, **world)
    return [states, violation and violation.partition(":")[0]]


if __name__ == "__main__":
    print(json.dumps({name: explored(*case) for name, case in json.load(sys.stdin).items()}))
