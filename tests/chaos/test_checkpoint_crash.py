"""A writer killed at any crash point leaves a whole checkpoint behind.

SIGKILL keeps the page cache, so these tests cannot find a missing fsync; the order of the calls is held
by ``tests/unit/test_checkpoint_save_load.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from holdfast import points
from holdfast.checkpoint import load, newest_intact, steps, write_tensors

pytestmark = pytest.mark.chaos

WRITER = """
import sys, torch
from pathlib import Path
from holdfast.checkpoint import write_tensors
root, step = Path(sys.argv[1]), int(sys.argv[2])
write_tensors(root, step, {"w": torch.full((1000,), 2.0)}, {"value": 2}).commit(0)
"""

# Writes into the final place: the tensors, the point, the manifest. It passes the same points.
BROKEN_WRITER = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from holdfast import points
from holdfast.checkpoint import storage
from holdfast.checkpoint.manifest import dump
from holdfast.checkpoint.save import write_tensors
root, step = Path(sys.argv[1]), int(sys.argv[2])
reach, points.reach = points.reach, lambda name: None
pending = write_tensors(root, step, {"w": torch.full((1000,), 2.0)}, {"value": 2})
points.reach = reach
final = storage.step_dir(root, step)
final.mkdir(exist_ok=True)
old = next(final.glob("tensors-*"), final / "tensors-0.safetensors")
data = next(pending.attempt.glob("tensors-*")).read_bytes()
points.reach("checkpoint.begin")
with old.open("wb") as file:
    file.write(data[: len(data) // 2])
    file.flush()
    points.reach("checkpoint.tensors")
    file.write(data[len(data) // 2 :])
manifest = dump(replace(pending.manifest, file=old.name))
with (final / "manifest.json").open("wb") as file:
    file.write(manifest[: len(manifest) // 2])
    file.flush()
    points.reach("checkpoint.manifest")
    file.write(manifest[len(manifest) // 2 :])
points.reach("checkpoint.committed")
"""


def save(root, step, value):
    write_tensors(root, step, {"w": torch.full((1000,), float(value))}, {"value": value}).commit(0)


def crash_writer_at(point, root, step, writer=WRITER):
    """Run a writer that must die at ``point``, and prove that it did."""
    environment = os.environ | {"HOLDFAST_CRASH_AT": point}
    command = [sys.executable, "-c", writer, str(root), str(step)]
    done = subprocess.run(command, env=environment, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, f"the fault never landed: {done}"


def loaded_value(root):
    """Return the newest intact step and the value in it; every element must be that value."""
    step = newest_intact(root, lambda step, error: pytest.fail(f"step {step} is damaged: {error}"))
    loaded = load(root, step)
    assert loaded.state["w"].tolist() == [float(loaded.info["value"])] * 1000
    return step, loaded.info["value"]


@pytest.mark.parametrize("point", points.POINTS)
def test_a_killed_writer_leaves_the_newest_complete_step(point, tmp_path):
    save(tmp_path, 10, 1)

    crash_writer_at(point, tmp_path, 20)

    assert loaded_value(tmp_path) == ((20, 2) if point == "checkpoint.committed" else (10, 1))


@pytest.mark.parametrize("point", points.POINTS)
def test_a_writer_killed_while_it_saves_a_step_again_leaves_the_old_or_the_new_one(point, tmp_path):
    save(tmp_path, 20, 1)

    crash_writer_at(point, tmp_path, 20)

    assert loaded_value(tmp_path) == (20, 2 if point == "checkpoint.committed" else 1)


@pytest.mark.parametrize("point", points.POINTS)
def test_the_next_save_goes_on_after_a_killed_writer_and_removes_what_it_left(point, tmp_path):
    crash_writer_at(point, tmp_path, 20)

    save(tmp_path, 20, 3)

    assert loaded_value(tmp_path) == (20, 3)
    assert steps(tmp_path) == [20]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000020"]
    assert len(list((tmp_path / "step-00000020").iterdir())) == 2


@pytest.mark.parametrize("point", ["checkpoint.tensors", "checkpoint.manifest"])
def test_negative_control_a_writer_that_writes_in_place_fails_the_same_check(point, tmp_path):
    """The check above can fail: with a writer that overwrites the old step it does."""
    save(tmp_path, 20, 1)

    crash_writer_at(point, tmp_path, 20, BROKEN_WRITER)

    with pytest.raises(pytest.fail.Exception, match="step 20 is damaged"):
        loaded_value(tmp_path)


FULL_DISK_WRITER = """
import resource, sys, torch
from pathlib import Path
from holdfast.checkpoint import write_tensors
from holdfast.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_tensors(Path(sys.argv[1]), 20, {"w": torch.full((1000,), 2.0)}, {"value": 2})
except CheckpointError as error:
    print(error)
"""


def test_a_writer_whose_disk_takes_no_more_says_so_and_leaves_what_was_there(tmp_path):
    save(tmp_path, 10, 1)

    command = [sys.executable, "-c", FULL_DISK_WRITER, str(tmp_path)]
    done = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True)

    assert "File too large" in done.stdout
    assert "The checkpoints that were complete are untouched; make sure that the disk has room" in done.stdout
    assert loaded_value(tmp_path) == (10, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]
