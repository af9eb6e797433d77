"""Fitted lifetimes: known parameters come back, and intervals contain them as often as they say."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast_lab.simulate.cluster import Cluster
from holdfast_lab.simulate.distributions import Bathtub, Distribution, Exponential, Weibull, stretched
from holdfast_lab.simulate.failures import Failures, Source
from holdfast_lab.simulate.logs.families import BathtubHazard, WeibullHazard
from holdfast_lab.simulate.logs.fitted import survival_curve
from holdfast_lab.simulate.logs.fitting import LifetimeFit, fit_lifetimes
from holdfast_lab.simulate.logs.lifetimes import Lifetimes, UpTime

HOUR = 3600.0


def censored(distribution: Distribution, number: int, seed: int, until_s: float) -> Lifetimes:
    """Lifetimes, each observed for a time that is drawn evenly up to ``until_s``."""
    rng = np.random.default_rng(seed)
    life, seen = distribution.draw(rng, number), rng.uniform(0, until_s, number)
    return Lifetimes.of(np.minimum(life, seen), life <= seen)


def window(distribution: Distribution, units: int, span_s: float, seed: int) -> Lifetimes:
    """What a log of machines that have run for long contains: the rest of a lifetime first, then whole ones."""
    outages = Failures((Source("worker", distribution, stationary=True),)).draw(
        Cluster(workers=units), span_s, (seed, 0)
    )
    up = []
    for unit in range(units):
        ends = [0.0, *(outages.start[outages.first == unit] / 1e9), span_s]
        pairs = pairwise(ends)
        up += [UpTime(unit, a, b, b != span_s, number == 0) for number, (a, b) in enumerate(pairs)]
    return Lifetimes.of_up_times(up)


def value(fit: LifetimeFit, name: str) -> tuple[float, float, float]:
    found = next(one for one in fit.parameters if one.name == name)
    return found.value, found.low or 0.0, found.high or math.inf


def by_name(fits: tuple[LifetimeFit, ...]) -> dict[str, LifetimeFit]:
    return {fit.family: fit for fit in fits}


def test_a_weibull_fit_is_that_of_scipy():
    import scipy.stats

    lifetimes = censored(Weibull(10 * HOUR, 0.7), 300, 1, 40 * HOUR)
    data = scipy.stats.CensoredData(
        uncensored=lifetimes.seconds[lifetimes.ended], right=lifetimes.seconds[~lifetimes.ended]
    )
    shape, _, scale = scipy.stats.weibull_min.fit(data, floc=0)

    _, fits = fit_lifetimes(lifetimes)
    fit = by_name(fits)["weibull"]
    assert value(fit, "shape")[0] == pytest.approx(shape, rel=1e-3)
    assert value(fit, "mean_s")[0] == pytest.approx(scale * math.gamma(1 + 1 / shape), rel=1e-3)


def test_the_exponential_mean_is_the_time_per_failure_and_its_interval_the_likelihoods():
    lifetimes = Lifetimes.of([HOUR] * 8 + [2 * HOUR] * 2, [True] * 8 + [False] * 2)
    fit, _ = fit_lifetimes(lifetimes, "exponential")
    mean_s, low_s, high_s = value(fit, "mean_s")

    assert mean_s == pytest.approx(12 * HOUR / 8, rel=1e-6)
    for end_s in (low_s, high_s):  # 2 (log L(mean) - log L(end)) = 3.84
        fall = 8 * (math.log(end_s / mean_s) + mean_s / end_s - 1)
        assert 2 * fall == pytest.approx(3.84, rel=0.03)


@pytest.mark.parametrize(
    ("distribution", "family", "seed"),
    [
        (Exponential(10 * HOUR), "exponential", 1),
        (Weibull(10 * HOUR, 2.5), "weibull", 3),
        (Bathtub(math.inf, 30 * HOUR, 20 * HOUR, 0.5, 6), "bathtub", 4),
    ],
)
def test_the_family_is_recognised_and_its_mean_found(distribution, family, seed):
    chosen, _ = fit_lifetimes(censored(distribution, 400, seed, 60 * HOUR))

    assert chosen.family == family
    _, low_s, high_s = value(chosen, "mean_s")
    assert low_s < distribution.mean_s < high_s
    assert chosen.distribution.mean_s == pytest.approx(value(chosen, "mean_s")[0], rel=5e-3)


def test_95_percent_intervals_contain_the_truth_95_percent_of_the_time():
    truth, hits = Weibull(10 * HOUR, 0.7), {"mean_s": 0, "shape": 0}
    for seed in range(25):
        fit, _ = fit_lifetimes(censored(truth, 60, seed, 30 * HOUR), "weibull", only=True)
        for name, true in (("mean_s", truth.mean_s), ("shape", truth.shape)):
            _, low, high = value(fit, name)
            hits[name] += low < true < high

    assert all(count >= 21 for count in hits.values()), hits  # 23.75 - 2.5 standard deviations


def test_machines_of_unknown_age_do_not_bias_the_fit():
    truth = Weibull(100 * HOUR, 0.6)
    lifetimes = window(truth, 600, 40 * HOUR, seed=5)
    assert lifetimes.running.sum() == 600
    fit, _ = fit_lifetimes(lifetimes, "weibull", only=True)
    as_new = Lifetimes(lifetimes.seconds, lifetimes.ended, np.zeros(len(lifetimes), np.bool_))
    biased, _ = fit_lifetimes(as_new, "weibull", only=True)

    for name, true in (("mean_s", truth.mean_s), ("shape", truth.shape)):
        _, low, high = value(fit, name)
        assert low < true < high
    assert value(biased, "mean_s")[1] > truth.mean_s, "taking them for new must be noticeably wrong"


def test_units_in_use_for_long_fail_at_the_same_rate_from_the_beginning_on():
    lifetime = Weibull(100 * HOUR, 0.5)
    counts = {}
    for stationary in (True, False):
        failures = Failures((Source("worker", lifetime, stationary=stationary),))
        outages = failures.draw(Cluster(workers=20_000), 5 * HOUR, (1, 0))
        counts[stationary] = len(outages)

    expected = 20_000 * 5 / 100
    assert counts[True] == pytest.approx(expected, rel=0.15)
    assert counts[False] > 2 * expected  # all new: an early failure is likelier


def test_more_lifetimes_than_are_searched_singly_give_the_same_fit():
    truth = Weibull(10 * HOUR, 0.7)
    lifetimes = censored(truth, 3000, 7, 40 * HOUR)
    fit, _ = fit_lifetimes(lifetimes, "weibull", only=True)
    hazard = WeibullHazard(*(one.value for one in fit.parameters))
    exact = hazard.log_hazard(lifetimes.seconds[lifetimes.ended]).sum() - hazard.cumulative(lifetimes.seconds).sum()

    assert fit.log_likelihood == pytest.approx(float(exact), abs=0.05)


def test_hazards_agree_with_the_distributions_that_are_drawn_from():
    rng, at = np.random.default_rng(0), np.array([1.0, 5.0, 20.0])
    for hazard, distribution in (
        (WeibullHazard(10.0, 0.6), Weibull(10.0, 0.6)),
        (BathtubHazard(30.0, 20.0, 0.5, 6.0), Bathtub(math.inf, 30.0, 20.0, 0.5, 6.0)),
    ):
        drawn = distribution.draw(rng, 200_000)
        alive = (drawn[:, None] > at).mean(0)
        assert np.exp(-hazard.cumulative(at)) == pytest.approx(alive, abs=0.005)
        assert hazard.mean == pytest.approx(distribution.mean_s, rel=2e-3)
        beyond = np.maximum(drawn[:, None] - at, 0).mean(0) / distribution.mean_s
        assert np.exp(hazard.log_remaining(at)) == pytest.approx(beyond, abs=0.01)
        step = 1e-5
        slope = (hazard.cumulative(at + step) - hazard.cumulative(at - step)) / (2 * step)
        assert np.exp(hazard.log_hazard(at)) == pytest.approx(slope, rel=1e-4)
        assert stretched(distribution, 40.0).mean_s == pytest.approx(40.0, rel=1e-6)


def test_the_survival_curve_is_kaplan_and_meiers():
    curve = survival_curve(Lifetimes.of([1, 2, 2, 3, 4], [True, True, False, True, False]))

    assert curve["t_s"] == [0, 1, 2, 3, 4]
    assert curve["alive"] == pytest.approx([1, 4 / 5, 3 / 5, 3 / 10, 3 / 10])
    assert all(
        low <= alive <= high for low, alive, high in zip(curve["low"], curve["alive"], curve["high"], strict=True)
    )


def test_too_few_failures_are_refused():
    with pytest.raises(ConfigError, match="bathtub cannot be fitted: it needs 20 failures, and there are 6"):
        fit_lifetimes(Lifetimes.of([1, 2, 3, 4, 5, 6], [True] * 6), "bathtub")
    with pytest.raises(ConfigError, match="does not say how long each machine lived"):
        fit_lifetimes(Lifetimes.of([1.0] * 30, [True] * 30, has_shape=False), "weibull")
    with pytest.raises(ConfigError, match="fit must be one of best, exponential, weibull, bathtub, got 'gamma'"):
        fit_lifetimes(Lifetimes.of([1.0], [True]), "gamma")
