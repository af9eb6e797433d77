"""The bounds on iteration cost, and perturbations, against programs of which everything is known by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast_lab.studies.scar.kappa import kappa_within
from holdfast_lab.studies.scar.perturbation import (
    CachedUndisturbed,
    LazyUndisturbed,
    NoPerturbation,
    PerturbationRecorder,
    fit_rate,
    irreducible_error,
    log_delta,
    most_iterations,
    paper_cost,
    undisturbed,
)
from holdfast_lab.studies.scar.perturbation_kinds import (
    EVERY_STEP,
    Adversarial,
    Asynchronous,
    BitFlip,
    LostUpdate,
    RandomDirection,
    Reset,
    Rounded,
    Stale,
    at,
)
from holdfast_lab.workloads.iterative.base import State, euclidean


class Scaled:
    """x -> c x, each column by its own c; with it goes how often each block was iterated."""

    name = "scaled"
    live = None

    def __init__(self, c=0.5, blocks=8, width=3, start=1.0, dtype=torch.float64):
        self.blocks, self.block_bytes = blocks, torch.full((blocks,), width * 8)
        self.c = torch.as_tensor(c, dtype=dtype).expand(width)
        self.optimum = torch.zeros(blocks, width, dtype=dtype)
        self._start = (torch.ones(blocks, width) * torch.as_tensor(start)).to(dtype)
        self.mended: list[Tensor] = []

    def start(self) -> State:
        return {"x": self._start.clone(), "count": torch.zeros(self.blocks, 1, dtype=torch.int64)}

    def iterate(self, state, iteration):
        state["x"] *= self.c
        state["count"] += 1

    def rows(self, state):
        return state["x"], state["count"]

    def distance(self, a, b):
        return euclidean(a, b)

    def mend(self, state, written):
        self.mended.append(written)

    def loss(self, state):
        return float((state["x"] ** 2).sum())


def run(program, perturbation, iterations):
    """Return what each iteration read, and the last state."""
    state, read = program.start(), []
    for iteration in range(iterations):
        perturbation.disturb(state, program, iteration)
        read.append(state["x"].clone())
        program.iterate(state, iteration)
    return read, state


def to_optimum(program, perturbation, iterations):
    """Return ||y(k) - x*||, that of y(0) first, and ||d(k)||."""
    recorder, state, distances = PerturbationRecorder(perturbation, LazyUndisturbed(program)), program.start(), []
    for iteration in range(iterations):
        distances.append(float((state["x"] - program.optimum).norm()))
        recorder.disturb(state, program, iteration)
        program.iterate(state, iteration)
    return [*distances, float((state["x"] - program.optimum).norm())], recorder.sizes


# ---------------------------------------------------------------------------------------------
# The bounds


def steps_of(draw_seed, c, kind):
    """Return a contraction of rate ``c``, exactly, of 3 numbers."""
    rng = np.random.default_rng(draw_seed)
    q, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    p, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    values = np.array([c, c * rng.random(), -c * rng.random()])
    return q @ np.diag(values) @ (q.T if kind == "symmetric" else p)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    c=st.floats(0.05, 0.95),
    kind=st.sampled_from(["symmetric", "any"]),
    sizes=st.lists(st.just(0.0) | st.floats(1e-4, 1e3), min_size=1, max_size=8),
    away=st.booleans(),
    eps=st.floats(1e-6, 1.0),
)
def test_no_perturbation_takes_a_contraction_beyond_the_absolute_bound(seed, c, kind, sizes, away, eps):
    rng, matrix = np.random.default_rng(seed), steps_of(seed, c, kind)
    y = rng.standard_normal(3)
    distances = [np.linalg.norm(y)]
    for step in range(1000):  # more than the bound for any of the values drawn
        size = sizes[step] if step < len(sizes) else 0.0
        direction = y if away else rng.standard_normal(3)
        y = matrix @ (y + size * direction / np.linalg.norm(direction)) if np.linalg.norm(direction) else matrix @ y
        distances.append(np.linalg.norm(y))
        if distances[-1] <= eps and step >= len(sizes):
            break

    most = most_iterations(c, distances[0], log_delta(sizes, c), eps)

    assert kappa_within(distances, eps) <= most * (1 + 1e-9) + 1e-9


def test_the_absolute_bound_is_attained_by_an_adversary():
    program = Scaled(c=0.8)

    distances, sizes = to_optimum(program, Adversarial(at(2, 5), 3.0, program.optimum), 80)

    assert kappa_within(distances, 1e-3) == pytest.approx(
        float(most_iterations(0.8, distances[0], log_delta(sizes, 0.8), 1e-3))
    )


def test_the_bound_on_the_difference_fails_where_the_undisturbed_run_is_faster_than_its_rate():
    """x(0) has nothing in the slow direction, and the perturbation is in that alone."""

    class Kicked(NoPerturbation):
        def disturb(self, state, program, iteration):
            if iteration == 0:
                state["x"][0, 0] = 1.0

    program = Scaled(c=[0.9, 0.1], blocks=1, width=2, start=[0.0, 1.0])
    plain, _ = to_optimum(program, NoPerturbation(), 100)
    kicked, sizes = to_optimum(program, Kicked(), 100)

    cost = kappa_within(kicked, 1e-3) - kappa_within(plain, 1e-3)

    assert cost == pytest.approx(math.log(1e-3) / math.log(0.9) - 3)
    assert paper_cost(0.9, 1.0, log_delta(sizes, 0.9)) == pytest.approx(math.log(2) / math.log(1 / 0.9))
    assert cost > 9 * paper_cost(0.9, 1.0, log_delta(sizes, 0.9))
    assert kappa_within(kicked, 1e-3) <= most_iterations(0.9, 1.0, log_delta(sizes, 0.9), 1e-3)


def test_the_irreducible_error_is_where_an_adversary_at_every_step_holds_the_run():
    program = Scaled(c=0.8)

    distances, _ = to_optimum(program, Adversarial(EVERY_STEP, 0.5, program.optimum), 200)

    assert distances[-1] == pytest.approx(irreducible_error(0.8, 0.5)) == pytest.approx(2.0)


def test_a_weighted_sum_beyond_any_float_still_bounds():
    sizes = np.zeros(5000)
    sizes[-1] = 1.0

    most = most_iterations(0.5, 1.0, log_delta(sizes, 0.5), 0.5**3)

    assert most == pytest.approx(4999 + 3)
    assert log_delta([0.0, 0.0], 0.5) == -math.inf
    assert most_iterations(0.5, 1.0, -math.inf, 0.25) == pytest.approx(2)


@pytest.mark.parametrize("c", [0.0, 1.0, 1.02])
def test_there_is_no_bound_without_a_contraction(c):
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        irreducible_error(c, 1.0)


# ---------------------------------------------------------------------------------------------
# The rate


def test_the_rate_of_a_run_that_has_one_is_that():
    rate = fit_rate([7 * 0.9**k for k in range(100)])

    assert (rate.fitted, rate.worst) == (pytest.approx(0.9), pytest.approx(0.9))
    assert rate.interval == (pytest.approx(0.9), pytest.approx(0.9))


def test_the_interval_of_a_fitted_rate_has_the_true_one_nineteen_times_in_twenty():
    """The noise is correlated from step to step: an interval for independent ones would miss it half of the time."""
    hits = 0
    for seed in range(200):
        rng, noise, logs = np.random.default_rng(seed), 0.0, []
        for k in range(150):
            noise = 0.7 * noise + 0.1 * rng.standard_normal()
            logs.append(k * math.log(0.97) + noise)
        low, high = fit_rate(np.exp(logs)).interval
        hits += low <= 0.97 <= high

    assert 175 <= hits <= 199


def test_a_rate_is_not_fitted_to_the_floor_of_the_noise():
    rng = np.random.default_rng(0)
    distances = 0.9 ** np.arange(400.0) + 1e-4 * rng.random(400)

    rate = fit_rate(distances)

    assert rate.fitted == pytest.approx(0.9, abs=0.003)
    assert rate.iterations < 90
    with pytest.raises(ConfigError, match="at least 4 distances"):
        fit_rate(distances[300:])
    still_moving = fit_rate(0.99 ** np.arange(100.0))
    assert still_moving.iterations == 99


# ---------------------------------------------------------------------------------------------
# Perturbations


@pytest.mark.parametrize("kind", [RandomDirection, Adversarial])
@pytest.mark.parametrize("when", [at(3), at(1, 4), EVERY_STEP], ids=["once", "several", "every"])
def test_a_step_of_a_given_length_has_it_and_comes_when_it_should(kind, when):
    program = Scaled()
    how = program.optimum if kind is Adversarial else 11

    _, sizes = to_optimum(program, kind(when, 0.25, how), 6)

    assert sizes == [pytest.approx(0.25 if step in when else 0.0, abs=1e-12) for step in range(6)]
    assert all(written.tolist() == list(range(8)) for written in program.mended)


def test_an_adversary_goes_straight_away_from_the_optimum():
    program = Scaled(c=[0.5, 0.9, 0.2])
    program.optimum += 2.0
    before = program.start()

    (after,), _ = run(program, Adversarial(at(0), 4.0, program.optimum), 1)

    was, is_ = before["x"] - program.optimum, after - program.optimum
    assert torch.allclose(is_, was * ((was.norm() + 4) / was.norm()))


def test_random_directions_are_not_all_one_and_have_no_preferred_one():
    program = Scaled(blocks=4, width=1)
    read, _ = run(program, RandomDirection(EVERY_STEP, 1.0, 0), 1)
    steps = []
    for seed in range(400):
        state = program.start()
        RandomDirection(at(0), 1.0, seed).disturb(state, program, 0)
        steps.append((state["x"] - 1).flatten())

    assert len(read) == 1
    assert torch.stack(steps).mean(dim=0).abs().max() < 4 * 0.5 / 20  # of each coordinate: deviation 1/2, 400 times
    assert torch.stack(steps).square().mean(dim=0).sub(0.25).abs().max() < 0.06


def test_reset_gives_a_share_of_the_blocks_what_they_began_with_and_their_optimizer_too():
    program = Scaled()
    state = program.start()
    for iteration in range(3):
        program.iterate(state, iteration)

    Reset(at(3), 0.25, seed=5).disturb(state, program, 3)

    begun = (state["x"] == 1).all(dim=1)
    assert begun.sum() == 2
    assert state["count"].flatten().tolist() == [0 if is_begun else 3 for is_begun in begun]
    assert (state["x"][~begun] == 0.125).all()
    assert program.mended[-1].tolist() == begun.nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_bit_flip_changes_one_bit_of_one_parameter(dtype):
    program = Scaled(dtype=dtype)
    state, width = program.start(), {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    sign = 8 * dtype.itemsize - 1

    BitFlip(at(0), seed=1, bit=sign).disturb(state, program, 0)
    negative = (state["x"] == -1).sum()
    BitFlip(at(1), seed=2).disturb(state, program, 1)
    changed = state["x"].view(width) ^ program.start()["x"].view(width)

    assert negative == 1
    assert sum(bin(int(bits) & (2 ** (sign + 1) - 1)).count("1") for bits in changed.flatten()) == 2
    with pytest.raises(ConfigError, match=f"bit must be from 0 to {sign}"):
        BitFlip(at(0), seed=1, bit=sign + 1).disturb(state, program, 0)


def test_a_bit_flip_that_leaves_no_number_has_an_infinite_size():
    program = Scaled(c=1.0, dtype=torch.float32, start=1.5)  # 0x3fc00000: with bit 30, the exponent is full

    _, sizes = to_optimum(program, BitFlip(at(1), seed=0, bit=30), 2)

    assert sizes == [0.0, math.inf]


@pytest.mark.parametrize(
    ("dtype", "value", "rounded"),
    [
        (torch.bfloat16, 1 + 2**-8 + 2**-12, 1 + 2**-7),
        (torch.bfloat16, 1 + 2**-9, 1.0),
        (torch.float8_e4m3fn, 1.1, 1.125),
        (torch.float8_e4m3fn, -1e4, -448.0),
    ],
)
def test_rounding_is_to_the_nearest_number_of_the_type_and_never_leaves_it(dtype, value, rounded):
    program = Scaled(start=value)
    state = program.start()

    Rounded(EVERY_STEP, dtype).disturb(state, program, 0)

    assert state["x"].unique().tolist() == [rounded]
    assert state["x"].dtype == torch.float64


def test_what_is_no_number_is_neither_added_to_nor_rounded():
    program = Scaled(dtype=torch.int64)

    with pytest.raises(ConfigError, match=r"parameters of scaled are torch\.int64"):
        Rounded(EVERY_STEP, torch.bfloat16).disturb(program.start(), program, 0)


def test_a_lost_update_is_as_if_the_iteration_had_not_reached_those_blocks():
    program = Scaled()

    read, state = run(program, LostUpdate(at(1), 0.5, seed=3), 3)

    lost = read[2][:, 0] == 0.5  # what the iteration 1 read
    assert lost.sum() == 4
    assert (read[1] == 0.5).all()
    assert (read[2][~lost] == 0.25).all()
    assert state["count"].flatten().tolist() == [2 if is_lost else 3 for is_lost in lost]


def test_of_a_lost_part_of_the_batch_that_part_of_the_update_is_lost():
    read, _ = run(Scaled(), LostUpdate(at(0, 1), 1.0, seed=3, part=0.25), 3)

    assert [float(x[0, 0]) for x in read] == [1.0, 0.625, 0.625**2]


def test_stale_blocks_are_what_they_were_some_steps_ago():
    read, _ = run(Scaled(), Stale(at(3), 2, 0.5, seed=0), 4)

    assert (read[2] == 0.25).all()
    assert sorted(read[3][:, 0].tolist()) == [0.125] * 4 + [0.5] * 4
    early, _ = run(Scaled(), Stale(at(1), 5, 1.0, seed=0), 2)
    assert (early[1] == 1).all()


def test_asynchronous_blocks_take_their_update_at_least_once_in_so_many_steps():
    program = Scaled(c=0.5, blocks=20)

    read, _ = run(program, Asynchronous(share=0.25, delay=3, seed=0), 40)

    updated = torch.stack([later[:, 0] < earlier[:, 0] for earlier, later in pairwise(read)])
    assert updated[0].sum() == 5
    waited = [
        max(len(run_) for run_ in "".join("ux"[bit == 0] for bit in block.int().tolist()).split("u"))
        for block in updated.T
    ]
    assert max(waited) == 3
    everybody, _ = run(program, Asynchronous(share=1.0, delay=1, seed=0), 5)
    assert [float(x[0, 0]) for x in everybody] == [0.5**k for k in range(5)]


def all_kinds(seed, optimum):
    return [
        RandomDirection(EVERY_STEP, 0.1, seed),
        Adversarial(EVERY_STEP, 0.1, optimum),
        BitFlip(EVERY_STEP, seed),
        Rounded(EVERY_STEP, torch.bfloat16),
        Reset(EVERY_STEP, 0.25, seed),
        Stale(EVERY_STEP, 2, 0.5, seed),
        LostUpdate(EVERY_STEP, 0.5, seed),
        Asynchronous(0.5, 4, seed),
    ]


@pytest.mark.parametrize("number", range(8))
def test_the_same_seed_gives_the_same_perturbation_and_another_another(number):
    program = Scaled(c=0.7, start=1.1)

    first, again, other = (run(program, all_kinds(seed, program.optimum)[number], 5)[0] for seed in (1, 1, 2))

    draws = not isinstance(all_kinds(0, program.optimum)[number], Adversarial | Rounded)
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert torch.equal(torch.stack(first), torch.stack(other)) is not draws


# ---------------------------------------------------------------------------------------------
# The recorder


@pytest.mark.parametrize("most_bytes", [0, 2**20], ids=["beside", "kept"])
def test_recorded_distances_are_those_to_the_undisturbed_run(most_bytes):
    program = Scaled(c=0.5)
    beside = undisturbed(program, 6, most_bytes)()
    recorder = PerturbationRecorder(RandomDirection(at(1, 3), 0.25, seed=4), beside)

    read, state = run(program, recorder, 6)
    recorder.close(state, program, 6)

    assert isinstance(beside, LazyUndisturbed if most_bytes == 0 else CachedUndisturbed)
    assert recorder.sizes == [0, pytest.approx(0.25), 0, pytest.approx(0.25), 0, 0]
    after = [
        float((x - 0.5**k).norm()) for k, x in enumerate([*read, state["x"]])
    ]  # with d(k) added, where there is one
    assert recorder.distances[:2] == [0, 0]
    assert recorder.distances[2] == pytest.approx(0.125)
    assert [recorder.distances[k] for k in (4, 5, 6)] == [pytest.approx(after[k]) for k in (4, 5, 6)]
    assert recorder.distances[3] == pytest.approx(0.0625)


def test_a_run_that_begins_later_was_at_no_distance_before():
    program = Scaled()
    kept = CachedUndisturbed(program)
    recorder, state = (
        PerturbationRecorder(NoPerturbation(), kept),
        {name: tensor.clone() for name, tensor in kept.at(2).items()},
    )

    recorder.disturb(state, program, 2)

    assert (recorder.distances, recorder.sizes) == ([0.0] * 3, [0.0] * 3)


def test_a_run_that_is_not_kept_cannot_be_gone_back_in():
    beside = LazyUndisturbed(Scaled())
    beside.at(3)

    with pytest.raises(ConfigError, match="iteration 2 was requested after 3"):
        beside.at(2)
