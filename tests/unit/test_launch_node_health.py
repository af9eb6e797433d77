"""A node checks itself before it joins: what is unfit is found, and what hangs does not hang the start."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, JobError
from holdfast.launch import node_health, node_probe
from holdfast.launch.clock_offset import ClockServer, measure_offset
from holdfast.launch.node_health import HealthLimits, NodeCheck, clock_complaint, parse_limits
from holdfast.membership import Hub, open_store

NONE = HealthLimits(disk_s=None, memory_bytes=None, clock_s=None, loopback_bytes_per_s=None, gpu_s=None)


def findings(limits: HealthLimits, *folders: Path) -> dict[str, node_health.HealthFinding]:
    check = NodeCheck(limits, folders)
    try:
        return {one.name: one for one in check.findings()}
    finally:
        check.close()


def test_a_healthy_machine_passes_and_leaves_nothing_behind(tmp_path):
    found = findings(HealthLimits(gpu_s=None), tmp_path)

    assert list(found) == [f"disk {tmp_path}", "memory", "loopback"]
    assert not any(one.why for one in found.values()), found
    assert "MiB available" in found["memory"].value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "name", "why"),
    [
        (HealthLimits(disk_s=1e-7), "disk", "a synced write of 1 MiB took .* s, more than 1e-07 s"),
        (HealthLimits(memory_bytes=1e15), "memory", "MiB available, fewer than 953,674,316"),
        (HealthLimits(loopback_bytes_per_s=1e15), "loopback", "MB/s, less than 1e.09"),
    ],
)
def test_what_is_below_a_limit_is_unfit(tmp_path, limits, name, why):
    import re

    found = findings(limits, tmp_path)

    for one in found.values():
        assert bool(re.search(why, one.why)) is one.name.startswith(name), one


def test_a_folder_that_cannot_be_written_is_unfit():
    found = findings(HealthLimits(), Path("/proc"))

    assert found["disk /proc"].why.startswith("cannot be written: ")


def test_a_disk_that_takes_no_more_is_unfit(tmp_path):
    def allow_4_kib() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    wanted = json.dumps([["disk", "disk", str(tmp_path), 5.0]])
    done = subprocess.run(
        [sys.executable, "-I", "-S", node_probe.__file__, wanted],
        preexec_fn=allow_4_kib,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert json.loads(done.stdout)["why"] == "cannot be written: File too large"
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_hangs_is_a_failed_check(tmp_path, monkeypatch):
    monkeypatch.setattr(node_health, "_MARGIN_S", 0.3)
    check = NodeCheck(HealthLimits(disk_s=0.2, gpu_s=None), (tmp_path,))
    assert check._probe is not None
    os.kill(check._probe.pid, signal.SIGSTOP)
    began_s = time.monotonic()

    with pytest.raises(JobError, match=f"node 3 stays out of the job, because it is unfit: disk {tmp_path}: no answer"):
        check.admit(node=3)
    assert time.monotonic() - began_s < 5
    check.close()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo '00:1, No, No'; echo '00:2, No, No'", ""),
        ("echo '00:1, No, No'; echo '00:2, Yes, No'", "the remapping of memory rows of GPU 00:2 is pending, which needs a reset"),
        ("echo '00:1, No, Yes'", "the remapping of memory rows of GPU 00:1 is impossible"),
        ("echo 'Unable to determine the device handle for GPU 00:1: GPU is lost.'; exit 15", "nvidia-smi: Unable to determine"),
        ("echo 'Field \"remapped_rows.pending\" is not a valid field to query.'; exit 2", ""),
        ("sleep 30", "nvidia-smi did not answer within 0.3 s"),
    ],
)  # fmt: skip
def test_gpus_are_judged_by_what_the_driver_says(tmp_path, monkeypatch, script, why):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    found = findings(HealthLimits(disk_s=None, memory_bytes=None, loopback_bytes_per_s=None, gpu_s=0.3))
    assert found["gpu"].why.startswith(why)
    assert bool(found["gpu"].why) is bool(why)


def test_an_offset_is_found_from_the_round_trip():
    with ClockServer("127.0.0.1", lambda: time.time() - 100.0) as server:
        offset = measure_offset("127.0.0.1", server.port, 5.0)

    assert offset is not None
    ahead_s, half_s = offset
    assert abs(ahead_s - 100.0) <= half_s + 1e-3
    assert 0 < half_s < 1
    assert measure_offset("127.0.0.1", server.port, 0.2) is None, "it was closed"


def test_a_clock_is_blamed_only_beyond_its_uncertainty():
    assert clock_complaint(10.4, 0.5, 10) == ""
    assert clock_complaint(-10.6, 0.5, 10) == (
        "the clock is 10.6 s behind that of the node that hosts the store, more than 10 s"
    )


def test_a_node_whose_clock_is_off_says_so_in_the_store_and_stays_out(monkeypatch):
    limits = HealthLimits(disk_s=None, memory_bytes=None, loopback_bytes_per_s=None, gpu_s=None, clock_s=10.0)
    with Hub("", "127.0.0.1", 0) as hub:
        stores = [open_store(f"holdfast://{hub.address}/job", "") for _ in range(3)]
        checks = [NodeCheck(limits, ()) for _ in stores]
        try:
            checks[0].admit(stores[0], 0, hosts_store=True)
            checks[1].admit(stores[1], 1)
            measured = measure_offset
            monkeypatch.setattr(
                node_health,
                "measure_offset",
                lambda host, port, timeout_s: measured(host, port, timeout_s, lambda: time.time() - 3600),
            )
            with pytest.raises(JobError, match=r"node 2 stays out .*: the clock is 3.6e.03 s behind that of the node"):
                checks[2].admit(stores[2], 2)
            unfit = stores[0].wait(lambda: stores[0].under("unfit/") or None, 10)
            assert unfit is not None
            assert list(unfit) == ["2"]
        finally:
            for each in (*checks, *stores):
                each.close()


def test_without_a_host_of_the_store_the_first_node_gives_the_time():
    with Hub("", "127.0.0.1", 0) as hub:
        stores = [open_store(f"holdfast://{hub.address}/job", "") for _ in range(2)]
        checks = [NodeCheck(HealthLimits(gpu_s=None), (), elects=True) for _ in stores]
        try:
            checks[0].admit(stores[0], 0)
            address = stores[1].wait(lambda: stores[1].get("clock"), 10)
            checks[1].admit(stores[1], 1)
            assert address is not None
            assert stores[1].get("clock") == address, "the second measured against the first"
        finally:
            for each in (*checks, *stores):
                each.close()


def test_without_another_clock_none_is_measured():
    limits = HealthLimits(disk_s=None, memory_bytes=None, loopback_bytes_per_s=None, gpu_s=None)
    with Hub("", "127.0.0.1", 0) as hub:
        store, check = open_store(f"holdfast://{hub.address}/job", ""), NodeCheck(limits, ())
        check.admit(store, 1)
        store.close()
        check.close()


def test_limits_are_read_and_wrong_ones_refused():
    assert parse_limits("on") == HealthLimits()
    assert parse_limits("off") is None
    assert parse_limits("disk=200ms,memory=1GiB,gpu=off") == HealthLimits(disk_s=0.2, memory_bytes=2**30, gpu_s=None)
    assert parse_limits("disk=off,memory=off,clock=off,loopback=off,gpu=off") == NONE
    for text, message in (
        ("yes", "--health-check must be on, off, or limits of disk, memory, clock, loopback, gpu"),
        ("disk=5", "--health-check disk must be off, or a number above 0 with ms or s, got '5'"),
        ("disk=-1s", "above 0"),
        ("loopback=infMB/s", "above 0"),
        ("disk", "got ''"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_limits(text)


def test_the_doctor_shows_the_same_checks(capsys):
    from holdfast.cli import main

    def doctor(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--node", *words])
        return int(ended.value.code or 0)

    assert doctor("--json") == 0
    assert json.loads(capsys.readouterr().out)["fit"] is True
    assert doctor("--health-check", "memory=900000GB") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("memory")] == ["unfit"]
    assert doctor("--health-check", "off") == 2
    assert doctor("train.py") == 2


def test_a_check_for_which_the_system_refuses_a_thread_says_so(monkeypatch, capsys):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(node_probe.threading.Thread, "start", refuse)
    node_probe.main([["memory", "memory", 1]])

    said = {"name": "memory", "value": "", "why": "the system refuses a thread for the check"}
    assert json.loads(capsys.readouterr().out) == said


def test_checks_whose_launcher_was_killed_end_without_a_word():
    reads, writes = os.pipe()
    os.close(reads)
    wanted = json.dumps([["memory", "memory", 1], ["loopback", "loopback", 1.0]])
    words = [sys.executable, "-I", "-S", node_probe.__file__, wanted]

    done = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writes)

    assert (done.returncode, done.stderr) == (1, b"")
