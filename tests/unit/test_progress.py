"""Progress of commands that take a while: bars with the remaining time on a terminal, lines without one."""

from __future__ import annotations

import io
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from holdfast.checkpoint.loading import find_damage, read_manifest
from holdfast.checkpoint.save import write_tensors
from holdfast.checkpoint.storage import open_storage
from holdfast.cli import progress as module
from holdfast.cli.progress import Reporter, progress
from holdfast.observe.terminal.bar import bar_line
from holdfast.tools.checkpoints.convert import convert
from holdfast.tools.checkpoints.counted import CountedStorage
from holdfast.tools.checkpoints.source import saved_source


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    made = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now_s)
    return made


# -- the remaining time


def test_the_rest_takes_as_long_as_what_is_done(clock):
    work = Reporter("reading")
    assert (work.share, work.left_s) == (None, None)

    work.expect(400)
    work.advance(100)
    clock.now_s += 10

    assert work.share == 0.25
    assert work.left_s == pytest.approx(30.0)
    assert work.line() == "reading, 25 %, 10 s, about 30 s left"


def test_too_little_work_says_nothing_of_the_rest(clock):
    work = Reporter("reading")
    work.expect(100)
    work.advance(1)
    clock.now_s += 60
    assert work.left_s is None

    work.advance(49)
    assert work.left_s == pytest.approx(60.0)
    clock.now_s -= 59
    assert work.left_s is None


def test_what_was_done_before_the_total_was_known_does_not_count(clock):
    work = Reporter("looking for the newest")
    work.advance(1000)
    clock.now_s += 100
    work.expect(50)
    work.advance(25)
    clock.now_s += 5

    assert work.share == 0.5
    assert work.left_s == pytest.approx(5.0)
    assert work.elapsed_s == 105


def test_a_remaining_time_that_is_given_counts_down_and_never_completes_the_work(clock):
    work = Reporter("")
    work.at_task("[2/4] task", 0.5, 100.0)
    clock.now_s += 50

    assert (work.text, work.left_s) == ("[2/4] task", pytest.approx(50.0))
    assert work.share == pytest.approx(0.75)
    clock.now_s += 500
    assert work.left_s == 0
    assert work.share == pytest.approx(0.99)


def test_more_than_expected_is_everything():
    work = Reporter("")
    work.expect(10)
    work.advance(11)

    assert work.share == 1.0


# -- where it is shown


def test_without_a_terminal_there_is_a_line_every_half_minute(clock, capsys):
    with progress("reading") as now:
        now.expect(100)
        for _ in range(70):
            clock.now_s += 1
            now.advance()

    assert capsys.readouterr().err.splitlines() == ["reading, 30 %, 30 s, about 1 min 10 s left", "reading, 60 %, 1 min 0 s, about 40 s left"]  # fmt: skip


def test_a_short_command_and_one_whose_output_programs_read_print_nothing(clock, capsys):
    with progress("reading") as now:
        now("reading step 3")
        now.at(0.5)
    with progress("reading", quiet=True) as now:
        clock.now_s += 300
        now.expect(10)
        now.advance()

    assert capsys.readouterr() == ("", "")


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(capsys):
    with progress("reading"):
        warnings.warn("read slowly", stacklevel=1)

    assert capsys.readouterr().err == "warning: read slowly\n"


def test_on_a_terminal_a_bar_is_drawn_and_removed(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")

    with progress("reading\x1b]0;title\x07") as now:
        now.expect(4)
        now.advance(3)
        now.print_line("a line that stays")
        now.live.refresh()

    assert "reading\\x1b]0;title\\x07" in screen.getvalue()
    assert "75 %" in screen.getvalue()
    assert "a line that stays\n" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the bar's line is erased


@pytest.mark.parametrize("width", [10, 20, 40, 80, 200])
@pytest.mark.parametrize("share", [None, 0.0, 0.333, 1.0])
def test_a_bar_fits_into_the_terminal(width, share):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)

    console.print(bar_line("converting /a/long/path/of/checkpoints/step-00000020", share, "0:12  3 s left", width))

    lines = console.file.getvalue().rstrip("\n").split("\n")
    assert len(lines) == 1
    assert len(lines[0]) <= width


# -- the bytes of checkpoints


@pytest.fixture
def storage(tmp_path):
    """Two checkpoints."""
    for step in (10, 20):
        state = {"a": torch.arange(3000.0), "b": torch.ones(7, 11), "tied": torch.zeros(5)}
        write_tensors(tmp_path / "saved", step, state, {}).commit(0)
    return open_storage(tmp_path / "saved")


def test_reading_a_checkpoint_counts_each_byte_of_its_files_once(storage):
    lock, counted = threading.Lock(), []

    def count(size):
        with lock:
            counted.append(size)

    _, damage = find_damage(CountedStorage(storage, count), 10)

    assert damage == []
    assert sum(counted) == sum(file.size_bytes for file in read_manifest(storage, 10).files.values())


@pytest.mark.parametrize("format", ["safetensors", "npz"])
def test_converting_counts_what_is_read_written_and_read_again(storage, tmp_path, format):
    counted = []
    source = saved_source(CountedStorage(storage, counted.append), 20)
    target = CountedStorage(open_storage(tmp_path / "out"), counted.append)

    convert(source, target, format, counted.append)

    values = sum(entry.size_bytes for entry in source.tensors.values())
    assert 3 * values <= sum(counted) < 3 * values + 8192  # headers are read, too


def test_a_counted_storage_knows_when_a_checkpoint_was_written(storage):
    inner, counted = (saved_source(one, 10).written_s for one in (storage, CountedStorage(storage, lambda size: None)))

    assert counted == inner is not None
