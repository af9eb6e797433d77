"""Every study at a tiny size: a part that breaks is seen on the day it breaks, and not when somebody runs the study."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from warm import QUICK_START

from holdfast.cli import main
from holdfast_lab.studies import STUDIES, frameworks
from holdfast_lab.studies.exact.spread import EXACT, NOTHING
from holdfast_lab.studies.exact.spread import QUICK as QUICK_SPREAD
from holdfast_lab.studies.guard.setup import GuardSetup
from holdfast_lab.studies.parallelism.needs import OMISSIONS
from holdfast_lab.studies.resilience.cases import QUICK as QUICK_NETWORKS
from holdfast_lab.studies.scar.programs import policies_of
from holdfast_lab.workloads.iterative.quadratic import Quadratic

Rows = list[dict[str, Any]]


def of(rows: Rows, part: str) -> Rows:
    return [row for row in rows if row["part"] == part]


def restored_whole_or_with_other_bits(rows: Rows) -> None:
    assert all(row["loads_equal"] for row in of(rows, "cost"))
    same = {row["run"]: row["same_bits"] for row in of(rows, "determinism")}
    assert same.pop("undisturbed")
    assert {run for run, is_same in same.items() if is_same} == {"again", "everything restored"}


def same_bits_where_they_are_promised(rows: Rows) -> None:
    calm, *others = of(rows, "spread")
    assert calm["policy"] == NOTHING
    assert {row["policy"] for row in others if row["sha256"] == calm["sha256"]} == {*EXACT}


def recovered_as_undisturbed(rows: Rows) -> None:
    (killed,), (bare,) = of(rows, "recovery"), of(rows, "bare")
    assert (killed["decision"], killed["redone_steps"], killed["differs"]) == ("redo", 1, "nothing")
    assert (bare["decision"], bare["completes"]) == ("load", True)
    needs = {row["structure"]: row["needs"] for row in of(rows, "structures")}
    assert (needs["weights"], needs["random numbers"]) == ("without a copy", "no")
    assert [row["breaks"] for row in of(rows, "needs")] == [True] * 3


def every_policy_in_every_trial(rows: Rows) -> None:
    policies = [policy.name for policy in policies_of("quick", (), Quadratic())]
    tried = {(row["kind"], row["trial"], row["policy"]) for row in of(rows, "trial")}
    assert {one for one in tried if one[0] == "main"} == {("main", n, name) for n in range(3) for name in policies}
    assert len({(row["kind"], row["trial"]) for row in rows if row.get("late")}) == 3


def a_cell_of_each_alteration(rows: Rows) -> None:
    assert [(row["flips"], row["bits"], row["trials"]) for row in of(rows, "cell")] == [
        (1, "all", 1),
        (1, "critical", 1),
        (100, "below", 1),
    ]


@dataclass(frozen=True)
class Smallest:
    """How little a study can do.

    Args:
        options: Options besides ``--quick``. What they leave out takes minutes, or is another entry, a long one.
        parts: Parts of its rows.
        smaller: What no option makes smaller, below ``holdfast_lab.studies``.
        check: Holds its rows to what the study is about.
        files: The files it leaves besides its page, its results, its journal and figures.
    """

    options: tuple[str, ...]
    parts: set[str]
    smaller: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Rows], None] = lambda rows: None
    files: tuple[str, ...] = ()


SMALLEST = {
    "checkpoint-cost": Smallest(
        ("--only", "torch", "--only", "cost", "--only", "determinism", "--network", "tiny"),
        {"versions", "cost", "determinism"},
        {"checkpoint_cost.study._TRAINING_STEPS": 16},
        restored_whole_or_with_other_bits,
    ),
    "checkpoint-cost workers": Smallest(("--only", "torch", "--only", "workers", "--network", "tiny"), {"workers"}),
    "exact": Smallest(
        ("--only", "spread", "--repetitions", "2"),
        {"spread"},
        {"exact.study.QUICK": tuple(replace(one, steps=20) for one in QUICK_SPREAD)},
        same_bits_where_they_are_promised,
    ),
    "guard": Smallest(
        ("--only", "flips", "--only", "clean", "--repetitions", "1"),
        {"kind", "clean"},
        {"guard.cells.GuardSetup": lambda **given: GuardSetup(**given | {"warm": 1, "epochs": 1})},
        files=("clean.sqlite", "the-critical-bit-of-every-kind.sqlite"),
    ),
    "parallelism": Smallest(
        ("--only", "pipeline"),
        {"undisturbed", "recovery", "bare", "structures", "needs"},
        {"parallelism.study.OMISSIONS": OMISSIONS[6:7]},  # each is tried in tests/lab/test_study_parallelism.py
        recovered_as_undisturbed,
    ),
    "resilience": Smallest(
        ("--only", "simulated", "--only", "modes", "--repetitions", "2"),
        {"undisturbed", "case", "together", "update", "modes"},
        {"resilience.study.QUICK": tuple(replace(one, steps=12, workers=(16,)) for one in QUICK_NETWORKS)},
        files=("trials",),
    ),
    "scar": Smallest(
        ("--only", "quadratic", "--repetitions", "3"), {"pilot", "trial"}, check=every_policy_in_every_trial
    ),
    "soft-errors": Smallest(
        ("--only", "ddp", "--repetitions", "1"),
        {"cell", "alone", "explained"},
        check=a_cell_of_each_alteration,
        files=("trials.sqlite",),
    ),
}


def test_there_is_a_smallest_size_of_every_study():
    assert list(dict.fromkeys(name.split()[0] for name in SMALLEST)) == list(STUDIES)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if " " in name else []) for name in SMALLEST]
)
def test_every_part_of_a_study_measures_something_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    smallest, out = SMALLEST[name], tmp_path / "out"
    for place, size in smallest.smaller.items():
        monkeypatch.setattr(f"holdfast_lab.studies.{place}", size)
    monkeypatch.setitem(frameworks._CALM, "PYTHONPATH", f"{QUICK_START}:{Path(__file__).parents[3] / 'src'}")

    said = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["study", name.split()[0], "--quick", *smallest.options, "--out", str(out)])
        said.append(capsys.readouterr().err)
        assert not ended.value.code, said[-1]

    results = json.loads((out / "results.json").read_text())
    assert results["failed"] == []
    assert not {row["status"] for row in results["rows"]} & {"not run", "failed"}
    assert smallest.parts <= {row["part"] for row in results["rows"]}
    assert "interrupted" not in " ".join(results["left_out"])
    assert all(f"left out: {sentence}" in said[0] for sentence in results["left_out"])
    assert any(claim["ours"] is not None for claim in results["claims"])
    assert {"claim", "source", "paper", "ours", "ci", "holds"} <= results["claims"][0].keys()
    assert "Parts that failed" not in (out / "index.html").read_text()
    left = {path.name for path in out.iterdir() if not path.name.endswith(("-wal", "-shm"))}  # SQLite's beside its file
    assert left - {"figures"} == {"index.html", "results.json", "rows.jsonl", *smallest.files}
    smallest.check(results["rows"])
    assert "tasks are already finished" in said[1]
    assert "[1/" not in said[1]
