"""All workers train on the same data, also after a resume: Python's hashes are the same, and other data are noticed."""

from __future__ import annotations

import json
import shutil

import pytest
from jobs import run_report

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = """
import json, os, sys
import torch, holdfast
from torch.utils.data import TensorDataset

kind, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
words = [f"word {n}" for n in range(40)]
numbers = {word: n for n, word in enumerate(set(words))}
with open(f"{folder}/{kind}-{rank}", "w") as file:
    json.dump([numbers, hash("a word")], file)

data = TensorDataset(torch.tensor([[hash(word) % 50, numbers[word]] for word in words], dtype=torch.float32))
if kind == "other":
    data = TensorDataset(data.tensors[0] + 1)
if kind == "part":
    data = TensorDataset(data.tensors[0][rank::2])
model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=1e-5))
for step in session.steps(data, 4, epochs=2):
    for (x,) in step:
        step.backward(model(x).mean())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_hashes_are_the_same_at_all_workers_and_when_the_job_resumes_and_other_data_are_noticed(tmp_path, script):
    how = ("-n", 2, "--fabric", "gloo", "--no-preload", "--checkpoint-dir", tmp_path / "c")

    def run(kind, *options, seed="", **expected):
        seeded = {"PYTHONHASHSEED": seed} if seed else {}
        report = run_report(tmp_path, *how, *options, script, kind, tmp_path, env=seeded, **expected)
        numbers = [json.loads((tmp_path / f"{kind}-{rank}").read_text()) for rank in range(2)]
        return numbers, report["_stdout"] + report["_stderr"]

    first, _ = run("first", "--stop-after", 10, seed="5", exit_code=4)
    same, output = run("same", "--resume", seed="6")

    assert first[0] == first[1]
    assert same == first
    said = "holdfast: PYTHONHASHSEED is 5 as when the checkpoint was made, and not 6 as in the environment"
    assert output.count(said) == 1
    assert "the data of this loop" not in output
    assert "hash()" not in output

    shutil.rmtree(tmp_path / "c" / "step-00000020", ignore_errors=True)  # the end of the loop, if it was saved
    other, output = run("other", "--resume")
    assert other == first, "the checkpoint's seed, not the job's"
    assert "not exact: the data of this loop are not those that the checkpoint was made with" in output


def test_a_dataset_that_has_a_part_by_rank_is_refused_before_the_first_step(tmp_path, script):
    report = run_report(tmp_path, "-n", 2, "--fabric", "gloo", script, "part", tmp_path, exit_code=93)

    assert report["error"]["message"].startswith(
        "workers have different samples in their datasets of 20: every worker must"
    )
    assert report["steps"] == 0
