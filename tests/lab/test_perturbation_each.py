"""Every kind of perturbation side by side, of programs whose costs are known by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from holdfast_lab.studies.base import MEASURED, NOT_RUN
from holdfast_lab.studies.scar.perturbation_each import ALWAYS, ASUNDER, ONCE, SEVERAL, STANDING, kind_rows
from holdfast_lab.workloads.iterative.base import State, euclidean
from holdfast_lab.workloads.iterative.quadratic import Quadratic

RATE = 0.9
ITERATIONS = 60


class Shrinking:
    """x - x* -> c (x - x*), from a distance of 1 along each axis; its rate is not told."""

    name = "shrinking"
    live = None
    blocks = 8
    block_bytes = torch.full((8,), 16)

    def __init__(self, optimum=0.0, c=RATE):
        self.optimum, self.c = torch.full((8, 2), optimum, dtype=torch.float64), c

    def start(self) -> State:
        return {"x": self.optimum + 1}

    def iterate(self, state, iteration):
        state["x"] += (self.c - 1) * (state["x"] - self.optimum)

    def rows(self, state):
        return (state["x"],)

    def distance(self, a, b):
        return euclidean(a, b)

    def mend(self, state, written):
        assert written.dtype == torch.int64

    def loss(self, state):
        return float((state["x"] - self.optimum).square().sum())


def rows_of(program, trials=2, **options):
    rows = kind_rows(program, trials, 0, ITERATIONS, 1, **options)
    return {(row["kind"], row["often"]): row for row in rows}


@pytest.fixture(scope="module")
def shrunk():
    return rows_of(Shrinking())


@pytest.mark.parametrize(
    ("kind", "cost"),
    [
        ("gradient lost", 1.0),
        ("half of the gradient lost", math.log((1 + RATE) / 2 / RATE, 1 / RATE)),
        ("stale by 4", 4.0),
    ],
)
def test_what_takes_a_run_back_costs_the_way_back_once_and_three_times(shrunk, kind, cost):
    once, several = shrunk[kind, ONCE], shrunk[kind, SEVERAL]

    assert (once["trials"], several["trials"]) == (2, 2)
    assert once["cost"] == pytest.approx(cost)
    assert once["cost"] < several["cost"] <= 3 * cost + 1e-9  # of two that are close the second goes back less far
    assert once["loss_cost"] == pytest.approx(once["cost"], abs=0.5)
    assert (once["violations"], once["censored"], once["diverged"]) == (0, 0, 0)


def test_a_step_has_its_size_and_away_from_the_optimum_costs_what_the_bound_allows(shrunk):
    away, drawn = (shrunk[f"{kind}, {ASUNDER:g}", ONCE] for kind in ("adversarial", "random"))

    assert [away["size"], drawn["size"]] == pytest.approx([ASUNDER] * 2)
    assert away["cost"] == pytest.approx(away["bound"])
    assert drawn["cost"] < away["cost"]
    assert drawn["bound"] == pytest.approx(away["bound"])  # they strike at the same iterations


def test_a_flip_that_leaves_no_number_is_counted_to_the_end_and_not_dropped():
    found = rows_of(Shrinking(optimum=1.0))  # from 2 down to 1: with the first bit of the exponent flipped, NaN

    for often, trials in ((ONCE, 2), (SEVERAL, 2), (ALWAYS, 1)):
        row = found["bit flip, first of the exponent", often]
        assert row["status"] == MEASURED
        assert (row["trials"], row["diverged"], row["censored"], row["loss_censored"]) == (trials,) * 4
        assert row["cost"] > 2 * ITERATIONS
        assert (row["size"], row["bound"], row["violations"]) == (None, None, 0)
    assert found["bit flip, first of the exponent", ALWAYS]["holds"] is None
    mild = found["bit flip, first of the fraction", ONCE]
    assert (mild["diverged"], mild["censored"], mild["violations"]) == (0, 0, 0)
    assert mild["cost"] < ITERATIONS
    assert json.loads(json.dumps(list(found.values()), allow_nan=False)) == list(found.values())


def test_the_error_that_stays_is_below_its_bound_and_at_it_for_an_adversary():
    rows = kind_rows(Quadratic(dimension=16, condition=10), 1, 0, ITERATIONS, 1)

    standing = {row["kind"]: row for row in rows if row["often"] == ALWAYS}
    assert next(iter(standing)) == "nothing"
    assert len(standing) == 13
    assert all(row["holds"] in (True, None) for row in standing.values())
    assert sum(row["violations"] for row in rows) == 0
    nothing, drawn, away = (
        standing[kind] for kind in ("nothing", f"random, {STANDING:g}", f"adversarial, {STANDING:g}")
    )
    assert nothing["error"] < 1e-12
    assert nothing["cost"] == 0
    assert away["error_bound"] == pytest.approx(0.9 / 0.1 * STANDING)
    assert 0.999 * away["error_bound"] < away["error"] <= 1.001 * away["error_bound"]
    assert 0.1 * drawn["error_bound"] < drawn["error"] < away["error"]
    assert away["censored"] == away["trials"] == 1


def test_parts_together_are_the_whole_and_the_same_again(shrunk):
    parts = {}
    for part in range(3):
        found = rows_of(Shrinking(), part=part, parts=3)
        assert len(found) >= len(shrunk) // 3
        parts |= found

    assert parts == shrunk


def test_a_program_that_does_not_converge_is_said_not_to_once():
    (row,) = kind_rows(Shrinking(c=1.0), 3, 0, ITERATIONS, 1)

    assert row["status"] == NOT_RUN
    assert "at least 4 distances" in row["why"]
    assert kind_rows(Shrinking(c=1.0), 3, 0, ITERATIONS, 1, part=1, parts=2) == []
