"""The study of resilience: what its trainings show, what the simulator makes of them, and how claims are judged."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.models.overlap import UndoCopy
from holdfast_lab.pages.study import render_study
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Claim, Journal, Options
from holdfast_lab.studies.resilience import claims
from holdfast_lab.studies.resilience.cases import (
    ADDITION,
    FORWARD,
    MIDDLE,
    QUICK,
    REPLACED,
    RESTART,
    ROLLBACK,
    ResilienceCase,
    cases,
)
from holdfast_lab.studies.resilience.claims import hold_claims
from holdfast_lab.studies.resilience.cost import STATED, overhead, simulated
from holdfast_lab.studies.resilience.jobs import REALS, STEP, RealRun, _time, compare, measure
from holdfast_lab.studies.resilience.page import sections
from holdfast_lab.studies.resilience.study import STUDY, _estimate, _together
from holdfast_lab.studies.resilience.training import fresh, train, trials
from holdfast_lab.studies.resilience.updates import EAGER, LAZY, UPDATING, cross

SMALL = dataclasses.replace(QUICK[0], batch=64, steps=10, tested=50)


def case(strategy: str, **more: Any) -> ResilienceCase:
    return ResilienceCase(**{"strategy": strategy, "workers": 16, "count": 4} | more)


def test_trainings_differ_from_the_undisturbed_one_where_something_was_lost_and_only_there():
    keeps = [case(ROLLBACK), case(RESTART, every=3), case(FORWARD, averaged=1.0), case(ROLLBACK, what=ADDITION, moment=MIDDLE)]  # fmt: skip
    loses = [case(FORWARD), case(FORWARD, averaged=0.5), case(FORWARD, rescale="original"), case(ROLLBACK, batch="local")]  # fmt: skip

    _, *rows = trials(SMALL, None, 5, [*keeps, *loses])

    assert [row["same"] for row in rows] == [True] * 4 + [False] * 4
    assert [row["distance"] == 0 for row in rows] == [True] * 4 + [False] * 4
    assert [row["lost"] > 0 for row in rows] == [False] * 4 + [True] * 3 + [False]
    assert all(row["redone"] > 0 for row in rows[:2])


def test_a_training_that_goes_on_from_the_undisturbed_one_ends_as_one_from_the_beginning():
    tried = [one for one in cases(dataclasses.replace(SMALL, workers=(16,)), quick=False) if one.count == 4]

    _, *rows = trials(SMALL, None, 5, tried)

    assert {one.strategy for one in tried} == {ROLLBACK, FORWARD, RESTART}
    undisturbed = train(SMALL, None, 5, None)
    for one, row in zip(tried, rows, strict=True):
        whole = train(SMALL, None, 5, one)
        assert (row["lost"], row["redone"], row["steps"]) == (whole.lost, whole.redone, whole.steps)
        assert row["same"] == torch.equal(whole.weights, undisturbed.weights)
        assert (row["distance"] == 0) == row["same"]
        assert row["accuracy"] == undisturbed.accuracy - whole.accuracy
        assert row["loss"] == whole.loss - undisturbed.loss


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


def test_eager_updates_save_what_lies_beside_sums_and_cost_what_is_taken_back():
    """Worked out by hand: of 16 workers 4 die in step 5 of 10 when three of six sums are in; an update and its copy take less than a sum."""
    rows = {(row["strategy"], row["moment"], row["averaged"]): row for row in cross(SMALL, None, [0, 1], quick=True) if row["workers"] == 16}  # fmt: skip

    saved_s = 10 * (UPDATING.update_s - (UPDATING.update_s + UPDATING.copy_s) / 6)
    for strategy, undo_s in ((ROLLBACK, UPDATING.undo_s * 3 / 6), (FORWARD, 0.0), (RESTART, 0.0)):
        row = rows[strategy, MIDDLE, 0.5]
        assert row["undo_s"] == pytest.approx(undo_s, rel=1e-6)
        assert row["lazy_s"] - row["eager_s"] == pytest.approx(saved_s - undo_s, rel=1e-6)
    assert rows[ROLLBACK, MIDDLE, 0.0]["undo_s"] == 0
    assert {row["copy_bytes"] for row in rows.values()} == {undo_copy_bytes(list(fresh(SMALL, None, 0).parameters()))}


def undo_copy_bytes(parameters: list[torch.nn.Parameter]) -> int:
    """Return what the copies of a real update hold."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    copy = UndoCopy(parameters, optimizer)
    copy.take()
    return copy.size_bytes


