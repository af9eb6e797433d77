"""Every study at a tiny size: a part that breaks is seen on the day it breaks, and not when somebody runs the study."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast_lab.studies import STUDIES
from holdfast_lab.studies.exact.spread import QUICK as QUICK_SPREAD
from holdfast_lab.studies.resilience.cases import QUICK as QUICK_NETWORKS

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
    "soft-errors": (("--only", "ddp", "--repetitions", "1"), {"cell", "alone", "explained"}),
}
"""By study: options besides ``--quick``, and parts of its rows. What is left out takes minutes: ``workers`` of
``checkpoint-cost``, ``cost`` of ``guard``, all but ``spread`` of ``exact``, ``real`` of ``resilience``, other kinds
of ``parallelism``."""

SMALLER: dict[str, dict[str, Any]] = {
    "exact": {"exact.study.QUICK": tuple(replace(one, steps=20) for one in QUICK_SPREAD)},
    "guard": {"guard.cells._CLEAN_EPOCHS": 4},
    "resilience": {"resilience.study.QUICK": tuple(replace(one, steps=12, workers=(16,)) for one in QUICK_NETWORKS)},
}
"""By study: what no option makes smaller, below ``holdfast_lab.studies``."""


def test_there_is_a_smallest_size_of_every_study():
    assert list(SMALLEST) == list(STUDIES)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALLEST)
def test_every_part_of_a_study_measures_something(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    options, parts = SMALLEST[name]
    for place, size in SMALLER.get(name, {}).items():
        monkeypatch.setattr(f"holdfast_lab.studies.{place}", size)

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
