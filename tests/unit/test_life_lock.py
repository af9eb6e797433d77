"""The kernel's note that a process is ending: never of a process that goes on, whatever becomes of it."""

import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path

import pytest
from lock_holders import LockHolder as Worker
from lock_holders import wait_for

from holdfast.comm.pmix import report_ended
from holdfast.records import life_lock
from holdfast.records.beacon import Beacon
from holdfast.records.life_lock import LOCK_BYTES, hold_life_lock
from holdfast.records.paths import beacon_path


def has_ended(locks, rank):
    return locks.core_of_end(rank) is not None


def test_a_killed_process_has_ended_before_anything_waits_for_it(tmp_path):
    locks = Beacon.peer_locks(tmp_path)
    with Worker(tmp_path, 0) as killed, Worker(tmp_path, 1):
        assert not has_ended(locks, 0)

        killed.process.kill()

        wait_for(lambda: has_ended(locks, 0))
        assert not has_ended(locks, 1)
        killed.process.wait()
        assert has_ended(locks, 0)


@pytest.mark.parametrize("last", ["sys.exit(0)", "os._exit(3)", "os.abort()", "raise OSError"])
def test_any_other_end_is_noted_too(tmp_path, last):
    locks = Beacon.peer_locks(tmp_path)
    with Worker(tmp_path, 0, last=f"sys.stderr.close()\n{last}") as ending:
        assert not has_ended(locks, 0)

        ending.process.stdin.write("\n")
        ending.process.stdin.flush()

        wait_for(lambda: has_ended(locks, 0))


def test_a_stopped_process_has_not_ended(tmp_path):
    locks = Beacon.peer_locks(tmp_path)
    with Worker(tmp_path, 0) as stopped:
        stopped.process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)

        assert not has_ended(locks, 0)


def test_neither_a_forked_child_nor_a_thread_that_ends_releases_the_lock(tmp_path):
    then = """
import threading
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
"""
    locks = Beacon.peer_locks(tmp_path)
    with Worker(tmp_path, 0, then):
        assert not has_ended(locks, 0)


@pytest.mark.parametrize(
    "last",
    [
        pytest.param('os.execv("/bin/sleep", ["sleep", "60"])', id="it has replaced its program"),
        pytest.param(
            "memory = next(iter(__import__('holdfast.records.beacon')"
            ".records.beacon._of_process.values()))._map\n"
            "memory[Beacon._LOCK_AT + 3] |= 0x40\ntime.sleep(60)",
            id="it has overwritten its lock",
        ),
    ],
)
def test_a_process_that_goes_on_is_not_taken_for_ended_though_its_lock_says_so(tmp_path, last):
    locks = Beacon.peer_locks(tmp_path)
    with Worker(tmp_path, 0, "from holdfast.records.beacon import Beacon", last) as alive:
        alive.process.stdin.write("\n")
        alive.process.stdin.flush()
        beacon = beacon_path(tmp_path, 0)

        wait_for(lambda: struct.unpack_from("<I", beacon.read_bytes(), Beacon._LOCK_AT)[0] & 0x40000000)

        assert not has_ended(locks, 0)
        alive.process.kill()
        wait_for(lambda: has_ended(locks, 0))


def test_nothing_is_known_of_a_worker_without_a_lock(tmp_path):
    Beacon(beacon_path(tmp_path, 0)).mark("forward", 1)
    beacon_path(tmp_path, 1).touch()

    assert [Beacon.peer_locks(tmp_path).core_of_end(rank) for rank in (0, 1, 2)] == [None, None, None]


def test_a_thread_that_may_end_before_its_process_takes_no_lock():
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    thread = threading.Thread(target=hold_life_lock, args=(memory, 0))

    thread.start()
    thread.join()

    assert memory[:8] == bytes(8)


def test_a_process_without_mpi_can_tell_it_nothing():
    assert report_ended(1) is False


def test_a_mapped_lock_keeps_no_file_descriptor(tmp_path):
    locks = Beacon.peer_locks(tmp_path)
    with Worker(tmp_path, 0):
        before = os.listdir("/proc/self/fd")

        assert locks.on_this_host([0, 1]) == [0]

        assert os.listdir("/proc/self/fd") == before


def test_waiting_for_an_end_keeps_neither_a_file_descriptor_nor_in_the_long_run_a_mapping(tmp_path):
    locks = Beacon.peer_locks(tmp_path)
    with Worker(tmp_path, 0) as first, Worker(tmp_path, 1) as second:
        before = os.listdir("/proc/self/fd")
        for rank, worker in enumerate((first, second)):
            thread = threading.Thread(target=Beacon.wait_for_end, args=(beacon_path(tmp_path, rank),), daemon=True)
            thread.start()
            wait_for(lambda rank=rank: str(beacon_path(tmp_path, rank)) in mapped())
            worker.process.kill()
            thread.join()
        assert os.listdir("/proc/self/fd") == before

        def are_unmapped():
            assert not Beacon.wait_for_end(beacon_path(tmp_path, 2)), "there is no such worker"
            return str(tmp_path) not in mapped()

        wait_for(are_unmapped)  # once the threads have ended
        assert [has_ended(locks, rank) for rank in (0, 1)] == [True, True]


def mapped():
    return Path("/proc/self/maps").read_text()


def test_a_lock_of_another_host_is_neither_mapped_nor_read_again(tmp_path):
    with Worker(tmp_path, 0) as killed, Worker(tmp_path, 1):
        beacon = beacon_path(tmp_path, 0)
        with beacon.open("r+b") as file:  # as its process would have written it elsewhere, in a shared folder
            file.seek(Beacon._LOCK_AT + LOCK_BYTES - 8)
            file.write(b"elsewher")
        locks = Beacon.peer_locks(tmp_path)

        assert locks.on_this_host([0, 1]) == [1]
        killed.process.kill()
        killed.process.wait()
        maps = Path("/proc/self/maps").read_text()

        assert not has_ended(locks, 0)
        assert str(beacon_path(tmp_path, 1)) in maps
        assert str(beacon) not in maps


def test_a_process_that_may_not_be_kept_on_its_core_ends_nevertheless(tmp_path, monkeypatch):
    stat = tmp_path / "proc" / "stat"
    fields = ["S", *["0"] * 50]
    fields[1 + 5], fields[1 + 35] = str(0x4), "7"
    stat.parent.mkdir()
    stat.write_text(f"1 (python) {' '.join(fields)}")

    def denied(*_):
        raise PermissionError

    monkeypatch.setattr(life_lock, "Path", lambda _: stat)
    monkeypatch.setattr(os, "listdir", lambda _: ["1"])
    monkeypatch.setattr(os, "sched_setaffinity", denied)

    assert life_lock._core_of_end(1) == 7
