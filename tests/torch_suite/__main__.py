"""Compares this backend with Gloo on PyTorch's own tests of ``torch.distributed``: ``python tests/torch_suite``.

Ends with 1 if a test that passes on Gloo does not pass here, unless :data:`DIFFER` says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

SCRIPT = Path(__file__).parent / "on_backend.py"

DIFFER = {
    "test_send_recv_any_source_autograd_profiler": "torch's profiler takes one of four receives for a synchronous event",
    "test_send_recv_any_source_torch_profiler": "as the one before",
    "test_barrier_timeout_full_group": "hangs in some runs: without a launcher, probably nothing tells a rank that another has ended",
}
"""Tests that pass on Gloo and not here, and why."""


def run(backend: str, tests: list[str]) -> dict[str, dict[str, str]]:
    """Return what the tests gave on a backend, by name."""
    command = [sys.executable, str(SCRIPT), backend, *tests]
    env = os.environ | {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    found: dict[str, dict[str, str]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"test"'):
                told = json.loads(line)
                found[told["test"]] = told
                sys.stderr.write(f"\r{backend}: {len(found)} of {len(tests)} tests")
    sys.stderr.write("\n")
    return found


def main() -> int:
    """Run all tests, or those that are given, on both backends, and print what differs."""
    listed = subprocess.run([sys.executable, str(SCRIPT), "gloo"], stdout=subprocess.PIPE, text=True, check=True)
    tests = sys.argv[1:] or listed.stdout.split()
    theirs = run("gloo", tests)
    needed = [name for name in tests if theirs.get(name, {}).get("outcome") == "passed"]
    ours = run("holdfast", needed)
    counts = Counter(told["outcome"] for told in theirs.values())
    print(f"gloo: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    failed = [name for name in needed if ours.get(name, {}).get("outcome") != "passed"]
    print(f"holdfast, of these: {len(needed) - len(failed)} passed, {len(failed)} did not")
    new = [name for name in failed if name not in DIFFER]
    for name in failed:
        print(f"- {name}: {DIFFER.get(name) or ours.get(name, {}).get('why', 'no result')}")
    for name in sorted(DIFFER.keys() & set(needed) - set(failed)):
        print(f"- {name} passes now: remove it from DIFFER")
    return 1 if new or not needed else 0


if __name__ == "__main__":
    sys.exit(main())
