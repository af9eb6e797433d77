"""Cost against the size of a perturbation, of programs whose costs are known by hand and of the quadratic."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from holdfast_lab.studies.base import MEASURED, NOT_RUN
from holdfast_lab.studies.scar.kappa import kappa_within
from holdfast_lab.studies.scar.perturbation import log_delta, most_iterations
from holdfast_lab.studies.scar.perturbation_batch import (
    ADVERSARIAL,
    ALL_KINDS,
    KINDS,
    RANDOM,
    RESET,
    ContractionBatch,
    matrix_of,
    measured,
)
from holdfast_lab.studies.scar.perturbation_rows import FITTED, KNOWN, WORST, cost_rows
from holdfast_lab.workloads.iterative.base import State, euclidean
from holdfast_lab.workloads.iterative.quadratic import Quadratic


class Shrinking:
    """x -> c x, or towards a random point near 0; its optimum is known, and its rate is not told."""

    name = "shrinking"
    live = None
    blocks = 6
    block_bytes = torch.full((6,), 16)
    optimum = torch.zeros(6, 2, dtype=torch.float64)

    def __init__(self, c=0.9, grows_at=-1):
        self.c, self.grows_at = c, grows_at

    def start(self) -> State:
        return {"x": torch.ones(6, 2, dtype=torch.float64)}

    def iterate(self, state, iteration):
        state["x"] *= 1.05 if iteration == self.grows_at else self.c

    def rows(self, state):
        return (state["x"],)

    def distance(self, a, b):
        return euclidean(a, b)

    def mend(self, state, written):
        pass

    def loss(self, state):
        return float(state["x"].square().sum())


def of(rows, part, **fields):
    return [row for row in rows if row["part"] == part and all(row[name] == value for name, value in fields.items())]


# ---------------------------------------------------------------------------------------------
# Many at once


def test_the_matrix_of_a_linear_program_is_found_from_what_it_does():
    program = Quadratic(dimension=6, condition=10)
    state = program.start()
    error = (state["x"] - program.optimum).flatten().numpy()

    matrix = matrix_of(program)
    program.iterate(state, 0)

    assert np.allclose(matrix @ error, (state["x"] - program.optimum).flatten().numpy())
    assert np.linalg.norm(matrix, 2) == pytest.approx(program.rate)


def test_what_is_not_linear_or_not_known_has_no_matrix():
    crooked = Quadratic(dimension=6)
    plain = crooked.iterate
    crooked.iterate = lambda state, iteration: (plain(state, iteration), state["x"].add_(state["x"].sin(), alpha=0.1))

    assert matrix_of(crooked) is None
    assert matrix_of(Quadratic(dimension=6, noise=0.1)) is None
    assert matrix_of(Shrinking()) is None


def test_runs_in_a_batch_are_those_of_the_program():
    """One perturbation of each kind, done again by hand with the program itself."""
    program = Quadratic(dimension=8, condition=8, width=2)
    batch = ContractionBatch(program, matrix_of(program))
    begin = float(program.optimum.norm())
    for kind in KINDS:
        rng = np.random.default_rng(0)
        strikes, error = batch._strikes(1, rng), batch._begin[None]
        state = program.start()
        for iteration, strike in enumerate(strikes[:, 0]):
            if strike:
                change = batch._change(kind, error, np.array([0.5]), iteration, rng)
                before = float((state["x"] - program.optimum).norm())
                state["x"] += torch.from_numpy(change[0]).view(4, 2) * begin
                after = float((state["x"] - program.optimum).norm())
                size = np.linalg.norm(change) * begin
                if kind == ADVERSARIAL:
                    assert after == pytest.approx(before + size)
                if kind == RESET:
                    assert all(block.any() == block.all() for block in state["x"].abs() < 1e-12)
                else:
                    assert size == pytest.approx(0.5 * batch.distances[iteration] * begin)
                error = error + change
            error = error @ batch._matrix.T
            program.iterate(state, iteration)
        assert np.allclose(error[0] * begin, (state["x"] - program.optimum).flatten().numpy())


def test_no_perturbation_of_the_quadratic_exceeds_the_absolute_bound_and_many_exceed_the_other():
    rows = cost_rows(Quadratic(), 1200, seed=3)

    bounds = of(rows, "bound", status=MEASURED, c_from=KNOWN)
    assert [row["kind"] for row in bounds] == list(ALL_KINDS)
    assert sum(row["perturbations"] for row in bounds) == 1200
    assert [row["violations"] for row in bounds] == [0] * 4
    assert 0 < min(row["least_room"] for row in bounds) < 8  # the bound is not just far away
    share = {row["kind"]: row["difference_share"] for row in bounds}
    assert share[ADVERSARIAL] > 0.9 > 0.5 > share[RANDOM] > 0
    assert sum(row["trials"] for row in of(rows, "perturbation")) == 1200
    assert any(row["negative"] for row in of(rows, "perturbation", kind=RANDOM))
    assert all(row["least"] <= row["cost"] <= row["greatest"] for row in of(rows, "perturbation"))
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert cost_rows(Quadratic(), 1200, seed=3) == rows != cost_rows(Quadratic(), 1200, seed=4)


def test_a_rate_that_is_better_than_the_true_one_is_found_out():
    program = Quadratic()
    program.rate *= 0.97

    bounds = of(cost_rows(program, 400, seed=0), "bound")

    assert sum(row["violations"] for row in bounds) > 100


def test_a_run_that_was_given_up_has_not_exceeded_its_bound_unless_that_was_before():
    plain = 0.5 ** np.arange(30.0)
    sizes = np.zeros((30, 2))
    sizes[0] = 3.0
    distances = np.stack([np.full(12, 1.0), np.full(12, 1.0)], axis=1)

    near, far = (measured(distances, plain, sizes, 0.5, [eps]) for eps in (2.0**-5, 2.0**-20))

    assert near.room.tolist() == [-math.inf] * 2  # at most 7 iterations, and not there after 11
    assert far.room.tolist() == [math.inf] * 2  # at most 22
    assert near.censored.tolist() == [1, 1]
    assert near.cost.tolist() == [11 - 5] * 2


# ---------------------------------------------------------------------------------------------
# One at a time


def test_away_from_the_optimum_of_a_scaling_the_cost_is_the_paper_s_bound_itself():
    rows = cost_rows(Shrinking(), 30, seed=0, iterations=60, window=1)

    fitted = of(rows, "bound", c_from=FITTED)
    assert [row["kind"] for row in fitted] == list(KINDS)
    assert [row["c"] for row in fitted] == [pytest.approx(0.9)] * 3
    assert [row["violations"] for row in fitted] == [row["difference_violations"] for row in fitted] == [0] * 3
    assert [row["undisturbed_room"] for row in fitted] == [pytest.approx(0, abs=1e-6)] * 3
    assert [row["c"] for row in of(rows, "bound", c_from=WORST)] == [pytest.approx(0.9)] * 3
    away = of(rows, "perturbation", kind=ADVERSARIAL)
    assert sum(row["trials"] for row in away) == 10
    assert [row["cost"] for row in away] == [pytest.approx(row["paper_bound"]) for row in away]
    assert [row["cost"] for row in away] == [pytest.approx(row["absolute_bound"]) for row in away]
    assert [row["loss_cost"] for row in away] == [pytest.approx(row["cost"], abs=0.5) for row in away]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_where_an_iteration_leads_away_there_is_no_worst_rate_and_the_row_says_so():
    rows = cost_rows(Shrinking(grows_at=5), 3, seed=0, iterations=60, window=1)

    (worst,) = of(rows, "bound", status=NOT_RUN)
    assert worst["c_from"] == WORST
    assert worst["why"] == "c = 1.05 is not below 1: there is no bound"


def test_a_program_that_does_not_converge_is_said_not_to():
    (row,) = cost_rows(Shrinking(c=1.0), 3, seed=0, iterations=60)

    assert row["status"] == NOT_RUN
    assert "at least 4 distances" in row["why"]


def test_the_count_of_one_run_of_the_program_is_below_the_bound():
    """Without the batch: the program, a perturbation, and the count."""
    program = Quadratic(seed=5)
    state, distances = program.start(), []
    for iteration in range(500):
        distances.append(float((state["x"] - program.optimum).norm()))
        if iteration == 20:
            state["x"] += 3.0
        program.iterate(state, iteration)

    most = most_iterations(program.rate, distances[0], log_delta([0.0] * 20 + [3.0 * 8], program.rate), 1e-3)

    assert kappa_within(distances, 1e-3) <= most
