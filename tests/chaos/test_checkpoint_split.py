"""A worker of a split model is killed while all write their parts of a checkpoint: a whole one is there at any moment."""

from __future__ import annotations

import multiprocessing
import signal

import pytest
from checkpoint_bytes import data_dir, same, step_dir
from checkpoint_writers import end, start
from split_writers import NUM_STAGES, save_part, stage, state_of

from holdfast.checkpoint import all_but, load, newest_intact, steps, verify
from holdfast.faults import points

pytestmark = pytest.mark.chaos

KILLED = -signal.SIGKILL
# Who writes a part passes "rename" twice: with the description of its part, and with the manifest.
OF_THE_FIRST = [(point, 1) for point in points.POINTS] + [("checkpoint.rename", 2)]
OF_ANOTHER = ["checkpoint.begin", "checkpoint.rename", "checkpoint.tensors"]
HOLDERS = [(0, 3), (1,), (2,)]


def save(root, step, value, holders, victim=-1, point="", nth=1):
    """All write their parts; return how each of them ended, and prove that the victim was killed."""
    pipes, workers = [], []
    for rank in range(len(holders)):
        theirs, ours = multiprocessing.Pipe(duplex=False)
        dies = (point, nth) if rank == victim else ("", 1)
        workers.append(start(save_part, str(root), step, value, rank, holders, theirs, *dies))
        pipes.append(ours)
    alive = [rank for rank in range(len(holders)) if rank != victim]
    if victim >= 0:
        assert end(workers[victim]) == [KILLED], "the fault never landed"
    for rank in alive:
        pipes[rank].send(alive)
    codes = end(*(workers[rank] for rank in alive))
    return dict(zip(alive, codes, strict=True))


def assert_holds(root, step, value):
    """The newest step that is intact is this one; the whole state is that of one moment, and so is each part."""
    assert newest_intact(root, lambda step, error: pytest.fail(f"step {step} is damaged: {error}")) == step
    assert same(load(root, step).state, state_of(value))
    for number in range(NUM_STAGES):
        own = load(root, step, only=all_but("replica/parts", f"replica/parts/{number}")).state
        assert same(own["replica"]["parts"], {str(number): stage(number, value)})


@pytest.mark.parametrize("point", OF_ANOTHER)
def test_the_holder_of_a_part_is_killed(point, tmp_path):
    """What it described is complete, and counts; what it did not is missing, and nothing counts."""
    assert save(tmp_path, 10, 1, HOLDERS) == {0: 0, 1: 0, 2: 0}

    codes = save(tmp_path, 20, 2, HOLDERS, victim=2, point=point)

    done = point == "checkpoint.tensors"
    assert codes == {0: 0 if done else 1, 1: 0}
    assert_holds(tmp_path, *((20, 2) if done else (10, 1)))


@pytest.mark.parametrize(("point", "nth"), OF_THE_FIRST)
def test_the_lead_is_killed_and_the_others_go_on_with_its_parts(point, nth, tmp_path):
    save(tmp_path, 10, 1, HOLDERS)

    codes = save(tmp_path, 20, 2, HOLDERS, victim=0, point=point, nth=nth)

    done = point == "checkpoint.committed"
    assert codes == {1: 0, 2: 0}
    assert_holds(tmp_path, *((20, 2) if done else (10, 1)))
    assert save(tmp_path, 20, 3, [(1, 2), (0, 3)]) == {0: 0, 1: 0}
    assert_holds(tmp_path, 20, 3)
    assert steps(tmp_path) == [10, 20]
    assert len(verify(tmp_path, 20).files) == 2
    left = sorted(path.name for path in step_dir(tmp_path, 20).iterdir())
    assert left == [data_dir(tmp_path, 20).name, "manifest.json"]