def test_with_lazy_updates_the_costs_of_the_crossing_are_those_that_are_stated():
    one = case(ROLLBACK, moment=MIDDLE)

    assert simulated(one, 40, 0, UPDATING).total_ns == pytest.approx(simulated(one, 40, 0, STATED).total_ns, abs=100)


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
    row |= {"averaged": 0, "repetition": 0, "accuracy_loss": 0.0, "same": same, "decisions": "redo", "update": LAZY}
    return row | {"overhead_percent": percent, "predicted_percent": predicted, "undone": 0}


def claim(rows: list[dict[str, Any]], words: str) -> Claim:
    return next(one for one in hold_claims(rows, 0) if one.claim == words)


def test_one_training_with_other_bits_refutes_that_rollback_keeps_them():
    assert claim([case_row(ROLLBACK)], claims.BITS[ROLLBACK]).holds is True
    assert claim([case_row(ROLLBACK), case_row(ROLLBACK, count=1, same=29)], claims.BITS[ROLLBACK]).holds is False


@pytest.mark.parametrize(("low", "high", "holds"), [(-0.1, 0.4, True), (0.5, 1.2, None), (1.1, 1.4, False)])
def test_a_small_loss_is_judged_by_its_interval(low, high, holds):
    row = case_row(FORWARD, accuracy_loss=(low + high) / 2, accuracy_loss_low=low, accuracy_loss_high=high)

    assert claim([row], claims.SMALL_LOSS).holds is holds


@pytest.mark.parametrize(("means", "holds"), [((0.3, 0.5), True), ((0.1, -0.1), None), ((-0.3, -0.5), False)])
def test_whether_forward_loses_is_judged_over_seeds_and_networks_not_over_cases(means, holds):
    rows = [
        {"part": "together", "status": MEASURED, "network": name, "cases": 84, "seeds": 30} for name in ("mlp", "cnn")
    ]
    for row, mean in zip(rows, means, strict=True):
        for name in ("accuracy_loss", "loss_more"):
            row |= {name: mean, f"{name}_low": mean - 0.3, f"{name}_high": mean + 0.3}

    found = claim(rows, claims.NOT_BETTER)

    assert found.holds is holds
    assert found.ours == pytest.approx(sum(means) / 2)
    assert found.ci is not None
    assert found.ci[1] - found.ci[0] == pytest.approx(0.6 / 2**0.5)
    assert found.found.startswith("mean of 168 cases, 2 networks. The test loss is ")


def test_cases_that_have_their_seeds_in_common_count_as_one_a_seed():
    lossy = [case(FORWARD, count=count).key for count in (1, 4)]
    rows = [case_row(FORWARD, count=count, case=key) for count, key in zip((1, 4), lossy, strict=True)]
    kept = case_row(ROLLBACK, case="kept")
    found = {
        key: [{"accuracy": seed + more, "loss": 0.0} for seed in (1.0, 3.0)]
        for key, more in zip(lossy, (0, 2), strict=True)
    }

    (row,) = _together({}, [*rows, kept], found | {"kept": [{"accuracy": 0.0, "loss": 0.0}] * 2})

    assert (row["cases"], row["seeds"], row["accuracy_loss"]) == (2, 2, 3.0)
    assert row["accuracy_loss_high"] - row["accuracy_loss_low"] == pytest.approx(2 * 12.706, rel=1e-3)  # of 2 and 4


