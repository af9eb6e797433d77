"""One contract, every communicator."""

import subprocess
import sys
from pathlib import Path

import gloo
import pytest
from jobs import MPIRUN, clean_env

from holdfast.comm import VirtualCommunicator
from holdfast.records.files import read_run
from holdfast.records.types import WorkerEnded
from holdfast.testing.contract import check_communicator
from holdfast_lab.counting import CountingCommunicator


@pytest.mark.parametrize("workers", [3, 4, 7])
def test_virtual_workers_keep_the_contract(workers):
    comm = VirtualCommunicator(workers)

    check_communicator(comm, comm.fail, (0, 2))

    assert len(comm.members) == workers - 2


def test_the_counting_communicator_keeps_the_contract():
    comm = VirtualCommunicator(4)
    counting = CountingCommunicator(comm)

    check_communicator(counting, comm.fail, (3, 1))

    assert counting.calls["shrink"] == 2


@pytest.mark.chaos
def test_real_workers_keep_the_contract_while_two_are_killed(tmp_path):
    worker = Path(__file__).with_name("ulfm_worker.py")

    done = subprocess.run(
        [*MPIRUN, "-n", "4", sys.executable, "-m", "holdfast.launch.supervise.worker", str(worker)],
        env=clean_env(HOLDFAST_RUN_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert sorted(line for line in done.stdout.splitlines() if line.startswith("passed")) == [
        "passed 1 of (1, 3)",
        "passed 3 of (1, 3)",
    ], done.stdout + done.stderr
    ended = {record.rank: record.exit_code for record in read_run(tmp_path) if isinstance(record, WorkerEnded)}
    assert ended == {0: -9, 1: 0, 2: -9, 3: 0}


def run_gloo(tmp_path, workers, scene):
    """Start so many workers of gloo_worker.py; return who passed as whom, and how each ended."""
    worker = gloo.command(Path(__file__).with_name("gloo_worker.py"), scene)

    done = subprocess.run(
        gloo.launcher([worker] * workers),
        env=clean_env(HOLDFAST_RUN_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    passed = sorted(line for line in done.stdout.splitlines() if line.startswith("passed"))
    assert passed, done.stdout + done.stderr
    return passed, {r.rank: r.exit_code for r in read_run(tmp_path) if isinstance(r, WorkerEnded)}


@pytest.mark.chaos
def test_workers_over_gloo_keep_the_contract_while_two_are_killed(tmp_path):
    passed, ended = run_gloo(tmp_path, 4, "contract")

    assert passed == ["passed 1 of (1, 3)", "passed 3 of (1, 3)"]
    assert ended == {0: -9, 1: 0, 2: -9, 3: 0}


@pytest.mark.chaos
def test_a_worker_that_dies_while_the_group_is_made_keeps_nobody_waiting(tmp_path):
    passed, ended = run_gloo(tmp_path, 4, "building")

    assert passed == [f"passed {rank} of (0, 3)" for rank in (0, 3)]
    assert ended == {0: 0, 1: -9, 2: -9, 3: 0}


@pytest.mark.chaos
def test_groups_that_were_given_up_leave_no_thread_and_no_file_behind(tmp_path):
    passed, ended = run_gloo(tmp_path, 3, "rebuilding")

    assert passed == [f"passed {rank} of (0, 1, 2)" for rank in range(3)]
    assert ended == {0: 0, 1: 0, 2: 0}


@pytest.mark.chaos
def test_members_that_lose_the_store_in_the_moment_of_an_agreement_have_the_same_outcome(tmp_path):
    passed, ended = run_gloo(tmp_path, 3, "stranded")

    assert passed == [f"passed {rank} of (0, 1, 2)" for rank in range(3)]
    assert ended == {0: 0, 1: 0, 2: 0}


def test_a_communicator_that_forgets_a_death_is_found_out():
    class Forgetful(VirtualCommunicator):
        def maximum(self, values):
            return list(values)

    comm = Forgetful(3)

    with pytest.raises(AssertionError, match="kept completing with a failed member"):
        check_communicator(comm, comm.fail, (1,))
