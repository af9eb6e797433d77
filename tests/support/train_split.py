"""A model that is split over workers, as a script: ``train_split.py pipeline|sharded|whole [--no-recovery]``."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from train_reference import turn_recovery_off

import holdfast

WAIT_S = 60.0


class Stage(nn.Sequential):
    """Computes in lower precision, if the features say so."""

    features = ()
    dies_evaluating = False

    def forward(self, x):
        if self.dies_evaluating and not self.training:
            os.kill(os.getpid(), signal.SIGKILL)
        with reference.lower_precision(self.features):
            return super().forward(x)


def stages():
    """Four stages with difficult layers: batch norm, dropout, a stage without hidden layers."""
    return [
        lambda: Stage(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        lambda: Stage(nn.Dropout(0.3), nn.Flatten(), nn.Linear(512, 32)),
        lambda: Stage(nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32)),
        lambda: Stage(nn.Linear(32, 10)),
    ]


def loss(output, labels):
    return F.cross_entropy(output, labels), {"accuracy": (output.argmax(1) == labels).float().mean()}


def wait_for(path):
    ends_s = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < ends_s, f"{path} has not come"
        time.sleep(0.01)


def note(session, step, folder):
    """Save the parts held here, as they are before the step."""
    for part, held in session._trainable.resident.held.items():
        torch.save(held.state_dict(), folder / f"part-{part}-step-{step.number}-{step.attempt}.pt")


def evaluate(session, step, model, options):
    """Return the loss of all samples, before the step; nothing if a worker dies meanwhile."""
    x, y = reference.data()
    if options.kind == "pipeline":
        Stage.dies_evaluating = (step.number, session.rank) == (3, options.dies_evaluating)
        found = step.evaluate(TensorDataset(x, y), 16, averaged="average" in options.features and step.number % 2 == 0)
        return None if found is None else found["loss"]
    with torch.no_grad():
        found = float(F.cross_entropy(model.module.eval()(x), y))
    model.module.train()
    return found


def trained_with(features):
    """The session's settings for the features."""
    return {
        "clip_grad_norm": reference.LARGEST_NORM if "clip" in features else None,
        "scheduler": reference.make_scheduler if "scheduler" in features else None,
        "scaler": reference.make_scaler() if "scaler" in features else None,
        "average": reference.make_ema if "average" in features else None,
    }


def main(options):
    """Train; called again after a failure under reinit."""
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "adam": lambda p: torch.optim.Adam(p, lr=1e-3)}
    data = reference.Noisy() if "augment" in options.features else TensorDataset(*reference.data())
    settings = {"seed": reference.SEED, "slices": 4, "bucket_bytes": 4096} | trained_with(options.features)
    if options.kind == "pipeline":
        Stage.features = options.features
        model = holdfast.Pipeline(stages(), loss)
        session = holdfast.Session(model, make[options.optimizer], **settings)
    else:
        module = reference.make_model("cnn")
        model, optimizer = module, make[options.optimizer]
        if options.kind == "sharded":
            model = holdfast.Sharded(module, shards=options.shards)
        else:
            optimizer = optimizer(module.parameters())
        session = holdfast.Session(model, optimizer, **settings)
    ema = reference.make_ema(module) if "ema" in options.features else None
    if ema is not None:
        session.register(ema=ema)
    evaluated = None
    loaders = {"num_workers": 1 if "loaders" in options.features else 0}
    for step in session.steps(data, reference.BATCH, reference.EPOCHS, **loaders):
        time.sleep(options.pause)
        if options.wait_for and step.number == int(options.wait_for[0]):
            wait_for(Path(options.wait_for[1]))
        if options.note:
            note(session, step, options.note)
        if ema is not None and step.number:
            ema.update_parameters(module)
        if "evaluate" in options.features and step.number % 3 == 0:
            evaluated = evaluate(session, step, model, options)
        if options.kind == "pipeline":
            step.compute()
            continue
        for x, y in step:
            with reference.lower_precision(options.features):
                output = module(x)
                value, figures = loss(output, y)
            step.backward(value)
            step.log(**figures)
    if ema is not None:
        ema.update_parameters(module)
        session.log(ema=reference.ema_hash(ema))
    if evaluated is not None:  # a worker that joined after the last evaluation has none
        session.log(evaluated=evaluated)
    if session.is_lead:
        whole = model.module if options.kind == "pipeline" else module
        x, y = reference.data()
        with torch.no_grad():
            accuracy = (whole.eval()(x).argmax(1) == y).float().mean()
        session.log(test_accuracy=float(accuracy))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("pipeline", "sharded", "whole"))
    parser.add_argument("--optimizer", choices=reference.OPTIMIZERS, default="adam")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument(
        "--wait-for", nargs=2, metavar=("STEP", "PATH"), help="in this step wait until this file exists"
    )
    parser.add_argument("--note", type=Path, metavar="DIR", help="save the parts there before every step")
    parser.add_argument("--features", type=lambda text: tuple(text.split(",")) if text else (), default=())
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument(
        "--dies-evaluating",
        type=int,
        default=-1,
        metavar="RANK",
        help="the worker that dies while it evaluates the stages, in step 3",
    )
    parser.add_argument("--no-recovery", action="store_true")
    parsed = parser.parse_args()
    if parsed.no_recovery:
        turn_recovery_off()
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    holdfast.reinit(lambda: main(parsed))
