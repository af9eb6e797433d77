"""A few plans of the campaign, which ``make chaos`` runs by thousands, and negative controls of how they are judged."""

from dataclasses import replace

import pytest

from campaign import jobs, runner
from campaign.judge import judge
from campaign.plan import Attack, Job, Plan

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170), pytest.mark.cold_start]  # plans strike while a job starts

QUICK = Job(workers=2, pause_ms=10)
KILLED = Plan(QUICK, (Attack("signal", "worker 1", "commit 3", 5, {"signal": "SIGKILL"}),))
REFUSED = Plan(replace(QUICK, fabric="virtual"), (Attack("limit-at-start", values={"limit": "nofile", "value": 8}),))


def test_a_killed_worker_is_survived_and_other_bits_would_be_found(tmp_path):
    outcome = runner.run(KILLED, tmp_path / "plan")
    verdict = judge(outcome, tmp_path / "kept")

    assert verdict.kind == "right", verdict
    assert outcome.landed == [True]
    assert {event["rank"]: event["exit_code"] for event in outcome.first.of_kind("WorkerEnded")} == {0: 0, 1: -9}
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_text("0" * 64)
    assert judge(outcome, tmp_path / "kept").kind == "wrong hash"


@pytest.mark.soak  # the line itself: tests/unit/test_system_errors.py
def test_a_job_that_may_open_no_file_refuses_and_is_run_without_that_limit(tmp_path):
    outcome = runner.run(REFUSED, tmp_path / "plan")

    assert judge(outcome, tmp_path / "kept").kind == "right"
    assert outcome.first.code != 0
    assert outcome.resumed.code == 0


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("sleep 60", "hang"),
        ("sleep 60 & exit 0", "left-overs"),
        ("touch $TMPDIR/left", "left-overs"),
        ("echo Traceback '(most recent call last)'", "traceback"),
        ("exit 0", "false success"),
        ("exit 1", "stopped"),
    ],
)
def test_a_job_that_goes_wrong_is_found(tmp_path, monkeypatch, script, expected):
    """The command is replaced by one that does the wrong thing really."""
    monkeypatch.setattr(jobs, "ENDS_S", 0.3)
    monkeypatch.setattr(jobs, "deadline_s", lambda job, attacks: 1.0 if expected == "hang" else 20.0)
    monkeypatch.setattr(runner, "words_of", lambda plan, launch, report, *more: ["sh", "-c", script])

    outcome = runner.run(Plan(QUICK, ()), tmp_path / "plan")

    assert judge(outcome, tmp_path / "kept").kind == expected
    assert runner.Processes([], tmp_path, str(tmp_path / "plan")).all() == [], "all that it started is ended"
