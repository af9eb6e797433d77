from __future__ import annotations

import dataclasses
import random

import pytest

from holdfast_lab.pages.study import render_study
from holdfast_lab.studies.base import MEASURED
from holdfast_lab.studies.campaign_plan import Campaign, StopRule, check_alone
from holdfast_lab.studies.guard import trial as guard_trial
from holdfast_lab.studies.guard.cells import CLEAN, KINDS, parts
from holdfast_lab.studies.guard.claims import hold_claims
from holdfast_lab.studies.guard.cost import LARGE, cost_rows
from holdfast_lab.studies.guard.page import sections
from holdfast_lab.studies.guard.rows import bit_rows, clean_row, is_harmful, kind_row, missed_rows, weighted
from holdfast_lab.studies.guard.setup import CRITICAL, STRATA, TARGETS, WEIGHTS, GuardCase, GuardSetup
from holdfast_lab.studies.guard.study import flip_rows
from holdfast_lab.studies.guard.trial import prepare, prepare_clean, trial, trial_clean

SHORT = GuardSetup(optimizer="sgd", warm=2, epochs=1)
FLIPPED = GuardCase(target=WEIGHTS, bits=CRITICAL).settings(SHORT)


@pytest.fixture(scope="module")
def warm():
    return prepare(FLIPPED)


def harmful_ones(warm, count):
    found = (seed for seed in range(100) if is_harmful(trial(warm, seed)))
    return [next(found) for _ in range(count)]


def test_what_harms_is_healed_with_the_guard_and_only_with_it(warm, monkeypatch):
    seeds = harmful_ones(warm, 2)

    rows = {}
    for guard in ("heal", "warn", "off"):
        monkeypatch.setattr(guard_trial, "GUARD", guard)
        rows[guard] = [trial(warm, seed) for seed in seeds]

    assert [(r["found"], r["healed"], r["outcome_guarded"]) for r in rows["heal"]] == [(True, True, "RWC")] * 2
    assert all(r["accuracy_guarded"] == r["undisturbed"] > r["accuracy"] for r in rows["heal"])
    assert [(r["found"], r["healed"]) for r in rows["warn"]] == [(True, False)] * 2
    assert [(r["found"], r["healed"]) for r in rows["off"]] == [(False, False)] * 2
    assert {r["bit"] for r in rows["heal"]} == {30}


def test_a_trial_finds_the_same_alone_as_after_others():
    stop = StopRule(width=0.0, least=1, most=1)
    cells = [cell for cell in parts(0, quick=True, trials=1)[0].cells if cell.settings["target"] == WEIGHTS]
    settings = cells[0].settings | {"warm": 1, "epochs": 1}
    cell = dataclasses.replace(cells[0], settings=settings)

    check_alone(Campaign(name="guard", seed=0, cells=[cell], prepare=prepare, trial=trial, stop=stop), cell, 2)


def test_a_clean_training_says_how_many_steps_it_had_and_counts_what_is_found(monkeypatch):
    setup = prepare_clean(dataclasses.asdict(dataclasses.replace(SHORT, epochs=2)))
    assert (trial_clean(setup, 5)["steps"], trial_clean(setup, 5)["alarms"]) == (46, 0)

    real = guard_trial.train
    flip = guard_trial.drawn(
        guard_trial.GuardWarmStart(setup, GuardCase(target=WEIGHTS, bits="20"), {}, None), random.Random(0)
    )
    monkeypatch.setattr(guard_trial, "train", lambda *a, **more: real(*a, **more, fault=flip))
    assert trial_clean(setup, 5)["alarms"] == 1


# ---------------------------------------------------------------------------------------------
# Rows and claims


def row(*, harmful=True, healed=True, found=True, within=1, **more):
    """The row of a trial."""
    tried = {"tried": True, "found": found, "healed": healed, "redone_steps": 4, "accuracy_guarded": 0.9}
    tried |= {"outcome_guarded": "RWC" if healed else "NaN"} | (
        {"within": within, "found_by": "replicas"} if found else {}
    )
    about = {"outcome": "NaN" if harmful else "RWC", "differs": True, "accuracy": 0.1, "undisturbed": 0.9, "bit": 30}
    struck = {"path": "head.weight", "before": 0.1, "after": 1e37, "step": 3, "rank": 1}
    return FLIPPED | about | struck | (tried if harmful else {}) | more


def kind(healed, missed=0, target=WEIGHTS, **more):
    rows = [row(**more)] * healed + [row(healed=False, **more)] * missed
    return kind_row(FLIPPED | {"target": target}, {CRITICAL: rows or [row(harmful=False)]})


def claim(rows, words):
    return next(one for one in hold_claims(rows) if words in one.claim)


@pytest.mark.parametrize(
    ("healed", "missed", "holds"), [(3838, 0, True), (3000, 0, None), (2990, 10, False), (9999, 1, True)]
)
def test_99_9_percent_are_healed_if_the_interval_says_so(healed, missed, holds):
    found = claim([kind(healed, missed)], "in the weights of one replica")

    assert found.holds is holds
    assert found.ours == pytest.approx(100 * healed / (healed + missed))


