"""What eager updates took in a run, as costs of their own: nothing is counted twice, and nothing is forgotten."""

from __future__ import annotations

import json

import pytest

from holdfast.simulate.measured import read_measured

FAILURE = {
    "recovery": 0,
    "decision": "redo",
    "t_s": 1.0,
    "detect_s": None,
    "times_s": {"Shrink": 0.03, "DiscardStep": 0.01},
}
REPORT = {"workers": {"started": 3}, "steps": 100, "step_s": {"p50": 0.2}, "failures": [FAILURE]}
# 100 steps of 5 buckets, and 2 buckets of a step that was taken back.
WORKER = {"event": "UpdatedEagerly", "t_s": 30.0, "rank": 0, "step": 100, "steps": 100, "buckets": 502, "undone": 2,
          "copy_bytes": 4096, "copy_s": 0.502, "update_s": 1.004, "waited_s": 0.3, "undo_s": 0.004}  # fmt: skip


def measured(tmp_path, *records):
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_measured(tmp_path)


def test_eager_updates_are_costs_of_their_own(tmp_path):
    run = measured(tmp_path, WORKER, WORKER | {"rank": 1})

    found = {name: one.value for name, one in run.costs.items()}
    whole = {"step_s": 0.2, "regroup_s": 0.04, "waited_s": 0.003, "discard_s": 0.01}
    costs = {"update_s": 5 * 0.002, "copy_s": 5 * 0.001, "undo_s": 5 * 0.002}
    assert found == pytest.approx(whole | costs)
    assert run.apart() == pytest.approx({"step_s": 0.2 - 0.003, "regroup_s": 0.03} | costs)


def test_without_them_a_step_has_the_optimizer_in_it(tmp_path):
    run = measured(tmp_path)

    assert run.apart() == pytest.approx({"step_s": 0.2, "regroup_s": 0.04})


def test_who_had_nothing_to_take_back_says_nothing_of_what_that_takes(tmp_path):
    run = measured(tmp_path, WORKER | {"undone": 0, "undo_s": 0.0, "buckets": 500})

    assert "undo_s" not in run.costs
    assert run.costs["copy_s"].value == pytest.approx(0.502 / 100)
