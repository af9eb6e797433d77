"""What a run lost against the undisturbed one, from what both wrote into their reports."""

from __future__ import annotations

import json
import os

import pytest

from holdfast.errors import ConfigError
from holdfast.tools.against import cost_against

STEPS = 96


def write(folder, losses, *, failed_at=None, seed=0):
    """Write what is read of the report of a run."""
    folder.mkdir()
    failures = [] if failed_at is None else [{"step": failed_at}, {"step": None}]
    alike = {"seed": seed, "slices": 4, "steps_planned": STEPS, "parameters": 10}
    (folder / "report.json").write_text(json.dumps(alike | {"failures": failures}))
    committed = [{"event": "StepCommitted", "step": at, "metrics": {"loss": loss}} for at, loss in enumerate(losses)]
    (folder / "events.jsonl").write_text("\n".join(map(json.dumps, committed)))
    return folder


@pytest.fixture
def undisturbed(tmp_path):
    return write(tmp_path / "undisturbed", [0.95**step for step in range(STEPS)])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["report.json", "events.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path, undisturbed, name):
    (undisturbed / name).unlink()
    os.mkfifo(undisturbed / name)
    with pytest.raises(ConfigError, match=f"must hold report.json and events.jsonl .*: {name} is no file"):
        cost_against(write(tmp_path / "run", [1.0] * STEPS), undisturbed)


def test_a_run_that_is_thrown_back_costs_so_many_steps_however_late_that_is(tmp_path, undisturbed):
    for at in (8, 50):
        losses = [0.95 ** (step if step < at else step - 6) for step in range(STEPS)]

        cost = cost_against(write(tmp_path / f"at {at}", losses, failed_at=at), undisturbed, windows=[1])

        assert cost["iterations"] == pytest.approx(6, abs=0.9)  # one level is crossed while it is thrown back
        assert len(cost["levels"]) == 7
        assert max(cost["levels"]) <= 0.95**at


def test_a_level_that_is_never_reached_is_counted(tmp_path, undisturbed):
    losses = [0.95 ** min(step, 60) for step in range(STEPS)]

    cost = cost_against(write(tmp_path / "stuck", losses, failed_at=61), undisturbed, windows=[1])

    assert cost["censored"] == len(cost["levels"])
    assert cost["iterations"] > 0


def test_where_nothing_falls_after_the_failure_nothing_is_said(tmp_path):
    flat = [0.95 ** min(step, 40) for step in range(STEPS)]
    base = write(tmp_path / "base", flat)

    cost = cost_against(write(tmp_path / "run", flat, failed_at=60), base, windows=[4, 8])

    assert (cost["iterations"], cost["levels"], cost["window"]) == (None, [], None)


def test_only_runs_of_the_same_job_are_compared(tmp_path, undisturbed):
    other = write(tmp_path / "other", [1.0] * STEPS, seed=1)

    with pytest.raises(ConfigError, match="has seed 0, this one 1: compare runs of the same job"):
        cost_against(other, undisturbed)
