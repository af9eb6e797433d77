"""What a training may have besides: augmentation, processes that load, clipping, a scaler, averages, schedulers, evaluation.

Under real kills it ends with the bits of a plain loop in torch that has the same; what each looks like when it depends on the
worker is in ``tests/unit/test_loading.py``.
"""

import pytest
import reference
import soak
import train_bf16
from exact import SCRIPT, check_nothing_lost
from jobs import ROOT, assert_landed, run_report

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # the scaler leaves the first steps out
]

KILLS = ("--inject", "kill:rank=1,step=3,phase=allreduce,bucket=0", "--inject", "kill:rank=0,step=8,phase=optimizer")


@pytest.mark.parametrize(
    ("fabric", "case"),
    [("ulfm", ("cnn", "adam")), pytest.param("gloo", ("mlp", "sgd"), marks=pytest.mark.soak)],
    ids=["ulfm", "gloo"],
)
def test_a_training_that_has_everything_ends_with_the_same_bits(tmp_path, fabric, case):
    job = ("-n", 3, "--fabric", fabric, *KILLS)

    report = run_report(tmp_path, *job, SCRIPT, *case, f"--features={','.join(reference.FEATURES)}")

    state, average = reference.train(*case, reference.FEATURES)
    check_nothing_lost(report, state, [2])
    assert_landed(report, 0, 1)
    assert int(report["metrics"]["ema"]) == average


@pytest.mark.soak
@pytest.mark.parametrize("kind", soak.SPLIT)
def test_a_split_model_with_all_that_it_may_have_ends_with_the_same_bits(tmp_path, kind):
    features = f"--features={','.join(soak.FEATURES[kind])}"
    kill = ("--inject", "kill:rank=1,step=0,phase=backward")  # of which the gradients are too large

    report = run_report(tmp_path, "-n", 4, *kill, soak.SPLIT_SCRIPT, kind, features)

    assert_landed(report, 1)
    assert soak.split_end(report) == soak.split_hash(kind, "adam", soak.FEATURES[kind])
    assert soak.split_end(report) != soak.split_hash(kind, "adam"), "they make a difference"


@pytest.mark.parametrize("fabric", ["ulfm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_a_worker_that_dies_in_an_evaluation_changes_nothing(tmp_path, fabric):
    features = ("average", "evaluate")
    dies = ("--dies-evaluating", 1, f"--features={','.join(features)}")

    report = run_report(tmp_path, "-n", 4, "--fabric", fabric, soak.SPLIT_SCRIPT, "pipeline", *dies)

    assert_landed(report, 1)
    assert soak.split_end(report) == soak.split_hash("pipeline", "adam", features)


UNLIKE = """
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast


class Own:
    def __init__(self, value):
        self.value = torch.full((3,), value)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"].clone()


model = nn.Linear(4, 1)  # of numbers that no seed says
session = holdfast.Session(KIND, OPTIMIZER)
own = Own(float(session.rank + 7))
session.register(own=own)
for step in session.steps(TensorDataset(torch.ones(8, 4)), 4):
    for (x,) in step:
        step.backward(model(x).mean())
session.log(own=own.value.sum())
print("own", own.value.tolist())
"""


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("model", "torch.optim.SGD(model.parameters(), lr=0.1 + os.getpid() % 97)"),
        ("holdfast.Sharded(model)", "lambda p: torch.optim.SGD(p, lr=0.1)"),
    ],
    ids=["whole", "sharded"],
)
def test_what_differs_where_a_script_is_not_seeded_is_that_of_the_lowest_worker(tmp_path, kind, optimizer):
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE.replace("KIND", kind).replace("OPTIMIZER", optimizer))

    report = run_report(tmp_path, "-n", 2, script)

    assert report["replicas"]["identical"] is True
    assert report["metrics"]["own"] == 21.0
    assert (report["_stdout"] + report["_stderr"]).count("own [7.0, 7.0, 7.0]") == 2


def test_a_model_in_bfloat16_that_is_added_in_float32_survives_a_kill(tmp_path):
    kill = "kill:rank=1,step=3,phase=allreduce,bucket=1"
    script = ROOT / "tests" / "support" / "train_bf16.py"

    report = run_report(
        tmp_path, "-n", 3, "--order", "tree-wide", "--inject", kill, script,
        env={"HOLDFAST_SHARED_BYTES": "0"},
    )  # fmt: skip

    assert_landed(report, 1)
    assert report["_stdout"].count(f"weights {train_bf16.train(order='tree-wide')}") >= 1
    assert report["workers"]["ranks_finished"] == [0, 2]
