"""Workers of the Trainer are killed; the job finishes with the weights of the undisturbed run, which are those of one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, assert_landed, clean_env, free_port, holdfast, run_report
from tutorials import comparable, executed

transformers = pytest.importorskip("transformers")

from hf_tiny import sha256  # noqa: E402

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

SCRIPT = ROOT / "tests" / "support" / "train_hf.py"
LIMIT_S = 150


def weights(said: str) -> set[str]:
    return set(re.findall(r"weights ([0-9a-f]{64})", said))


def alone(*words, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=clean_env(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    """The weights that one process ends with, in as many slices as a job of four workers."""
    process = alone(SCRIPT, tmp_path_factory.mktemp("one"), HOLDFAST_SLICES="4")
    said, _ = process.communicate(timeout=LIMIT_S)
    (found,) = weights(said)
    return found


def saved(folder: Path) -> str:
    return sha256(transformers.GPT2LMHeadModel.from_pretrained(folder))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fabric", ["gloo", "ulfm"])
def test_workers_die_in_a_step_in_an_evaluation_and_while_saving(tmp_path, undisturbed, fabric):
    """Rank 2 in the all-reduce, rank 0 in an evaluation by a plain SIGKILL, rank 1, then the lead, in its last save."""
    faults = ("--inject", "kill:rank=2,step=1,phase=allreduce", "--inject", "kill:rank=1,step=8,phase=save")
    report = run_report(
        tmp_path, "-n", 4, "--fabric", fabric, *faults, SCRIPT, tmp_path / "out", env={"KILL": "0:4:evaluate"}
    )

    assert_landed(report, 0, 1, 2)
    assert weights(report["_stdout"]) == {undisturbed}
    assert saved(tmp_path / "out" / "final") == saved(tmp_path / "out" / "checkpoint-8") == undisturbed
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"checkpoint-4", "checkpoint-8", "final"}


def test_over_ddp_on_gloo_the_same_script_does_not_finish(tmp_path):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "KILL": "1:3:step"}
    workers = [alone(SCRIPT, tmp_path, "ddp", **common, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]

    said = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]

    assert workers[1].returncode == -9
    assert workers[0].returncode == 1, said[0]
    assert "Connection closed by peer" in said[0] or "Connection reset by peer" in said[0]
    assert weights(said[0]) == set()


def test_the_changed_lines_of_a_script_are_two():
    before, after = (
        [
            line
            for line in (ROOT / "examples" / "frameworks" / name).read_text().split("import torch\n")[1].splitlines()
            if line
        ]
        for name in ("transformers_before.py", "transformers_after.py")
    )

    assert len([line for line in after if line not in before]) == 2
    assert len([line for line in before if line not in after]) == 1


def test_the_callback_saves_and_stops_where_a_plain_trainer_over_ddp_would_fail(tmp_path):
    """First a rank receives SIGTERM: all stop after the same step. Then a rank is killed: the survivors save."""
    pytest.importorskip("mpi4py")  # the backend needs Open MPI
    script = ROOT / "tests" / "support" / "train_hf_ddp.py"

    done = holdfast("run", "-n", 3, script, tmp_path, timeout=LIMIT_S)

    assert done.returncode == 1
    assert re.findall(r"asked (\d)", done.stdout) == ["3"] * 3
    assert "received SIGTERM: saving and stopping after step 3" in done.stderr + done.stdout
    assert f"the state after step 4 is in {tmp_path}/killed/checkpoint-4: resume from it on 2 ranks" in done.stderr
    for folder in ("asked/checkpoint-3", "killed/checkpoint-4"):
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= {
            path.name for path in (tmp_path / folder).iterdir()
        }


def test_the_tutorial_shows_what_its_commands_print(tmp_path):
    done = executed((ROOT / "docs" / "tutorials" / "from-transformers.md").read_text(), tmp_path)

    assert len(done) == 2
    for command, printed in done:
        assert comparable(printed) == comparable(command.printed), f"$ {command.line}\n{printed}"
    undisturbed, disturbed = (re.findall(r"weights (\w+)", printed) for _, printed in done)
    assert set(disturbed) == set(undisturbed)