def test_what_was_not_tried_is_not_checked():
    found = claim([kind(0)], "in the weights of one replica")

    assert (found.holds, found.ours) == (None, None)


@pytest.mark.parametrize(("steps", "alarms", "holds"), [(101_200, 0, True), (101_200, 1, False), (99_999, 0, None)])
def test_no_alarm_in_a_hundred_thousand_steps_holds_if_there_were_so_many(steps, alarms, holds):
    cell = next(part for part in parts(0, quick=True, trials=None) if part.name == CLEAN).cells[0]

    found = claim([clean_row(cell, [{"steps": steps, "alarms": alarms, "found": []}])], "false alarms")

    assert found.holds is holds


@pytest.mark.parametrize(("slower", "holds"), [(1.02, True), (1.05, False)])
def test_the_cost_is_held_against_the_upper_end_of_the_ratio_within_rounds(slower, holds):
    """Rounds are slower and slower, by far more than what is looked for."""
    off = [0.01 * 1.1**round for round in range(12)]
    about = {"part": "cost", "training": LARGE.name, "blocks": 12}

    rows = cost_rows(about, {"off": off, "heal": [slower * step for step in off]}, 0)

    found = claim(rows, "--guard heal")
    assert (found.holds, found.ours) == (holds, pytest.approx(slower))


def test_shares_of_any_flip_are_weighted_by_how_many_bits_there_are():
    assert sum(STRATA.values()) == 1
    assert weighted(dict.fromkeys(STRATA, (30, 60)))[0] == pytest.approx(0.5)
    share, low, high = weighted({bits: (60 if bits == CRITICAL else 0, 60) for bits in STRATA})
    assert (share, low) == (pytest.approx(1 / 32), pytest.approx(1 / 32, abs=0.003))
    assert 0.04 < high < 0.10, "60 trials of 23 bits without a hit do not say that there is none"


def test_cells_of_one_kind_are_put_together_and_what_ended_without_an_answer_is_told():
    cells = next(part for part in parts(0, quick=False, trials=None) if part.name == KINDS).cells
    of = {cell.name: [row(harmful=False) | cell.settings] for cell in cells}
    of[cells[0].name].append(cells[0].settings | {"outcome": "TF", "error": "the process died twice"})

    rows = flip_rows(cells, of)

    kinds = [one for one in rows if one["part"] == "kind"]
    assert (len(kinds), {one["trials"] for one in kinds}) == (2 * len(TARGETS) + 2, {len(STRATA)})
    assert all("harmful_percent" in one for one in kinds)
    assert [one["why"] for one in rows if one["status"] != MEASURED] == ["1 trials ended without a result"]


def test_within_how_many_steps_half_99_of_100_and_all_were_found():
    rows = [row(within=n) for n in range(1, 201)]

    found = kind_row(FLIPPED, {CRITICAL: rows})

    assert [found[f"within_{name}"] for name in ("half", "most", "all")] == [100, 198, 200]
    assert claim([found], "within a check rotation").holds is False


def test_what_was_missed_is_shown_and_counted_bit_by_bit():
    rows = [row(), row(healed=False, found=False), row(harmful=False)]

    (missed,) = missed_rows(rows)
    changed = {one["guard"]: one["changed"] for one in bit_rows(FLIPPED, rows)}

    assert (missed["path"], missed["found"], missed["outcome_guarded"]) == ("head.weight", False, "NaN")
    assert changed == {"without the guard": 2, "with the guard": 1}


def test_the_page_shows_a_miss_and_an_alarm():
    cell = parts(0, quick=True, trials=None)[1].cells[0]
    rows = [kind(3, 1), *missed_rows([row(healed=False, found=False)]), *bit_rows(FLIPPED, [row(), row(healed=False)])]
    rows += [clean_row(cell, [{"steps": 50, "alarms": 7, "found": []}])]
    results = {"study": "guard", "rows": rows, "page": sections(rows), "settings": {}}

    page = render_study(results | {"claims": [one.to_dict() for one in hold_claims(rows)]})

    for text in (
        "head.weight",
        "nothing",
        "75 [30.06, 95.44]".replace(" ", "\N{NO-BREAK SPACE}"),
        "does not hold",
        "<svg",
    ):
        assert text in page
    assert {row["status"] for row in rows} == {MEASURED}


def test_the_design_has_every_bit_of_every_kind_and_the_steps_that_are_asked_for():
    whole = parts(0, quick=False, trials=None)

    kinds = next(part for part in whole if part.name == KINDS)
    of = {(c.settings["workers"], c.settings["target"], c.settings["bits"]) for c in kinds.cells}
    assert of == {(workers, target, bits) for workers in (2, 4) for target in TARGETS for bits in STRATA}
    clean = [(part, cell) for part in whole if part.clean for cell in part.cells]
    assert sum(part.trials * cell.settings["epochs"] * (1497 // 64) for part, cell in clean) >= 100_000
    assert all(len({cell.name for cell in part.cells}) == len(part.cells) for part in whole)
