from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from holdfast.errors import ConfigError
from holdfast_lab.pages.study import render_study
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Options, carry_out
from holdfast_lab.studies.scar import save as scar_save
from holdfast_lab.studies.scar import study as scar_module
from holdfast_lab.studies.scar import trials as scar_trials
from holdfast_lab.studies.scar.bound import bound_sections
from holdfast_lab.studies.scar.claims import hold_claims
from holdfast_lab.studies.scar.figures import shown
from holdfast_lab.studies.scar.pilot import pilot, skew, with_levels
from holdfast_lab.studies.scar.policies import (
    HINDSIGHT,
    HINDSIGHT_WHO,
    LINE,
    NO_CHECKPOINT,
    RESEED,
    SCAR,
    TRADITIONAL,
    ScarPolicy,
    bounds,
    controls,
    scar,
    traditional,
)
from holdfast_lab.studies.scar.programs import policies_of
from holdfast_lab.studies.scar.restore import least_sum
from holdfast_lab.studies.scar.rows import TrialRows
from holdfast_lab.studies.scar.save import held_claims, held_rows
from holdfast_lab.studies.scar.study import STUDY, WorkerPool
from holdfast_lab.studies.scar.text import policies_table
from holdfast_lab.studies.scar.trials import FollowedRun, ProgramRun, failure_at, lost_of, trial, trial_of_several
from holdfast_lab.studies.stats import RESAMPLES
from holdfast_lab.workloads.iterative.base import State, euclidean

RATE = 0.9
EVERY = 8
BEHIND = RATE**-5
"""What a block that is five iterations behind is, against what it was."""


