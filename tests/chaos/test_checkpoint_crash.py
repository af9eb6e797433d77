"""A writer killed at any crash point, or at any moment, leaves a whole checkpoint behind; a disk that fills up does too.

SIGKILL keeps the page cache, so these tests cannot find a missing fsync; the order of the calls is held
by ``tests/unit/test_checkpoint_save_load.py``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_bytes import all_names, data_dir, save_parts, step_dir
from checkpoint_chain import Chain, copy_of
from checkpoint_writers import (
    end,
    save_again,
    save_chain,
    save_for_ever,
    save_with_small_files,
    start,
    state_of,
    write_beside,
    write_in_place,
    write_manifest_first,
    write_part,
)

from holdfast.checkpoint import load, load_box, load_newest, newest_intact, steps, verify
from holdfast.errors import CheckpointError
from holdfast.faults import points

pytestmark = pytest.mark.chaos

KILLED = -signal.SIGKILL
# Who writes a part passes "rename" twice: with the description of its part, and with the manifest.
OF_THE_FIRST = [(point, 1) for point in points.POINTS] + [("checkpoint.rename", 2)]


def save(root, step, value, parts=1):
    save_parts(root, step, [state_of(value)] * parts, {"value": value}, token=f"saved-{value}")


def attempt(root, step, value, parts, point, nth=1):
    """Several processes write a checkpoint; the first dies at ``point``, which is proved."""
    others = [start(write_part, root, step, value, part, parts, "attempt", "", 1, False) for part in range(1, parts)]
    first = start(write_part, root, step, value, 0, parts, "attempt" if parts > 1 else "", point, nth)
    assert end(first, *others) == [KILLED] + [0] * (parts - 1), "the fault never landed"


def loaded_value(root):
    """Return the newest intact step and the value in it; every element must be that value."""
    loaded = load_newest(root, lambda step, error: pytest.fail(f"step {step} is damaged: {error}"))
    value = loaded.info["value"]
    assert loaded.state["value"] == value
    assert set(loaded.state["w"].tolist()) == set(loaded.state["b"].flatten().tolist()) == {float(value)}
    return loaded.step, value


def is_complete_at(point):
    return point == "checkpoint.committed"


@pytest.mark.parametrize("point", points.POINTS)
def test_a_killed_writer_leaves_the_newest_complete_step(point, tmp_path):
    save(tmp_path, 10, 1)

    attempt(tmp_path, 20, 2, 1, point)

    assert loaded_value(tmp_path) == ((20, 2) if is_complete_at(point) else (10, 1))


def test_a_writer_of_incremental_checkpoints_killed_before_any_operation_leaves_all_that_were_complete(tmp_path):
    before = Chain(tmp_path / "undisturbed")
    for step in range(1, 6):
        before.save([step])
    codes = []
    for dies_after in range(6):
        root = tmp_path / f"{dies_after}"
        codes += end(start(save_chain, root, dies_after))
        chain = Chain(root)
        chain.saved, chain.state, chain.step = {**before.saved}, copy_of(before.state), 5

        assert steps(root) == [1, 2, 3, 4] + [5] * (codes[-1] == 0)
        assert chain.check() == []
        chain.save([9])
        assert chain.check() == []
        assert not list(root.glob("step-00000005")) or 5 in steps(root), "the next one removes what was left"
    assert codes == [KILLED] * 5 + [0], "prepare, link twice, store, put"


@pytest.mark.parametrize("point", points.POINTS)
def test_a_writer_killed_while_it_saves_a_step_again_leaves_the_old_or_the_new_one(point, tmp_path):
    save(tmp_path, 20, 1)

    attempt(tmp_path, 20, 2, 1, point)

    assert loaded_value(tmp_path) == (20, 2 if is_complete_at(point) else 1)


@pytest.mark.parametrize("point", points.POINTS)
def test_a_writer_killed_beside_its_training_loop_leaves_the_old_or_the_new_one(point, tmp_path):
    save(tmp_path, 20, 1)

    assert end(start(write_beside, str(tmp_path), 20, 2, point)) == [KILLED]

    assert loaded_value(tmp_path) == (20, 2 if is_complete_at(point) else 1)


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize(("point", "nth"), OF_THE_FIRST)
def test_of_three_writers_the_one_that_completes_is_killed(point, nth, again, tmp_path):
    save(tmp_path, 20 if again else 10, 1, parts=3)

    attempt(tmp_path, 20, 2, 3, point, nth)

    old = (20, 1) if again else (10, 1)
    assert loaded_value(tmp_path) == ((20, 2) if is_complete_at(point) else old)


@pytest.mark.parametrize(
    ("point", "again"), [("checkpoint.begin", True), ("checkpoint.rename", False), ("checkpoint.tensors", True)]
)
def test_of_three_writers_another_is_killed(point, again, tmp_path):
    """What it described is complete, and counts; what it did not is missing, and nothing counts."""
    save(tmp_path, 20 if again else 10, 1, parts=3)
    doomed = start(write_part, tmp_path, 20, 2, 1, 3, "attempt", point, 1, False)
    other = start(write_part, tmp_path, 20, 2, 2, 3, "attempt", "", 1, False)
    assert end(doomed, other) == [KILLED, 0]

    (code,) = end(start(write_part, tmp_path, 20, 2, 0, 3, "attempt"))

    done = point == "checkpoint.tensors"
    assert code == (0 if done else 1)
    assert loaded_value(tmp_path) == ((20, 2) if done else (20, 1) if again else (10, 1))


@pytest.mark.parametrize(("again", "step"), [(False, 20), (True, 20), (True, 30)])
@pytest.mark.parametrize("point", points.POINTS)
def test_the_next_save_goes_on_after_a_killed_writer_and_removes_what_it_left(point, again, step, tmp_path):
    if again:
        save(tmp_path, 20, 1, 3)
    attempt(tmp_path, 20, 2, 3, point)

    save(tmp_path, step, 3, 3)

    assert loaded_value(tmp_path) == (step, 3)
    assert steps(tmp_path) == ([20, 30] if step == 30 else [20])
    for found in steps(tmp_path):
        verify(tmp_path, found)
        assert sorted(path.name for path in step_dir(tmp_path, found).iterdir()) == [
            data_dir(tmp_path, found).name,
            "manifest.json",
        ]
    assert len(list(tmp_path.iterdir())) == len(steps(tmp_path))


@pytest.mark.parametrize("point", ["checkpoint.begin", "checkpoint.manifest", "checkpoint.tensors"])
def test_negative_control_a_writer_that_writes_the_manifest_first_fails_the_same_check(point, tmp_path):
    save(tmp_path, 10, 1)
    assert end(start(write_manifest_first, str(tmp_path), 20, 2, point)) == [KILLED]

    if point == "checkpoint.begin":
        assert loaded_value(tmp_path) == (10, 1)
    else:
        with pytest.raises(pytest.fail.Exception, match="step 20 is damaged"):
            loaded_value(tmp_path)


@pytest.mark.parametrize("point", ["checkpoint.tensors", "checkpoint.manifest"])
def test_negative_control_a_writer_that_writes_in_place_fails_the_same_check(point, tmp_path):
    save(tmp_path, 20, 1)
    assert end(start(write_in_place, str(tmp_path), 20, 2, point)) == [KILLED]

    with pytest.raises(pytest.fail.Exception, match="step 20 is damaged"):
        loaded_value(tmp_path)


@pytest.mark.parametrize("parts", [1, 3])
def test_killed_at_any_moment_nothing_that_was_complete_is_lost(parts, tmp_path):
    chance = random.Random(parts)
    reached = []
    for _ in range(15):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        writer = start(save_for_ever, str(tmp_path), theirs, parts, 3)
        theirs.close()
        assert ours.poll(60), "the writer hangs"
        time.sleep(chance.uniform(0, 0.1))
        writer.kill()
        assert end(writer) == [KILLED]

        said = _last(ours)
        step, value = loaded_value(tmp_path)
        assert step == value
        assert said <= step <= said + 1
        for other in steps(tmp_path):
            verify(tmp_path, other)
        reached.append(step)
    assert reached == sorted(set(reached))


def _last(pipe):
    """The last that a dead process said: behind it the pipe ends."""
    said = 0
    with contextlib.suppress(EOFError):
        while True:
            said = pipe.recv()
    return said


# --------------------------------------------------------------------------------------------- readers meanwhile


def test_who_reads_while_a_step_is_saved_again_and_again_never_sees_damage(tmp_path):
    save(tmp_path, 20, 1)
    writer = start(save_again, str(tmp_path), 20, 20, (2, 3))
    seen, reads = set(), 0
    while writer.is_alive():
        seen.add(loaded_value(tmp_path)[1])
        assert load(tmp_path, 20).info["value"] in (1, 2, 3)
        verify(tmp_path, 20)
        assert load_box(tmp_path, 20, "b", (2, 1), (3, 2)).flatten().unique().numel() == 1
        reads += 1

    assert end(writer) == [0]
    assert reads > 3
    assert {2, 3} <= seen | {loaded_value(tmp_path)[1]} <= {1, 2, 3}


def test_who_reads_while_steps_come_and_go_always_finds_one(tmp_path):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    writer = start(save_for_ever, str(tmp_path), theirs, 2, 1)
    assert ours.poll(60), "the writer hangs"
    seen = []
    end_s = time.monotonic() + 60
    while len(set(seen)) < 20:
        step, value = loaded_value(tmp_path)
        assert step == value
        seen.append(step)
        assert time.monotonic() < end_s, f"the writer hangs at step {step}"
    writer.kill()

    assert end(writer) == [KILLED]
    assert seen == sorted(seen)


# --------------------------------------------------------------------------------------------- a disk that takes no more


@pytest.mark.parametrize("size_bytes", [0, 100, 1000, 4200])
def test_files_that_may_not_grow_are_an_error_that_leaves_what_was_there(size_bytes, tmp_path):
    save(tmp_path, 10, 1)
    before = all_names(tmp_path)
    ours, theirs = multiprocessing.Pipe(duplex=False)

    assert end(start(save_with_small_files, str(tmp_path), size_bytes, theirs)) == [0]

    said = ours.recv()
    assert "File too large. The checkpoints that were complete are untouched; raise the limit on file sizes" in said
    assert all_names(tmp_path) == before
    assert loaded_value(tmp_path) == (10, 1)


@pytest.fixture(scope="module")
def on_small_disks(tmp_path_factory):
    """What each of the plays below prints, each on a disk of one megabyte that nobody else sees, in one process of their own."""
    place = tmp_path_factory.mktemp("disks")
    (place / "plays.py").write_text(f"{_STAGE}\n{_EACH}")
    for name, (play, _) in _PLAYS.items():
        (place / f"{name}.py").write_text(play)
        (place / name).mkdir()
    mounts = [f'mount -t tmpfs -o {options} tmpfs "$0/{name}" || exit 77' for name, (_, options) in _PLAYS.items()]
    command = ["unshare", "-Urm", "sh", "-c", "; ".join([*mounts, 'exec "$@"']), str(place), sys.executable]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((_SUPPORT, os.environ.get("PYTHONPATH", "")))}
    try:
        done = subprocess.run(
            [*command, str(place / "plays.py"), *_PLAYS],
            cwd=place, env=env, timeout=120, check=False, capture_output=True, text=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no disk can be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


_SUPPORT = str(Path(__file__).parents[1] / "support")
_STAGE = """
import contextlib, io, json, os, sys, traceback
import torch
from checkpoint_bytes import all_names
from holdfast.checkpoint import CheckpointStore, load, newest_intact, take, write, write_tensors
from holdfast.checkpoint.writer import CheckpointWriter
from holdfast.errors import CheckpointError

