"""One failure script through two bodies: real processes and virtual workers end with the same weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import reference
from jobs import MPIRUN, assert_landed, clean_env, run_report

from holdfast.faults.plan import FaultPlan, parse

pytestmark = pytest.mark.chaos

SCRIPT = Path(__file__).parents[1] / "support" / "train_reference.py"


@pytest.mark.parametrize(
    ("strategy", "specs", "policies"),
    [
        ("forward", ["kill:rank=0,step=6,phase=allreduce,bucket=1"], ["--rescale", "original"]),
        ("rollback", ["kill:rank=2,step=5,phase=backward"], ["--split", "even", "--seed", 11]),
        ("rollback", ["kill:rank=1,step=3,phase=optimizer", "kill:rank=0,step=8"], ["--batch", "local"]),
    ],
)
def test_what_changes_the_bits_changes_them_alike_in_both_bodies(tmp_path, strategy, specs, policies):
    """``forward`` and the policies give other bits than the undisturbed run by design: the same on both fabrics."""
    inject = [word for spec in specs for word in ("--inject", spec)]
    options = ["-n", 4, "--strategy", strategy, *policies, *inject]

    real = run_report(tmp_path / "real", *options, SCRIPT, "cnn", "sgd")
    virtual = run_report(tmp_path / "virtual", "--fabric", "virtual", *options, SCRIPT, "cnn", "sgd")

    assert_landed(real, *[parse(spec).rank for spec in specs])
    assert real["replicas"] == virtual["replicas"]
    assert real["replicas"]["state_sha256"] != reference.train("cnn", "sgd")
    assert real["samples"] == virtual["samples"]
    assert real["samples"]["repeated"] == 0
    assert real["lost"] == virtual["lost"]


def mpirun(*args, **env):
    return subprocess.run(
        [*MPIRUN, "-n", "2", sys.executable, str(SCRIPT), *args],
        env=clean_env(**env),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_a_bare_mpirun_survives_too():
    plan = FaultPlan((parse("kill:rank=0,step=3,phase=backward"),)).to_json()

    done = mpirun("mlp", "adam", HOLDFAST_FAULTS=plan)

    assert "holdfast: lost [0] at step 3; 1 workers resume (redo)" in done.stderr
    assert re.findall("state (.*)", done.stdout) == [reference.train("mlp", "adam")]


def test_under_a_bare_mpirun_a_worker_that_raises_ends_the_job():
    done = mpirun("mlp", "adam", "--raise-at", "3")

    assert done.returncode != 0
    assert "ValueError: the script has a bug" in done.stderr
    assert "state" not in done.stdout
