"""The trends of ``benchmarks/long/life.py``: what grows is found, and noise is not taken for growth."""

import random
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # behind everything else: names of benchmarks are common ones

from long.trend import trend  # noqa: E402

STEPS = [1000.0 * number for number in range(100)]


def noisy(begin, percent, noise, seed=0):
    """Values that change by so many percent, with so much noise, in percent, and one in ten far off."""
    rng = random.Random(seed)
    line = [begin * (1 + percent / 100 * step / STEPS[-1]) for step in STEPS]
    return [value * (1 + rng.gauss(0, noise) / 100) * rng.choice([1] * 9 + [3]) for value in line]


@pytest.mark.parametrize("percent", [-30, 0, 5, 300])
def test_the_change_over_a_run_is_found_whatever_single_samples_are(percent):
    found = trend(STEPS, noisy(40.0, percent, 0.2))

    assert found.low <= found.percent <= found.high
    assert found.percent == pytest.approx(percent, abs=1)
    assert found.begin == pytest.approx(40.0, rel=0.01)
    assert found.verdict(2.0) == ("flat" if percent == 0 else "changes")


def test_what_is_too_noisy_to_say_is_unclear():
    assert trend(STEPS, noisy(40.0, 3, 20.0)).verdict(2.0) == "unclear"


def test_a_count_that_never_changes_has_no_interval_and_two_samples_have_no_trend():
    found = trend(STEPS, [35] * 100)

    assert (found.percent, found.low, found.high, found.verdict(2.0)) == (0, 0, 0, "flat")
    assert trend(STEPS[:2], [1.0, 2.0]) is None


def test_a_descriptor_more_for_each_death_changes():
    assert trend(STEPS, [32 + 3 * number for number in range(100)]).verdict(2.0) == "changes"
