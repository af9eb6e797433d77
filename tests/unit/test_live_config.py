"""Changes to a running job: from one step on, once, for later loops and for runs that go on from a checkpoint."""

from __future__ import annotations

import json
import os
import signal

import pytest
from train_saving import LOOP_ENDS, Training

from holdfast.checkpoint import steps
from holdfast.launch.control import append
from holdfast.records.files import read_run
from holdfast.records.paths import requests_path
from holdfast.records.types import SettingChanged

STEPS = LOOP_ENDS[-1]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def train(run_dir, at=None, each=lambda step: None, **settings):
    """Train in one process; ``at`` says what is asked for in which step."""
    run_dir.mkdir(exist_ok=True)
    ask = dict(at or {})

    def in_step(step):
        if (changes := ask.pop(step.number, None)) is not None:
            append(requests_path(run_dir), changes)
        each(step)

    return Training(**({"run_dir": str(run_dir), "origin_s": 1.0} | settings)).run(in_step)


def changes(run_dir):
    return [(r.step, r.name, json.loads(r.value)) for r in read_run(run_dir) if isinstance(r, SettingChanged)]


def stop_before(number):
    """Stop the run, its state saved, before a step."""
    return lambda step: os.kill(os.getpid(), signal.SIGTERM) if step.number == number - 1 else None


def test_a_change_counts_from_the_next_step_on_and_stays_in_later_loops(tmp_path):
    done = train(tmp_path / "run", {1: {"batch_size": 15}})

    assert changes(tmp_path / "run") == [(2, "batch_size", 15)]
    assert done.session.step == 5 + 8  # of 60 samples: 10, 10, 15, 15, 10, and then twice 15, 15, 15, 15
    assert done.session._job.loops.finished[0].committed == 180


def test_a_new_learning_rate_is_what_the_scheduler_goes_on_from(tmp_path):
    done = train(tmp_path / "run", {3: {"lr": 0.5}})

    assert changes(tmp_path / "run") == [(4, "lr", 0.5)]
    (rate,) = {group["lr"] for group in done.session._trainable.optimizer.param_groups}
    assert rate == pytest.approx(0.5 / (1 + 0.3 * STEPS))


def test_several_changes_are_taken_in_the_order_in_which_they_were_asked_for(tmp_path):
    run_dir = tmp_path / "run"
    ask = {2: {"lr": 0.1, "strategy": "forward"}, 5: {"lr": 0.3}}

    train(run_dir, ask, lambda step: append(requests_path(run_dir), {"lr": 0.2}) if step.number == 2 else None)

    assert changes(run_dir) == [(3, "lr", 0.1), (3, "strategy", "forward"), (3, "lr", 0.2), (6, "lr", 0.3)]


def test_half_a_line_is_left_until_it_is_whole(tmp_path):
    run_dir = tmp_path / "run"

    def write(step):
        text = {2: '{"lr"', 4: ": 0.1}\n"}.get(step.number, "")
        with requests_path(run_dir).open("a") as file:
            file.write(text)

    train(run_dir, each=write)

    assert changes(run_dir) == [(5, "lr", 0.1)]


BAD_LINES = {
    "not JSON": b"lr = 0.1",
    "nothing": b"",
    "half a line": b'{"lr": 0.',
    "no object": b'["lr", 0.1]',
    "not text": b'{"lr": \xff\xfe}',
    "an unknown name": b'{"momentum": 0.9}',
    "a name that is half a letter": b'{"\\ud800": 1}',
    "a text as a number": b'{"lr": "fast"}',
    "no finite number": b'{"lr": NaN}',
    "a number beyond all floats": b'{"lr": 1' + b"0" * 400 + b"}",
    "a number with thousands of digits": b'{"batch_size": 1' + b"0" * 5000 + b"}",
    "half a batch": b'{"batch_size": 7.5}',
    "a list as a strategy": b'{"strategy": ["rollback"]}',
    "a strategy that needs a start": b'{"strategy": "reinit"}',
    "half a letter": b'{"strategy": "\\ud800"}',
    "a list of speeds": b'{"speeds": [1, 2]}',
    "a speed of no worker": b'{"speeds": {"first": 1.0}}',
    "a speed of nothing": b'{"speeds": {"0": 0}}',
    "deep": b'{"lr": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "10 MB": b'{"lr": 0.1, "why": "' + b"x" * (10 << 20) + b'"}',
    "right and wrong": b'{"lr": 0.1, "workers": -1}',
}


