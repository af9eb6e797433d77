"""One contract of torch.distributed, for Gloo and for this backend over each fabric: Gloo shows that the checks are right."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from dist_checks import CHECKS, FOLDER
from jobs import ROOT, clean_env, free_port

SCRIPT = ROOT / "tests" / "support" / "dist_checks.py"
JOB_S = 150


class Finished:
    """What the workers of one job wrote, by check and by rank."""

    def __init__(self, folder, size, exit_code, output):
        self.size, self.exit_code, self.output = size, exit_code, output
        self._lines = {}
        for rank in range(size):
            path = folder / f"rank-{rank}.jsonl"
            for text in path.read_text().splitlines() if path.exists() else ():
                line = json.loads(text)
                self._lines[line["check"], rank] = line

    def lines(self, check):
        """Each rank's line for ``check``, which it must have reached."""
        missing = [rank for rank in range(self.size) if (check, rank) not in self._lines]
        assert not missing, f"ranks {missing} never ended {check}; exit {self.exit_code}\n{self.output[-6000:]}"
        return [self._lines[check, rank] for rank in range(self.size)]

    def failures(self):
        """The checks that a rank did not pass, or after which ranks hold different values."""
        by_check = {check: self.lines(check) for check in CHECKS}
        errors = [f"{name}: {line['error']}" for name, lines in by_check.items() for line in lines if "error" in line]
        unequal = [
            f"{name}: unequal" for name, lines in by_check.items() if len({line["shared"] for line in lines}) > 1
        ]
        return errors + unequal


@cache
def _run(fabric, size, folder):
    folder.mkdir()
    run = ["-m", "holdfast", "run", "--fabric", fabric, "--max-restarts", "0", "-n", str(size), SCRIPT, "holdfast"]
    command = [sys.executable, *(run if fabric else [SCRIPT, "gloo", "--ranks", str(size)])]
    shared = {FOLDER: str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (folder / "output").open("w") as output:
        done = subprocess.run(
            command, env=clean_env(**shared), stdout=output, stderr=output, timeout=JOB_S, check=False
        )
    return Finished(folder, size, done.returncode, (folder / "output").read_text(errors="replace"))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Run the checks with so many processes, on this backend over a fabric, or on Gloo, once for all tests."""
    base = Path(tmp_path_factory.mktemp("jobs"))
    return lambda fabric, size: _run(fabric, size, base / f"{fabric or 'reference'}-{size}")


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.timeout(2 * JOB_S + 60)
def test_every_check_passes_and_each_rank_gets_the_bits_of_the_reference(start, fabric, size):
    reference, ours = start("", size), start(fabric, size)

    for job in (reference, ours):
        assert job.failures() == [], job.output[-6000:]
        assert job.exit_code == 0, job.output[-6000:]
    different = [
        f"{check} on rank {mine['rank']}"
        for check in CHECKS
        for mine, theirs in zip(ours.lines(check), reference.lines(check), strict=True)
        if mine["bits"] != theirs["bits"]
    ]
    assert not different
