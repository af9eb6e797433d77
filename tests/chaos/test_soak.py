"""Random plans, judged by one hash: one in every run of the tests, a long campaign with ``make soak``; see ``soak.py``.

HOLDFAST_SOAK_RUNS and HOLDFAST_SOAK_SEED choose the campaign.
"""

import os
import signal

import pytest
import soak

from holdfast.faults.plan import PHASES, SPLIT_PHASES

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),  # two runs, where the launcher is struck
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # a scaler leaves the first steps out
]

RUNS = int(os.environ.get("HOLDFAST_SOAK_RUNS", "300"))
FIRST_SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "1000"))
TWO_DEATHS = 108
"""A plan with two deaths, one of them of the lead."""


def check(seed, folder):
    plan = soak.draw(seed, folder)
    print(f"seed {seed}: {plan}")
    print(soak.describe(plan, soak.run(plan, folder)))


def test_a_random_plan_changes_no_bit(tmp_path):
    check(TWO_DEATHS, tmp_path)


def test_a_campaign_holds_all_that_can_be_drawn(tmp_path):
    """A plan is its seed; between them they have all that is drawn."""
    plans = [soak.draw(seed, tmp_path) for seed in range(FIRST_SEED, FIRST_SEED + 300)]

    assert plans[0] == soak.draw(FIRST_SEED, tmp_path)
    assert {plan.case[0] for plan in plans} == {*soak.reference.MODELS, *soak.SPLIT}
    assert {(plan.nodes, plan.struck) for plan in plans} == {(1, 0), (1, signal.SIGTERM), (1, signal.SIGKILL), (2, 0)}
    for model, features in soak.FEATURES.items():
        assert {one for plan in plans if plan.case[0] == model for one in plan.features} == set(features)
    assert {workers for plan in plans for _, workers in plan.scaled} == set(range(1, 9))
    assert {plan.case[0] for plan in plans if plan.scaled} == {*soak.reference.MODELS, *soak.SPLIT}
    assert {plan.slices for plan in plans if not plan.computes} == {4, 7, 8, 0}
    assert {plan.slices for plan in plans if plan.computes} == {4, 6, 8, 10}
    assert {plan.trained[0] for plan in plans} == {*soak.reference.MODELS, *soak.SPLIT, soak.reference.ROWS}
    assert {plan.fabric for plan in plans} == set(soak.FABRICS)
    said = {word for plan in plans for word in (*plan.options, *plan.more)}
    assert {"tree", "auto", "auto:1", "reinit", "restart", "rollback", "rebalance", "replace"} <= said
    struck = [plan for plan in plans if plan.struck]
    assert any(plan.resumed[-2] != plan.option("-n") for plan in struck), "some go on with another number of workers"
    words = " ".join(fault for plan in plans for fault in plan.faults)
    drawn = {*soak.KINDS, *PHASES[1:], *SPLIT_PHASES, "nodeloss"} - {"mirror"}
    assert [what for what in sorted(drawn) if what not in words] == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_random_faults_change_no_bit(seed, tmp_path):
    check(seed, tmp_path)
