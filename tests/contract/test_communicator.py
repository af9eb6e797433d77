"""One contract, every communicator."""

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import MPIRUN, clean_env

from holdfast.comm import VirtualCommunicator
from holdfast.events import WorkerEnded
from holdfast.records import read_run
from holdfast.testing.contract import check_communicator
from holdfast.testing.counting import CountingCommunicator


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
        [*MPIRUN, "-n", "4", sys.executable, "-m", "holdfast.launch.worker", str(worker)],
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


def test_a_communicator_that_forgets_a_death_is_found_out():
    class Forgetful(VirtualCommunicator):
        def maximum(self, values):
            return list(values)

    comm = Forgetful(3)

    with pytest.raises(AssertionError, match="must not go on completing"):
        check_communicator(comm, comm.fail, (1,))
