"""Bits flip in the memory of real workers: what each policy of the guard makes of it.

The judge is the hash of the same training undisturbed, in one process. One that stays as it is altered must not have it.
"""

import functools

import pytest
import train_flip
from jobs import ROOT, assert_landed, run_report

pytestmark = pytest.mark.chaos
SCRIPT = ROOT / "tests" / "support" / "train_flip.py"


@functools.cache
def quiet_hash():
    return train_flip.train(fabric="virtual", workers=2, guard="off")[1]


def run(tmp_path, fabric, workers, guard, *flips, options=(), **expected):
    words = [word for flip in flips for word in ("--flip", flip)]
    policy = ("--guard", guard) if guard else ()
    return run_report(
        tmp_path, "-n", workers, "--slices", 4, "--fabric", fabric, *policy, *options, SCRIPT, *words, **expected
    )


def check_healed(report, survivors):
    assert report["replicas"]["state_sha256"] == quiet_hash()
    assert report["replicas"]["identical"] is True
    assert report["samples"] == {"planned": 812, "committed": 812, "lost": 0, "repeated": 0}
    assert report["steps"] == train_flip.STEPS
    assert report["workers"]["ranks_finished"] == survivors


@pytest.mark.parametrize(
    ("fabric", "workers", "flip", "named"),
    [("gloo", 2, "1:6:1.weight:28", []), ("ulfm", 3, "2:9:1.weight/exp_avg:20", [2])],
    ids=["gloo-2-weights", "ulfm-3-optimizer"],
)
def test_healing_gives_the_bits_of_the_undisturbed_run_and_names_who_was_at_fault(
    tmp_path, fabric, workers, flip, named
):
    report = run(tmp_path, fabric, workers, "heal", flip)

    check_healed(report, list(range(workers)))
    (found,), (healed,) = report["guard"]["found"], report["guard"]["healed"]
    assert (found["what"], found["ranks"], found["policy"]) == ("replicas", named, "heal")
    assert healed["ranks"] == [int(flip[0])], "whose history did not reproduce, of two workers too"
    assert (healed["source"], healed["went_back_to"]) == ("snapshot", 0)
    assert report["guard"]["steps_redone"] == report["steps_redone"] == found["step"] + 1
    assert report["failures"] == []


def test_a_worker_that_dies_while_corruption_is_heard_of_changes_nothing(tmp_path):
    """It dies in the closing sum of the step in which the flip is found: it flips in the step before, when that has begun."""
    kill = ("--inject", "kill:rank=2,step=6,phase=allreduce,bucket=1")

    report = run(tmp_path, "gloo", 3, "heal", "1:5:1.weight:24", options=kill)

    check_healed(report, [0, 1])
    assert_landed(report, 2)
    assert [found["ranks"] for found in report["guard"]["found"]] in ([[1]], [[]])
    assert len(report["guard"]["healed"]) == 1


def test_warning_names_the_worker_and_goes_on_with_other_bits(tmp_path):
    """The negative control of healing."""
    report = run(tmp_path, "gloo", 3, "warn", "1:6:1.weight:24", exit_code=1)

    assert report["outcome"] == "done"
    assert "rank 1: " in report["_stderr"].partition("the replicas hold different weights")[2]
    assert {rank for found in report["guard"]["found"] for rank in found["ranks"]} == {1}
    assert report["guard"]["healed"] == []
    assert report["replicas"]["identical"] is False
    assert report["replicas"]["state_sha256"] != quiet_hash()


def test_by_default_the_job_stops(tmp_path):
    report = run(tmp_path, "gloo", 2, "", "1:5:1.weight:24", options=("--max-restarts", 0), exit_code=1)

    assert "the replicas differ before step 6" in report["error"]["message"]


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["gloo", "ulfm"])
@pytest.mark.parametrize("what", ["1.weight", "4.bias", "1.weight/exp_avg", "4.weight/exp_avg_sq"])
@pytest.mark.parametrize("step", [0, 13, 27])
def test_any_flip_is_healed(tmp_path, fabric, what, step):
    if step == 0 and "/" in what:
        pytest.skip("before the first step there is no optimizer's state")
    report = run(tmp_path, fabric, 2, "heal", f"1:{step}:{what}:22")

    check_healed(report, [0, 1])


@pytest.mark.soak
def test_a_flip_that_comes_again_is_no_soft_error(tmp_path):
    words = ("--fabric", "gloo", "--guard", "heal", SCRIPT, "--flip", "1:6:4.bias:24", "--sticky")

    report = run_report(tmp_path, "-n", 2, "--slices", 4, *words, exit_code=1)

    assert "again after a rollback to step 0" in report["error"]["message"]


@pytest.mark.soak
def test_who_joins_is_compared_with_the_others_and_rings_no_alarm(tmp_path):
    options = ("--respawn", "--inject", "kill:rank=2,step=2")
    words = ("--slices", 4, "--fabric", "gloo", "--guard", "heal", *options, SCRIPT, "--pause", 1.0)

    report = run_report(tmp_path, "-n", 3, *words, timeout=300)

    check_healed(report, [0, 1, 3])
    assert [joined["rank"] for joined in report["joined"]] == [3]
    assert report["guard"]["found"] == []


# -- messages, which are altered after the checksums that go with them were made

ALTERED = ("--guard-sums", "--inject", "flip:rank=1,step=6,target=message,bucket=1,count=1,bits=22")


@pytest.mark.parametrize(
    ("fabric", "env"),
    [
        ("gloo", {}),
        pytest.param("gloo", {"HOLDFAST_SHARED_BYTES": "0"}, marks=pytest.mark.soak),
        pytest.param("ulfm", {}, marks=pytest.mark.soak),
    ],
    ids=["gloo-memory", "gloo-messages", "ulfm-memory"],
)
def test_an_altered_message_is_found_by_who_adds_it_and_its_step_is_done_again(tmp_path, fabric, env):
    report = run(tmp_path, fabric, 3, "heal", options=ALTERED, env=env)

    check_healed(report, [0, 1, 2])
    (found,), (healed,) = report["guard"]["found"], report["guard"]["healed"]
    assert (found["step"], found["what"], found["ranks"], found["policy"]) == (6, "message", [1], "heal")
    assert (healed["found_at"], healed["went_back_to"], healed["source"]) == (6, 6, "step")
    assert report["guard"]["steps_redone"] == report["steps_redone"] == 1
    assert report["failures"] == []


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["rollback", "forward"])
def test_a_worker_that_dies_while_an_altered_message_is_heard_of_changes_nothing(tmp_path, strategy):
    kill = ("--strategy", strategy, "--inject", "kill:rank=2,step=6,phase=allreduce,bucket=1")

    report = run(tmp_path, "gloo", 3, "heal", options=(*ALTERED, *kill))

    assert_landed(report, 2)
    if strategy == "rollback":
        check_healed(report, [0, 1])
    assert [found["ranks"] for found in report["guard"]["found"]] == [[1]]


@pytest.mark.soak
def test_without_checksums_an_altered_message_makes_all_replicas_wrong_alike(tmp_path):
    """The negative control."""
    report = run(tmp_path, "gloo", 3, "heal", options=ALTERED[1:])

    assert report["replicas"]["identical"] is True
    assert report["replicas"]["state_sha256"] != quiet_hash()
    assert report["guard"]["found"] == []
