from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

demo = importlib.import_module("holdfast_lab.commands.demo")  # the package offers the command by the same name


def reports(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the runs of a good demo report, with ``changes`` by run."""
    good = {
        run.name: {
            "failures": [{}] * len(run.faults),
            "faults_not_fired": [],
            "replicas": {"sha256": "other" if run.strategy == "forward" else "same"},
        }
        for run in demo.RUNS
    }
    return {name: report | changes.get(name, {}) for name, report in good.items()}


def test_a_good_demo_ends_well(capsys):
    assert demo._judge(reports()) == 0
    assert "the weights are bit-identical" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollback": {"replicas": {"sha256": "ab"}}},
            "rollback ended with sha256 ab, the undisturbed run with same",
        ),
        ({"forward": {"failures": [{}]}}, "the run forward must lose 2 workers, lost 1"),
        ({"restart": {"faults_not_fired": ["kill:rank=1,step=40"]}}, "the run restart must lose 2 workers"),
    ],
)
def test_a_demo_that_does_not_show_what_it_should_fails_and_says_so(changes, message, capsys):
    assert demo._judge(reports(**changes)) == 1
    assert message in capsys.readouterr().err


def test_the_demo_does_not_depend_on_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_STRATEGY", "forward")
    monkeypatch.setenv("HOLDFAST_SEED", "7")

    settings = demo._job(demo.RUNS[0], tmp_path, 4).settings

    assert (settings.strategy, settings.seed, settings.workers) == ("rollback", 0, 4)


def test_only_the_checkpoints_of_an_earlier_demo_are_removed(tmp_path):
    (tmp_path / "checkpoints").mkdir()

    demo._remove_earlier_checkpoints(tmp_path)
    assert (tmp_path / "checkpoints").is_dir()
    (tmp_path / "report.json").touch()
    demo._remove_earlier_checkpoints(tmp_path)

    assert not (tmp_path / "checkpoints").exists()


def test_two_of_the_workers_are_killed_so_there_must_be_three():
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "demo", "--workers", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert "--workers" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.chaos
def test_the_demo_shows_that_rollback_keeps_every_bit(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "demo", "--workers", "3", "--out", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert list(rows) == [run.name for run in demo.RUNS]
    hashes = {name: row["replicas"]["sha256"] for name, row in rows.items()}
    assert hashes["rollback"] == hashes["restart"] == hashes["undisturbed"] != hashes["forward"]
    assert [row["workers"]["finished"] for row in rows.values()] == [3, 1, 1, 1]
    assert rows["forward"]["samples"]["lost"] > 0
    assert (tmp_path / "index.html").read_text().startswith("<!doctype html>")