@dataclass
class Shrinking:
    """x(k + 1) = c x(k), each block a number; the loss is how often that shrinks from 1, so it falls by 1 an iteration."""

    seed: int = 0
    rates: tuple[float, ...] = (RATE,) * 8
    has_steps: bool = False
    """Whether something goes along, as an optimizer's state would: how many iterations the block has seen."""
    half_is_live: bool = False
    """Whether the second half of the blocks is overwritten by the first half before it is read."""
    is_brittle: bool = False
    """Whether it stops when blocks differ: the run never gets to a level then."""

    name = "shrinking"

    def __post_init__(self):
        self.blocks = len(self.rates)
        self.block_bytes = torch.full((self.blocks,), 16 if self.has_steps else 8)
        self.live = torch.arange(self.blocks) < self.blocks // 2 if self.half_is_live else None

    def start(self) -> State:
        return {name: torch.full((self.blocks, 1), value, dtype=torch.float64) for name, value in (("x", 1), ("n", 0))}

    def iterate(self, state: State, iteration: int) -> None:
        if self.is_brittle and state["x"].min() < state["x"].max():
            return
        state["x"] *= torch.tensor(self.rates, dtype=torch.float64)[:, None]
        state["n"] += 1
        if self.half_is_live:
            state["x"][self.blocks // 2 :] = state["x"][: self.blocks // 2]

    def rows(self, state: State):
        return (state["x"], state["n"]) if self.has_steps else (state["x"],)

    def distance(self, a, b):
        return euclidean(a, b)

    def mend(self, state: State, written) -> None:
        assert written.dtype == torch.int64

    def loss(self, state: State) -> float:
        return math.log(float(state["x"].norm()) / math.sqrt(self.blocks)) / math.log(1 / RATE)


COURSE = ProgramRun(
    name="shrinking", make=Shrinking, every=EVERY, window=1, iterations=60, levels=(-30.0, -40.5), last=40.5
)


def with_program(**options) -> ProgramRun:
    return replace(COURSE, make=lambda seed: Shrinking(seed, **options))


def costs(monkeypatch, policies, course=COURSE, failure=21, number=0):
    """Return the row of each policy in a trial that fails after so many iterations: all was saved after 16."""
    monkeypatch.setattr(scar_trials, "failure_at", lambda *_, **__: failure)
    return {row["policy"]: row for row in trial(course, "main", number, lambda _: policies)}


def made_up(norm_square: float) -> float:
    """Return the iterations that make up for a mean square that is so many times what it was."""
    return math.log(math.sqrt(norm_square)) / math.log(1 / RATE)


# ---------------------------------------------------------------------------------------------
# Trials


def test_rolling_all_back_costs_the_iterations_since_the_save(monkeypatch):
    row = costs(monkeypatch, [traditional()])[TRADITIONAL]

    assert row["cost"] == pytest.approx(5)
    assert (row["levels"], row["censored"], row["late"]) == (2, 0, True)
    assert row["bytes"] == 2 * 8 * 8 / 21


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_partial_recovery_costs_what_the_lost_share_of_the_square_does(monkeypatch, nodes):
    rows = costs(monkeypatch, [traditional(), ScarPolicy(name="partial", nodes=nodes)])

    share = nodes / 4
    assert rows["partial"]["cost"] == pytest.approx(made_up(1 - share + share * BEHIND**2))
    assert (rows["partial"]["error"] / rows[TRADITIONAL]["error"]) ** 2 == pytest.approx(share)


def test_before_the_first_save_the_beginning_is_restored_and_the_failure_is_not_late(monkeypatch):
    row = costs(monkeypatch, [traditional()], failure=5)[TRADITIONAL]

    assert row["cost"] == pytest.approx(5)
    assert (row["late"], row["bytes"]) == (False, 0)


@pytest.mark.parametrize(
    ("blocks", "expected"), [(8, [0, 2, 4, 6]), (55, [0, 13, 27, 41]), (3, [0, 1, 1, 2]), (2, [0, 1, 1, 1])]
)
def test_of_a_few_layers_at_least_one_is_lost_if_any_node_dies(blocks, expected):
    assert [len(lost_of(torch.arange(blocks), nodes)) for nodes in range(4)] == expected


def test_a_save_that_is_due_at_the_failure_was_made(monkeypatch):
    row = costs(monkeypatch, [traditional()], failure=24)[TRADITIONAL]

    assert row["cost"] == pytest.approx(0)
    assert row["error"] == 0


def test_a_level_that_was_reached_before_the_failure_says_nothing_of_it(monkeypatch):
    row = costs(monkeypatch, [traditional()], failure=37)[TRADITIONAL]

    assert row["levels"] == 1
    assert row["cost"] == pytest.approx(5)


def test_a_run_that_never_gets_to_a_level_is_counted_and_not_dropped(monkeypatch):
    row = costs(monkeypatch, [ScarPolicy(name="partial")], with_program(is_brittle=True))["partial"]

    assert row["censored"] == 2
    assert row["cost"] == pytest.approx(COURSE.limit - (30 + 40.5) / 2)


def test_a_failure_that_helps_has_a_negative_cost(monkeypatch):
    slope = (RATE**16 - RATE**8) / 8
    expected = (RATE**16 + 5 * slope) / RATE**21  # the line through the last two saves falls below the curve

    row = costs(monkeypatch, [ScarPolicy(name="line", predictor="line")])["line"]

    assert row["cost"] == pytest.approx(made_up((1 + expected**2) / 2))
    assert row["cost"] < 0


def test_calibrated_the_lost_go_as_far_as_the_survivors_went(monkeypatch):
    rows = costs(monkeypatch, [ScarPolicy(name="calibrated", predictor="line", restore="calibrated")])

    assert rows["calibrated"]["error"] == pytest.approx(0, abs=1e-9)
    assert rows["calibrated"]["cost"] == pytest.approx(0, abs=1e-6)


def test_of_a_factor_that_is_overwritten_nothing_is_saved_and_the_other_is_saved_more_often(monkeypatch):
    chance = COURSE.chance("main", 0)
    chance.integers(2**31, size=2)
    lost = int((chance.permutation(8)[:4] < 4).sum())

    row = costs(monkeypatch, [ScarPolicy(name="live", saves="live", restore="live")], with_program(half_is_live=True))[
        "live"
    ]

    assert 0 < lost < 4
    assert row["cost"] == pytest.approx(made_up((4 - lost + lost * RATE**-2) / 4))  # saved every 4 iterations, after 20
    assert row["bytes"] == 5 * 4 * 8 / 21


@pytest.mark.parametrize(("way", "steps"), [("lost", 16), ("lost, rest reset", 0), ("lost, rest kept", 21)])
def test_what_goes_with_the_parameters_is_saved_reset_or_kept(way, steps):
    followed = FollowedRun(Shrinking(has_steps=True), [policy := ScarPolicy(name="any", restore=way)], COURSE, seed=0)
    followed.advance(21)

    state = followed.restored(policy, torch.tensor([1, 6]), Shrinking).state

    assert state["n"].flatten().tolist() == [21, steps, 21, 21, 21, 21, steps, 21]
    assert state["x"][1] == pytest.approx(RATE**16)
    assert followed.state["n"].eq(21).all()  # the other policies go on from there


def test_parameters_alone_are_saved_more_often_at_the_same_bytes():
    policies = [ScarPolicy(name="all"), ScarPolicy(name="alone", saves="parameters", restore="lost, rest reset")]
    followed = FollowedRun(Shrinking(has_steps=True), policies, COURSE, seed=0)
    followed.advance(16)

    both, alone = (followed.bytes[policy.saving] for policy in policies)
    assert both == alone == 2 * 8 * 16


def test_full_saves_of_a_byte_a_number_come_as_much_sooner_as_they_are_smaller():
    followed = FollowedRun(Shrinking(), [policy := ScarPolicy(name="int8", codec="int8")], COURSE, seed=0)
    followed.advance(21)

    assert followed.bytes[policy.saving] == 4 * 8 * 5  # 5 bytes in the place of 8: every 5 iterations, not every 8
    state = followed.restored(policy, torch.tensor([2]), Shrinking).state
    assert state["x"][2] == pytest.approx(RATE**20, rel=0.02)


def test_with_nothing_lost_and_nothing_drawn_nothing_is_different(monkeypatch):
    rows = costs(monkeypatch, controls())

    assert rows[RESEED]["cost"] == 0
    assert rows[NO_CHECKPOINT]["cost"] == pytest.approx(made_up((1 + RATE**-42) / 2))


def test_who_knows_the_future_is_nearer_and_who_knows_the_dead_is_nearest(monkeypatch):
    course = with_program(rates=tuple(np.linspace(0.75, 0.97, 8)))

    rows = costs(monkeypatch, [scar(), *bounds()], replace(course, levels=(-15.0,), last=40.0), failure=13, number=1)

    assert 0 < rows[HINDSIGHT_WHO]["error"] < rows[HINDSIGHT]["error"] < rows[SCAR]["error"]


def test_the_times_chosen_in_hindsight_have_room_and_are_almost_the_best():
    rng = np.random.default_rng(0)
    for _ in range(6):
        table = rng.random((5, 4))
        chosen = least_sum(table, np.ones(5), 1.0)
        best = min(
            table[range(5), times].sum()
            for times in itertools.product(range(4), repeat=5)
            if all(times.count(time) <= 1 for time in (1, 2, 3))
        )
        assert all((chosen == time).sum() <= 1 for time in (1, 2, 3))
        assert table[range(5), chosen].sum() <= 1.05 * best


def test_several_failures_in_a_run_add_up(monkeypatch):
    failures = iter([29, 13])
    monkeypatch.setattr(scar_trials, "failure_at", lambda *_: next(failures))

    row = trial_of_several(COURSE, 0, lambda _: [traditional()], 2)[0]

    assert row["cost"] == pytest.approx(5 + 5)
    assert (row["failures"], row["failure"]) == (2, 13)


def test_a_failure_is_always_before_the_last_level():
    losses = [-float(k) for k in range(50)]

    drawn = [failure_at(COURSE.chance("main", number), COURSE, losses) or 0 for number in range(300)]
    late = [failure_at(COURSE.chance("late", number), COURSE, losses, least=EVERY) or 0 for number in range(300)]

    assert min(drawn) == 1
    assert min(late) == EVERY
    assert failure_at(COURSE.chance("late", 0), COURSE, losses, least=41) is None
    assert failure_at(COURSE.chance("main", 0), COURSE, losses[:30]) is None
    assert 35 < max(drawn) <= 40
    assert 10 < np.mean(drawn) < 17  # a geometric distribution of mean 20, cut off at 40


def test_the_pilot_finds_levels_that_every_seed_reaches_and_the_skew_of_the_drift():
    row = pilot(replace(COURSE, levels=(), last=0.0, make=lambda seed: Shrinking(seed)))[0]

    assert row["status"] == MEASURED
    assert len(row["levels"]) == 7
    assert row["kappas"] == pytest.approx([-level for level in row["levels"]])
    assert min(row["kappas"]) > 2 * EVERY
    assert row["skew"] == pytest.approx(1 / 8)
    assert skew(torch.tensor([3.0, 4.0, 0, 0, 0, 0, 0, 0])) == pytest.approx(16 / 25)


@dataclass
class Noisy(Shrinking):
    """The same, but what is read of the loss goes up and down by more than it falls in an iteration."""

    def loss(self, state: State) -> float:
        iteration = int(state["n"][0])
        return super().loss(state) + 3.0 * float(np.random.default_rng(iteration).normal())


def test_where_the_noise_hides_every_level_the_pilot_takes_a_wider_window_and_trials_too():
    course = replace(COURSE, levels=(), last=0.0, make=lambda seed: Noisy(seed), window=2, iterations=60)

    row = pilot(course)[0]

    assert row["window"] == 8
    assert row["levels"]
    assert with_levels(course, row).window == 8
    with pytest.raises(ConfigError, match="give a wider window"):
        pilot(replace(course, make=lambda seed: Noisy(seed, rates=(0.999,) * 8)))


# ---------------------------------------------------------------------------------------------
# What the trials say together


def rows_of(policy, cost, *, trials=40, program="mlr-digits", kind="main", late=None, **said):
    spread = np.random.default_rng(1).normal(0, 0.5, trials)
    return [
        {"part": "trial", "status": MEASURED, "program": program, "kind": kind, "policy": policy, "trial": number}
        | {"cost": cost + spread[number], "late": number % 4 > 0 if late is None else late, "censored": 0}
        | {"error": 1.0, "bytes": 1.0, "failure": 20, "levels": 7}
        | said
        for number in range(trials)
    ]


def test_a_reduction_is_one_less_the_ratio_of_the_mean_costs_of_the_same_trials():
    rows = [*rows_of(TRADITIONAL, 10.0), *rows_of(SCAR, 2.0)[:-2], *rows_of(TRADITIONAL, 99.0, program="other")]

    late, every = TrialRows(rows).cell("mlr-digits", SCAR), TrialRows(rows).cell("mlr-digits", SCAR, late=False)

    assert late is not None
    assert every is not None
    assert (late.trials, every.trials) == (28, 38)
    assert every.reduction == pytest.approx(0.8, abs=0.02)
    assert every.ci[0] < every.reduction < every.ci[1] < every.ci[0] + 0.05


def test_negative_and_censored_trials_are_in_the_mean_and_counted():
    rows = [*rows_of(TRADITIONAL, 10.0), *rows_of(SCAR, -3.0, censored=1)]

    cell = TrialRows(rows).cell("mlr-digits", SCAR, late=False)

    assert cell is not None
    assert (cell.negative, cell.censored) == (40, 40)
    assert cell.reduction > 1.2


def test_a_resample_in_which_going_back_costs_nothing_is_counted_and_widens_the_interval():
    costly = rows_of(TRADITIONAL, 0.0, trials=8)
    for number, row in enumerate(costly):
        row["cost"] = 40.0 if number == 0 else -1.0  # so that every third resample has no cost to save
    rows = [*costly, *rows_of(SCAR, 1.0, trials=8)]

    cell = TrialRows(rows).cell("mlr-digits", SCAR, late=False)

    assert cell is not None
    assert 0.3 < cell.undefined / RESAMPLES < 0.4
    assert cell.ci == (-math.inf, math.inf)
    assert shown(cell.reduction, cell.ci).endswith("[-∞,\N{NO-BREAK SPACE}∞]")
    assert claim([row | {"late": True} for row in rows], "78 to 95 % fewer iterations").holds is None


def test_a_policy_is_chosen_where_failures_were_rehearsed_not_where_it_is_judged():
    rehearsed = [*rows_of(LINE, 1.0, kind="rehearsal"), *rows_of(SCAR, 2.0, kind="rehearsal")]
    rows = [*rows_of(TRADITIONAL, 10.0), *rows_of(SCAR, 1.0), *rows_of(LINE, 3.0), *rehearsed]

    trials = TrialRows(rows)

    assert trials.chosen("mlr-digits") == LINE
    gap = trials.gap("mlr-digits", LINE, SCAR)
    assert gap is not None
    assert gap[0] == pytest.approx(-0.2, abs=0.01)
    assert claim(rows, "never below SCAR").holds is False


def claim(rows, words):
    return next(claim for claim in hold_claims(rows, 0) if words in claim.claim)


@pytest.mark.parametrize(
    ("cost", "holds", "where"),
    [
        (1.0, True, "inside the range"),
        (4.0, False, "18 points below the range"),
        (0.0, True, "5 points above the range"),
    ],
)
def test_each_program_is_held_against_the_range_of_the_abstract(cost, holds, where):
    found = claim([*rows_of(TRADITIONAL, 10.0), *rows_of(SCAR, cost)], "78 to 95 % fewer iterations")

    assert found.holds is holds
    assert where in found.found


def choices(program, priority, robin, random, r="1/8"):
    each = {"priority": priority, "round-robin": robin, "random": random}
    rows = [rows_of(f"partial, {name}, r = {r}", cost, program=program) for name, cost in each.items()]
    return [*rows_of(TRADITIONAL, 10.0, program=program), *itertools.chain(*rows)]


def test_the_order_of_the_choices_is_held_at_every_r_and_who_is_against_it_is_named():
    rows = [*choices("a", 1.0, 2.0, 3.0), *choices("b", 1.0, 2.0, 3.0), *choices("b", 4.0, 2.0, 3.0, r="1/2")]

    above, below = claim(rows, "priority saves more"), claim(rows, "round-robin saves more")

    assert above.holds is False
    assert "below 0: b, r = 1/2" in above.found
    assert above.ours == pytest.approx(-20, abs=1)
    assert below.holds is True
    assert "the smallest of 3" in below.found


@pytest.mark.parametrize(("hindsight", "holds"), [(1.5, True), (0.5, False)])
def test_scar_is_near_the_best_choice_of_blocks_or_it_is_said_how_far(hindsight, holds):
    rows = [*rows_of(TRADITIONAL, 10.0), *rows_of(SCAR, 2.0), *rows_of(HINDSIGHT, hindsight)]

    found = claim(rows, "SCAR is near-optimal")

    assert found.holds is holds
    assert found.ours == pytest.approx(10 * (2.0 - hindsight), abs=0.5)


@pytest.mark.parametrize(
    ("skews", "holds", "ours"), [(range(6), True, 1), ((1, 0, 2), None, 0.5), (range(6, 0, -1), False, -1)]
)
def test_the_skew_predicts_what_is_saved_only_if_chance_would_hardly_order_them_so(skews, holds, ours):
    rows = []
    for number, value in enumerate(skews):
        name = f"p{number}"
        rows += [*rows_of(TRADITIONAL, 10.0, program=name), *rows_of(SCAR, 8.0 - number, program=name)]
        rows.append(
            {"part": "pilot", "status": MEASURED, "program": name, "skew": value / 10, "blocks": 8}
            | {"block_bytes": 80, "every": 8}
        )

    found = claim(rows, "skew of the drift")

    assert (found.holds, found.ours) == (holds, pytest.approx(ours))


def kind(name, often, **said):
    row = {"part": "kind", "status": MEASURED, "program": "quadratic", "kind": name, "often": often, "trials": 30}
    row |= {"c": 0.9, "c_from": "known", "size": 0.1, "cost": 3.0, "ci": [2.0, 4.0], "loss_cost": 3.1, "bound": 9.0}
    row |= {
        "violations": 0,
        "difference_violations": 1,
        "censored": 0,
        "loss_censored": 0,
        "diverged": 0,
        "negative": 0,
    }
    return row | said


def test_every_kind_of_perturbation_is_on_the_page_and_one_that_left_the_numbers_is_not_dropped():
    lost = {"size": None, "bound": None, "censored": 30, "loss_censored": 30, "diverged": 12}
    standing = {"error": 0.05, "error_bound": 0.09, "left": 0.0, "holds": True}
    rows = [kind("stale", "once"), kind("bit flip", "3 times", **lost), kind("bf16", "every step", **standing)]

    page = render_study({"study": "scar", "settings": {}, "rows": rows, "claims": [], "page": STUDY.page(rows)})

    text = page.replace("\N{NO-BREAK SPACE}", " ")
    assert "3.0 [2.0, 4.0]" in text
    assert "&gt;= 3.0 [2.0, 4.0]" in text
    assert "30, 12" in text
    assert "quadratic 0.9 (known)" in text
    assert text.index("0.05") < text.index("0.09")
    found = claim(rows, "every kind")
    assert found.holds is True
    assert found.unit == "violations"
    assert "in 90 runs of 3 kinds" in found.found
    assert "12 of them diverged to NaN or infinity" in found.found
    assert claim([*rows, kind("stale", "3 times", violations=2)], "every kind").holds is False
    assert claim(rows, "Perturbed at every step").holds is None, "one kind decides nothing"
    assert claim(rows * 6, "Perturbed at every step").holds is True


def test_where_the_undisturbed_run_breaks_its_own_bound_the_page_says_why_and_sets_its_program_in_brackets():
    fitted = {"program": "mlr-digits", "c_from": "fitted", "error_bound": 0.0, "left": 0.31}
    slow = kind("nothing", "every step", **fitted, error=0.38, holds=False)
    rows = [slow, kind("bf16", "every step", **fitted, error=0.39, holds=True)]
    rows += [kind("bf16", "every step", error=0.05, error_bound=0.09, left=0.0, holds=True)] * 6

    table = next(section for section in bound_sections(rows) if section["id"] == "irreducible")

    assert [row["holds"] for row in table["rows"]] == ["(no)", "(yes)", *["yes"] * 6]
    assert "mlr-digits: error 0.38, left 0.31" in table["note"]
    found = claim(rows, "Perturbed at every step")
    assert (found.ours, found.holds) == (1.0, True)  # of those whose c is known
    assert "mlr-digits exceeds it even without perturbation" in found.found


def held(way, **said):
    row = {"part": "held", "status": MEASURED, "way": way, "parameters": 100, "held_to_copy": 3.0}
    for name, value in {"write_to_copy": (0.9, 1.0, 1.1), "selection_percent": (3.0, 4.0, 4.9), **said}.items():
        row |= dict(zip((f"{name}_low", name, f"{name}_high"), value, strict=True))
    return row


@pytest.mark.parametrize(
    ("write", "selection", "holds"),
    [
        ((0.9, 1.0, 1.1), (3.0, 4.0, 4.9), [True, True]),
        ((0.9, 1.0, 1.3), (3.0, 4.0, 5.1), [None, None]),
        ((1.3, 1.4, 1.5), (5.4, 5.5, 5.6), [False, False]),
    ],
)
def test_what_a_partial_save_takes_is_judged_by_its_interval_at_every_fraction(write, selection, holds):
    rows = [held("r = 1"), held("r = 1/8", write_to_copy=write, selection_percent=selection)]

    claims = held_claims(rows)

    assert [found.holds for found in claims] == holds
    assert claims[1].ours == max(4.0, selection[1])
    assert [found.holds for found in held_claims([])] == [None, None]


def test_a_partial_save_is_timed_at_every_fraction(monkeypatch):
    monkeypatch.setattr(scar_save, "_REPETITIONS", 2)
    monkeypatch.setattr(scar_save, "_WIDTHS", (784, 64, 10))

    rows = held_rows(0)

    assert [row["way"] for row in rows] == ["r = 1", "r = 1/4", "r = 1/8"]
    for row in rows:
        assert row["write_to_copy_low"] <= row["write_to_copy"] <= row["write_to_copy_high"]
        assert row["held_s"] > row["write_s"] > 0
        assert row["selection_percent"] > 0
    assert {found.unit for found in held_claims(rows)} == {"times the copy", "%"}


def test_every_policy_that_has_a_name_of_its_own_is_explained_on_the_page():
    program = Shrinking(has_steps=True, half_is_live=True)
    program.resolve = program.resample = program.log_likelihoods = None
    names = [policy.name for policy in policies_of("whole", (1 / 8,), program)]
    rows = [row for name in names for row in rows_of(name, 2.0)]

    told = {row["policy"]: row["what"] for row in policies_table(TrialRows(rows))["rows"]}

    patterns = ("full, ", "partial, r", "partial, 1", "partial, 3", f"{SCAR}, ")
    assert {name for name in names if not name.startswith(patterns)} <= {*told, SCAR}
    assert "survivors" in told["calibrated dead reckoning"]


# ---------------------------------------------------------------------------------------------
# The study


def in_this_process(monkeypatch):
    monkeypatch.setattr(WorkerPool, "rows", lambda self, run, values: [row for value in values for row in run(value)])


def options(out, **said) -> Options:
    return Options(out=out, quick=True, only=("quadratic",), repetitions=3, **said)


def without_times(results):
    return [{name: value for name, value in row.items() if name != "iteration_s"} for row in results["rows"]]


def test_interrupted_it_goes_on_and_finds_what_it_would_have_found(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    monkeypatch.setattr(scar_module, "_CHUNK", 1)
    whole = carry_out(STUDY, options(tmp_path / "whole"))
    asked = []

    def interrupted(line):
        asked.append(line)
        if len(asked) == 4:  # after how long it will take, the pilot, and the first trial
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(STUDY, options(tmp_path / "twice"), interrupted)
    again = []
    twice = carry_out(STUDY, options(tmp_path / "twice"), again.append)

    expected = [f"{kind}: quadratic, trials {n} to {n}" for kind in ("main", "late") for n in range(3)]
    assert [line.split("] ")[-1].split(";")[0] for line in again[2:]] == expected[1:]
    assert without_times(twice) == without_times(whole)


def test_data_that_cannot_be_read_are_a_failure_with_all_that_needs_them_and_are_read_again(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    damaged = tmp_path / "train-images-idx3-ubyte.gz"
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(b"not a gzip file")
    wanted = replace(options(tmp_path / "out", data=tmp_path), only=("mlr-fashion",))

    first = carry_out(STUDY, wanted)
    damaged.unlink()
    second = carry_out(STUDY, wanted)

    assert [one["task"].split(":")[0] for one in first["failed"]][:2] == ["pilot", "main"]
    assert "as a gzip file" in first["failed"][0]["why"]
    assert {one["why"] for one in first["failed"][1:]} <= {"its pilot failed"}
    headline = next(claim for claim in first["claims"] if claim["claim"].startswith("SCAR (r = 1/8"))
    assert headline["found"].startswith("failed: pilot: mlr-fashion: ConfigError: cannot read ")
    assert second["failed"] == []
    assert [(row["part"], row["status"]) for row in second["rows"]] == [("pilot", NOT_RUN)]


def test_a_program_whose_data_are_missing_is_reported_and_the_others_are_run(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    wanted = replace(options(tmp_path / "out", data=tmp_path), only=("mlr-covertype", "quadratic"))

    results = carry_out(STUDY, wanted)

    failed = [row for row in results["rows"] if row["status"] == NOT_RUN]
    assert [(row["part"], row["program"]) for row in failed] == [("pilot", "mlr-covertype")]
    assert "CoverType is not in" in failed[0]["why"]
    assert any(row["part"] == "trial" for row in results["rows"])


def test_every_task_of_the_whole_study_has_a_name_of_its_own(tmp_path):
    keys = [task.key for task in STUDY.plan(Options(out=tmp_path, data=tmp_path)).tasks()]

    assert len(set(keys)) == len(keys)
    assert {"pilot: als-movielens", "3 failures: mlr-digits", "rates: mlr-fashion"} <= set(keys)
    assert "kinds of perturbations: mlr-digits" in keys
    assert not any("documents" in key for key in keys)


def test_what_is_never_read_and_what_takes_too_long_is_said(tmp_path):
    told = " ".join(STUDY.plan(Options(out=tmp_path, data=tmp_path)).left_out())

    assert all(name in told for name in ("Jester", "20 Newsgroups", "MNIST", "gpt-adam", "by layer"))
    assert "--only" in told
    assert "gpt-adam" not in " ".join(STUDY.plan(Options(out=tmp_path, data=tmp_path, only=("gpt-adam",))).left_out())