def test_lines_that_ask_for_nothing_that_can_be_are_left_out_with_a_line_each_and_count(tmp_path, capsys):
    run_dir = tmp_path / "run"

    def write(step):
        if step.number == 2:
            with requests_path(run_dir).open("ab") as file:
                file.writelines(line + b"\n" for line in BAD_LINES.values())
            append(requests_path(run_dir), {"lr": 0.2})

    done = train(run_dir, {8: {"lr": 0.3}}, write, workers=2)

    assert changes(run_dir) == [(3, "lr", 0.2), (9, "lr", 0.3)]
    assert done.session._job.live.applied == len(BAD_LINES) + 2
    said = capsys.readouterr().err.splitlines()
    numbers = [int(line.split()[2]) for line in said if "of requests.jsonl is skipped: " in line]
    assert numbers == list(range(1, 1 + len(BAD_LINES)))
    assert max(map(len, said)) < 500


def test_a_change_makes_a_difference_and_the_same_change_at_the_same_step_gives_the_same_bits(tmp_path):
    ask = {7: {"batch_size": 15, "lr": 0.02}}
    first, again = (train(tmp_path / name, ask, workers=n) for name, n in (("a", 1), ("b", 3)))
    later, never = train(tmp_path / "c", {8: {"lr": 0.02}}), train(tmp_path / "d")

    assert first.sha256 == again.sha256
    assert len({first.sha256, later.sha256, never.sha256}) == 3


@pytest.mark.parametrize("order", ["fold", "tree"])
def test_how_fast_workers_are_changes_who_computes_what_and_no_bit(tmp_path, order):
    held = {}

    def look(step):
        owners = list(step._batch.owners.values())
        held[step.number] = [owners.count(rank) for rank in range(3)]

    job = {"workers": 3, "slices": 5, "order": order}
    quiet = train(tmp_path / "quiet", **job)
    slow = train(
        tmp_path / "slow", {2: {"speeds": {"0": 0.25, "2": 1.5}}, 9: {"speeds": {"1": 0.1, "0": 1.0}}}, look, **job
    )

    assert (held[1], held[4], held[10]) == ([2, 2, 1], [0, 2, 3], [2, 0, 3])
    assert slow.sha256 == quiet.sha256


@pytest.mark.parametrize("saved_at", [6, 8, 11])
def test_a_job_that_is_started_again_takes_what_came_after_its_checkpoint_once_more_and_nothing_twice(
    tmp_path, saved_at
):
    undisturbed = train(tmp_path / "whole", {2: {"lr": 0.05}, 9: {"lr": 0.02}})
    run_dir, settings = tmp_path / "run", {"checkpoint_dir": str(tmp_path / "c")}
    with pytest.raises(SystemExit):
        train(run_dir, {2: {"lr": 0.05}, 9: {"lr": 0.02}}, stop_before(saved_at), **settings)

    resumed = train(run_dir, {9: {"lr": 0.02}} if saved_at < 10 else {}, resume=True, **settings)

    assert resumed.sha256 == undisturbed.sha256
    assert changes(run_dir) == [(3, "lr", 0.05), (10, "lr", 0.02)]


def test_another_job_goes_on_with_the_size_of_the_mini_batch_and_takes_its_own_changes(tmp_path):
    undisturbed = train(tmp_path / "whole", {7: {"batch_size": 15}})
    settings = {"checkpoint_dir": str(tmp_path / "c")}
    with pytest.raises(SystemExit):
        train(tmp_path / "one", {7: {"batch_size": 15, "strategy": "forward"}}, stop_before(11), **settings)

    resumed = train(tmp_path / "two", {12: {"strategy": "rollback"}}, resume=True, origin_s=2.0, **settings)

    assert resumed.sha256 == undisturbed.sha256
    assert changes(tmp_path / "two") == [(13, "strategy", "rollback")]
    assert resumed.session._job.live.strategy == "rollback"


def test_a_new_interval_between_checkpoints_takes_the_place_of_the_automatic_one(tmp_path):
    settings = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_auto": True, "mtbf_s": 1e9}
    train(tmp_path / "run", {9: {"checkpoint_every": 4}}, **settings)

    assert [step for step in steps(tmp_path / "c") if step > 10] == [12, 16]


def test_one_checkpoint_on_request_after_the_step_in_progress(tmp_path):
    train(tmp_path / "run", {2: {"save": True}}, checkpoint_dir="ck")

    assert changes(tmp_path / "run") == [(3, "save", True)]
    assert steps("ck") == [4]


def test_a_checkpoint_on_request_needs_a_directory(tmp_path):
    train(tmp_path / "run", {2: {"save": True}, 3: {"save": 1}})

    assert not list(tmp_path.glob("holdfast-checkpoint*"))
