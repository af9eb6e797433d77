"""What a training may have besides: augmentation, processes that load, clipping, a scaler, averages, schedulers, evaluation.

Under real kills it ends with the bits of a plain loop in torch that has the same; what each looks like when it depends on the
worker is in ``tests/unit/test_loading.py``.
"""

import pytest
import reference
import soak
from exact import SCRIPT, check_nothing_lost
from jobs import assert_landed, run_report

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
    assert report["replicas"]["sha256"] == soak.split_hash(kind, "adam", soak.FEATURES[kind])
    assert report["replicas"]["sha256"] != soak.split_hash(kind, "adam"), "they make a difference"
