"""A Fabric script: ``train_fabric.py OUT``. Every process that reaches the end writes ``OUT/done-RANK.json``."""

import json
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.nn import functional as F
from train_lightning import RANK, Saving, loaders, reach, sha256


def train(out):
    seed_everything(0, verbose=False)
    fabric = Fabric(accelerator="cpu", strategy="holdfast")
    fabric.launch()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    training, validation = fabric.setup_dataloaders(*loaders())
    module, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
    done = {"losses": [], "evaluated": [], "gathered": float(fabric.all_reduce(torch.ones(()), reduce_op="sum"))}
    for epoch in range(3):
        module.train()
        for x, y in training:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            training.holdfast.log(half=loss / 2)
            fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=0.5)
            optimizer.step()
            scheduler.step()
            if training.holdfast.committed:
                done["losses"].append(training.holdfast.metrics)
        module.eval()
        with torch.no_grad():
            done["evaluated"].append(sum(float(F.cross_entropy(module(x), y)) for x, y in validation))
        reach("evaluate")
        fabric.save(out / f"{epoch}.ckpt", {"model": module, "optimizer": optimizer, "saving": Saving()})
    loaded = fabric.load(out / "1.ckpt")
    return done | {"sha256": sha256(model), "lr": scheduler.get_last_lr(), "loaded": sorted(loaded)}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / f"done-{RANK}.json").write_text(json.dumps(train(out)))
