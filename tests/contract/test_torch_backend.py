"""One contract of torch.distributed, for Gloo and for this backend over each fabric: Gloo shows that the checks are right."""

import json
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from dist_checks import CHECKS, FOLDER
from jobs import MPIRUN, ROOT, clean_env

SCRIPT = ROOT / "tests" / "support" / "dist_checks.py"
SIZES = (2, 3, 4)
JOB_S = 150


class Finished:
    """What the workers of one job wrote, by check and by rank."""

    def __init__(self, folder, size, exit_codes, output):
        self.size, self.exit_codes, self.output = size, exit_codes, output
        self._lines = {}
        for rank in range(size):
            path = folder / f"rank-{rank}.jsonl"
            for text in path.read_text().splitlines() if path.exists() else ():
                line = json.loads(text)
                self._lines[line["check"], rank] = line

    def lines(self, check):
        """Each rank's line for ``check``, which it must have reached."""
        missing = [rank for rank in range(self.size) if (check, rank) not in self._lines]
        assert not missing, f"ranks {missing} never ended {check}; exits {self.exit_codes}\n{self.output[-6000:]}"
        return [self._lines[check, rank] for rank in range(self.size)]


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _commands(backend, size):
    """Each process to start, with what its environment has of its own."""
    if backend == "gloo":
        ranks = [{"RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
        return [([sys.executable, str(SCRIPT), backend], ours) for ours in ranks]
    if backend == "holdfast-gloo":
        run = [sys.executable, "-m", "holdfast", "run", "--fabric", "gloo", "--max-restarts", "0"]
        return [([*run, "-n", str(size), str(SCRIPT), "holdfast"], {})]
    worker = [sys.executable, "-m", "holdfast.launch.supervise.worker", str(SCRIPT), backend]
    return [([*MPIRUN, "-n", str(size), *worker], {})]


def _wait(processes):
    """Wait for all; once one has failed, the others get a little longer and then are killed."""
    end = time.monotonic() + JOB_S
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if any(p.poll() for p in processes):
            end = min(end, time.monotonic() + 10)
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


@cache
def _run(backend, size, folder):
    folder.mkdir()
    shared = {FOLDER: str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    with (folder / "output").open("w") as output:
        processes = [
            subprocess.Popen(command, env=clean_env(**shared, **ours), stdout=output, stderr=output)
            for command, ours in _commands(backend, size)
        ]
        exit_codes = _wait(processes)
    return Finished(folder, size, exit_codes, (folder / "output").read_text(errors="replace"))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Run the checks on a backend with so many processes, once for all tests."""
    base = Path(tmp_path_factory.mktemp("jobs"))
    return lambda backend, size: _run(backend, size, base / f"{backend}-{size}")


every_job = pytest.mark.parametrize(
    ("backend", "size"), [(name, size) for name in ("gloo", "holdfast", "holdfast-gloo") for size in SIZES]
)
every_check = pytest.mark.parametrize("check", CHECKS)
two_jobs = pytest.mark.timeout(2 * JOB_S + 60)


@every_check
@every_job
@two_jobs
def test_every_rank_passes_and_all_hold_the_same(start, backend, size, check):
    lines = start(backend, size).lines(check)

    assert [line.get("error") for line in lines] == [None] * size
    assert len({line["shared"] for line in lines}) == 1


@every_job
@two_jobs
def test_every_worker_ends_well(start, backend, size):
    job = start(backend, size)

    assert set(job.exit_codes) == {0}, job.output[-6000:]


@pytest.mark.parametrize("backend", ["holdfast", "holdfast-gloo"])
@pytest.mark.parametrize("size", SIZES)
@two_jobs
def test_each_rank_gets_the_bits_of_the_reference(start, backend, size):
    ours, reference = start(backend, size), start("gloo", size)

    different = [
        f"{check} on rank {mine['rank']}"
        for check in CHECKS
        for mine, theirs in zip(ours.lines(check), reference.lines(check), strict=True)
        if mine["bits"] != theirs["bits"]
    ]

    assert not different
