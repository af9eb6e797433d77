"""The simulators against closed forms."""

import math

import numpy as np
import pytest

from holdfast.checkpoint.interval import daly
from holdfast_lab.simulate import (
    Cluster,
    Costs,
    Estimate,
    Exponential,
    Failures,
    Scenario,
    SimulatedJob,
    Source,
    best_interval,
    daly_expected_s,
    exact_interval_s,
    monte_carlo,
)
from holdfast_lab.simulate.formulas import young

MTBF_S = 3600.0
SAVE_S, RESTART_S = 30.0, 60.0


def periodic(every, steps, *, strategy="relaunch", workers=4, horizon_s=1e6):
    """Return a job whose steps of 1 s are all sum, so that a death is missed at once; whoever dies is replaced at once."""
    restarts = {"relaunch": {"restart_s": RESTART_S}, "restart": {"load_s": RESTART_S}}[strategy]
    failures = Failures((Source("worker", Exponential(workers * MTBF_S)),))
    job = SimulatedJob(strategy=strategy, steps=steps, save_every=every, horizon_s=horizon_s)
    return Scenario(Cluster(workers=workers), job, Costs(sum_s=1, save_s=SAVE_S, **restarts), failures)


@pytest.mark.parametrize(("every", "strategy", "repetitions"), [(60, "relaunch", 800), (450, "restart", 1200)])
def test_the_mean_time_is_that_of_dalys_complete_model(every, strategy, repetitions):
    steps = 40 * every
    # The formula counts a checkpoint after the last step, too.
    expected_s = daly_expected_s(steps - every, every, SAVE_S, RESTART_S, MTBF_S)
    expected_s += daly_expected_s(every, every, 0, RESTART_S, MTBF_S)

    sweep = monte_carlo(periodic(every, steps, strategy=strategy, horizon_s=4 * expected_s), repetitions, seed=5)

    assert sweep.finished.all()
    assert abs(sweep.values("total_s").mean() / expected_s - 1) < 0.005


def test_the_exact_optimum_is_the_lowest_point_of_dalys_model():
    best_s = exact_interval_s(SAVE_S, MTBF_S)

    around = np.linspace(0.2 * best_s, 3 * best_s, 4001)
    lowest = min(around, key=lambda tau: daly_expected_s(1e6, tau, SAVE_S, RESTART_S, MTBF_S))
    assert lowest == pytest.approx(best_s, rel=1e-3)
    assert daly(SAVE_S, MTBF_S) == pytest.approx(best_s, rel=1e-3)
    assert young(SAVE_S, MTBF_S) == pytest.approx(best_s, rel=0.06)


def test_trying_finds_the_optimum():
    scenario = periodic(1, 20_000, horizon_s=2e5)

    found = best_interval(scenario, 20, seed=3)

    exact = exact_interval_s(SAVE_S, MTBF_S)
    assert 0.6 < found.save_every / exact < 1.6  # goodput is flat there
    best = daly_expected_s(20_000, exact, SAVE_S, RESTART_S, MTBF_S)
    assert daly_expected_s(20_000, found.interval_s, SAVE_S, RESTART_S, MTBF_S) < 1.02 * best
    assert dict(found.tried)[1].mean < found.goodput.mean  # a checkpoint after every step is tried, and no good


def test_an_interval_holds_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(1)

    holds = sum(low <= 3 <= high for _, low, high, _ in (Estimate.of(rng.normal(3, 1, 5)) for _ in range(2000)))

    assert 0.935 < holds / 2000 < 0.965


def test_what_is_too_large_for_a_number_is_infinite():
    assert daly_expected_s(1, 1e9, 0, 0, 1) == math.inf