def test_strategies_are_compared_where_all_else_is_alike():
    rows = [case_row(ROLLBACK, overhead_percent=6.0), case_row(ROLLBACK, count=1, overhead_percent=2.0)]
    rows += [case_row(FORWARD, overhead_percent=3.0), case_row(FORWARD, count=1, overhead_percent=2.2)]
    rows += [case_row(RESTART, every=every, overhead_percent=percent) for every, percent in ((2, 30.0), (5, 18.0))]

    forward, restart = claim(rows, claims.ORDER), claim(rows, claims.RESTART_MORE)

    assert (forward.holds, forward.ours) == (False, pytest.approx((0.5 + 1.1) / 2))
    assert (restart.holds, restart.ours) == (True, 3.0)


@pytest.mark.parametrize(("counts", "holds"), [((1,), None), ((1, 4), None), ((1, 4, 16), True)])
def test_a_pair_of_cases_or_two_decide_nothing(counts, holds):
    rows = [
        case_row(FORWARD, count=count, averaged=averaged, distance=1.0 - averaged / 2)
        for count in counts
        for averaged in (0.0, 0.5)
    ]

    found = claim(rows, claims.MORE)

    assert found.ours == 0.75
    assert (found.holds, found.ci is not None) == (holds, holds is True)


def test_runs_with_eager_updates_say_nothing_of_strategies_and_lazy_ones_nothing_of_taking_back():
    lazy = [point(ROLLBACK, 10.0), point(FORWARD, 7.0, 9.0)] * 3
    eager = [
        point(ROLLBACK, 1.0) | {"update": EAGER, "averaged": 2, "undone": 6},
        point(ROLLBACK, 1.0) | {"averaged": 2},
    ] * 4

    assert claim(lazy + eager, claims.REAL_ORDER).holds is True
    assert claim(lazy + eager, claims.UPDATE_BITS).holds is True
    assert claim([*lazy, *eager, eager[0] | {"same": False}], claims.UPDATE_BITS).holds is False
    assert claim(lazy, claims.UPDATE_BITS).holds is None


@pytest.mark.parametrize(("eager_s", "holds"), [(0.009, True), (0.02, False)])
def test_steps_with_eager_updates_are_held_against_those_with_lazy_ones(eager_s, holds):
    calm = {"part": "real", "status": MEASURED, "strategy": "", "averaged": 0}
    rows = [calm | {"step_s": 0.01}, calm | {"step_s": eager_s, "update": EAGER}] * 3
    crossed = {"part": "update", "status": "simulated", "lazy_s": 1.0, "eager_s": 100 * eager_s, "undo_s": 0.1}

    assert claim(rows, claims.UPDATE_STEP).holds is holds
    assert claim([crossed], claims.UPDATE_SHORTER).holds is holds


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
    assert len([title for title in titles if title.startswith(("Strategies", "Policies", "Forward: all", "Planned", "Real"))]) == 5  # fmt: skip
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
                      "strategy": strategy, "happens": strategy, "count": 1, "update": LAZY} for strategy in ("", ROLLBACK))  # fmt: skip
    rows = [row | {"repetition": r, "accuracy": 80.0 + r - 2 * bool(row["strategy"]), "sha256": f"{r}"}
            for r in (0, 1) for row in (clean, struck)]  # fmt: skip
    rows = [row | {"overhead_percent": 9.0, "cost_detect_s": 0.1 * (1 + row["repetition"])} for row in rows]

    points = compare(rows, 0)

    assert [(one["accuracy_loss"], one["same"]) for one in points] == [(2.0, True)] * 2
    assert points[0]["predicted_percent"] > 1.5 * points[1]["predicted_percent"]  # each from the other's costs