big = {"w": torch.ones(1 << 20)}

def fails(do, *args, **kwargs):
    try:
        do(*args, **kwargs)
    except CheckpointError as error:
        assert "The checkpoints that were complete are untouched" in str(error), error
        return str(error)
    raise AssertionError("it did not fail")

def still_there():
    assert newest_intact(root) == 10
    assert all_names(root) == before, all_names(root)

def fill():
    with open(root + "/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            pass
"""


_EACH = """
said = {}
for name in sys.argv[1:]:
    root = name
    write_tensors(root, 10, {"w": torch.ones(3)}, {}).commit(0)
    before = all_names(root)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(open(f"{name}.py").read(), f"{name}.py", "exec"))
        except BaseException:
            traceback.print_exc(file=out)
    said[name] = out.getvalue()
print(json.dumps(said))
"""

_PLAYS = {
    "error": (
        """
print(fails(write_tensors, root, 20, big, {}))
still_there()
write_tensors(root, 20, {"w": torch.ones(3)}, {}).commit(0)
assert newest_intact(root) == 20
""",
        "size=1m",
    ),
    "completed": (
        """
pending = write_tensors(root, 20, {"w": torch.ones(3)}, {})
fill()
print(fails(pending.commit, 0))
assert newest_intact(root) == 10
assert not any(name.endswith(".tmp") for name in all_names(root))
os.remove(root + "/filler")
pending.commit(0)
assert newest_intact(root) == 20
""",
        "size=1m",
    ),
    "beside": (
        """
