"""Training on a device that is not the host: ``train_elsewhere.py KIND``; see elsewhere.py. Its numbers mean nothing."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from elsewhere import META, HostReads, elsewhere
from torch import nn
from torch.utils.data import TensorDataset

import holdfast


def main():
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(64, 4, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(META)
    optimizer = torch.optim.Adam(model.parameters())
    with elsewhere(), HostReads():
        session = holdfast.Session(model, optimizer, slices=4, bucket_bytes=64)
        for step in session.steps(dataset, 8, 1):
            time.sleep(float(sys.argv[1]))
            for x, y in step:
                step.backward(F.cross_entropy(model(x.to(META)), y.to(META)))
    assert {parameter.device for parameter in model.parameters()} == {META}


main()