def test_eager_runs_are_held_against_lazy_ones_and_predicted_from_their_own_costs():
    about = {
        "part": "real",
        "status": MEASURED,
        "workers": 4,
        "decisions": "redo",
        "repetition": 0,
        "accuracy": 80.0,
        "step_s": 0.01,
    }
    calm = about | {"strategy": "", "happens": "nothing", "averaged": 0, "count": 0, "update": LAZY}
    struck = about | {"strategy": ROLLBACK, "averaged": 2, "buckets": 4, "count": 1, "overhead_percent": 9.0}
    lazy = struck | {"happens": "lazy", "sha256": "a", "update": LAZY, "cost_detect_s": 0.1}
    eager = struck | {
        "happens": "eager",
        "sha256": "a",
        "update": EAGER,
        "cost_detect_s": 0.2,
        "cost_undo_s": 0.1,
        "undone": 6,
    }
    rows = [calm | {"sha256": "a"}, lazy, eager, calm | {"sha256": "b", "accuracy": 0.0, "update": EAGER}]

    points = {point["happens"]: point for point in compare(rows, 0)}

    assert {name: (one["same"], one["accuracy_loss"], one["undone"]) for name, one in points.items()} == {"lazy": (True, 0.0, 0), "eager": (True, 0.0, 6)}  # fmt: skip
    more_s = (points["eager"]["predicted_percent"] - points["lazy"]["predicted_percent"]) / 100 * 48 * 0.01
    assert more_s == pytest.approx(0.1 + 0.1 * 3 / 6)  # of six buckets of the simulator three sums are in


def test_a_kill_that_left_nothing_to_take_back_counts_as_not_run(monkeypatch):
    real = RealRun(ROLLBACK, 2, EAGER)

    def run(words: list[str], folder: Path, limit_s: float) -> tuple[int, str]:
        assert "--overlap-optimizer" in words
        (folder / "report").mkdir()
        report = {
            "workers": {"started": 4},
            "steps": 48,
            "step_s": {"p50": 0.01},
            "failures": [],
            "optimizer_overlap": [{"undone": 0, "copy_bytes": 8}],
        }
        (folder / "report" / "report.json").write_text(json.dumps(report))
        (folder / "report" / "events.jsonl").write_text("")
        return 0, ""

    monkeypatch.setattr("holdfast_lab.studies.processes.ended", run)

    (row,) = measure(real, 0, 0)

    assert (row["status"], row["happens"]) == (NOT_RUN, "rollback, 2 buckets averaged, eager")
    assert "nothing to undo" in row["why"]


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

    rows = [row for task in STUDY.plan(options).tasks() for row in task.run([])]

    rows = [row for row in rows if row["part"] not in ("update", "together")]
    assert {row["seeds"] for row in rows} == {2}
    assert len(rows) == len(tried)
    assert rows[1]["accuracy_loss"] == 1.5


def test_what_a_journal_of_before_holds_is_done_under_the_same_names_but_for_what_is_drawn_from_all(tmp_path):
    """A name stands for its rows, so what means more than it did has another one."""
    keys = [task.key for task in STUDY.plan(Options(out=tmp_path)).tasks()]

    assert {"real: nothing, 0", "real: forward, 2 buckets averaged, 4", "real: rollback, 1", "real: restart, 0"} < set(
        keys
    )
    assert "real: compared" not in keys
    assert len(set(keys)) == len(keys)
    assert len({real.name for real in REALS}) == len(REALS)


def test_what_comes_of_the_order_of_adding_is_no_loss_of_accuracy():
    assert _estimate("accuracy_loss", [5e-16, 4e-16, 3e-16]) == {
        "accuracy_loss": 0,
        "accuracy_loss_low": 0,
        "accuracy_loss_high": 0,
    }


def test_settings_are_in_words():
    settings = {"quick": True, "data": False, "only": [], "network": "", "trainings a case": {"mlp": 4, "cnn": 30}}

    page = render_study({"study": "resilience", "settings": settings, "rows": [], "claims": []})

    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page) == [
        ("quick", "yes"),
        ("data", "no"),
        ("trainings a case", "mlp 4, cnn 30"),
    ]
