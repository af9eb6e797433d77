"""``events.jsonl`` while a job runs: full files, readers that follow them, crashes, and several launchers."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from some_records import some

from holdfast.errors import ConfigError
from holdfast.launch.job_rules import size_in_bytes
from holdfast.observe.monitor.followed import FollowedFolder, GrowingEvents
from holdfast.records.event_log import EventLog
from holdfast.records.files import complete_lines, load_events, read_event_files
from holdfast.records.paths import event_files, events_path
from holdfast.records.types import StepCommitted
from holdfast.summary.files import write_report
from holdfast.tools.against import read_losses
from holdfast.tools.debug.bundle import BundleSource, write_bundle


def step(number):
    return some(StepCommitted, t_s=float(number), step=number, metrics={"loss": 1.0})


def written(folder, numbers, most_bytes):
    log = EventLog(folder, most_bytes)
    for number in numbers:
        log.write(step(number))
    return log


def names(folder):
    return [path.name for path in event_files(folder)]


def test_a_full_file_gets_a_number_and_all_readers_read_all_of_them_in_order(tmp_path):
    log = written(tmp_path, range(100), 4000)
    assert log.is_final()
    log.close()

    assert names(tmp_path)[:2] == ["events-000001.jsonl", "events-000002.jsonl"]
    assert names(tmp_path)[-1] == "events.jsonl"
    assert all(4000 <= path.stat().st_size < 4400 for path in event_files(tmp_path)[:-1])
    assert [record.step for record in load_events(tmp_path)] == list(range(100))
    in_order = [json.loads(line)["step"] for path in event_files(tmp_path) for line in path.read_text().splitlines()]
    assert in_order == list(range(100))

    write_report(
        [step(number) for number in range(100)], tmp_path, has_events=True, started=range(4), wall_s=99.0, seed=0
    )
    _, losses = read_losses(tmp_path)
    assert len(losses) == 100
    run = FollowedFolder(tmp_path, "out")
    assert run.live.full(run.now_s())["progress"]["step"] == 100
    bundled = write_bundle(BundleSource(report_dir=tmp_path), tmp_path / "bundle.tgz")
    assert {*names(tmp_path), "report.json"} <= set(bundled)


def test_files_beyond_the_last_number_of_six_digits_stay_in_order(tmp_path):
    for number in (999_999, 1_000_000, 0):
        events_path(tmp_path, number).write_text("")

    assert names(tmp_path) == ["events-999999.jsonl", "events-1000000.jsonl", "events.jsonl"]


def test_a_new_run_replaces_all_files_of_an_earlier_one_and_never_those_of_a_running_one(tmp_path):
    written(tmp_path, range(50), 2000).close()
    (tmp_path / "report.json").write_text("{}")
    running = written(tmp_path, range(3), 2000)
    other = written(tmp_path, range(100, 120), 2000)
    third = EventLog(tmp_path, is_first=False)
    third.write(step(200))

    assert [record.step for record in load_events(tmp_path)] == [0, 1, 2]
    assert not (tmp_path / "report.json").exists()
    assert other.is_final(), "the records of a job with two launchers are written by one of them"
    running.close()
    assert not other.is_final(), "that one is gone, so the other one writes all records at the end"
    assert third.is_final()
    other.close()
    assert not third.is_final(), "a launcher of another node writes nothing while the job runs"
    third.close()


def test_an_earlier_report_stays_where_no_new_file_can_be_begun(tmp_path):
    written(tmp_path, range(50), 2000).close()
    earlier = names(tmp_path)
    (tmp_path / "events.jsonl.next" / "in the way").mkdir(parents=True)
    log = written(tmp_path, range(3), 2000)

    assert names(tmp_path) == earlier
    assert not log.is_final()
    log.close()


def test_a_file_that_has_the_next_number_is_never_replaced(tmp_path):
    log = written(tmp_path, [0], 1)
    events_path(tmp_path, 1).write_text("of another launcher\n")
    log.write_all([step(1), step(2)])
    log.close()

    assert names(tmp_path) == ["events-000001.jsonl", "events-000002.jsonl", "events-000003.jsonl", "events.jsonl"]
    assert events_path(tmp_path, 1).read_text() == "of another launcher\n"


def test_records_of_one_look_are_written_at_once_and_split_where_a_file_is_full(tmp_path, monkeypatch):
    sizes, write = [], os.write
    monkeypatch.setattr(os, "write", lambda file, text: sizes.append(len(text)) or write(file, text))
    log = EventLog(tmp_path, 1000)
    log.write_all([step(number) for number in range(20)])
    log.close()

    assert sizes == [path.stat().st_size for path in event_files(tmp_path)]
    assert len(sizes) > 2
    assert all(1000 <= size < 1300 for size in sizes[:-1])
    assert [record.step for record in load_events(tmp_path)] == list(range(20))


@pytest.mark.parametrize("what", ["removed", "replaced", "moved"])
def test_all_records_are_written_at_the_end_if_the_file_is_not_there_any_more(tmp_path, what):
    folder = tmp_path / "out"
    log = written(folder, range(50), 2000)
    assert log.is_final()
    if what == "removed":
        events_path(folder).unlink()
    elif what == "replaced":
        (folder / "other").write_text("of another launcher\n")
        (folder / "other").replace(events_path(folder))
    else:
        folder.rename(tmp_path / "elsewhere")

    assert not log.is_final()
    log.write_all([step(number) for number in range(50, 100)])
    log.close()
    assert what != "replaced" or events_path(folder).read_text() == "of another launcher\n"


def test_a_line_that_a_full_disk_has_truncated_is_skipped_and_removed_by_the_next_one(tmp_path, monkeypatch, capsys):
    log, events, write = written(tmp_path, range(3), 1), GrowingEvents(tmp_path), os.write  # a new file for each record
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:40]))
    log.write(step(3))
    monkeypatch.undo()

    assert events_path(tmp_path).stat().st_size == 40, "no line was truncated"
    assert [record.step for record in load_events(tmp_path)] == [0, 1, 2]
    assert followed(events) == [0, 1, 2]
    log.write_all([step(4), step(5)])
    assert [record.step for record in load_events(tmp_path)] == [0, 1, 2, 4, 5]
    assert followed(events) == [4, 5]
    assert not log.is_final()
    assert "these records are written at its end" in capsys.readouterr().err
    log.close()


def followed(events):
    seen = []
    while records := events.read()[0]:
        seen += [record.step for record in records]
    return seen


def test_what_a_reader_finds_renamed_between_two_looks_is_looked_for_again(tmp_path):
    log, looks = written(tmp_path, range(3), 1), []

    def read(path):
        looks.append(path.name)
        if len(looks) == 3:
            log.write(step(3))  # the newest file has its number now
        return [json.loads(line)["step"] for line in complete_lines(path)]

    assert read_event_files(tmp_path, read) == [0, 1, 2, 3]
    assert len(looks) == 3 + 4
    log.close()

    def read_removed(path):
        if path.exists() and path.name == "events-000001.jsonl":
            path.unlink()
        return [json.loads(line)["step"] for line in complete_lines(path)]

    assert read_event_files(tmp_path, read_removed) == [1, 2, 3]


def test_full_files_are_gone_before_the_one_that_has_all_records_is_there(tmp_path, monkeypatch):
    written(tmp_path, range(50), 2000).close()
    records = [step(number) for number in range(50)]

    def killed(draft, path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_report(records, tmp_path, started=range(4), wall_s=1.0, seed=0)
    found = [record.step for record in load_events(tmp_path)]
    assert len(found) == len(set(found)), "no record is there twice"

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full_disk)
        with pytest.raises(ConfigError, match="No space left"):
            write_report(records, tmp_path, started=range(4), wall_s=1.0, seed=0)
    assert names(tmp_path) == ["events.jsonl"]
    assert not list(tmp_path.glob("*.draft"))

    write_report(records, tmp_path, started=range(4), wall_s=1.0, seed=0)
    assert load_events(tmp_path) == records


def full_disk(path, text):
    path.write_bytes(text[:10].encode())
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_no_new_file_can_be_begun_the_full_one_is_continued(tmp_path):
    log = EventLog(tmp_path, 1000)
    log.write(step(0))
    (tmp_path / "events.jsonl.next" / "in the way").mkdir(parents=True)
    for number in range(1, 40):
        log.write(step(number))
    log.close()

    assert names(tmp_path) == ["events.jsonl"]
    assert len(events_path(tmp_path).read_text().splitlines()) == 40


def test_a_reader_that_follows_gets_each_record_once_whatever_happens_between_two_looks(tmp_path):
    for seed in range(30):
        folder, rng = tmp_path / str(seed), random.Random(seed)
        log, events, seen, number = EventLog(folder, 1500), GrowingEvents(folder), [], 0
        while number < 60 or rng.random() < 0.5:
            for _ in range(rng.randrange(20)):
                log.write(step(number))
                number += 1
            for _ in range(rng.randrange(4)):
                records, is_other = events.read()
                assert not is_other
                seen += [record.step for record in records]
        log.close()
        while records := events.read()[0]:
            seen += [record.step for record in records]

        assert seen == list(range(number))
        assert len(names(folder)) > 5


def test_a_reader_notices_another_run_in_the_same_folder(tmp_path):
    written(tmp_path, range(30), 1500).close()
    events = GrowingEvents(tmp_path)
    while events.read()[0]:
        pass
    written(tmp_path, range(5), 1500).close()

    assert events.read() == ([], True)


WRITER = """
import sys
from pathlib import Path
from holdfast.records.event_log import EventLog
from holdfast.records.types import StepCommitted

