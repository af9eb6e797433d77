"""A pipeline over real processes that die, get stuck, leave and come: the bits stay those of one worker that nothing happened to.

Each job holds several faults, so that few processes are started.
"""

from pathlib import Path

import pytest
from jobs import assert_landed, exit_codes, of_kind, run_report
from train_pipeline import SAMPLES, train, undisturbed

from holdfast.checkpoint import steps
from holdfast.faults.plan import FaultPlan, parse

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_pipeline.py"
STEPS = 14
LIMIT_S = 300
NOTHING_LOST = {"planned": 2 * SAMPLES, "committed": 2 * SAMPLES, "lost": 0, "repeated": 0}


def run(tmp_path, *options, inject=(), script=(), **more):
    """The report of a job of 4 stages, unless the script is told otherwise."""
    faults = [word for spec in inject for word in ("--inject", spec)]
    return run_report(tmp_path, *options, *faults, SCRIPT, *script, timeout=LIMIT_S, **more)


def workers_of(report, *numbers):
    """How many workers computed these steps."""
    workers = {event["step"]: event["workers"] for event in of_kind(report, "StepCommitted")}
    return [workers[number] for number in numbers]


def decisions(report):
    return {event["decision"] for event in of_kind(report, "Recovered")}


def check_same(report, stages=4, steps_done=STEPS):
    """Nothing was lost, and the bits are those of the undisturbed run."""
    assert report["outcome"] == "done"
    assert report["replicas"]["identical"] is True
    assert report["replicas"]["state_sha256"] == undisturbed(stages)
    assert report["steps"] == steps_done
    assert report["samples"] == NOTHING_LOST
    assert report["restarts"] == 0
    assert {tuple(event["metrics"]) for event in of_kind(report, "StepCommitted")} == {("loss", "accuracy")}


ALL_PHASES = [
    "kill:rank=0,step=1",
    "kill:rank=3,step=3,phase=handover,slice=2",
    "kill:rank=1,step=5,phase=backward",
    "kill:rank=4,step=7,phase=allreduce,bucket=0",
    "kill:rank=5,step=7,phase=rehome",
    "kill:rank=2,step=9,phase=optimizer",
]


@pytest.mark.parametrize("fabric", ["gloo", pytest.param("ulfm", marks=pytest.mark.soak)])
def test_kills_in_every_phase_one_after_the_other_down_to_one_worker_change_no_bit(tmp_path, fabric):
    report = run(tmp_path, "-n", 7, "--fabric", fabric, "--mirror", 2, inject=ALL_PHASES)

    assert_landed(report, *range(6))
    assert decisions(report) <= {"redo", "continue"}, "every stage came back from memory"
    assert workers_of(report, 0, 10) == [4, 1]
    check_same(report)


@pytest.mark.parametrize(
    ("fabric", "kills"),
    [
        ("ulfm", {3: "step=2,phase=allreduce", 1: "step=2,phase=recovery"}),  # the second while the others recover
        pytest.param("ulfm", {0: "step=4,phase=allreduce", 2: "step=8,phase=handover"}, marks=pytest.mark.soak),
        pytest.param("gloo", {3: "step=2,phase=backward", 1: "step=2,phase=recovery"}, marks=pytest.mark.soak),
        pytest.param("gloo", {0: "step=13,phase=optimizer"}, marks=pytest.mark.soak),
        pytest.param("ulfm", {0: "step=0,phase=forward", 1: "step=0,phase=rehome"}, marks=pytest.mark.soak),
        pytest.param("ulfm", {2: "step=6,phase=backward", 3: "step=7,phase=handover"}, marks=pytest.mark.soak),
        pytest.param("gloo", {1: "step=6,phase=allreduce,bucket=1", 2: "step=7"}, marks=pytest.mark.soak),
    ],
)
def test_two_deaths_of_four_workers_change_no_bit(tmp_path, fabric, kills):
    report = run(tmp_path, "-n", 4, "--fabric", fabric, inject=[f"kill:rank={r},{spec}" for r, spec in kills.items()])

    assert_landed(report, *kills)
    check_same(report)


