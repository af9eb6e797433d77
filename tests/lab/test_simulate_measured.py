"""What eager updates took in a run, as costs of their own: nothing is counted twice, and nothing is forgotten."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.simulate import toml
from holdfast_lab.simulate.assuming import ask
from holdfast_lab.simulate.measured import Measured, MeasuredRun, read_measured

SCENARIO = """
strategies = ["rollback"]
[cluster]
workers = 4
[job]
work_s = "1h"
save_every = "5min"
[[failures]]
level = "worker"
mean_s = "1d"
[costs]
from_report = "run"
step_s = "1s"
"""
FAILURE = {
    "recovery": 0,
    "decision": "redo",
    "t_s": 1.0,
    "detect_s": None,
    "times_s": {"Shrink": 0.03, "DiscardStep": 0.01},
}
REPORT = {"workers": {"started": 3}, "steps": 100, "step_s": {"p50": 0.2}, "failures": [FAILURE]}
# 100 steps of 5 buckets, and 2 buckets of a step that was taken back.
WORKER = {"event": "OptimizerOverlapped", "t_s": 30.0, "rank": 0, "step": 100, "steps": 100, "buckets": 502, "undone": 2,
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


def run_with_saves():
    costs = {
        name: Measured(value, "measured") for name, value in {"save_s": 2.0, "load_s": 3.0, "regroup_s": 0.5}.items()
    }
    return MeasuredRun(directory=Path("run"), workers=4, costs=costs)


@pytest.mark.parametrize(
    ("given", "source", "save_s"),
    [
        ({}, "measured", 2.0),
        ({"state_bytes": 1e11, "write_bytes_per_s": 1e9}, "derived", 100.0),
        ({"state_bytes": 1e11, "write_bytes_per_s": 1e9, "save_s": 7.0}, "given", 7.0),
    ],
)
def test_a_size_that_is_given_goes_before_saves_that_were_measured_of_another_size(given, source, save_s):
    question, known = ask({"workers": 4, "mtbf_node_s": 1e6, **given}, run_with_saves())
    sources = {one.name: one.source for one in known}

    assert (question.save_s, sources["save_s"]) == (save_s, source)
    assert sources["regroup_s"] == "measured"


def test_a_scenario_with_a_report_and_a_size_saves_as_the_size_says(tmp_path, monkeypatch):
    monkeypatch.setattr(toml, "read_measured", lambda folder: run_with_saves())
    found = {}
    for name, more in {"report": "", "size": "state_bytes = 100e9\nwrite_bytes_per_s = 1e9\n"}.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(SCENARIO + more)
        found[name] = toml.read_scenario(path).settings[0].scenario.costs

    assert (found["report"].save_s, found["report"].load_s) == (2.0, 3.0)
    assert (found["size"].save_s, found["size"].load_s) == (100.0, 100.0)
    assert found["size"].regroup_s == 0.5


@pytest.mark.parametrize(
    ("name", "says"), [("report.json", "cannot be read: "), ("events.jsonl", "line 1: not a record")]
)
def test_brackets_without_end_in_a_run_are_refused_in_one_line(tmp_path, name, says):
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / name).write_text("[" * 100_000 + "\n")

    with pytest.raises(ConfigError) as refused:
        read_measured(tmp_path)

    assert says in str(refused.value)
    assert "nested too deep" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    from holdfast_lab.inject.files import replay
    from holdfast_lab.simulate.reading import open_text
    from holdfast_lab.simulate.toml import read_scenario

    os.mkfifo(tmp_path / "trace.csv")
    with pytest.raises(ConfigError, match=r"trace\.csv cannot be read: it is no file"):
        open_text(tmp_path / "trace.csv")
    with pytest.raises(ConfigError, match=r"cannot read .*trace\.csv: it is no file"):
        read_scenario(tmp_path / "trace.csv")
    with pytest.raises(ConfigError, match=r"cannot read .*trace\.csv: it is no file"):
        replay.read_file(tmp_path / "trace.csv")
