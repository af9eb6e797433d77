"""Real runs with checkpoints: killed as a whole while they save, damaged afterwards, short of disk, and gone on with.

The judge is the hash of the run that nothing happened to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import assert_landed, clean_env, run_report
from train_saving import LOOP_ENDS, Training, undisturbed

from holdfast.checkpoint import steps, verify
from holdfast.checkpoint.interval import daly
from holdfast.checkpoint.loading import read_manifest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_saving.py"
STEPS = LOOP_ENDS[-1]
BALLAST_MB = 40


def run(tmp_path, *options, deeds=(), script=(), **expected):
    """Run the training with ``--checkpoint-dir``, and return its report."""
    words = [word for deed in deeds for word in ("--deed", deed)]
    given = ("--slices", 3, "--checkpoint-dir", tmp_path / "c", *options)
    return run_report(tmp_path, *given, SCRIPT, *words, *script, **expected)


def end_of_everything(tmp_path, *options, deeds, script=()):
    """Run until the launcher and the workers kill themselves; prove that they did, and that nobody is left."""
    words = [word for deed in deeds for word in ("--deed", deed)]
    given = ["--slices", 3, "--checkpoint-dir", tmp_path / "c", *options, SCRIPT, *words, *script]
    command = [sys.executable, "-m", "holdfast", "run", *map(str, given)]
    # What a killed launcher leaves goes with the test, and its workers close the pipes when they end.
    done = subprocess.run(
        command, env=clean_env(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL, f"the kill never landed: {done}"


def flip_a_byte(file, at):
    """Change one byte of a file where it lies."""
    old = file.read_bytes()[at]
    subprocess.run(
        ["dd", f"of={file}", "bs=1", f"seek={at}", "conv=notrunc"],
        input=bytes([old ^ 0x10]), check=True, capture_output=True,
    )  # fmt: skip
    assert file.read_bytes()[at] == old ^ 0x10


def damage_the_newest(place):
    """Flip a byte in the middle of a tensor of the newest checkpoint; return the step and the tensor's path."""
    newest, path = steps(place)[-1], "replica/model/0.weight"
    manifest = read_manifest(place, newest)
    (piece,) = manifest.tensors[path].pieces
    folder = place / f"step-{newest:08d}" / manifest.folder
    flip_a_byte(folder / piece.file, piece.offset + piece.size_bytes // 2)
    return newest, path


def test_a_run_that_is_killed_while_it_saves_goes_on_from_before_a_damaged_checkpoint(tmp_path):
    how = ("-n", 3, "--checkpoint-every", 2)
    end_of_everything(tmp_path, *how, deeds=["end@checkpoint.tensors:10:all"])
    assert steps(tmp_path / "c") == [2, 4, 6, 8], "it died before the manifest of step 10"
    newest, path = damage_the_newest(tmp_path / "c")

    report = run(tmp_path, *how, "--resume")

    assert f"skipped step {newest}: the checkpoint of step {newest} in {tmp_path / 'c'} is damaged" in report["_stdout"]
    assert f"tensor '{path}' (float32, shape [16, 8])" in report["_stdout"]
    assert "from step 6" in report["_stderr"] + report["_stdout"]
    assert report["replicas"]["state_sha256"] == undisturbed()
    assert report["samples"] == {"planned": 180, "committed": 180, "lost": 0, "repeated": 0}
    for step in steps(tmp_path / "c"):
        verify(tmp_path / "c", step)  # step 8 was saved again


def test_it_goes_on_in_another_format_and_on_another_number_of_workers(tmp_path, capfd):
    how = ("-n", 2, "--checkpoint-every", 2, "--checkpoint-format", "npz")
    end_of_everything(tmp_path, *how, deeds=["end@checkpoint.rename:10:all"])
    assert steps(tmp_path / "c") == [2, 4, 6, 8]
    newest, path = damage_the_newest(tmp_path / "c")

    resumed = Training(workers=3, checkpoint_dir=str(tmp_path / "c"), resume=True).run()

    assert resumed.sha256 == undisturbed()
    said = capfd.readouterr().err
    assert f"skipped step {newest}" in said
    assert f"tensor '{path}'" in said


def test_a_job_that_is_lost_starts_again_from_its_newest_checkpoint(tmp_path):
    deeds = ["die@checkpoint.rename:12:0", "die:12:1"]

    report = run(tmp_path, "-n", 2, "--checkpoint-every", 4, deeds=deeds)

    assert report["restarts"] == 1
    assert "from step 8" in report["_stderr"] + report["_stdout"]
    assert report["replicas"]["state_sha256"] == undisturbed()


@pytest.mark.parametrize("strategy", ["rollback", "forward"])
def test_a_worker_that_dies_with_its_part_of_a_checkpoint_leaves_the_others_to_go_on(tmp_path, strategy):
    report = run(
        tmp_path, "-n", 3, "--checkpoint-every", 4, "--strategy", strategy,
        deeds=["die@checkpoint.begin:8:1"], script=("--ballast", BALLAST_MB),
    )  # fmt: skip

    assert_landed(report, 1)
    assert report["restarts"] == 0
    parts = {step: len(written(tmp_path / "c", step)) for step in steps(tmp_path / "c")}
    assert {step: count for step, count in parts.items() if step != 8} == {4: 3, 12: 2, 16: 2, 18: 1}
    if strategy != "forward":  # which has no moment at which the state could be saved again
        assert parts.get(8, 2) == 2, "it is not there if step 8 was committed before the death was seen"
        assert report["replicas"]["state_sha256"] == undisturbed()
    attempts = [name for step in (4, 12, 16) for name in os.listdir(tmp_path / "c" / f"step-{step:08d}")]
    assert len(attempts) == 6, "a manifest and a folder each"


def written(place, step):
    """The sizes of the files that were written for a checkpoint, every byte of which is right."""
    return [file.size_bytes for file in verify(place, step).files.values() if file.rest_xxh3 is not None]


def test_all_workers_write_what_changed_and_any_number_of_workers_goes_on(tmp_path):
    script = ("--ballast", BALLAST_MB)
    deeds = ["await-checkpoint:5:all", "await-checkpoint:7:all", "end@checkpoint.tensors:10:all"]
    end_of_everything(tmp_path, "-n", 3, "--checkpoint-every", 2, deeds=deeds, script=script)
    assert steps(tmp_path / "c") == [2, 4, 6, 8]
    for step in (2, 4, 6, 8):
        sizes = written(tmp_path / "c", step)
        assert len(sizes) == 3
        if step < 5:
            assert min(sizes) > BALLAST_MB << 18
        else:  # the ballast is shared with the last checkpoint but one
            assert max(sizes) < 1 << 18

    settings = {"workers": 2, "checkpoint_dir": str(tmp_path / "c"), "resume": True}
    assert Training(ballast_mb=BALLAST_MB, **settings).run().sha256 == undisturbed()


@pytest.mark.parametrize("how", ["block", "limit"])
def test_a_disk_that_takes_no_checkpoint_costs_warnings_and_not_the_run(tmp_path, how):
    report = run(tmp_path, "-n", 2, "--checkpoint-every", 4, deeds=[f"{how}:5:0"], script=("--ballast", 1))

    assert report["replicas"]["state_sha256"] == undisturbed()
    said = report["_stdout"] + report["_stderr"]
    for step in (8, 12, 16):
        assert said.count(f"the checkpoint of step {step} is not complete: ") == 1
    assert report["checkpoints"] == (2 if how == "limit" else 1)
    if how == "limit":
        assert steps(tmp_path / "c") == [4, 18], "at the end another worker saves what this one cannot"
        assert "File too large" in said


def test_old_checkpoints_make_room(tmp_path):
    options = ("--checkpoint-every", 2, "--keep-last", 2, "--keep-every", 8)

    report = run(tmp_path, "-n", 4, *options)

    assert steps(tmp_path / "c") == [8, 16, 18]
    assert report["replicas"]["state_sha256"] == undisturbed(), "one of the four workers had no slice to compute"


def test_checkpoints_by_the_clock_come_more_often_when_workers_die(tmp_path):
    options = ("--checkpoint-every", "auto", "--expected-mtbf", 20)

    report = run(tmp_path, "-n", 3, *options, deeds=["die:6:1", "die:12:2"], script=("--step-s", 0.1))

    assert_landed(report, 1, 2)
    assert report["replicas"]["state_sha256"] == undisturbed()
    costs, failures, seen = [], 0, set()
    began_s = min(event["t_s"] for event in report["_events"] if event["event"] == "RunStarted")
    last_step = max(event["step"] for event in report["_events"] if event["event"] == "CheckpointSaved")
    for event in report["_events"]:
        if event["event"] == "Recovered" and event["rank"] == 0:
            failures += 1
        # That of the end of training may be written after the loop, which it does not hold up: it costs nothing.
        if event["event"] == "CheckpointSaved" and event["step"] < last_step:
            costs = [*costs, max(event["seconds"], 1e-4)][-5:]
            cost_s, run_s = sorted(costs)[len(costs) // 2], event["t_s"] - began_s
            least, most = (daly(cost_s, mtbf_s / (1 + failures)) for mtbf_s in (20, 20 + run_s))
            print(
                f"step {event['step']}: cost {cost_s:.5f} s, {failures} failures, next in {event['interval_s']:.3f} s"
            )
            assert least <= event["interval_s"] <= most
            seen.add(failures)
    assert seen == {0, 1, 2}
