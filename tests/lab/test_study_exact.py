"""The study of exactness: what is measured, how ratios and spreads come about, and how claims are judged."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from holdfast_lab.pages.study import render_study
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Claim, Options
from holdfast_lab.studies.exact import claims, spread
from holdfast_lab.studies.exact.claims import hold_claims
from holdfast_lab.studies.exact.cost import cost_rows, memory_rows
from holdfast_lab.studies.exact.goodput import BATCH, EVEN, FEWEST, SPARE, STEP, STEPS, WorkDivision, after_the_kill
from holdfast_lab.studies.exact.page import sections
from holdfast_lab.studies.exact.study import STUDY
from holdfast_lab.studies.exact.workers import cost as script
from holdfast_lab.studies.exact.workers.cost import (
    ALONE,
    CERTIFICATE,
    DDP,
    FOLD,
    MEMORY,
    MPI,
    PLAIN,
    TREE,
    VARIANTS,
    WHOLE,
)
from holdfast_lab.workloads import loss_of

# ---------------------------------------------------------------------------------------------
# Cost and memory

ABOUT = {"part": "cost", "network": "mlp", "workers": 2, "slices": 4, "share": 2, "rounds": 8, "batch": 128}


def test_a_step_is_held_against_the_quicker_sum_in_any_order_within_each_round():
    noise = [1.0, 1.1, 3.0, 0.9, 5.0, 1.2, 1.0, 8.0]  # of rounds: it hits all that take turns in one
    sizes = {
        FOLD: 1.2,
        TREE: 1.1,
        CERTIFICATE: 1.3,
        MPI: 2.0,
        MEMORY: 1.0,
        PLAIN: 0.8,
        DDP: 3.0,
        ALONE: 0.9,
        WHOLE: 0.5,
    }

    rows = {row["variant"]: row for row in cost_rows(ABOUT, {v: [s * n for n in noise] for v, s in sizes.items()}, 0)}

    assert {row["any_order"] for row in rows.values()} == {MEMORY}
    found = [
        [rows[FOLD][f"{name}{end}"] for end in ("", "_low", "_high")]
        for name in ("to_any", "to_plain", "to_ddp", "to_whole")
    ]
    assert found == [pytest.approx([ratio] * 3) for ratio in (1.2, 1.5, 0.4, 2.4)]


def test_memory_is_expected_by_slices_and_of_ddp_by_workers():
    sizes = {FOLD: {"slots and result": 5500}, DDP: {"buckets": 2000, "gradients": 2000}}

    ordered, ddp = memory_rows(ABOUT | {"part": "memory"}, 250, sizes)

    assert (ordered["bytes"], ordered["expected_bytes"]) == (5500, (4 + 1) * 1000)
    assert (ddp["bytes"], ddp["expected_bytes"]) == (4000, 2 * 2 * 1000)


def test_the_plain_loop_that_is_timed_trains_as_accumulating_gradients_does():
    options = argparse.Namespace(network="cnn", batch=16, workers=1)
    timed, plain = (script.CostTraining(options, rank=0, slices=4) for _ in range(2))
    steps = script.plain(timed, lambda _: None)
    for _ in range(1 + 2):  # each begins with the step before in the weights
        next(steps)

    for step in range(2):
        plain.optimizer.zero_grad()
        for x, y in plain.mine(step):
            (loss_of(plain.model(x), y) / 4).backward()
        plain.optimizer.step()

    assert max(map(abs, plain.moved())) > 1e-3
    assert timed.moved() == pytest.approx(plain.moved(), abs=1e-6)


# ---------------------------------------------------------------------------------------------
# After a kill


def test_imbalance_is_that_of_the_fullest_hands():
    ways = (FEWEST, WorkDivision(8), WorkDivision(12), WorkDivision(16), EVEN, SPARE)

    assert [one.imbalance for one in ways] == pytest.approx([1.5, 9 / 8, 1.0, 18 / 16, 1.0, 1.0])


def test_what_came_after_a_kill_is_read_from_the_commits():
    """Worked out by hand: 0.1 s a step, one second without, then 0.2 s a step among three of four."""
    at = [0.1 * step if step < STEP else 0.1 * (STEP - 1) + 1.0 + 0.2 * (step - STEP) for step in range(STEPS)]
    events = [{"event": "StepCommitted", "t_s": t, "step": step, "samples": BATCH} for step, t in enumerate(at)]

    found = after_the_kill([{"event": "Recovered"}, *events], alive=3)

    last = STEPS - STEP  # steps from the one of the kill on
    assert found["recover_s"] == pytest.approx(1.0)
    assert found["samples_per_s"] == pytest.approx(BATCH * last / (1.0 + 0.2 * (last - 1)))
    assert found["goodput"] == pytest.approx(0.1 * last / (1.0 + 0.2 * (last - 1)))
    assert found["imbalance"] == pytest.approx((0.2 * 3) / (0.1 * 4))


# ---------------------------------------------------------------------------------------------
# What it buys

SMALL = spread.SpreadTraining(network="mlp", dataset="digits", batch=64, steps=16)


def test_a_disturbed_training_ends_with_the_same_bits_where_that_is_promised_and_only_there():
    deaths = spread.draw_deaths(SMALL.steps, 0, 3)
    ended = {policy: spread.train(SMALL, None, 0, policy, 3) for policy in (spread.NOTHING, *spread.POLICIES)}

    same = {policy for policy, row in ended.items() if row["sha256"] == ended[spread.NOTHING]["sha256"]}
    assert same == {spread.NOTHING, *spread.EXACT}
    assert {row["struck"] for row in ended.values()} == {"", "; ".join(map(str, deaths))}
    assert ended[spread.SKIP]["steps"] == SMALL.steps - len(deaths)
    assert ended[spread.FORWARD]["steps"] == SMALL.steps


def test_skipping_leaves_out_the_mini_batches_of_the_steps_in_which_somebody_died_and_no_others():
    samples = TensorDataset(torch.arange(12))

    assert spread.without(samples, 3, [1, 3])[:][0].tolist() == [0, 1, 2, 6, 7, 8]


def test_runs_differ_in_who_dies_when_and_nobody_dies_twice_in_one_step():
    drawn = [spread.draw_deaths(60, 0, run) for run in range(30)]

    assert len({str(deaths) for deaths in drawn}) == 30
    assert {len(deaths) for deaths in drawn} == {1, 2, 3, 4, 5}
    assert all(len({d.step for d in deaths}) == len({d.rank for d in deaths}) == len(deaths) for deaths in drawn)


# ---------------------------------------------------------------------------------------------
# Claims, from rows that were made up


def cost_row(share: int, ratio: float, half: float = 0.01, variant: str = FOLD) -> dict[str, Any]:
    row = ABOUT | {
        "status": MEASURED,
        "variant": variant,
        "share": share,
        "slices": 2 * share,
        "step_s": 0.1,
        "any_order": MEMORY,
    }
    for name in ("to_any", "to_fold", "to_plain", "to_ddp", "to_whole"):
        row |= {name: ratio, f"{name}_low": ratio - half, f"{name}_high": ratio + half}
    return row


def job_row(divided: WorkDivision, samples_per_s: float, imbalance: float) -> dict[str, Any]:
    row = {"part": "goodput", "status": MEASURED, "divided": divided.name, "alive": divided.alive, "repetition": 0}
    row |= {"expected": divided.imbalance, "samples_per_s": samples_per_s, "imbalance": imbalance}
    return row | {"goodput": 0.5, "recover_s": 0.2}


def run_row(policy: str, run: int, accuracy: float, sha256: str) -> dict[str, Any]:
    row = {"part": "spread", "status": MEASURED, "training": "mlp, digits", "policy": policy, "run": run}
    return row | {"accuracy": accuracy, "loss": 1.0, "sha256": sha256}


def claim(rows: list[dict[str, Any]], words: str) -> Claim:
    return next(one for one in hold_claims(rows, 0) if one.claim == words)


@pytest.mark.parametrize(("ratio", "holds"), [(1.0, True), (1.025, None), (1.06, False)])
def test_one_network_that_costs_more_refutes_that_order_costs_nothing(ratio, holds):
    rows = [cost_row(1, 0.8), cost_row(1, ratio), cost_row(2, 9.0), cost_row(1, 9.0, variant=TREE)]

    assert claim(rows, claims.ONE_SLICE).holds is holds
    assert claim(rows, claims.MORE_SLICES[FOLD]).holds is False
    assert claim(rows, claims.MORE_SLICES[TREE]).ours is None  # one slice a worker says nothing of more
    assert claim([row | {"rounds": 4} for row in rows], claims.ONE_SLICE).holds is None


def test_one_job_decides_nothing_and_three_do():
    rows = [job_row(FEWEST, 100.0, 1.5), job_row(EVEN, 140.0, 1.0)]

    assert [claim(rows, words).holds for words in (claims.GOODPUT, claims.IMBALANCE)] == [None, None]
    assert [claim(rows * 3, words).holds for words in (claims.GOODPUT, claims.IMBALANCE)] == [True, True]
    assert claim([job_row(FEWEST, 150.0, 1.5), rows[1]] * 3, claims.GOODPUT).holds is False
    assert claim([job_row(FEWEST, 100.0, 1.7), rows[1]] * 3, claims.IMBALANCE).holds is False


def test_one_run_with_other_bits_refutes_that_all_end_in_one_point():
    rows = [run_row(spread.NOTHING, 0, 90.0, "a"), *(run_row(spread.ROLLBACK, n, 90.0, "a") for n in range(5))]
    words = claims.ONE_POINT[spread.ROLLBACK]

    assert claim(rows, words).holds is True
    assert claim([*rows, run_row(spread.ROLLBACK, 5, 90.0, "b")], words).holds is False
    # All alike, but not like the undisturbed run.
    assert claim([rows[0], *(run_row(spread.ROLLBACK, n, 90.0, "b") for n in range(5))], words).holds is False


def test_a_spread_is_one_of_accuracy_and_not_of_bits():
    base = run_row(spread.NOTHING, 0, 90.0, "a")
    alike = [run_row(spread.SKIP, n, 90.0, str(n)) for n in range(5)]
    apart = [run_row(spread.SKIP, n, 90.0 + n % 3, str(n)) for n in range(12)]

    assert claim([base, *alike], claims.SPREAD[spread.SKIP]).holds is False
    assert claim([base, *apart], claims.SPREAD[spread.SKIP]).holds is True


def test_every_part_is_on_the_page():
    rows = [cost_row(share, 1.0, variant=variant) for share in (1, 4) for variant in VARIANTS]
    rows += memory_rows(ABOUT | {"part": "memory"}, 250, {FOLD: {"slots and result": 5500}})
    rows += [job_row(FEWEST, 100.0, 1.5), run_row(spread.NOTHING, 0, 90.0, "a")]
    rows += [run_row(spread.FORWARD, n, 90.0 + n, str(n)) for n in range(3)]
    rows += [ABOUT | {"status": NOT_RUN, "why": "<MPI> is not there"}]
    told = [one.to_dict() for one in hold_claims(rows, 0)]

    page = render_study({"study": "exact", "settings": {}, "rows": rows, "claims": told, "page": sections(rows)})

    titles = re.findall(r"<h2[^>]*>([^<]*)", page)
    for begin in ("Step time with", "More slices", "Median step", "Memory of", "Goodput after a kill", "Imbalance", "Final accuracy", "Spread of"):  # fmt: skip
        assert len([title for title in titles if title.startswith(begin)]) == 1, begin
    assert "&lt;MPI&gt; is not there" in page


# ---------------------------------------------------------------------------------------------
# What is asked for


def test_parts_and_networks_are_left_out_as_asked(tmp_path):
    tasks = STUDY.plan(Options(out=tmp_path, only=("memory", "spread"), model="cnn", repetitions=2)).tasks()

    assert {task.key.split(",")[0] for task in tasks} == {"memory: cnn", "spread: cnn"}
