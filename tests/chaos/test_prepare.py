"""``holdfast.prepare`` with real workers: whichever rank dies, and wherever, an unchanged loop ends with the same bits."""

import difflib
import functools
import re
from pathlib import Path

import pytest
import train_prepared
from jobs import ROOT, assert_landed, run_report

pytestmark = pytest.mark.chaos

SCRIPT = Path(train_prepared.__file__)


@functools.cache
def undisturbed():
    """Return the state's sha256 of the run in one process, and the learning rate at its end."""
    session = train_prepared.train(fabric="virtual", workers=1, slices=5)
    finished = session._job.loops.finished[0]
    return finished.state_sha256, session.metrics["loss"], finished.metrics["lr"]


def check(report, survivors):
    state, loss, rate = undisturbed()
    assert report["replicas"]["state_sha256"] == state
    assert report["replicas"]["identical"] is True
    assert report["samples"] == {"planned": 240, "committed": 240, "lost": 0, "repeated": 0}
    assert report["workers"]["ranks_finished"] == survivors
    assert report["metrics"]["loss"] == loss
    assert (report["metrics"]["lr"], report["metrics"]["averaged"]) == (rate, 16)


def test_deaths_everywhere_in_an_unchanged_loop_change_no_bit(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    kills = ("kill:rank=1,step=2", "kill:rank=0,step=5,phase=allreduce,bucket=0", "kill:rank=4,step=12,phase=optimizer")
    inject = [word for kill in kills for word in ("--inject", kill)]
    saves = ("--checkpoint-dir", checkpoints, "--checkpoint-every", 4)

    report = run_report(tmp_path, "-n", 5, "--fabric", "gloo", *inject, *saves, SCRIPT, "--dies-evaluating", 2)

    assert_landed(report, 0, 1, 2, 4)
    check(report, [3])


def test_a_spare_and_a_newcomer_take_part_and_change_no_bit(tmp_path):
    kills = ("--inject", "kill:rank=0,step=3", "--inject", "kill:rank=2,step=6,phase=allreduce")

    report = run_report(
        tmp_path, "-n", 3, "--slices", 5, "--spares", 1, "--respawn", "--fabric", "gloo", *kills, SCRIPT, timeout=240
    )

    assert_landed(report, 0, 2)
    state, loss, _ = undisturbed()
    assert (report["replicas"]["state_sha256"], report["metrics"]["loss"]) == (state, loss)
    assert report["replicas"]["identical"] is True
    assert report["samples"]["committed"] == 240


def test_a_loop_that_was_stopped_is_resumed_in_its_second_epoch_on_other_workers(tmp_path):
    saves = ("--checkpoint-dir", tmp_path / "checkpoints", "--fabric", "gloo")

    run_report(tmp_path / "first", "-n", 2, "--slices", 5, *saves, "--stop-after", 10, SCRIPT, exit_code=4)
    report = run_report(
        tmp_path / "second", "-n", 3, *saves, "--resume", "--inject", "kill:rank=1,step=13,phase=allreduce", SCRIPT
    )

    assert_landed(report, 1)
    check(report, [0, 2])


def test_two_lines_change_in_a_plain_loop(tmp_path):
    before, after = (ROOT / "examples" / "frameworks" / f"plain_{name}.py" for name in ("before", "after"))
    lines = [path.read_text().split('"""', 2)[2].splitlines() for path in (before, after)]
    changed = [line for line in difflib.unified_diff(*lines, n=0) if re.match(r"[+-][^+-]", line)]

    report = run_report(tmp_path, "-n", 3, "--fabric", "gloo", "--inject", "kill:rank=0,step=5,phase=allreduce", after)

    assert changed == [
        "+import holdfast",
        "+model, optimizer, loader, scheduler = holdfast.prepare(model, optimizer, loader, scheduler)",
    ]
    assert_landed(report, 0)
    assert report["samples"] == {"planned": 720, "committed": 720, "lost": 0, "repeated": 0}
    assert report["replicas"]["identical"] is True
