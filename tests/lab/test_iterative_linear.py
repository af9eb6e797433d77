"""Quadratic, logistic regression, factorisation: against what is known of them, and against others' programs."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data import DataMissing, digits, generated_documents, generated_ratings
from holdfast_lab.workloads.iterative import PROGRAMS, copy_of, make_program
from holdfast_lab.workloads.iterative.als import AlsProblem, Factorisation
from holdfast_lab.workloads.iterative.mlr import Dense, Logistic, Samples, samples_of
from holdfast_lab.workloads.iterative.quadratic import Quadratic

REAL = os.environ.get("HOLDFAST_DATA")
WITHOUT_FILES = {
    "quadratic": {"noise": 0.1},
    "quadratic-diagonal": {"width": 4},
    "mlr-digits": {"batch": 16},
    "als-ratings": {"rank": 3},
}
each = pytest.mark.parametrize("name", WITHOUT_FILES)


def program_of(name: str, seed: int = 0):
    return make_program(name, seed=seed, **WITHOUT_FILES[name])


def after(program, iterations: range, state=None):
    state = program.start() if state is None else state
    for iteration in iterations:
        program.iterate(state, iteration)
    return state


def real(name: str, **options):
    if REAL is None:
        pytest.skip("HOLDFAST_DATA names no directory with datasets")
    try:
        return make_program(name, Path(REAL), **options)
    except DataMissing as missing:
        pytest.skip(str(missing))


@each
def test_an_iteration_is_a_function_of_state_and_number(name):
    straight, disturbed = program_of(name), program_of(name)
    state = after(straight, range(6))
    after(disturbed, range(3, 5))

    again = after(disturbed, range(6))

    assert all(torch.equal(state[key], again[key]) for key in state)


@each
def test_blocks_are_views_that_tell_their_size(name):
    program = program_of(name)
    state = after(program, range(2))
    (rows,) = program.rows(state)
    before, loss = rows.clone(), program.loss(state)

    rows[2:4, 0] += 1.0

    assert program.loss(state) != loss
    assert torch.equal(program.rows(copy_of(state))[0], rows)
    assert program.distance(rows, before).nonzero().flatten().tolist() == [2, 3]
    assert program.block_bytes.tolist() == [rows[0].nbytes] * program.blocks
    assert program.block_bytes.sum() == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("name", ["quadratic", "mlr-digits", "als-ratings"])
def test_another_seed_draws_something_else(name):
    states = [after(program_of(name, seed), range(2)) for seed in (0, 1)]

    assert not any(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_noise_is_drawn_alike_wherever_the_state_is():
    quiet, noisy = Quadratic(), Quadratic(noise=0.5)

    def noise(x: torch.Tensor, iteration: int) -> torch.Tensor:
        states = [after(program, range(iteration, iteration + 1), {"x": x.clone()}) for program in (quiet, noisy)]
        return states[1]["x"] - states[0]["x"]

    here, there = noise(torch.zeros(64, 1, dtype=torch.float64), 7), noise(quiet.optimum * 2, 7)
    torch.testing.assert_close(here, there)
    assert 0.3 < float(here.std()) < 0.7
    assert not torch.allclose(here, noise(quiet.optimum * 2, 8))


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("learning_rate", [1.0, 1.97])
def test_a_quadratic_contracts_by_exactly_its_rate(rotated, learning_rate):
    program = Quadratic(seed=3, condition=30, rotated=rotated, learning_rate=learning_rate)
    values, vectors = torch.linalg.eigh(program.curvature)
    assert float(values[-1] / values[0]) == pytest.approx(30)

    def contraction(error: torch.Tensor) -> float:
        state = after(program, range(1), {"x": program.optimum + error.view_as(program.optimum)})
        return float((state["x"] - program.optimum).norm() / error.norm())

    along = [contraction(vector) for vector in vectors.T]
    generator = torch.Generator().manual_seed(0)
    anywhere = [contraction(torch.randn(64, generator=generator, dtype=torch.float64)) for _ in range(20)]
    assert max(along) == pytest.approx(program.rate, rel=1e-12)
    assert max(anywhere) < program.rate


def quarters_of_digits() -> tuple[Samples, Samples]:
    """Four features, the ink in each quarter: no planes divide the classes, so that there is a least loss."""
    parts = [(F.avg_pool2d(x, 4).flatten(1), y) for x, y in (part[:] for part in digits())]
    mean, spread = parts[0][0].mean(0), parts[0][0].std(0)
    return tuple(Samples(Dense(F.pad((x - mean) / spread, (0, 1), value=1.0)), y) for x, y in parts)


def test_logistic_regression_finds_what_scikit_learn_finds():
    train, test = quarters_of_digits()
    x, y = train.inputs.matrix[:, :-1].numpy(), train.labels.numpy()
    reference = LogisticRegression(C=np.inf, tol=1e-6, max_iter=1000).fit(x, y)
    least = log_loss(y, reference.predict_proba(x))
    program = Logistic("quarters", 0, train, test, 10, learning_rate=0.5, batch=256)
    solution = np.column_stack([reference.coef_, reference.intercept_]).T

    found = after(program, range(1000))

    assert program.loss({"weights": torch.tensor(solution, dtype=torch.float32)}) == pytest.approx(least, rel=1e-5)
    assert least < program.loss(found) < 1.01 * least
    theirs = reference.score(test.inputs.matrix[:, :-1].numpy(), test.labels.numpy())
    assert program.accuracy(found) == pytest.approx(theirs, abs=0.02)


def test_digits_are_recognised_as_well_as_by_scikit_learn():
    train, test = digits()
    reference = LogisticRegression(max_iter=1000).fit(train[:][0].flatten(1), train[:][1])
    program = make_program("mlr-digits")

    state = after(program, range(500))

    theirs = reference.score(test[:][0].flatten(1), test[:][1])
    assert program.accuracy(state) == pytest.approx(theirs, abs=0.02)


@pytest.mark.parametrize("kind", ["dense", "bags"])
def test_a_step_goes_down_the_gradient_that_autograd_finds(kind):
    dataset = digits() if kind == "dense" else generated_documents(documents=90, vocabulary=60)
    train, test = (samples_of(part) for part in dataset)
    program = Logistic(kind, 5, train, test, dataset.num_classes, learning_rate=0.5, batch=32)
    state = after(program, range(3))
    drawn = program.drawn(3)
    x, y = dataset.train[drawn]
    x = x.flatten(1) if kind == "dense" else F.normalize(x)
    weights = state["weights"].clone().requires_grad_()
    F.cross_entropy(F.pad(x, (0, 1), value=1.0) @ weights, y).backward()

    program.iterate(state, 3)

    torch.testing.assert_close(state["weights"], weights.detach() - 0.5 * weights.grad)


def test_the_loss_is_on_the_same_samples_whatever_the_seed():
    programs = [make_program("mlr-digits", seed=seed, evaluated=50) for seed in (0, 1)]
    state = after(programs[0], range(5))

    assert programs[0].loss(state) == programs[1].loss(state)
    assert programs[0].train.inputs is programs[1].train.inputs  # read once a process


def objective(program: Factorisation, factors: torch.Tensor) -> torch.Tensor:
    """Zhou et al.'s, rating by rating."""
    ratings = program.problem.train
    rows = factors[ratings.users], factors[ratings.items + program.problem.num_users]
    squares = (ratings.values - (rows[0] * rows[1]).sum(1)).square()
    return (squares + program.penalty * (rows[0].square().sum(1) + rows[1].square().sum(1))).sum()


