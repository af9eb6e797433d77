"""Training on a device that is not the host: ``train_elsewhere.py PAUSE KIND``; see elsewhere.py. Its numbers mean nothing."""

import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from elsewhere import META, HostReads, elsewhere
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter", category=UserWarning)


def layers():
    return [lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).to(META), lambda: nn.Linear(8, 3).to(META)]


def adam(parameters):
    return torch.optim.Adam(parameters)


def main(pause_s, kind):
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(64, 4, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    model = nn.Sequential(*(make() for make in layers()))
    given = {
        "replicated": (model, adam(model.parameters())),
        "sharded": (holdfast.Sharded(model), adam),
        "pipeline": (holdfast.Pipeline(layers(), F.cross_entropy), adam),
    }[kind]
    with elsewhere(), HostReads():
        session = holdfast.Session(*given, slices=4, bucket_bytes=64)
        for step in session.steps(dataset, 8, 1):
            time.sleep(pause_s)
            if kind == "pipeline":
                if step.number == 3:
                    step.evaluate(dataset, 16)
                step.compute()
                continue
            for x, y in step:
                step.backward(F.cross_entropy(model(x.to(META)), y.to(META)))
    trained = given[0].module if kind == "pipeline" else model
    assert {tensor.device for tensor in (*trained.parameters(), *trained.buffers())} == {META}


main(float(sys.argv[1]), sys.argv[2])
