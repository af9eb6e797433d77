"""`holdfast run` of a module, of a command, and in a step of Slurm."""

import json
import subprocess
import sys

import pytest
from jobs import clean_env, holdfast

from holdfast.base.slurm import read_step

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import holdfast

torch.manual_seed(0)
print("ran", __name__, __package__, sys.argv[1:], flush=True)
model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(TensorDataset(torch.ones(8, 2)), 4):
    for (x,) in step:
        step.backward(model(x).sum())
"""


@pytest.fixture
def package(tmp_path):
    """A directory with a package that has a script."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("workers", "words", "ran"),
    [
        (2, ["-m", "package.train"], "__main__ package"),
        (1, ["--no-preload", "--", sys.executable, "package/train.py"], "__main__ "),
    ],
    ids=["module", "command-without-fork-server"],
)
def test_a_module_and_a_command_train(package, workers, words, ran):
    options = ["--fabric", "gloo", "--nproc_per_node", workers, "--no-page", "--report", "out"]

    done = holdfast("run", *options, *words, "--word", "-n", cwd=package)

    assert done.returncode == 0, done.stderr
    report = json.loads((package / "out" / "report.json").read_text())
    assert (report["steps"], report["workers"]["finished"]) == (2, workers)
    for rank in range(workers):
        assert f"ran {ran} ['--word', '-n']\n" in (package / "out" / "logs" / f"rank-{rank}.log").read_text()


def test_the_report_of_a_module_says_how_to_run_it_again(package):
    holdfast("run", "--fabric", "virtual", "--no-page", "--report", "out", "-m", "package.train", cwd=package)

    report = json.loads((package / "out" / "report.json").read_text())
    assert report["job"]["module"] == "package.train"
    verified = holdfast("verify", "out", "--script", "package/train.py", cwd=package)
    assert verified.returncode == 0, verified.stderr
    elsewhere = holdfast("verify", "../out", "--script", "train.py", cwd=package / "package")
    assert elsewhere.returncode == 2
    assert "package.train" in elsewhere.stderr


def test_two_tasks_of_srun_are_two_nodes_of_one_job(package):
    step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": "localhost"}
    command = [sys.executable, "-m", "holdfast", "run", "--no-page", "package/train.py"]
    nodes = [
        subprocess.Popen(
            command, cwd=package, env=clean_env(**step, SLURM_NODEID=str(node)), stderr=subprocess.PIPE, text=True
        )
        for node in range(2)
    ]

    said = [node.communicate(timeout=120)[1] for node in nodes]

    assert [node.returncode for node in nodes] == [0, 0], said
    port = read_step(step).port
    for node in range(2):
        assert f"--node-rank {node} (SLURM_NODEID={node}), --rdzv holdfast://localhost:{port} (" in said[node]
