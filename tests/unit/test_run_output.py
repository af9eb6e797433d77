"""Output of ``holdfast run``: a job neither waits for the reader of its output, nor ends with it."""

from __future__ import annotations

import os
import pty
import signal
import sys
import threading
import time

import pytest

from holdfast import cli
from holdfast.cli import output
from holdfast.cli.output import RunOutput


@pytest.fixture
def streams(monkeypatch):
    """Return a function that opens stdout and stderr on two file descriptors, which it closes in the end."""
    opened = []

    def use(*fds):
        for name, fd in zip(("stdout", "stderr"), fds, strict=True):
            opened.append(os.fdopen(fd, "w", closefd=False))
            monkeypatch.setattr(sys, name, opened[-1])

    yield use
    for stream in opened:
        stream.close()


def everything(fd):
    """All that can be read from a file descriptor whose other end is closed."""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_output_arrives_in_order_also_of_two_streams_of_one_file(streams):
    reads, writes = os.pipe()
    twin = os.dup(writes)
    streams(writes, twin)
    threads = threading.active_count()

    with RunOutput():
        assert threading.active_count() == threads + 1
        for number in range(100):
            print(number, file=sys.stderr if number % 2 else sys.stdout)
    os.close(writes)
    os.close(twin)

    assert everything(reads).split() == [b"%d" % number for number in range(100)]


def test_output_that_nothing_reads_holds_up_nothing_and_is_left_out_beyond_a_limit(streams, monkeypatch):
    monkeypatch.setattr(output, "CAPACITY_BYTES", 300_000)
    reads, writes = os.pipe()
    streams(writes, os.open(os.devnull, os.O_WRONLY))

    with RunOutput() as run:
        for _ in range(10):
            print("x" * 99_999)
        run.patience_s = 0.1
        run.drain()  # gives up
        reader = threading.Thread(target=lambda: read.append(everything(reads)))
        read = []
        reader.start()
        run.patience_s = 60.0
        run.drain()
        print("the end")
    os.close(writes)
    reader.join()

    said = read[0].decode()
    assert said.endswith("\nholdfast: 700000 bytes of output are left out here, because nothing read them\nthe end\n")
    assert said.count("x") == 3 * 99_999


def test_a_signal_ends_the_wait_for_a_reader(streams):
    reads, writes = os.pipe()
    streams(writes, os.open(os.devnull, os.O_WRONLY))
    before = signal.signal(signal.SIGTERM, ignore := lambda *_: None)  # it may arrive before the wait, or after it
    is_over = threading.Event()

    def ask_to_end():
        while not is_over.wait(0.05):
            os.kill(os.getpid(), signal.SIGTERM)

    asker = threading.Thread(target=ask_to_end)
    asker.start()
    began_s = time.monotonic()
    try:
        with RunOutput() as run:
            print("x" * 999_999)
        assert time.monotonic() - began_s < 30
        assert signal.getsignal(signal.SIGTERM) is ignore
    finally:
        is_over.set()
        asker.join()
        signal.signal(signal.SIGTERM, before)
        os.close(reads)
        wait_for_queues(run)
        os.close(writes)


def wait_for_queues(run):
    """Wait until nothing is written any more: another file would get the number of one that is closed before."""
    while any(queue.is_waiting() for queue in run._queues.values()):
        time.sleep(0.01)


def test_what_the_encoding_does_not_have_is_printed_by_its_number(monkeypatch):
    reads, writes = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writes, "w", encoding="ascii"))

    with RunOutput():
        print("50 % ███ \udcff")
    sys.stdout.close()

    assert everything(reads) == b"50 % \\u2588\\u2588\\u2588 \\udcff\n"


def closed_pipe():
    reads, writes = os.pipe()
    os.close(reads)
    return writes, "Broken pipe"


def full_disk():
    return os.open("/dev/full", os.O_WRONLY), "No space left on device"


def closed_terminal():
    master, terminal = pty.openpty()
    os.close(master)
    return terminal, "Input/output error"


@pytest.mark.parametrize("lost", [closed_pipe, full_disk, closed_terminal])
def test_a_job_continues_without_a_reader_of_its_output(lost, streams):
    writes, why = lost()
    reads, errors = os.pipe()
    streams(writes, errors)

    with RunOutput() as run:
        print("one")
        run.drain()
        print("two")
        run.drain()
    os.close(writes)
    os.close(errors)

    assert run.error.strerror == why
    assert everything(reads).decode() == f"holdfast: cannot write to stdout: {why}; the job continues\n"


def test_a_terminal_that_another_program_made_non_blocking_gets_all_output(streams):
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    streams(writes, os.open(os.devnull, os.O_WRONLY))
    read = []
    reader = threading.Thread(target=lambda: read.append(everything(reads)))

    with RunOutput():
        print("x" * 999_999)
        reader.start()
    os.close(writes)
    reader.join()

    assert len(read[0]) == 1_000_000


def test_streams_that_are_closed_are_opened():
    pid = os.fork()
    if pid == 0:
        os.closerange(0, 3)
        sys.stdin = sys.stdout = sys.stderr = None
        cli._open_standard_files()
        sys.stdout.write("dropped")
        os._exit(int([stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)] != [0, 1, 2]))

    assert os.waitpid(pid, 0)[1] == 0