# -- a part is lost


@pytest.mark.parametrize(
    ("fabric", "saving", "step"),
    [
        ("gloo", True, 3),
        pytest.param("gloo", False, 0, marks=pytest.mark.soak),
        pytest.param("ulfm", True, 3, marks=pytest.mark.soak),
    ],
)
def test_a_stage_that_is_lost_with_its_mirror_takes_all_back_and_the_run_says_so(tmp_path, fabric, saving, step):
    options = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 3) if saving else ()
    kills = ["kill:rank=1,step=5", "kill:rank=2,step=5"]

    report = run(tmp_path, "-n", 4, "--fabric", fabric, *options, inject=kills)

    assert_landed(report, 1, 2)
    assert "load" in decisions(report)
    assert f"no surviving worker holds part 1 of the model: all workers roll back to step {step}" in report["_stdout"]
    check_same(report)


def test_two_twins_of_a_stage_that_die_at_once_take_all_back_and_the_run_says_so(tmp_path):
    """Of two chains of two stages: who is left has stage 0 alone, twice."""
    saving = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 3)
    kills = ["kill:rank=1,step=5", "kill:rank=3,step=5"]

    report = run(tmp_path, "-n", 4, "--fabric", "gloo", *saving, inject=kills, script=["--stages", 2])

    assert_landed(report, 1, 3)
    assert "load" in decisions(report)
    assert "no surviving worker holds part 1 of the model: all workers roll back to step 3" in report["_stdout"]
    check_same(report, stages=2)


def test_who_dies_while_it_sends_its_copy_comes_back_as_it_was_sent_whole_before(tmp_path):
    fault = "kill:rank=2,step=8,phase=mirror"
    lazily = {"strategy": "partial", "mirror_every": 4, "faults": FaultPlan((parse(fault),)).to_json()}

    report = run(tmp_path, *("-n", 4, "--fabric", "gloo", "--strategy", "partial", "--mirror-every", 4), inject=[fault])

    assert_landed(report, 2)
    assert report["samples"] == NOTHING_LOST
    (restored,) = report["restored"]
    assert (restored["part"], restored["step"], restored["source"]) == (2, 8, "backup")
    assert restored["stale_steps"]["blocks_of_age"] == {"4": restored["blocks"]}
    virtual = train(4, workers=4, fabric="virtual", **lazily)._trainable.sha256s((0,))[0][1]
    assert report["replicas"]["identical"] is True
    assert report["replicas"]["state_sha256"] == virtual != undisturbed(4)


# -- several chains, spares, newcomers


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        (("-n", 4, "--fabric", "ulfm"), {1: "step=7,phase=backward", 2: "step=9,phase=allreduce"}),
        pytest.param(
            ("-n", 5, "--spares", 1, "--fabric", "gloo"),
            {0: "step=4,phase=handover", 3: "step=8,phase=optimizer"},
            marks=pytest.mark.soak,
        ),
    ],
)
def test_in_one_of_two_chains_a_twin_or_a_spare_takes_over(tmp_path, options, kills):
    inject = [f"kill:rank={rank},{spec}" for rank, spec in kills.items()]

    report = run(tmp_path, *options, inject=inject, script=["--stages", 2])

    assert_landed(report, *kills)
    assert decisions(report) <= {"redo", "continue"}
    check_same(report, stages=2)


def test_new_workers_get_a_part_and_compute_it_though_all_who_began_are_gone(tmp_path):
    kills = ["kill:rank=1,step=2,phase=handover", "kill:rank=0,step=7,phase=backward"]

    report = run(
        tmp_path,
        *("-n", 2, "--fabric", "gloo", "--respawn"),
        inject=kills,
        script=["--stages", 2, "--await", 4, "--await", 9],
    )

    assert_landed(report, 0, 1)
    assert {(e["step"], *e["joined"]) for e in of_kind(report, "Recovered") if e["joined"]} == {(5, 2), (10, 3)}
    assert workers_of(report, 1, 3, 5, 8, 10) == [2, 1, 2, 1, 2]
    assert {e["rank"]: e["parameters"] for e in of_kind(report, "RunStarted")} == dict.fromkeys(range(4), 17898)
    check_same(report, stages=2)


