"""What DDP scripts sum, gather and average by themselves, while and after ranks are really killed."""

import json
import re

import pytest
from jobs import ROOT, exit_codes, run_report

pytestmark = pytest.mark.chaos

SCRIPT = ROOT / "tests" / "support" / "ddp_figures.py"
JOB_S = 150
KILL = ("--inject", "kill:rank=4,step=1,phase=allreduce")
DEATHS = {0: "reduce_tensor", 3: "own gradients", 5: "distribute_bn", 1: "objects"}


def noted(folder):
    return {
        int(path.stem.removeprefix("rank-")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("rank-*.jsonl")
    }


def figures(folder, *options, fabric="gloo"):
    report = run_report(folder, "-n", 6, "--fabric", fabric, *KILL, *options, SCRIPT, folder, timeout=JOB_S)
    return report, noted(folder)


def test_means_of_a_script_are_means_over_the_survivors_whenever_ranks_die(tmp_path):
    """Also in the call in which a rank dies, with rank 0 among the dead, and after five deaths of six."""
    report, said = figures(tmp_path, fabric="ulfm")

    assert exit_codes(report) == {rank: 0 if rank == 2 else -9 for rank in range(6)}
    assert {int(path.name[5:]): path.read_text() for path in tmp_path.glob("died-*")} == DEATHS
    lines = said[2]
    assert [line["alive"] for line in lines if line["name"] == "reduce_tensor"] == [[1, 2, 3, 5], [1, 2, 5]]
    assert [line["name"] for line in lines].count("own gradients") == 2
    for line in (line for lines in said.values() for line in lines):
        tolerance = 1e-2 if line["name"] == "in 16 bits" else 1e-5
        assert line["got"] == pytest.approx(line["right"], rel=tolerance), line
    told = re.findall(r"reduce\(SUM\) \(ddp_figures.py, line \d+\) is over (\d) of 6 ranks", report["_stdout"])
    assert told == ["5", "4", "3", "2", "1"]
    assert "multiplied by 6/5 from now on, so that sum / world_size stays a mean" in report["_stdout"]
    assert any(-1 in each["sources"] for each in report["seats_filled"])


def test_a_script_that_divides_by_the_survivors_gets_their_sums(tmp_path):
    report, said = figures(tmp_path, "--empty-seats", "survivors")

    assert exit_codes(report)[2] == 0
    sums = [line for line in said[2] if line["name"] == "reduce_tensor"]
    assert [line["got"] for line in sums] == pytest.approx(
        [line["right"] * n / 6 for line, n in zip(sums, (4, 3), strict=True)]
    )
    assert "from now on" not in report["_stdout"]
