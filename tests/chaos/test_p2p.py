"""Messages inside a step, while their senders are killed, or stopped and woken late."""

import subprocess
import sys
from pathlib import Path

import gloo
import pytest
from jobs import MPIRUN, clean_env

from holdfast.records.files import read_run
from holdfast.records.types import WorkerEnded

pytestmark = pytest.mark.chaos

WORKER = Path(__file__).with_name("p2p_worker.py")


def run(tmp_path, fabric, workers, scene):
    """Run so many workers; return who passed as whom, and how each ended."""
    signs = tmp_path / "signs"
    signs.mkdir()
    words = [scene, signs]
    if fabric == "ulfm":
        command = [sys.executable, "-m", "holdfast.launch.supervise.worker", WORKER, fabric, *words]
        start = [*MPIRUN, "-n", str(workers), *map(str, command)]
    else:
        start = gloo.launcher([gloo.command(WORKER, fabric, *words)] * workers)
    done = subprocess.run(
        start, env=clean_env(HOLDFAST_RUN_DIR=str(tmp_path)), capture_output=True, text=True, timeout=100, check=False
    )
    passed = sorted(line for line in done.stdout.splitlines() if line.startswith("passed"))
    assert passed, done.stdout + done.stderr
    return passed, {r.rank: r.exit_code for r in read_run(tmp_path) if isinstance(r, WorkerEnded)}


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_who_waits_for_a_killed_sender_goes_on_and_no_old_message_is_taken_for_a_new_one(tmp_path, fabric):
    passed, ended = run(tmp_path, fabric, 4, "killed")

    assert passed == ["passed 0 of (0, 2)", "passed 2 of (0, 2)"]
    assert ended == {0: 0, 1: -9, 2: 0, 3: -9}


def test_what_a_stopped_sender_writes_when_it_wakes_reaches_nobody(tmp_path):
    passed, ended = run(tmp_path, "gloo", 3, "stopped")

    assert passed == ["passed 0 of (0, 2)", "passed 2 of (0, 2)"]
    assert ended == {0: 0, 1: -9, 2: 0}


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_a_death_outside_a_group_ends_the_waiting_inside_it(tmp_path, fabric):
    passed, ended = run(tmp_path, fabric, 4, "outside")

    assert passed == ["passed 0 of (0, 1)", "passed 1 of (0, 1)"]
    assert ended == {0: 0, 1: 0, 2: -9, 3: -9}
