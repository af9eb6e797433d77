"""What training loses if gradients travel in 16 bits: loss and accuracy on held-out digits, with and without.

    python benchmarks/allreduce/sixteen_bits.py [--seeds 10] [--epochs 6] [--workers 4] [--json FILE]

For each seed, the CNN of ``examples/01_survive_a_kill.py`` is trained with each order, from the same weights, on the
same mini-batches. Differences are taken within a seed, so the interval (95 %, by bootstrap over seeds) is that of what the
order changes. ``seeds`` is for comparison: the spread of the loss between seeds. All workers are virtual: the bits are
those of real ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from common import command_line, mean_interval, table, write_json
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

HELD_OUT = 297
ORDERS = ("fold", "fold-bf16", "tree", "tree-bf16-2")


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)


def make_model(seed: int) -> nn.Module:
    """Return the model with the weights of a seed."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(512, 10))


def train(order: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train with an order; return loss and accuracy on the held-out images, and the last loss of training."""
    images, labels = digits()
    data, model = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]), make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = holdfast.Session(
        model, optimizer, fabric="virtual", workers=options.workers, order=order, seed=seed, certificate=False
    )
    for step in session.steps(data, batch_size=128, epochs=options.epochs):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    model.eval()
    with torch.no_grad():
        out = model(images[:HELD_OUT])
        right = (out.argmax(1) == labels[:HELD_OUT]).float().mean().item()
        loss = F.cross_entropy(out, labels[:HELD_OUT]).item()
    return {"loss": loss, "accuracy": right, "train_loss": session.metrics["loss"]}


def main() -> None:
    """Train, and print the differences."""
    options = command_line(__doc__, seeds=10, epochs=6, workers=4).parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {
        order: [train(order, seed, options) for seed in range(options.seeds)] for order in ORDERS
    }
    rows, differences = [], {}
    for order, base in (("fold-bf16", "fold"), ("tree-bf16-2", "tree"), ("tree", "fold")):
        for what in ("loss", "accuracy", "train_loss"):
            each = [a[what] - b[what] for a, b in zip(found[order], found[base], strict=True)]
            mean, low, high = differences[f"{order} - {base}: {what}"] = mean_interval(each, 2000)
            usual = [one[what] for one in found[base]]
            cells: list[Any] = [f"{order} - {base}", what, f"{statistics.fmean(usual):.4f}"]
            spread = statistics.stdev(usual) if len(usual) > 1 else math.nan
            rows.append([*cells, f"{mean:+.5f}", f"{low:+.5f} to {high:+.5f}", f"{spread:.4f}"])
    head = ["difference", "of", "mean of the second", "mean difference", "95 %", "seeds"]
    print(table(f"digits CNN, {options.epochs} epochs, {options.seeds} seeds", head, rows))
    write_json(options.json, options=vars(options), found=found, differences=differences)


if __name__ == "__main__":
    main()