def gradient(program: Factorisation, state) -> torch.Tensor:
    factors = state["factors"].double().requires_grad_()
    objective(program, factors).backward()
    return factors.grad


def test_each_half_step_is_the_exact_minimiser():
    program = make_program("als-ratings", penalty=0.05)
    state = after(program, range(2))
    scale = gradient(program, program.start()).abs().max()
    users = ~program.live

    slope = gradient(program, state)
    assert slope[program.live].abs().max() < 1e-5 * scale
    assert slope[users].abs().max() > 1e-3 * scale
    program.resolve(state, users)
    assert gradient(program, state)[users].abs().max() < 1e-5 * scale
    expected = objective(program, state["factors"].double()) / len(program.problem.train.values)
    assert program.loss(state) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("first", ["users", "items"])
def test_the_next_iteration_reads_the_live_blocks_alone(first):
    program = make_program("als-ratings", first=first)
    assert program.live.sum() == (program.problem.num_items if first == "users" else program.problem.num_users)
    state = after(program, range(2))
    disturbed, wrong = copy_of(state), copy_of(state)
    disturbed["factors"][~program.live] = torch.nan
    wrong["factors"][program.live.nonzero()[0]] = 1.0

    for each_state in (state, disturbed, wrong):
        program.iterate(each_state, 2)

    assert torch.equal(state["factors"], disturbed["factors"])
    assert not torch.equal(state["factors"], wrong["factors"])


