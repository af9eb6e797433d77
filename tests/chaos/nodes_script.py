"""The reference's training, in which every worker says before each step how many it has committed."""

import argparse
import functools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import reference
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import holdfast
from holdfast.comm.c10d import C10dCommunicator

parser = argparse.ArgumentParser()
parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
parser.add_argument("--hold", metavar="FILE", type=Path, help="wait in the middle of training until it is there")
parser.add_argument(
    "--paced", metavar="FOLDER", type=Path, help="wait before each step until a file named after it is there"
)
parser.add_argument(
    "--fail", metavar="FILE", type=Path, help="as long as it is there no sum completes, though nobody dies"
)
options = parser.parse_args()


def fail_while(path):
    """Have sums raise, as a network does through which workers reach the store, but not each other."""
    run = C10dCommunicator._run

    def begin_or_fail(begin, group):
        if path.exists():
            msg = "no sum is possible just now"
            raise RuntimeError(msg)
        return begin(group)

    C10dCommunicator._run = lambda self, begin: run(self, functools.partial(begin_or_fail, begin))


settings = {}
if options.fail:
    fail_while(options.fail)
    settings["shared_bytes"] = 0  # sums through shared memory know no network
torch.set_num_threads(1)
torch.set_deterministic_debug_mode("error")
model = reference.make_model("mlp")
session = holdfast.Session(
    model,
    reference.make_optimizer("sgd", model),
    seed=reference.SEED,
    slices=reference.SLICES,
    bucket_bytes=4096,
    **settings,
)
for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, reference.EPOCHS):
    print(f"committed {session.step}", flush=True)
    time.sleep(options.pause)
    while options.hold and step.number == reference.STEPS // 2 and not options.hold.exists():
        time.sleep(0.01)
    while options.paced and not (options.paced / str(step.number)).exists():
        time.sleep(0.01)
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
print(f"committed {session.step}", flush=True)
