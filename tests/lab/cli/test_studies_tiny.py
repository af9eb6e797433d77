"""Every study at a tiny size: a part that breaks is seen on the day it breaks, and not when somebody runs the study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast_lab.studies import STUDIES

SMALLEST: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "checkpoint-cost": (
        ("--only", "torch", "--only", "cost", "--only", "determinism", "--network", "tiny"),
        {"versions", "cost", "determinism"},
    ),
    "exact": (("--only", "spread", "--repetitions", "2"), {"spread"}),
    "guard": (("--only", "flips", "--only", "clean", "--repetitions", "1"), {"kind", "clean"}),
    "parallelism": (("--only", "pipeline"), {"undisturbed", "recovery", "bare", "structures", "needs"}),
    "resilience": (
        ("--only", "simulated", "--only", "modes", "--repetitions", "2"),
        {"undisturbed", "case", "together", "update", "modes"},
    ),
    "scar": (("--repetitions", "4"), {"pilot", "trial"}),
    "soft-errors": (("--only", "ddp", "--repetitions", "2"), {"cell", "alone", "explained"}),
}
"""By study: options besides ``--quick``, and parts of its rows. What is left out takes minutes: ``workers`` of
``checkpoint-cost``, ``cost`` of ``guard``, all but ``spread`` of ``exact``, ``real`` of ``resilience``, other kinds
of ``parallelism``."""


def test_there_is_a_smallest_size_of_every_study():
    assert list(SMALLEST) == list(STUDIES)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALLEST)
def test_every_part_of_a_study_measures_something(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options, parts = SMALLEST[name]

    with pytest.raises(SystemExit) as ended:
        main(["study", name, "--quick", *options, "--out", str(tmp_path / "out")])

    assert not ended.value.code, capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["failed"] == []
    assert not {row["status"] for row in results["rows"]} & {"not run", "failed"}
    assert parts <= {row["part"] for row in results["rows"]}
    assert "interrupted" not in " ".join(results["left_out"])
    assert any(claim["ours"] is not None for claim in results["claims"])
    assert "Parts that failed" not in (tmp_path / "out" / "index.html").read_text()
