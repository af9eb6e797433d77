"""Strangers at every port that a job opens: rubbish and silence change nothing, also when workers die."""

import contextlib
import os
import random
import socket
import threading
from pathlib import Path

import pytest
from exact import SCRIPT, check_nothing_lost, reference_hash
from jobs import assert_landed, run_report

from holdfast.launch.supervise.processes import name_of, value_of

pytestmark = [pytest.mark.chaos, pytest.mark.cold_start]  # strangers need time to find the ports

LISTENS = "0A"  # in the kernel's table


def open_ports(folder):
    """What the processes of a job listen on, by port: who, and at which address."""
    owners = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if value_of(int(entry.name), "TMPDIR") == str(folder):
            for handle in (entry / "fd").glob("*"):
                try:
                    owners[os.readlink(handle)] = int(entry.name)
                except OSError:  # closed meanwhile
                    continue
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    listening = [(words[1].split(":"), owners.get(f"socket:[{words[9]}]")) for words in lines if words[3] == LISTENS]
    return {int(port, 16): (pid, address(host)) for (host, port), pid in listening if pid}


def address(host):
    """An address of the kernel's table as one writes it; it is made of words in the machine's order."""
    words = b"".join(bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def disturb(folder, over, reached):
    """Send random bytes to all of them until it is over; ``reached`` is where they arrived."""
    rng = random.Random(0)
    while not over.wait(0.2):
        for port, (pid, host) in open_ports(folder).items():
            try:
                with socket.create_connection((host, port), timeout=1) as stranger:
                    stranger.sendall(rng.randbytes(rng.choice((1, 8, 24, 64, 4096))))
            except OSError:  # it ends, or has cut us off
                continue
            reached.add((pid, port, host))


def test_rubbish_on_every_open_port_changes_no_bit(tmp_path):
    over, reached = threading.Event(), set()
    thread = threading.Thread(target=disturb, args=(tmp_path, over, reached))
    thread.start()
    try:
        options = ("-n", 3, "--fabric", "gloo", "--max-restarts", 0, "--inject", "kill:rank=1,step=7,phase=allreduce")
        report = run_report(tmp_path, *options, SCRIPT, "mlp", "sgd", "--pause", 0.1, env={"TMPDIR": str(tmp_path)})
    finally:
        over.set()
        thread.join()

    assert_landed(report, 1)
    check_nothing_lost(report, reference_hash("mlp", "sgd"), [0, 2])
    assert len({pid for pid, _, _ in reached}) >= 4, "the launcher's store, and each worker"
    assert {host for _, _, host in reached} == {"127.0.0.1"}, "a job on one machine is open to that machine alone"


def say_nothing(folder, over, owners):
    """Once training has begun, hold a connection to each port, and send nothing; ``owners`` are whose ports take one."""
    while not any('"StepCommitted"' in path.read_text() for path in folder.glob("holdfast-*/records-0.jsonl")):
        if over.wait(0.05):
            return
    with contextlib.ExitStack() as held:
        for port, (pid, host) in open_ports(folder).items():
            held.enter_context(socket.create_connection((host, port), timeout=1))
            owners.append(name_of(pid))
        over.wait()


def test_a_stranger_that_says_nothing_does_not_keep_a_death_from_being_noticed(tmp_path):
    over, owners = threading.Event(), []
    thread = threading.Thread(target=say_nothing, args=(tmp_path, over, owners))
    thread.start()
    try:
        kill = ("--max-restarts", 0, "--stall-timeout", 10, "--inject", "kill:rank=1,step=6,phase=allreduce")
        options = ("-n", 3, "--fabric", "ulfm", *kill, SCRIPT, "mlp", "sgd", "--pause", 0.4)
        report = run_report(tmp_path, *options, env={"TMPDIR": str(tmp_path)})
    finally:
        over.set()
        thread.join()

    assert_landed(report, 1)
    check_nothing_lost(report, reference_hash("mlp", "sgd"), [0, 2])
    assert set(owners) == {"prterun"}, "workers listen nowhere"
