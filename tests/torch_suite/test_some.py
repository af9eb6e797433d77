"""A few of PyTorch's own tests over this backend, for every run of the tests; ``make torch-suite`` runs all of them."""

import json
import subprocess
import sys
from pathlib import Path

from jobs import clean_env

SCRIPT = Path(__file__).parent / "on_backend.py"
SOME = ("test_sparse_all_reduce_sum", "test_all_gather_coalesced_simple")


def test_some_of_pytorchs_own_tests_pass():
    command = [sys.executable, str(SCRIPT), "holdfast", *SOME]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=clean_env(), timeout=240)

    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"test"')]
    assert {line["test"]: line["outcome"] for line in told} == dict.fromkeys(SOME, "passed")
    assert ended.returncode == 0
