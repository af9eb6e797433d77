"""The study of resilience: what its trainings show, what the simulator makes of them, and how claims are judged."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.report import render_study
from holdfast.study import resilience_claims as claims
from holdfast.study.base import MEASURED, NOT_RUN, Claim, Journal, Options
from holdfast.study.resilience import Resilience
from holdfast.study.resilience_cases import ADDITION, FORWARD, MIDDLE, QUICK, REPLACED, RESTART, ROLLBACK, Case, cases
from holdfast.study.resilience_claims import hold_claims
from holdfast.study.resilience_cost import STATED, overhead
from holdfast.study.resilience_jobs import STEP, _time, compare
from holdfast.study.resilience_page import sections
from holdfast.study.resilience_training import trials

SMALL = dataclasses.replace(QUICK[0], batch=64, steps=10, tested=50)


def case(strategy: str, **more: Any) -> Case:
    return Case(**{"strategy": strategy, "workers": 16, "count": 4} | more)


def test_trainings_differ_from_the_undisturbed_one_where_something_was_lost_and_only_there():
    keeps = [case(ROLLBACK), case(RESTART, every=3), case(FORWARD, averaged=1.0), case(ROLLBACK, what=ADDITION, moment=MIDDLE)]  # fmt: skip
    loses = [case(FORWARD), case(FORWARD, averaged=0.5), case(FORWARD, rescale="original"), case(ROLLBACK, batch="local")]  # fmt: skip

    _, *rows = trials(SMALL, None, 5, [*keeps, *loses])

    assert [row["same"] for row in rows] == [True] * 4 + [False] * 4
    assert [row["distance"] == 0 for row in rows] == [True] * 4 + [False] * 4
    assert [row["lost"] > 0 for row in rows] == [False] * 4 + [True] * 3 + [False]
    assert all(row["redone"] > 0 for row in rows[:2])


def test_who_is_lost_when_is_the_same_for_all_that_is_compared():
    alike = [case(strategy, batch=batch) for strategy in (ROLLBACK, FORWARD, RESTART) for batch in ("global", "local")]

    assert len({(*one.victims(7), *one.shares(7)) for one in alike}) == 1
    assert alike[0].victims(7) != alike[0].victims(8)


def test_the_time_of_a_failure_is_that_of_its_parts():
    """Worked out by hand: 16 workers, of whom 4 die in one step; a step is 0.8 s to compute, and 0.17 s to sum."""
    steps, step_s, regroup_s = 40, 0.97, 0.5 + 0.05 * 3.584962500721156  # log2(12)

    forward = overhead(case(FORWARD, moment=MIDDLE, averaged=0.5), steps, [0])
    rollback = overhead(case(ROLLBACK, moment=MIDDLE), steps, [0])
    restart = overhead(case(RESTART, moment=MIDDLE, every=5), steps, [0])

    assert forward["lost_s"] == 0
    assert forward["held_s"] == pytest.approx(STATED.detect_s + regroup_s, rel=1e-6)
    assert forward["overhead_percent"] == pytest.approx(100 * forward["held_s"] / (steps * step_s), rel=1e-6)
    # All compute to the end of the step before they miss anybody in its first sum, and that is lost.
    assert rollback["lost_s"] == pytest.approx(0.8, rel=1e-6)
    # The newest checkpoint that counts is that of step 15, and the failure is in step 20; seven of them hold for 0.5 s.
    assert restart["lost_s"] == pytest.approx(5 * step_s + 0.8, rel=0.01)
    assert restart["held_s"] > forward["held_s"] + STATED.load_s


def test_a_planned_removal_loses_and_detects_nothing():
    removed, failed = (overhead(case(ROLLBACK, what=what, moment=MIDDLE), 40, [0]) for what in (ADDITION, REPLACED))

    assert removed["lost_s"] == 0
    assert failed["held_s"] - removed["held_s"] == pytest.approx(STATED.detect_s)


# ---------------------------------------------------------------------------------------------
# Claims, from rows that were made up


def case_row(strategy: str, **more: Any) -> dict[str, Any]:
    row = {"part": "case", "status": MEASURED, "network": "mlp", "dataset": "digits", **case(strategy).columns()}
    row |= {"seeds": 30, "same": 30, "lost": 0.0, "redone": 1.0, "steps": 40.0}
    for name, value in (("accuracy_loss", 0.0), ("loss_more", 0.0), ("distance", 0.0)):
        row |= {name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}
    for name in ("overhead", "longer"):
        row |= {f"{name}_percent": 5.0, f"{name}_low": 5.0, f"{name}_high": 5.0}
    return row | more


def point(strategy: str, percent: float, predicted: float = 10.0, *, same: bool = True) -> dict[str, Any]:
    row = {"part": "point", "status": MEASURED, "happens": strategy, "strategy": strategy, "workers": 4, "count": 1}
    row |= {"averaged": 0, "repetition": 0, "accuracy_loss": 0.0, "same": same, "decisions": "redo"}
    return row | {"overhead_percent": percent, "predicted_percent": predicted}


def claim(rows: list[dict[str, Any]], words: str) -> Claim:
    return next(one for one in hold_claims(rows, 0) if one.claim == words)


def test_without_rows_nothing_is_claimed():
    assert {(one.holds, one.ours) for one in hold_claims([], 0)} == {(None, None)}


def test_one_training_with_other_bits_refutes_that_rollback_keeps_them():
    assert claim([case_row(ROLLBACK)], claims.BITS[ROLLBACK]).holds is True
    assert claim([case_row(ROLLBACK), case_row(ROLLBACK, count=1, same=29)], claims.BITS[ROLLBACK]).holds is False


@pytest.mark.parametrize(("low", "high", "holds"), [(-0.1, 0.4, True), (0.5, 1.2, None), (1.1, 1.4, False)])
def test_a_small_loss_is_judged_by_its_interval(low, high, holds):
    row = case_row(FORWARD, accuracy_loss=(low + high) / 2, accuracy_loss_low=low, accuracy_loss_high=high)

    assert claim([row], claims.SMALL_LOSS).holds is holds


def test_strategies_are_compared_where_all_else_is_alike():
    rows = [case_row(ROLLBACK, overhead_percent=6.0), case_row(ROLLBACK, count=1, overhead_percent=2.0)]
    rows += [case_row(FORWARD, overhead_percent=3.0), case_row(FORWARD, count=1, overhead_percent=2.2)]
    rows += [case_row(RESTART, every=every, overhead_percent=percent) for every, percent in ((2, 30.0), (5, 18.0))]

    forward, restart = claim(rows, claims.ORDER), claim(rows, claims.RESTART_MORE)

    assert (forward.holds, forward.ours) == (False, pytest.approx((0.5 + 1.1) / 2))
    assert (restart.holds, restart.ours) == (True, 3.0)


def test_one_run_of_real_processes_decides_nothing_and_three_do():
    once = [point(ROLLBACK, 10.0), point(FORWARD, 7.0, 9.0), point(RESTART, 30.0, 29.0)]
    slower = [point(ROLLBACK, 10.0), point(FORWARD, 70.0)] * 3

    assert [claim(once, words).holds for words in (claims.REAL_ORDER, claims.PREDICTED)] == [None, None]
    assert claim(once * 3, claims.REAL_ORDER).holds is True
    assert claim(slower, claims.REAL_ORDER).holds is False
    assert claim(once * 3, claims.PREDICTED).holds is True
    assert claim([point(ROLLBACK, 20.0)] * 3, claims.PREDICTED).holds is False
    assert claim([point(RESTART, 20.0, same=False)], claims.REAL_BITS).holds is False


def test_a_mode_that_lies_farther_off_than_another_order_of_samples_is_told():
    row = {"part": "modes", "status": MEASURED, "variant": "cnn", "happens": "nothing", "seeds": 30}
    row |= {"accuracy_more": 0.1, "accuracy_more_low": -0.2, "accuracy_more_high": 0.4, "accuracy_usual": 2.0}

    assert claim([row | {"accuracy_apart": 1.0}], claims.MODES).holds is True
    assert claim([row | {"accuracy_apart": 2.5}], claims.MODES).holds is False


def test_every_case_is_on_the_page():
    rows = [case_row(FORWARD), case_row(ROLLBACK, batch="local"), case_row(FORWARD, moment=MIDDLE)]
    rows += [case_row(ROLLBACK, what=ADDITION), point(ROLLBACK, 10.0)]
    rows += [{"part": "real", "status": NOT_RUN, "happens": "restart", "repetition": 0, "why": "<MPI> is not there"}]
    told = [one.to_dict() for one in hold_claims(rows, 0)]

    page = render_study({"study": "resilience", "settings": {}, "rows": rows, "claims": told, "page": sections(rows)})

    titles = re.findall(r"<h2[^>]*>([^<]*)", page)
    assert len([title for title in titles if title.startswith(("Strategies", "Policies", "Forward: all", "A planned", "Real"))]) == 5  # fmt: skip
    assert "&lt;MPI&gt; is not there" in page


# ---------------------------------------------------------------------------------------------
# Real runs


def test_what_a_kill_costs_is_read_from_the_steps_around_it():
    commits = [(0.1 * step if step < STEP else 0.1 * step + 0.5, step) for step in range(30)]
    events = [{"event": "StepCommitted", "t_s": at, "step": step} for at, step in commits]

    found = _time([*events, {"event": "CheckpointSaved", "seconds": 0.2}], disturbed=True)

    assert found["step_s"] == pytest.approx(0.1)
    assert found["more_s"] == pytest.approx(0.5 + 0.2)


def test_a_real_run_is_held_against_the_undisturbed_one_of_its_seed_and_predicted_from_others():
    clean, struck = ({"part": "real", "status": MEASURED, "workers": 4, "averaged": 0, "step_s": 0.01, "decisions": "redo",
                      "strategy": strategy, "happens": strategy, "count": 1} for strategy in ("", ROLLBACK))  # fmt: skip
    rows = [row | {"repetition": r, "accuracy": 80.0 + r - 2 * bool(row["strategy"]), "sha256": f"{r}"}
            for r in (0, 1) for row in (clean, struck)]  # fmt: skip
    rows = [row | {"overhead_percent": 9.0, "cost_detect_s": 0.1 * (1 + row["repetition"])} for row in rows]

    points = compare(rows, 0)

    assert [(one["accuracy_loss"], one["same"]) for one in points] == [(2.0, True)] * 2
    assert points[0]["predicted_percent"] > 1.5 * points[1]["predicted_percent"]  # each from the other's costs


# ---------------------------------------------------------------------------------------------
# What is asked for


def test_trainings_that_were_done_are_not_done_again(tmp_path):
    options = Options(out=tmp_path, quick=True, repetitions=2, only=("simulated",))
    tried = ["", *(one.key for one in cases(QUICK[0], quick=True))]
    journal = Journal(tmp_path / "trials" / "mlp", "mlp", {"seed": 0, "quick": True})
    for seed in (0, 1):
        found = {
            "accuracy": 1.0 + seed,
            "loss": 0.0,
            "distance": 0.0,
            "same": True,
            "lost": 0,
            "redone": 0,
            "steps": 40,
        }
        journal.add(str(seed), [{"case": key, "seed": seed} | found for key in tried], 0.0)

    rows = [row for task in Resilience().tasks(options) for row in task.run([])]

    assert {row["seeds"] for row in rows} == {2}
    assert len(rows) == len(tried)
    assert rows[1]["accuracy_loss"] == 1.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ("imagined",)}, "--only must be one of simulated, modes, real, got 'imagined'"),
        ({"model": "vgg16"}, r"--network must be one of mlp, cnn \(more with --data\), got 'vgg16'"),
        ({"repetitions": 1}, "--repetitions must be at least 2"),
    ],
)
def test_what_there_is_not_is_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        Resilience().settings(Options(out=tmp_path, **options))