writer = CheckpointWriter(CheckpointStore(root), background=True)
writer.begin(20, take(big), {}, "a")
writer.commit(0)
writer.wait()
(outcome,) = writer.poll()
print(outcome.error)
assert outcome.saved is None
still_there()
writer.begin(30, take({"w": torch.ones(3)}), {}, "b")
writer.commit(0)
writer.wait()
assert newest_intact(root) == 30
""",
        "size=1m",
    ),
    "several": (
        """
state = {"small": torch.ones(1 << 16), "more": torch.ones(1 << 16), "last": torch.ones(1 << 17)}
first = write(root, 20, take(state, 0, 2), {}, token="a")
print(fails(write, root, 20, take(state, 1, 2), {}, token="a"))
try:
    first.commit(0, wait_s=0)
    raise SystemExit("half a checkpoint became complete")
except CheckpointError as error:
    print(error)
first.abandon()
still_there()
""",
        "size=1m",
    ),
    "files": (
        """
def crowd():
    try:
        for i in range(100):
            open(f"{root}/crowd{i}", "x").close()
    except OSError:
        pass

crowd()
print(fails(write_tensors, root, 20, {"w": torch.ones(3)}, {}))
assert newest_intact(root) == 10
assert not os.path.exists(root + "/step-00000020")
for room in range(1, 5):
    assert newest_intact(root) == 10
    os.remove(f"{root}/crowd{room}")
    pending = None
    try:
        pending = write_tensors(root, 20, {"w": torch.ones(3)}, {})
        pending.commit(0)
    except CheckpointError:
        if pending is not None:
            pending.abandon()
        assert not os.path.exists(root + "/step-00000020"), room
