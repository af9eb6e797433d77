"""A command says whether a node is fit before it joins; one that hangs does not hang the start."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from holdfast.errors import JobError
from holdfast.launch.fleet.node_health import NodeCheck
from holdfast.membership import Hub, open_store

DEADLINE_S = 30


def why(command, **limits):
    check = NodeCheck(command, **limits)
    try:
        return check.why_unfit()
    finally:
        check.close()


@pytest.mark.parametrize(
    ("command", "unfit"),
    [
        ("", ""),
        ("true", ""),
        ("echo all is well; exit 0", ""),
        ("exit 3", "the command ended with 3"),
        ("echo one; echo the disk is full >&2; exit 1", "the command ended with 1: the disk is full"),
        ("printf '\\377'; exit 1", "the command ended with 1: \ufffd"),
        ("kill -9 $$", "the command was killed by signal 9"),
        ("no-such-command-here", "the command ended with 127: "),
    ],
)
def test_what_the_command_ends_with_says_whether_the_machine_is_fit(command, unfit):
    said = why(command)

    assert said.startswith(unfit) if unfit else said == ""


def test_a_long_line_is_cut():
    assert len(why("head -c 100000 /dev/zero | tr '\\0' x; exit 1")) < 300


def test_a_command_that_hangs_has_failed_and_nothing_is_left_of_it(tmp_path):
    begun_s = time.monotonic()

    said = why(f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait", limit_s=1.0)

    assert said == "the command did not end within 1 s"
    assert time.monotonic() - begun_s < DEADLINE_S
    pid = int((tmp_path / "pid").read_text())
    ends_s = time.monotonic() + DEADLINE_S
    while is_running(pid):
        assert time.monotonic() < ends_s, "what the command has started runs on"
        time.sleep(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_unfit_node_says_so_in_the_store_and_a_fit_one_takes_it_back():
    with Hub("secret") as hub, closing(open_store(f"holdfast://{hub.address}/a-job", "secret")) as store:
        with pytest.raises(JobError, match=r"node 2 stays out of the job, because it is unfit: .* 1: no disk "):
            NodeCheck("echo no disk; exit 1").admit(store, 2)
        assert store.get("unfit/2") == "the command ended with 1: no disk"

        check = NodeCheck("true")
        check.admit(store, 2)
        check.admit(store, 2)
        assert store.get("unfit/2") is None


def test_it_runs_beside_what_else_starts():
    check = NodeCheck("sleep 0.5")
    time.sleep(0.6)
    begun_s = time.monotonic()

    check.admit()

    assert time.monotonic() - begun_s < 0.4
