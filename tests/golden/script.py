"""The training of all golden jobs, over Holdfast's public names alone: ``script.py whole|pipeline|sharded [options]``.

Models and samples are those of the reference, tests/support/reference.py, which is plain torch.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import reference
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

PAUSE_S = 3.0
"""For a newcomer to come in."""
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def stages():
    """Four stages: with batch norm, with dropout, and one without hidden layers."""
    return [
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        lambda: nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Linear(512, 32)),
        lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32)),
        lambda: nn.Sequential(nn.Linear(32, 10)),
    ]


def loss(output, labels):
    """The loss of a slice, and what is logged."""
    return F.cross_entropy(output, labels), {"accuracy": (output.argmax(1) == labels).float().mean()}


def build(kind, model, optimizer, features, **settings):
    """Return the module, None of a pipeline, and the session."""
    settings = {"seed": reference.SEED, "bucket_bytes": 4096} | settings
    if "clip" in features:
        settings["clip_grad_norm"] = reference.LARGEST_NORM
    if kind == "pipeline":
        return None, holdfast.Session(holdfast.Pipeline(stages(), loss), OPTIMIZERS[optimizer], **settings)
    module = reference.make_model(model)
    if kind == "sharded":
        makers = {"scheduler": reference.make_scheduler, "average": reference.make_ema}
        settings |= {name: make for name, make in makers.items() if name in features}
        return module, holdfast.Session(holdfast.Sharded(module, shards=4), OPTIMIZERS[optimizer], **settings)
    made = OPTIMIZERS[optimizer](module.parameters())
    if "scheduler" in features:
        settings["scheduler"] = reference.make_scheduler(made)
    if "scaler" in features:
        settings["scaler"] = reference.make_scaler()
    if "average" in features:
        settings["average"] = reference.make_ema(module)
    return module, holdfast.Session(module, made, **settings)


def train(kind, model="mlp", optimizer="sgd", features=(), awaits=0, epochs=reference.EPOCHS, **settings):
    """Train; return the session."""
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    module, session = build(kind, model, optimizer, features, **settings)
    ema = reference.make_ema(module) if "ema" in features else None
    if ema is not None:
        session.register(ema=ema)
    data = reference.Noisy() if "augment" in features else TensorDataset(*reference.data())
    loaders = 1 if "loaders" in features else 0
    for step in session.steps(data, reference.BATCH, epochs, num_workers=loaders):
        if session.world_size < awaits:
            time.sleep(PAUSE_S)
        if ema is not None and step.number:
            ema.update_parameters(module)
        if kind == "pipeline":
            step.compute()
        elif "compute" in features:
            step.compute(module, F.cross_entropy)
        else:
            by_slices(step, module, features)
    if ema is not None:
        session.log(ema=reference.ema_hash(ema))
    return session


def by_slices(step, module, features):
    """Compute a step slice by slice, and log."""
    for x, y in step:
        with reference.lower_precision(features):
            value, figures = loss(module(x), y)
        step.backward(value)
        step.log(**figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("whole", "pipeline", "sharded"))
    parser.add_argument("--model", default="mlp", choices=(*reference.MODELS, reference.ROWS))
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS)
    parser.add_argument("--features", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--epochs", type=int, default=reference.EPOCHS)
    parser.add_argument("--awaits", type=int, default=0, help="steps take longer while there are fewer workers")
    options = parser.parse_args()
    holdfast.reinit(lambda: train(**vars(options)))
