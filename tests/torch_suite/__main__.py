"""Compares this backend with Gloo on PyTorch's own tests of ``torch.distributed``: ``python tests/torch_suite``.

Ends with 1 if a test that passes on Gloo does not pass here, over either fabric, unless :data:`DIFFER` says why.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from running import SCRIPT, Result, run

DIFFER: dict[str, str] = {}
"""Tests that pass on Gloo and not here, over any fabric, and why."""


def _run(backend: str, tests: list[str]) -> dict[str, Result]:
    ended: list[str] = []

    def show(name: str) -> None:
        ended.append(name)
        sys.stderr.write(f"\r{backend}: {len(ended)} of {len(tests)} tests")

    found = run(backend, tests, show=show)
    sys.stderr.write("\n")
    return found


def _compare(backend: str, needed: list[str]) -> bool:
    """Run the tests that pass on Gloo, print what differs, and return whether all of that is known."""
    ours = _run(backend, needed)
    failed = [name for name in needed if ours[name].outcome != "passed"]
    print(f"{backend}, of these: {len(needed) - len(failed)} passed, {len(failed)} did not")
    for name in failed:
        print(f"- {name}: {DIFFER.get(name) or ours[name].why or ours[name].outcome}")
    for name in sorted(DIFFER.keys() & set(needed) - set(failed)):
        print(f"- {name} passes now: remove it from DIFFER")
    return set(failed) <= DIFFER.keys()


def main() -> int:
    """Run all tests, or those that are given, on Gloo and over each fabric."""
    listed = subprocess.run([sys.executable, str(SCRIPT), "gloo"], stdout=subprocess.PIPE, text=True, check=True)
    tests = sys.argv[1:] or listed.stdout.split()
    theirs = _run("gloo", tests)
    needed = [name for name in tests if theirs[name].outcome == "passed"]
    counts = Counter(result.outcome for result in theirs.values())
    print(f"gloo: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    compared = [_compare(f"holdfast-{fabric}", needed) for fabric in ("gloo", "ulfm")]
    return 0 if needed and all(compared) else 1


if __name__ == "__main__":
    sys.exit(main())
