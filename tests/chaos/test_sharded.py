"""Models whose parameters are spread over workers: whatever happens, the bits are those of the replicated model.

Of four workers each holds a shard, and mirrors that of the worker before it: ranks 1 and 2 are all who hold shard 1.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
from exact import reference_hash
from jobs import assert_landed, assert_landed_for_good, exit_codes, of_kind, run_report
from reference import make_model

from holdfast import Sharded
from holdfast.base.formatting import listing

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_split.py"
LIMIT_S = 300
NOTHING_LOST = {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}


@functools.cache
def replicated():
    """The sha256 of the model at the end of the same training with a replica at every worker, with which the reference agrees."""
    with tempfile.TemporaryDirectory() as folder:
        report = run_report(folder, "-n", 4, "--fabric", "virtual", SCRIPT, "whole")
    assert report["replicas"]["state_sha256"] == reference_hash("cnn", "adam")
    return report["replicas"]["sha256"]


def run(tmp_path, fabric, *words, inject=(), workers=4, script=(), **expected):
    """Train the model in shards, and return the report."""
    faults = [word for spec in inject for word in ("--inject", spec)]
    given = ("-n", workers, "--fabric", fabric, *words, *faults, SCRIPT, "sharded", *script)
    return run_report(tmp_path, *given, timeout=LIMIT_S, **expected)


def check_same(report, finished):
    """Nothing was lost, these workers are left, and they have the bits of the replicated model."""
    assert report["outcome"] == "done"
    assert report["workers"]["ranks_finished"] == finished
    assert report["replicas"]["sha256"] == replicated()
    assert report["replicas"]["identical"] is True
    assert report["samples"] == NOTHING_LOST


def check_memory(report):
    """Each shard is held twice where two are left, and what was recorded and printed of it are the bytes of its tensors."""
    module = make_model("cnn")
    numel = {name: parameter.numel() for name, parameter in module.named_parameters()}
    adam = [
        sum(4 * (3 * numel[name] + 1) for name in names) for names in Sharded(module).shard_names(4)
    ]  # with moments, and steps
    held = report["parts_held"]
    for line in held:
        for kind, said in (("computes", "parts"), ("mirrors", "standbys of")):
            size_bytes = line[f"{kind}_bytes"]
            assert size_bytes == sum(adam[part] for part in line[kind])
            if size_bytes:
                assert f"{said} {listing(line[kind])} ({size_bytes / 1000:.1f} kB)" in report["_stdout"]
    assert sorted(part for line in held for part in line["computes"]) == [0, 1, 2, 3]
    assert sorted(part for line in held for part in line["mirrors"]) == ([0, 1, 2, 3] if len(held) > 1 else [])


def kill(rank, step, phase="forward"):
    return f"kill:rank={rank},step={step},phase={phase}"


# -- deaths


@pytest.mark.parametrize(
    ("fabric", "killed", "inject"),
    [
        # In the first step, when nobody has borrowed anything; then another in the middle of the backward pass.
        ("ulfm", (1, 2), [kill(1, 0, "handover"), kill(2, 6, "backward")]),
        # Who should lend a shard dies before it does; the one who gives another its new home follows.
        ("gloo", (0, 2), [kill(0, 4, "handover"), kill(2, 4, "rehome")]),
        *(
            pytest.param(fabric, tuple(int(spec[10]) for spec in inject), inject, marks=pytest.mark.soak)
            for fabric in ("ulfm", "gloo")
            for inject in (
                [kill(2, 3)],
                [kill(3, 5, "backward"), kill(1, 8, "optimizer")],
                [kill(0, 5, "allreduce,bucket=0"), kill(1, 13, "allreduce,bucket=2")],
                [kill(3, 4, "optimizer"), kill(0, 9), kill(2, 11, "handover")],
                [kill(2, 7), kill(0, 7, "recovery")],
                [kill(2, 13, "optimizer"), kill(0, 13, "rehome")],
            )
        ),
    ],
)
def test_killed_workers_change_no_bit(tmp_path, fabric, killed, inject):
    report = run(tmp_path, fabric, inject=inject)

    assert_landed(report, *killed)
    assert report["restarts"] == 0
    assert {event["decision"] for event in of_kind(report, "Recovered")} <= {"redo", "continue"}
    check_same(report, [rank for rank in range(4) if rank not in killed])
    check_memory(report)


@pytest.mark.parametrize("fabric", ["gloo", pytest.param("ulfm", marks=pytest.mark.soak)])
def test_of_two_groups_of_shards_one_dies_whole(tmp_path, fabric):
    """Four workers, two shards: each holds one shard, and its mirror is the same place of the other group."""
    report = run(tmp_path, fabric, inject=[kill(0, 6, "backward"), kill(1, 6, "backward")], script=["--shards", 2])

    assert_landed(report, 0, 1)
    assert report["restarts"] == 0
    assert {event["decision"] for event in of_kind(report, "Recovered")} == {"redo"}
    check_same(report, [2, 3])


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_a_worker_that_dies_while_it_writes_its_shard_changes_no_bit(tmp_path, fabric):
    saving = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 3)

    report = run(tmp_path, fabric, *saving, inject=[kill(0, 6, "checkpoint"), kill(2, 9, "allreduce")])

    assert_landed(report, 0, 2)
    check_same(report, [1, 3])


BOTH_WHO_HOLD_SHARD_1 = [kill(1, 8), kill(2, 8)]


@pytest.mark.parametrize("fabric", ["gloo", pytest.param("ulfm", marks=pytest.mark.soak)])
def test_a_shard_that_is_lost_with_all_who_hold_it_is_loaded(tmp_path, fabric):
    saving = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 3)

    report = run(tmp_path, fabric, *saving, inject=BOTH_WHO_HOLD_SHARD_1)

    assert_landed(report, 1, 2)
    assert report["restarts"] == 0
    assert {event["decision"] for event in of_kind(report, "Recovered")} == {"load"}
    assert (
        "no surviving worker holds part 1 of the model: all workers roll back to step 6"
        in report["_stderr"] + report["_stdout"]
    )
    check_same(report, [0, 3])


@pytest.mark.parametrize("fabric", ["ulfm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_without_a_checkpoint_the_job_begins_again(tmp_path, fabric):
    report = run(tmp_path, fabric, inject=BOTH_WHO_HOLD_SHARD_1)

    assert_landed_for_good(report, 1, 2)
    assert report["restarts"] == 1
    assert "without a checkpoint: the job must start over" in report["_stderr"] + report["_stdout"]
    check_same(report, report["workers"]["ranks_finished"])


def test_negative_control_a_shard_that_comes_without_its_momenta_is_found_out(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"import runpy, sys\n"
        f"from holdfast.models import resident_parts as holdings\n"
        f"take = holdings.receive_part\n"
        f"def forget(comm, giver):\n"
        f"    state = take(comm, giver)\n"
        f"    state['optimizer']['state'] = {{}}\n"
        f"    return state\n"
        f"holdings.receive_part = forget\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )

    report = run_report(
        tmp_path, "-n", 3, "--fabric", "gloo", "--inject", kill(1, 5), broken, "sharded", exit_code=1, timeout=LIMIT_S
    )

    assert "the replicas differ" in report["error"]["message"]


# -- workers that come and go


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_a_spare_takes_over_a_shard(tmp_path, fabric):
    report = run(tmp_path, fabric, "--spares", 1, inject=[kill(0, 3, "backward"), kill(2, 9)])

    assert_landed(report, 0, 2)
    check_same(report, [1, 3, 4])


@pytest.mark.soak
def test_newcomers_take_the_places_of_the_dead(tmp_path):
    patient = tmp_path / "patient.py"  # step 7 is not computed before both newcomers are at the door
    patient.write_text(
        f"import runpy, sys, time\n"
        f"from holdfast.session import session\n"
        f"from holdfast.models.step import Step\n"
        f"backward = Step.backward\n"
        f"def wait(self, loss):\n"
        f"    world, ends_s = session._sessions[0]._job, time.monotonic() + {LIMIT_S}\n"
        f"    while self.number == 7 and len(world.comm.newcomers(world.loop)) < 2 and time.monotonic() < ends_s:\n"
        f"        time.sleep(0.05)\n"
        f"    return backward(self, loss)\n"
        f"Step.backward = wait\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    faults = [word for spec in (kill(2, 1), kill(0, 2, "allreduce"), kill(1, 10)) for word in ("--inject", spec)]

    report = run_report(
        tmp_path,
        "-n",
        4,
        "--fabric",
        "gloo",
        "--respawn",
        "--hang-timeout",
        0,
        *faults,
        patient,
        "sharded",
        timeout=LIMIT_S,
    )

    assert {(event["step"], *event["joined"]) for event in of_kind(report, "Recovered") if event["joined"]} == {
        (8, 4, 5)
    }
    assert_landed(report, 0, 1, 2)
    assert {3, 4, 5} <= set(report["workers"]["ranks_finished"])
    check_same(report, report["workers"]["ranks_finished"])


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_a_worker_that_is_told_to_leave_is_no_failure(tmp_path, fabric):
    report = run(tmp_path, fabric, inject=["leave:rank=0,step=5", "leave:rank=2,step=9"])

    assert set(exit_codes(report).values()) == {0}
    assert {event["rank"] for event in of_kind(report, "Left")} == {0, 2}
    check_same(report, [1, 3])


@pytest.mark.soak
@pytest.mark.parametrize(("fabric", "workers"), [("ulfm", 2), ("gloo", 3), ("gloo", 5)])
def test_any_number_of_workers_gives_the_same_bits(tmp_path, fabric, workers):
    check_same(run(tmp_path, fabric, workers=workers), list(range(workers)))


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_it_is_resumed_with_other_numbers_of_workers(tmp_path, fabric):
    saving = ("--max-restarts", 0, "--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 3)
    everybody = lambda workers, step: [kill(rank, step) for rank in range(workers)]  # noqa: E731

    run(tmp_path / "4", fabric, *saving, inject=everybody(4, 5), exit_code=1)
    run(tmp_path / "2", fabric, *saving, "--resume", workers=2, inject=everybody(2, 10), exit_code=1)
    report = run(tmp_path / "3", fabric, *saving, "--resume", workers=3)

    first = min(event["step"] for event in of_kind(report, "StepCommitted"))
    assert first in (6, 9), "on from what two workers saved; that of step 9 may not have counted yet"
    check_same(report, [0, 1, 2])


# -- what a worker has in its memory, and what it may write


def test_between_steps_a_worker_has_only_what_it_holds(tmp_path):
    """Four workers hold two of four shards each: half of the model; how much memory a process has is only shown."""
    script = SCRIPT.with_name("train_sharded_memory.py")

    report = run_report(tmp_path, "-n", 4, "--fabric", "gloo", script, timeout=LIMIT_S)

    found = [json.loads(line.split("memory ")[1]) for line in report["_stdout"].splitlines() if "memory {" in line]
    assert len(found) == 4
    for of_worker in found:
        print(of_worker)
        assert of_worker["parameters_between_steps"] < 0.55 * of_worker["model"]
        assert of_worker["parameters_in_a_step"] > 0.99 * of_worker["model"]
        assert of_worker["optimizer"] < 2 * 0.55 * of_worker["model"]
        assert of_worker["whole_at_the_end"] is True


@pytest.mark.soak
def test_who_writes_a_parameter_that_is_lent_dies_and_harms_nobody_else(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"import os, runpy, sys\n"
        f"import torch\n"
        f"from holdfast.session import session\n"
        f"from holdfast.models.step import Step\n"
        f"backward = Step.backward\n"
        f"def write(self, loss):\n"
        f"    if self.number == 4 and os.environ['HOLDFAST_RANK'] == '2':\n"
        f"        with torch.no_grad():\n"
        f"            session._sessions[0]._trainable._parameters['0.weight'].add_(1.0)\n"
        f"    return backward(self, loss)\n"
        f"Step.backward = write\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )

    report = run_report(tmp_path, "-n", 4, "--fabric", "gloo", broken, "sharded", timeout=LIMIT_S)

    assert exit_codes(report)[2] == -11
    check_same(report, [0, 1, 3])
