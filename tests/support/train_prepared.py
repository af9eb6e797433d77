"""A training loop as people write it, with ``holdfast.prepare`` in it.

    train_prepared.py [--dies-evaluating RANK] [--epochs N]

The rank kills itself in the evaluation between two steps, after step 9.
"""

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import holdfast

SAMPLES, BATCH, EPOCHS = 120, 15, 2


def data(seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


def evaluate(model, session, dies):
    """What a script does between two steps, here with a death."""
    if session.step == 9 and session.rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    model.eval()
    with torch.no_grad():
        x, y = data(2).tensors
        found = F.cross_entropy(model(x), y).item()
    model.train()
    return found


def train(dies=-1, epochs=EPOCHS, **settings):
    """Train; return the session."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    average = AveragedModel(model)
    loader = DataLoader(data(1), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler, average = holdfast.prepare(
        model, optimizer, loader, scheduler, average=average, **settings
    )
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            optimizer.zero_grad()
            if loader.committed and loader.step % 3 == 0:
                evaluate(model, loader.session, dies)
    loader.session.log(lr=scheduler.get_last_lr()[0], averaged=float(average.n_averaged))
    return loader.session


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dies-evaluating", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    train(options.dies_evaluating, options.epochs)
