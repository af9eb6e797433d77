"""Scripts that stay on their framework's DDP, on the backend ``holdfast``: ranks die, the others finish and are equal."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import assert_landed, clean_env, exit_codes, free_port, run_report

SCRIPTS = Path(__file__).with_name("backend_scripts")
JOB_S = 150

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(JOB_S + 30)]

JOBS = {
    # Four ranks: rank 1 dies in a step, rank 3 in a gather. Three ranks: rank 1 dies in a metric of the framework.
    "ddp_loop": ("torch", 4, {1: "backward:5", 3: "all_gather:5"}, {"all_gather"}),
    "fabric_loop": ("lightning", 3, {1: "barrier:4"}, {"all_gather"}),
    "accelerate_loop": (
        "accelerate", 3, {1: "all_gather_into_tensor:3"}, {"all_gather", "all_gather_into_tensor"},
    ),
    "lightning_fit": ("lightning", 3, {1: "all_reduce:5"}, {"all_gather"}),
    "hf_trainer": ("transformers", 3, {1: "all_gather_into_tensor:9"}, {"all_gather", "all_gather_into_tensor"}),
}  # fmt: skip
"""Script: the framework it needs, its ranks, the deaths, and the kinds of collectives that are then filled."""


def needs(framework):
    """Skip the test where ``framework`` is not installed. To import it here would take long, and may warn."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: make integrations")


def env_of(folder, kills, **more):
    plan = json.dumps({str(rank): at for rank, at in kills.items()})
    return {"FRAMEWORKS_OUT": str(folder), "FRAMEWORKS_KILLS": plan, "HF_HUB_OFFLINE": "1"} | more


def said(folder):
    lines = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return {line["rank"]: line for line in lines}


@pytest.mark.parametrize("name", JOBS)
def test_survivors_finish_with_equal_weights(tmp_path, name):
    framework, size, kills, filled = JOBS[name]
    needs(framework)
    survivors = [rank for rank in range(size) if rank not in kills]

    report = run_report(
        tmp_path, "-n", size, "--max-restarts", 0, SCRIPTS / f"{name}.py",
        timeout=JOB_S, env=env_of(tmp_path, kills),
    )  # fmt: skip

    assert_landed(report, *kills)
    assert {rank: exit_codes(report)[rank] for rank in survivors} == dict.fromkeys(survivors, 0)
    lines = said(tmp_path)
    assert sorted(lines) == survivors
    found = [{key: value for key, value in line.items() if key != "rank"} for line in lines.values()]
    assert found == [found[0]] * len(survivors), "the survivors differ in their weights, or in what they gathered"
    assert found[0]["steps"] == (6 if name == "hf_trainer" else 8)
    assert {each["collective"] for each in report["seats_filled"]} - {"all_reduce(SUM)"} == filled
    # Lightning's environment for MPI would start MPI beside the backend, and finalize it when the script ends.
    assert found[0].get("environment", "LightningEnvironment") == "LightningEnvironment"


def test_without_filling_no_rank_finishes(tmp_path):
    """The other policy, which shows that filling is what lets them finish."""
    kills = {1: "backward:3"}

    report = run_report(
        tmp_path, "-n", 3, "--max-restarts", 0, "--empty-seats", "raise", SCRIPTS / "ddp_loop.py",
        exit_code=1, timeout=JOB_S, env=env_of(tmp_path, kills),
    )  # fmt: skip

    assert said(tmp_path) == {}
    assert "all_gather did not complete: it got one tensor per initial rank" in report["_stderr"]


def test_over_plain_gloo_a_death_ends_every_rank(tmp_path):
    """The negative control."""
    port = str(free_port())
    shared = env_of(tmp_path, {1: "backward:3"}, FRAMEWORKS_BACKEND="gloo", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with (tmp_path / "output").open("w") as output:
        ranks = [
            subprocess.Popen(
                [sys.executable, SCRIPTS / "ddp_loop.py"],
                env=clean_env(**shared, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3"),
                stdout=output,
                stderr=output,
            )
            for rank in range(3)
        ]
        end = time.monotonic() + JOB_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if ranks[1].poll() is not None:
                end = min(end, time.monotonic() + 10)
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()
        codes = [rank.wait() for rank in ranks]

    assert codes[1] == -9, (tmp_path / "output").read_text()[-3000:]
    assert 0 not in codes
    assert said(tmp_path) == {}
