from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main


def study(*words: str, timeout_s: float = 60, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", "study", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout_s,
        check=False,
    )


def refusal(capsys, *words: str) -> str:
    """Return what a command line is refused with, in this process: another would import torch to say it."""
    with pytest.raises(SystemExit) as ended:
        main(["study", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_list_names_every_study():
    done = study("--list")

    assert done.returncode == 0
    assert "checkpoint-cost" in done.stdout
    assert "2012.00825" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["checkpoint-price"],
            "the study must be one of checkpoint-cost, exact, guard, parallelism, resilience, scar, soft-errors, got 'checkpoint-price'",
        ),
        (["scar", "--data", "/nowhere"], "--data must be an existing directory, got '/nowhere'"),
        (["resilience", "--network", "gpt"], "--network must be one of mlp, cnn (more with --data), got 'gpt'"),
        (["checkpoint-cost", "--only", "caffe"], "--only must be one of torch, "),
        (["checkpoint-cost", "--repetitions", "0"], "--repetitions"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(words, message, tmp_path, capsys):
    refused = refusal(capsys, *words, "--out", str(tmp_path / "out"))

    assert message in refused
    assert len(refused.splitlines()) == 1


def test_a_file_is_no_place_for_results(tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("mine")

    refused = refusal(capsys, "scar", "--quick", "--out", str(taken))

    assert taken.read_text() == "mine"
    assert refused == f"error: --out must be a directory or a new path, got {str(taken)!r}, which is a file\n"


def test_a_framework_that_raises_ends_the_study_with_1_and_is_measured_again(tmp_path: Path):
    """A real failure: an environment whose Python has no Orbax."""
    python = tmp_path / ".venv-study-orbax" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    words = ("checkpoint-cost", "--quick", "--only", "orbax", "--network", "tiny", "--out", str(tmp_path / "out"))

    first, second = (study(*words, cwd=tmp_path) for _ in range(2))
    entries = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()[1:]]
    python.unlink()
    third = study(*words, cwd=tmp_path)

    task = "cost: orbax, tiny, optimizer none or momentum"
    assert (first.returncode, second.returncode) == (1, 1)
    for done in (first, second):
        [line] = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
        assert line.startswith(f"failed: {task}: ModuleNotFoundError: No module named ")
        assert line.endswith("; the same command measures it again")
        assert "failed         Every format loads exactly what was saved. failed: cost: orbax" in done.stdout
    assert f"measured again, because it failed: {task}" in second.stderr
    assert "already finished" not in second.stderr
    assert [entry["failed"][:19] for entry in entries] == ["ModuleNotFoundError"] * 2
    assert third.returncode == 0, third.stderr  # not installed: that is no failure
    assert "not checked    Every format loads exactly what was saved" in third.stdout


@pytest.mark.chaos
def test_a_quick_study_measures_says_what_it_left_out_and_is_not_done_twice(tmp_path: Path):
    words = ("checkpoint-cost", "--quick", "--only", "torch", "--network", "tiny", "--out", str(tmp_path))

    first = study(*words, timeout_s=170)
    second = study(*words, timeout_s=60)

    assert first.returncode == 0, first.stderr
    assert "left out: Frameworks: tensorflow, orbax." in first.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["status"] for row in results["rows"]} == {"measured", "extrapolated"}
    parts = {row["part"] for row in results["rows"]}
    assert parts == {"versions", "cost", "determinism", "workers"}
    assert all(row["loads_equal"] for row in results["rows"] if row["part"] == "cost")
    runs = {row["run"]: row["same_bits"] for row in results["rows"] if row["part"] == "determinism"}
    assert runs["everything restored"]
    assert not any(same for run, same in runs.items() if run.startswith("without"))
    assert (tmp_path / "index.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "index.html", "results.json", "rows.jsonl"]
    assert second.returncode == 0, second.stderr
    assert "tasks are already finished" in second.stderr
    assert "[1/" not in second.stderr


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_quick_study_of_parallelism_ends_with_the_bits_of_the_undisturbed_run(tmp_path: Path):
    words = ("parallelism", "--quick", "--only", "pipeline", "--out", str(tmp_path))

    done = study(*words, timeout_s=800)

    assert done.returncode == 0, done.stderr
    assert "left out: Parallelisms: replicated, sharded, hybrid." in done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["status"] for row in results["rows"]} == {"measured"}
    (killed,) = (row for row in results["rows"] if row["part"] == "recovery")
    (bare,) = (row for row in results["rows"] if row["part"] == "bare")
    assert (killed["decision"], killed["redone_steps"], killed["differs"]) == ("redo", 1, "nothing")
    assert (bare["decision"], bare["completes"]) == ("load", True)
    needs = {row["structure"]: row["needs"] for row in results["rows"] if row["part"] == "structures"}
    assert needs["weights"] == "without a copy"
    assert needs["random numbers"] == "no"
    assert not [claim["claim"] for claim in results["claims"] if claim["holds"] is False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "results.json", "rows.jsonl"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_quick_study_of_resilience_sets_real_processes_beside_logical_ones(tmp_path: Path):
    done = study("resilience", "--quick", "--out", str(tmp_path), timeout_s=800)

    assert done.returncode == 0, done.stderr
    assert "give the directory of the datasets with --data" in done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["status"] for row in results["rows"] if row["part"] != "update"} == {"measured"}
    points = {(row["strategy"], row["update"]): row for row in results["rows"] if row["part"] == "point"}
    assert {name: (row["same"], row["decisions"], row["undone"]) for name, row in points.items()} == {
        ("rollback", "lazy"): (True, "redo", 0),
        ("rollback", "eager"): (True, "redo", 3 * 2),  # two buckets at each of three survivors
        ("forward", "lazy"): (False, "continue", 0),
        ("restart", "lazy"): (True, "load", 0),
    }
    crossed = [row for row in results["rows"] if row["part"] == "update"]
    assert {row["undo_s"] > 0 for row in crossed if row["strategy"] == "rollback" and row["averaged"]} == {True}
    kept = [row for row in results["rows"] if row["part"] == "case" and row["batch"] == "global"]
    assert {row["strategy"] for row in kept if row["same"] == 0} == {"forward"}
    assert all(row["same"] == row["seeds"] for row in kept if row["strategy"] != "forward")
    assert (tmp_path / "trials" / "mlp" / "rows.jsonl").is_file()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_quick_study_of_the_guard_finds_harm_of_every_kind_and_none_where_there_is_none(tmp_path: Path):
    done = study("guard", "--quick", "--out", str(tmp_path), timeout_s=800)

    assert done.returncode == 0, done.stderr
    assert "left out: Flips in models that are split" in done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["status"] for row in results["rows"]} == {"measured"}
    kinds = {(row["target"], row["sums"]): row for row in results["rows"] if row["part"] == "kind"}
    assert len(kinds) == 6
    assert all(row["harmful"] == row["healed"] > 0 for row in kinds.values())
    assert [row["alarms"] for row in results["rows"] if row["part"] == "clean"] == [0]
    assert {row["guard"] for row in results["rows"] if row["part"] == "cost"} == {"off", "stop", "heal", "heal, sums"}
    assert not [claim["claim"] for claim in results["claims"] if claim["holds"] is False]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_quick_study_of_exactness_sums_the_same_in_all_ways_and_finds_one_point_where_it_is_promised(tmp_path: Path):
    done = study("exact", "--quick", "--out", str(tmp_path), timeout_s=800)

    assert done.returncode == 0, done.stderr
    assert "left out: All-reduce between hosts" in done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["status"] for row in results["rows"]} == {"measured"}  # weights that differ from the others' are not
    cost = [row for row in results["rows"] if row["part"] == "cost"]
    assert len({row["variant"] for row in cost}) == 9
    hashes = {row["policy"]: row["sha256"] for row in results["rows"] if row["part"] == "spread"}
    assert {policy for policy, one in hashes.items() if one == hashes["nothing happens"]} == {"nothing happens", "rollback", "restart"}  # fmt: skip
    held = {claim["claim"]: claim["holds"] for claim in results["claims"]}
    assert [holds for claim, holds in held.items() if "memory" in claim or "sha256" in claim or "one gradient per" in claim] == [True] * 3  # fmt: skip