log = EventLog(Path(sys.argv[1]), 1)  # a new file for each record
number = 0
while True:
    log.write(StepCommitted(t_s=float(number), rank=0, step=number, epoch=0, samples=4, workers=4, metrics={}))
    print(number, flush=True)
    number += 1
"""


def test_a_crash_in_the_middle_of_a_rotation_loses_no_record(tmp_path):
    rng = random.Random(5)
    for number in range(4):
        folder = tmp_path / str(number)
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"0\n"
            time.sleep(rng.uniform(0.0, 0.03))
            writer.send_signal(signal.SIGKILL)
            told = [0, *map(int, writer.stdout.read().split())]

        assert writer.returncode == -signal.SIGKILL
        found = [record.step for record in load_events(folder)]
        assert found == list(range(len(found)))
        assert len(told) <= len(found) <= len(told) + 1, "the last one may not have been told"


def test_a_size_has_a_unit():
    sizes = {"64MiB": 64 << 20, "1kB": 1000, "2GB": 2 * 10**9, "1KiB": 1024, "off": 0}
    assert {text: size_in_bytes(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "64", "64M", "0MiB", "-1MiB", "1.5GiB", "٣MiB"])
def test_a_size_that_is_none_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match="--events-max must be off, or a whole number above 0 with one of kB, MB, GB"):
        size_in_bytes(text)
