"""The reference's training as a script over Holdfast: ``train_reference.py MODEL OPTIMIZER [--broken WHAT]``."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import holdfast


def train(model_name, optimizer_name, raise_at=-1, pause=0.0, **session_arguments):
    """Train like the reference does; return the session and the hash of the state."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = reference.make_model(model_name)
    optimizer = reference.make_optimizer(optimizer_name, model)
    session = holdfast.Session(
        model,
        optimizer,
        **({"seed": reference.SEED, "slices": reference.SLICES, "bucket_bytes": 4096} | session_arguments),
    )
    for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, reference.EPOCHS):
        if step.number == raise_at and session.is_lead:
            raise ValueError("the script has a bug")
        time.sleep(pause)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    return session, reference.state_hash(model, optimizer)


def turn_recovery_off():
    """A failed sum raises into the script, as it does everywhere else."""
    from holdfast.train.run import Run

    def raise_it(run, error):
        raise error

    Run._answer = raise_it


def turn_undo_off():
    """What was updated eagerly stays when its step is taken back."""
    from holdfast.train.eager import UndoCopy

    UndoCopy.put_back = UndoCopy.forget


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=reference.MODELS)
    parser.add_argument("optimizer", choices=reference.OPTIMIZERS)
    parser.add_argument("--no-recovery", action="store_true")
    parser.add_argument("--no-undo", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, for newcomers to come in")
    parser.add_argument("--raise-at", type=int, default=-1, help="the lowest worker raises in this step")
    options = parser.parse_args()
    if options.no_recovery:
        turn_recovery_off()
    if options.no_undo:
        turn_undo_off()
    session, state = train(options.model, options.optimizer, raise_at=options.raise_at, pause=options.pause)
    if session.is_lead:
        print(f"state {state}")
