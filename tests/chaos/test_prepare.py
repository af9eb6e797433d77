"""``holdfast.prepare`` with real workers: whichever rank dies, and wherever, an unchanged loop ends with the same bits."""

import difflib
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import train_prepared
from jobs import ROOT, assert_landed, clean_env, run_report

pytestmark = pytest.mark.chaos

SCRIPT = Path(train_prepared.__file__)
PLAIN = """
import os, signal, torch, torch.distributed as dist, torch.nn.functional as F
from datetime import timedelta
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
model = DistributedDataParallel(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    F.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.int64)).backward()
    optimizer.step()
"""


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


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_deaths_everywhere_in_an_unchanged_loop_change_no_bit(tmp_path, fabric):
    checkpoints = tmp_path / "checkpoints"
    kills = (
        "kill:rank=1,step=2",
        "kill:rank=0,step=5,phase=allreduce,bucket=0",
        "kill:rank=4,step=12,phase=optimizer",
    )
    inject = [word for kill in kills for word in ("--inject", kill)]
    saves = ("--checkpoint-dir", checkpoints, "--checkpoint-every", 4)

    report = run_report(tmp_path, "-n", 5, "--fabric", fabric, *inject, *saves, SCRIPT, "--dies-evaluating", 2)

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


def test_without_prepare_the_same_death_ends_every_rank(tmp_path):
    """The negative control: plain DDP over Gloo."""
    script = tmp_path / "ddp.py"
    script.write_text(PLAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--max-restarts=0", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_env(), cwd=ROOT, check=False)

    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
