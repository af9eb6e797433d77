"""Iterations to a level, and what a disturbance costs of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.tools.iteration_cost import crossing, iteration_cost, levels, trailing_mean
from holdfast_lab.studies.scar.kappa import kappa, kappa_within


def test_iterations_to_a_level_are_counted_between_two_losses():
    assert kappa([4, 2, 1], 1.5) == 1.5
    assert kappa([4, 2, 1], 2.25, window=2) == 1.5  # of the means 4, 3, 1.5
    assert kappa([4, 2, 1], 4) == 0
    assert kappa([4, math.nan, 1, 3], 1) == 2
    assert kappa([4, 2, 1], 0.5) == math.inf


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 64, 130, 300])
def test_the_trailing_mean_is_to_the_bit_what_a_run_is_ended_by(window):
    losses = np.random.default_rng(window).standard_normal(200).tolist()

    means = trailing_mean(losses, window)

    assert means.tolist() == [np.mean(losses[: end + 1][-window:]) for end in range(200)]


def test_many_runs_are_counted_as_each_alone():
    runs = np.random.default_rng(0).random((30, 4, 2))

    counted = crossing(runs, 0.1)

    assert counted.shape == (4, 2)
    assert counted[3, 1] == crossing(runs[:, 3, 1], 0.1)
    assert crossing(runs, -1.0).tolist() == [[math.inf] * 2] * 4


def test_the_distance_to_the_optimum_is_interpolated_by_its_rate():
    assert kappa_within([0.5**k for k in range(9)], 0.5**3.25) == pytest.approx(3.25)
    assert kappa_within([1.0, 0.0], 1e-9) == pytest.approx(1, abs=0.98)


def test_the_cost_is_how_much_later_the_levels_are_reached():
    run_ = [2.0**-k for k in range(20)]
    at_levels = [0.3, 0.1, 0.01]

    assert iteration_cost([1.0] * 3 + run_, run_, at_levels).iterations == pytest.approx(3)
    assert iteration_cost(run_[2:], run_, at_levels[1:]).iterations == pytest.approx(-2)  # not clipped


def test_a_level_that_is_never_reached_is_counted_as_censored_and_bounds_from_below():
    run_ = [2.0**-k for k in range(20)]

    cost = iteration_cost(run_[:5], run_, [0.5, 2.0**-7])

    assert cost.censored == 1
    assert cost.iterations == pytest.approx((0 + (4 - 7)) / 2)
    with pytest.raises(ConfigError, match="must reach every level"):
        iteration_cost(run_, run_, [0.0])


def test_levels_are_where_the_loss_can_be_told_from_its_noise():
    rng = np.random.default_rng(1)
    losses = np.concatenate([np.linspace(1, 0.2, 100), np.full(200, 0.2)]) + 0.002 * rng.standard_normal(300)

    found = levels(losses, window=8, count=5, begin=20)

    assert found == sorted(found, reverse=True)
    assert len(found) == 5
    assert 0.203 < found[-1] < found[0] < 0.95
    with pytest.raises(ConfigError, match="falls nowhere"):
        levels(losses[120:], window=8)
