from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast_lab.studies import STUDIES


def study(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", "study", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def study_here(capsys, *words: str) -> tuple[int, str, str]:
    """Return exit code, output and messages of the command, run in this process: another would import torch."""
    with pytest.raises(SystemExit) as ended:
        main(["study", *words])
    return ended.value.code or 0, *capsys.readouterr()


def test_the_list_names_every_study(capsys):
    code, printed, _ = study_here(capsys, "--list")

    assert code == 0
    assert all(f"{known.name}  {known.title}\n    {known.paper}\n" in printed for known in STUDIES.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["checkpoint-price"],
            "the study must be one of checkpoint-cost, exact, guard, parallelism, resilience, scar, soft-errors, got 'checkpoint-price'",
        ),
        (["scar", "--data", "/nowhere"], "--data must be an existing directory, got '/nowhere'"),
        (["checkpoint-cost", "--repetitions", "0"], "--repetitions"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(words, message, tmp_path, capsys):
    code, printed, said = study_here(capsys, *words, "--out", str(tmp_path / "out"))

    assert (code, printed) == (2, "")
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_file_is_no_place_for_results(tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("mine")

    code, _, said = study_here(capsys, "scar", "--quick", "--out", str(taken))

    assert taken.read_text() == "mine"
    assert (code, said) == (2, f"error: --out must be a directory or a new path, got {str(taken)!r}, which is a file\n")


def test_a_framework_that_raises_ends_the_study_with_1_and_is_measured_again(tmp_path, monkeypatch, capsys):
    """A real failure: an environment whose Python has no Orbax."""
    python = tmp_path / ".venv-study-orbax" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    words = ("checkpoint-cost", "--quick", "--only", "orbax", "--network", "tiny", "--out", str(tmp_path / "out"))

    first, second = (study_here(capsys, *words) for _ in range(2))
    entries = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()[1:]]
    python.unlink()
    code, printed, said = study_here(capsys, *words)

    task = "cost: orbax, tiny, optimizer none or momentum"
    for ended, shown, told in (first, second):
        assert ended == 1
        [line] = [line for line in told.splitlines() if line.startswith("failed: ")]
        assert line.startswith(f"failed: {task}: ModuleNotFoundError: No module named ")
        assert line.endswith("; the same command measures it again")
        assert "failed         Every format loads exactly what was saved. failed: cost: orbax" in shown
    assert f"measured again, because it failed: {task}" in second[2]
    assert "already finished" not in second[2]
    assert [entry["failed"][:19] for entry in entries] == ["ModuleNotFoundError"] * 2
    assert code == 0, said  # not installed: that is no failure
    assert "not checked    Every format loads exactly what was saved" in printed


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
