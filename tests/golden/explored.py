"""The explorer: how many states small jobs have, and that what breaks without a line of the protocol breaks in the same way.

The broken protocols reach into the protocol, so they stand in the tree's own tests; these run here with the explorer tapped. By test
function, in the order of its cases: names of classes, which may change, are not in the record.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import doors
from tree import HERE

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
    """Return states and violations of the cases here, and of the tree's own tests."""
    with ThreadPoolExecutor(2) as pool:
        own = pool.submit(tree.script, "tapped.py", given=json.dumps(cases()))
        tests = {
            name: pool.submit(_of_tests, tree, paths, work / f"explored-{name}.json")
            for name, paths in doors.EXPLORED.items()
        }
        return {"worlds": own.result()} | {name: future.result() for name, future in tests.items()}


def _of_tests(tree, paths, out):
    """Run the explorations of a file of tests of the tree; return by function what each exploration found."""
    there = [path for path in paths if (tree.path / path).is_file()]
    if not there:
        return f"none of {', '.join(paths)} is there: adapt doors.py"
    words = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tapped",
        "--golden-out",
        out,
        "--timeout",
        600,
        there[0],
    )
    done = tree.python(*words, extra_path=HERE)
    return (
        {"exit": done.code, "found": json.loads(out.read_text())}
        if out.is_file()
        else {"exit": done.code, "said": done.out[-2000:]}
    )