assert newest_intact(root) == 20
""",
        "size=1m,nr_inodes=30",
    ),
}
"""Each with how its disk is mounted."""


@pytest.mark.parametrize(
    ("play", "hint"),
    [
        ("error", "free some space, or choose a directory on a larger disk"),
        ("completed", ""),
        ("beside", ""),
        ("several", "part 1 of 2"),
        ("files", ""),
    ],
)
def test_a_full_disk_is_an_error_that_leaves_what_was_there_and_nothing_else(on_small_disks, play, hint):
    said = on_small_disks[play]

    assert "Traceback" not in said, said
    assert "No space left on device" in said
    assert hint in said


def test_a_checkpoint_that_cannot_be_completed_says_why(tmp_path):
    """A test that a kill hits must know that what it hits is there: without a kill the same attempt counts."""
    save(tmp_path, 10, 1)

    with pytest.raises(AssertionError, match="the fault never landed"):
        attempt(tmp_path, 20, 2, 3, "no such point")

    assert newest_intact(tmp_path) == 20
    with pytest.raises(CheckpointError):
        save_parts(tmp_path, 30, [state_of(1), {"w": state_of(1)["w"]}])


def test_a_point_to_die_at_may_be_named_in_the_environment():
    code = "from holdfast.faults import points; points.reach('checkpoint.begin'); print('on'); points.reach('checkpoint.tensors')"
    environment = os.environ | {"HOLDFAST_CRASH_AT": "checkpoint.tensors"}
    command = [sys.executable, "-u", "-c", code]

    done = subprocess.run(command, env=environment, timeout=60, check=False, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (KILLED, "on\n")