def test_lost_rows_are_solved_from_survivors_alone():
    program = make_program("als-ratings", rank=3)
    state = after(program, range(3))
    lost = torch.from_numpy(np.random.default_rng(0).random(program.blocks) < 0.5)
    kept = state["factors"].clone()
    state["factors"][lost] = torch.nan

    program.resolve(state, lost)

    assert torch.equal(state["factors"][~lost], kept[~lost])
    users, ratings = program.problem.num_users, program.problem.train
    for block in lost.nonzero().flatten()[[0, 1, -2, -1]].tolist():
        own, other = (ratings.users, ratings.items + users) if block < users else (ratings.items + users, ratings.users)
        chosen = (own == block) & ~lost[other]
        known, ridge = kept[other[chosen]].double(), program.penalty * chosen.sum() * torch.eye(3)
        solution = torch.linalg.solve(known.T @ known + ridge, known.T @ ratings.values[chosen].double())
        torch.testing.assert_close(state["factors"][block].double(), solution, rtol=1e-3, atol=1e-4)


def test_a_row_without_a_surviving_partner_becomes_zero():
    program = make_program("als-ratings")
    state = after(program, range(1))

    program.resolve(state, torch.ones(program.blocks, dtype=torch.bool))

    assert not state["factors"].any()


def test_ratings_of_low_rank_are_recovered():
    problem = AlsProblem(generated_ratings(users=150, items=120, rank=3, density=0.3, noise=0.0))
    program = Factorisation("exact", 0, problem, rank=4, penalty=1e-4)  # less their mean, they have a rank more

    state = after(program, range(60))

    assert program.test_rmse(state) < 0.005 * float(problem.test.values.std())


@pytest.mark.parametrize(("penalty", "first"), [(0.01, "users"), (0.2, "users"), (0.01, "items")])
def test_the_objective_never_rises(penalty, first):
    program = make_program("als-ratings", penalty=penalty, first=first)
    state, losses = program.start(), []
    for iteration in range(25):
        program.iterate(state, iteration)
        losses.append(program.loss(state))

    assert losses[5] < 0.99 * losses[0]
    assert all(later < sooner * (1 + 1e-6) for sooner, later in pairwise(losses))


def test_movielens_is_predicted_as_well_as_published():
    """0.87 to 0.95 is what is reported for a random tenth of ml-latest-small."""
    program = real("als-movielens")
    state, losses = program.start(), []
    for iteration in range(10):
        program.iterate(state, iteration)
        losses.append(program.loss(state))

    assert 0.86 < program.test_rmse(state) < 0.95
    assert all(later < sooner for sooner, later in pairwise(losses))


def test_forests_are_told_apart_as_well_as_a_linear_model_can():
    """About 0.7 of CoverType are classified right by logistic regression; the largest class is less than half."""
    program = real("mlr-covertype")

    state = after(program, range(1500))

    assert 0.67 < program.accuracy(state) < 0.76


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_name_makes_a_program_or_asks_for_its_files(name):
    try:
        program = make_program(name)
    except DataMissing:
        return
    assert program.name == name
    assert len(program.rows(program.start())[0]) == program.blocks


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("mlr", {}, "program must be one of quadratic, .*, got 'mlr'"),
        ("quadratic", {"rank": 3}, "options of quadratic are: dimension, .*; got 'rank'"),
        ("quadratic", {"seed": -1}, "seed must be at least 0, got -1"),
        ("quadratic", {"width": 5}, "multiple of width, got dimension 64 and width 5"),
        ("quadratic", {"learning_rate": 2.0}, "learning_rate above 0 and below 2, .* got 30, 2 and 0"),
        ("mlr-digits", {"batch": 0}, "batch and evaluated at least 1, got 2, 0 and 2000"),
        ("als-ratings", {"penalty": 0.0}, "penalty above 0, got 8 and 0"),
        ("als-movielens", {}, "movielens is read from files: give their directory"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_line(name, options, line):
    with pytest.raises(ConfigError, match=line):
        make_program(name, **options)
