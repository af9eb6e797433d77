"""How often a checkpoint pays, held to Daly's exact model of the expected time, minimised without any formula of the product."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.interval import AdaptiveInterval, daly
from holdfast.errors import ConfigError
from holdfast_lab.simulate.formulas import young

PAIRS = [(cost, mtbf) for mtbf in (60.0, 3600.0, 86400.0) for cost in (1e-3, 0.1, 1.0, 10.0, 60.0, 100.0)]


def expected_s(interval_s, cost_s, mtbf_s):
    """Expected seconds for a second of work, restart aside: Daly (2006), eq. 20, for exponential failures.

    A segment of ``interval_s`` of work and its checkpoint is begun again until no failure falls into it.
    """
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


def best_s(cost_s, mtbf_s):
    """The interval of the least expected time, by golden section over its logarithm: the model has one minimum."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = math.log(1e-6 * min(cost_s, mtbf_s)), math.log(50 * mtbf_s)

    def at(x):
        return expected_s(math.exp(x), cost_s, mtbf_s)

    for _ in range(200):
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, two) if at(one) < at(two) else (one, high)
    return math.exp((low + high) / 2)


@pytest.mark.parametrize(("cost", "mtbf"), PAIRS)
def test_the_higher_order_estimate_costs_next_to_nothing_against_the_true_optimum(cost, mtbf):
    best = best_s(cost, mtbf)

    found = daly(cost, mtbf)

    assert expected_s(found, cost, mtbf) <= expected_s(best, cost, mtbf) * 1.001
    if cost < mtbf / 2:
        assert found == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize(
    ("cost", "mtbf", "wanted"),
    [
        (1.0, 3600.0, 84.187460654),
        (10.0, 3600.0, 261.703312702),
        (60.0, 86400.0, 3180.062732306),
        (1e-3, 60.0, 0.345743816),
        (60.0, 60.0, 50.484339626),
    ],
)
def test_reference_values(cost, mtbf, wanted):
    """Computed with 50 digits, as the root of the model's derivative."""
    assert best_s(cost, mtbf) == pytest.approx(wanted, rel=1e-6)
    assert daly(cost, mtbf) == pytest.approx(wanted, rel=0.02 if cost == mtbf else 1e-5)


@pytest.mark.parametrize(("cost", "mtbf"), [(200.0, 100.0), (1e9, 100.0), (200.0001, 100.0)])
def test_where_a_checkpoint_takes_longer_than_two_failures_the_interval_is_the_mtbf(cost, mtbf):
    assert daly(cost, mtbf) == mtbf


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e9))
def test_the_interval_is_always_a_time_that_can_be_waited_for(cost, mtbf):
    assert 0 < daly(cost, mtbf) <= young(cost, mtbf) + mtbf
    assert math.isfinite(daly(cost, mtbf))


@settings(deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(10, 1e6), st.floats(1.01, 10))
def test_rarer_failures_never_ask_for_more_checkpoints(cost, mtbf, factor):
    assert young(cost, mtbf * factor) > young(cost, mtbf)
    if cost < mtbf / 10:
        assert daly(cost, mtbf * factor) > daly(cost, mtbf)


@pytest.mark.parametrize("rule", [young, daly])
@pytest.mark.parametrize(("cost", "mtbf"), [(0, 1), (1, 0), (-1, 1), (1, -1), (math.nan, 1), (1, math.nan)])
def test_times_that_are_not_positive_are_refused(rule, cost, mtbf):
    with pytest.raises(ConfigError, match="cost and MTBF must be positive, got"):
        rule(cost, mtbf)


@pytest.mark.parametrize("rule", [young, daly])
def test_without_failures_a_checkpoint_never_pays(rule):
    assert rule(1.0, math.inf) == math.inf


# --------------------------------------------------------------------------------------------- as it goes


@pytest.mark.parametrize("mtbf", [0, -1, math.nan])
def test_a_belief_that_is_not_positive_is_refused(mtbf):
    with pytest.raises(ConfigError, match="mean time between failures must be positive"):
        AdaptiveInterval(mtbf)


def test_the_first_checkpoint_is_due_at_once_to_learn_what_it_costs():
    adaptive = AdaptiveInterval(3600)

    assert adaptive.interval_s(0) == 0
    assert adaptive.is_due(100.0)


def test_the_next_is_due_after_the_interval_that_the_cost_asks_for():
    adaptive = AdaptiveInterval(3600)
    adaptive.is_due(100.0)
    adaptive.began(100.0)
    adaptive.cost(1.0)

    due = next(now for now in range(101, 1000) if adaptive.is_due(float(now)))

    assert due - 100 == math.ceil(daly(1.0, 3600 + due - 100))


def test_one_slow_checkpoint_changes_nothing_and_lasting_slowness_does():
    adaptive = AdaptiveInterval(3600)
    for _ in range(4):
        adaptive.cost(1.0)
    usual = adaptive.interval_s(0)

    adaptive.cost(100.0)
    after_one = adaptive.interval_s(0)
    for _ in range(3):
        adaptive.cost(100.0)

    assert after_one == usual
    assert adaptive.interval_s(0) == daly(100.0, 3600)


def test_a_checkpoint_that_costs_nothing_is_not_taken_all_the_time():
    adaptive = AdaptiveInterval(3600)
    adaptive.cost(0.0)

    assert adaptive.interval_s(0) == daly(1e-4, 3600) > 0.5


def test_the_belief_counts_as_one_failure_and_what_is_seen_outweighs_it():
    adaptive = AdaptiveInterval(1000.0)
    adaptive.is_due(50.0)

    before = adaptive.mtbf_s(50.0)
    for _ in range(9):
        adaptive.failed()

    assert before == 1000.0
    assert adaptive.mtbf_s(50.0) == 100.0
    assert adaptive.mtbf_s(50.0 + 99_000) == 10_000.0


def test_more_failures_ask_for_more_checkpoints_and_quiet_for_fewer():
    adaptive = AdaptiveInterval(1000.0)
    adaptive.is_due(0.0)
    adaptive.cost(1.0)

    at_first, later = adaptive.interval_s(0.0), adaptive.interval_s(5000.0)
    adaptive.failed()

    assert later > at_first
    assert adaptive.interval_s(0.0) < at_first


def test_before_it_was_asked_for_the_first_time_no_time_has_passed():
    assert AdaptiveInterval(1000.0).mtbf_s(1e9) == 1000.0
