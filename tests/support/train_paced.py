"""Training in which chosen workers are slow: ``train_paced.py [--nap RANK STEP SECONDS HOW]...``.

STEP may be ``all``. HOW is ``busy``, if the script announces it, or ``quiet``; the time is spent once for each slice,
or once in a step. Results do not depend on it.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import holdfast

SLICES = 8


def train(epochs, naps=(), **session_arguments):
    """Train; return the hash of the state."""
    torch.set_num_threads(1)
    model = reference.make_model("mlp")
    optimizer = reference.make_optimizer("sgd", model)
    session = holdfast.Session(model, optimizer, **({"seed": reference.SEED, "slices": SLICES} | session_arguments))
    shares = {}
    for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, epochs):
        shares[step.number] = len(step.slices)
        for rank, number, seconds, how in naps:
            if session.rank == int(rank) and number == str(step.number) and step.attempt == 0:
                with session.busy() if how == "busy" else contextlib.nullcontext():
                    time.sleep(float(seconds))
        for x, y in step:
            for rank, number, seconds, _ in naps:
                if session.rank == int(rank) and number == "all":
                    time.sleep(float(seconds))
            step.backward(F.cross_entropy(model(x), y))
    print(f"slices {shares[min(shares)]} {shares[max(shares)]}")
    return reference.state_hash(model, optimizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--nap", nargs=4, action="append", default=[], metavar=("RANK", "STEP", "SECONDS", "HOW"))
    options = parser.parse_args()
    train(options.epochs, options.nap)