@pytest.mark.parametrize("fabric", ["gloo", pytest.param("ulfm", marks=pytest.mark.soak)])
def test_workers_that_are_told_to_leave_do_so_one_after_the_other(tmp_path, fabric):
    report = run(tmp_path, "-n", 4, "--fabric", fabric, inject=["leave:rank=1,step=3", "leave:rank=3,step=7"])

    assert {event["rank"] for event in of_kind(report, "Left")} == {1, 3}
    assert exit_codes(report) == dict.fromkeys(range(4), 0)
    assert report["failures"] == []
    check_same(report)


@pytest.mark.parametrize("fabric", ["ulfm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_who_is_stuck_is_found_and_not_those_who_wait_for_it_inside_the_step(tmp_path, fabric):
    stuck = {1: ("hang", 2, "forward"), 3: ("spin", 5, "backward"), 0: ("deadlock", 8, "handover")}
    inject = [f"{kind}:rank={rank},step={step},phase={phase}" for rank, (kind, step, phase) in stuck.items()]

    report = run(tmp_path, "-n", 5, "--fabric", fabric, "--hang-timeout", 2, "--max-restarts", 0, inject=inject)

    assert {e["rank"]: e["step"] for e in of_kind(report, "WorkerFenced")} == {r: f[1] for r, f in stuck.items()}
    assert {f["rank"]: f["kind"] for f in report["failures"]} == {r: kind for r, (kind, *_) in stuck.items()}
    check_same(report)


# -- checkpoints


def test_a_job_goes_on_from_its_checkpoints_with_other_numbers_of_workers(tmp_path):
    saving = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 3, "--max-restarts", 0)
    all_leave = lambda n, step: [f"leave:rank={rank},step={step}" for rank in range(n)]  # noqa: E731

    run(tmp_path / "1", "-n", 4, "--fabric", "gloo", *saving, inject=all_leave(4, 4), exit_code=4)
    assert steps(tmp_path / "c")[-1] == 5
    run(tmp_path / "2", "-n", 2, "--fabric", "ulfm", *saving, "--resume", inject=all_leave(2, 9), exit_code=4)
    assert steps(tmp_path / "c")[-1] == 10
    last = ("-n", 3, "--fabric", "gloo", *saving, "--resume")
    report = run(tmp_path / "3", *last, inject=["kill:rank=0,step=12,phase=checkpoint"])

    assert_landed(report, 0)
    assert {event["step"] for event in of_kind(report, "RunStarted")} == {10}
    check_same(report, steps_done=STEPS - 10)


FALLS_SILENT = """
import itertools
import sys
sys.path.insert(0, {support!r})
from train_pipeline import train
from holdfast.comm.p2p import Mailbox

def send_so_far(self, to, data, send=Mailbox.send, count=itertools.count()):
    if self._comm.local_ranks == (0,) or next(count) < 17:  # then it is in the middle of the way back through a step
        send(self, to, data)

Mailbox.send = send_so_far
train(2)
"""


def test_stages_that_wait_for_each_other_for_ever_are_ended_though_nobody_looks_for_who_hangs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FALLS_SILENT.format(support=str(SCRIPT.parent)))
    options = ("-n", 2, "--fabric", "gloo", "--hang-timeout", 0, "--stall-timeout", 2, "--max-restarts", 0)

    report = run_report(tmp_path, *options, script, exit_code=1, timeout=60)

    assert "no worker sent a heartbeat for 2 s, all of them waiting for each other" in report["_stderr"]
    assert {event["step"] for event in of_kind(report, "StepCommitted")} == {0, 1, 2}
