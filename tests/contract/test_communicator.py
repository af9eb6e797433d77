"""One contract, every communicator."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import MPIRUN, clean_env, exit_codes, run_report

from holdfast.comm import VirtualCommunicator
from holdfast.records.files import read_run
from holdfast.records.types import WorkerEnded
from holdfast.testing.contract import check_communicator
from holdfast_lab.counting import CountingCommunicator

WORKER = Path(__file__).with_name("communicator_worker.py")


@pytest.mark.parametrize("workers", [3, 7])
def test_virtual_workers_keep_the_contract(workers):
    comm = VirtualCommunicator(workers)

    check_communicator(comm, comm.fail, (0, 2))

    assert len(comm.members) == workers - 2


def test_the_counting_communicator_keeps_the_contract():
    comm = VirtualCommunicator(4)
    counting = CountingCommunicator(comm)

    check_communicator(counting, comm.fail, (3, 1))

    assert counting.calls["shrink"] == 2


def run(tmp_path, workers, scene):
    """Run a scene of the worker script over Gloo; return which ranks passed, with which members, and the exit codes of all."""
    command = ("-n", workers, "--fabric", "gloo", "--max-restarts", 0, WORKER, scene)
    report = run_report(tmp_path, *command, exit_code=93)  # which would fail again: it never trains

    return passed(report["_stdout"]), exit_codes(report)


def passed(output):
    return {int(rank): members for rank, members in re.findall(r"passed (\d) of \((.*)\)", output)}


@pytest.mark.chaos
def test_workers_over_gloo_keep_the_contract_while_two_are_killed(tmp_path):
    passed, ended = run(tmp_path, 4, "contract")

    assert passed == {1: "1, 3", 3: "1, 3"}
    assert ended == {0: -9, 1: 0, 2: -9, 3: 0}


@pytest.mark.chaos
def test_workers_over_mpi_keep_the_contract_while_two_are_killed(tmp_path):
    """Under a bare mpirun: the launcher waits for a session before it lets the others go on without the dead."""
    worker = [sys.executable, "-m", "holdfast.launch.supervise.worker", str(WORKER), "contract"]

    done = subprocess.run(
        [*MPIRUN, "-n", "4", *worker],
        env=clean_env(HOLDFAST_RUN_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert passed(done.stdout) == {1: "1, 3", 3: "1, 3"}, done.stdout + done.stderr
    ended = {record.rank: record.exit_code for record in read_run(tmp_path) if isinstance(record, WorkerEnded)}
    assert ended == {0: -9, 1: 0, 2: -9, 3: 0}


@pytest.mark.chaos
def test_a_worker_that_dies_while_the_group_is_made_keeps_nobody_waiting(tmp_path):
    passed, ended = run(tmp_path, 4, "building")

    assert passed == {0: "0, 3", 3: "0, 3"}
    assert ended == {0: 0, 1: -9, 2: -9, 3: 0}


@pytest.mark.chaos
@pytest.mark.parametrize("scene", ["rebuilding", "stranded"])
def test_all_pass_where_groups_were_given_up_or_the_store_goes_in_the_moment_of_an_agreement(tmp_path, scene):
    """Such groups leave no thread and no file behind, and the members have the same outcome."""
    passed, ended = run(tmp_path, 3, scene)

    assert passed == dict.fromkeys(range(3), "0, 1, 2")
    assert ended == {0: 0, 1: 0, 2: 0}


def test_a_communicator_that_forgets_a_death_is_found_out():
    class Forgetful(VirtualCommunicator):
        def maximum(self, values):
            return list(values)

    comm = Forgetful(3)

    with pytest.raises(AssertionError, match="kept completing with a failed member"):
        check_communicator(comm, comm.fail, (1,))
