"""The reference's training as a script over Holdfast: ``train_reference.py MODEL OPTIMIZER [--features a,b] [--broken a]``."""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
import torch
import torch.nn.functional as F
from lagging import lagging
from torch.utils.data import TensorDataset

import holdfast
from holdfast.comm.device import Wait

STUCK_AT = 15
"""Number of the copy in which a device gets stuck, in the second or third step."""


class OwnNoise(reference.Noisy):
    """Noise that depends on the loading process, which is forbidden."""

    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x + 1e-5 * os.getpid(), y


def train(
    model_name, optimizer_name, raise_at=-1, pause=0.0, features=(), broken="", compute=False, **session_arguments
):
    """Train like the reference; return the session and the hash of the state.

    Args:
        model_name: A model of the reference.
        optimizer_name: An optimizer of the reference.
        raise_at: The lowest worker raises in this step.
        pause: Seconds before each step.
        features: Features of the reference.
        compute: Call ``step.compute`` instead of a loop.
        broken: A feature that is made to depend on the worker, or on the attempt, instead of the slice.
        session_arguments: Settings of the session.
    """
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    model = reference.make_model(model_name)
    optimizer = reference.make_optimizer(optimizer_name, model)
    scheduler = reference.make_scheduler(optimizer) if "scheduler" in features else None
    scaler = reference.make_scaler() if "scaler" in features else None
    ema = reference.make_ema(model) if "ema" in features else None
    average = reference.make_ema(model) if "average" in features else None
    session = holdfast.Session(
        model,
        optimizer,
        scheduler=None if broken == "scheduler" else scheduler,
        scaler=None if broken == "scaler" else scaler,
        average=average,
        clip_grad_norm=reference.LARGEST_NORM if "clip" in features and broken != "clip" else None,
        **({"seed": reference.SEED, "slices": reference.SLICES, "bucket_bytes": 4096} | session_arguments),
    )
    if ema is not None and broken != "ema":
        session.register(ema=ema)
    dataset = TensorDataset(*reference.data())
    if "augment" in features:
        dataset = OwnNoise() if broken in ("augment", "loaders") else reference.Noisy()
    if broken == "clip":
        for parameter in model.parameters():  # of a single slice, or of all slices of this worker
            parameter.register_hook(lambda grad: grad.clamp(-0.01 * session.world_size, 0.01 * session.world_size))
    for step in session.steps(
        dataset, reference.BATCH, reference.EPOCHS, num_workers=1 if "loaders" in features else 0
    ):
        if step.number == raise_at and session.is_lead:
            raise ValueError("the script has a bug")
        time.sleep(pause)
        if ema is not None and step.number:
            ema.update_parameters(model)
        if broken == "scheduler":
            scheduler.step()
        if broken == "average" and session.world_size < 4:
            average.update_parameters(model)
        if "evaluate" in features and step.number % 3 == 0:
            evaluate(model)
            if broken == "evaluate" and session.world_size < 4:
                model.eval()
        if compute:
            step.compute(in_precision(features, model), in_precision(features, F.cross_entropy))
            continue
        for x, y in step:
            with reference.lower_precision(features):
                loss = F.cross_entropy(model(x), y)
            if broken == "scaler":
                scaler.scale(loss)
                loss = loss * (1 + 1 / session.world_size)
            step.backward(loss)
    if ema is not None:
        ema.update_parameters(model)
        session.log(ema=reference.ema_hash(ema))
    return session, reference.state_hash(model, optimizer, average)


def in_precision(features, call):
    """Return ``call`` in the precision of the training."""

    def called(*given):
        with reference.lower_precision(features):
            return call(*given)

    return called


def evaluate(model):
    """Compute the accuracy, and draw some numbers: neither may affect the result."""
    x, y = reference.data()
    with torch.no_grad():
        accuracy = (model.eval()(x + torch.randn(x.shape)).argmax(1) == y).float().mean()
    model.train()
    return float(accuracy)


def turn_recovery_off():
    """A failed all-reduce raises into the script, as with any other library."""
    from holdfast.engine.loop import TrainingLoop

    def raise_it(run, error):
        raise error

    TrainingLoop._answer = raise_it


def turn_undo_off():
    """Updates of the overlapped optimizer stay when their step is rolled back."""
    from holdfast.models.overlap import UndoCopy

    UndoCopy.put_back = UndoCopy.forget


def main(options):
    """Train; called again after a failure under reinit."""
    session, state = train(
        options.model,
        options.optimizer,
        raise_at=options.raise_at,
        pause=options.pause,
        features=options.features,
        broken=options.broken,
        slices=options.slices or None,
        compute=options.compute,
    )
    if session.is_lead:
        print(f"state {state}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=(*reference.MODELS, reference.ROWS))
    parser.add_argument("optimizer", choices=reference.OPTIMIZERS)
    parser.add_argument("--no-recovery", action="store_true")
    parser.add_argument("--no-undo", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, so that newcomers can join")
    parser.add_argument(
        "--lagging", type=int, metavar="SEED", help="train on a device whose copies lag; see lagging.py"
    )
    parser.add_argument("--stuck", type=int, metavar="RANK", help="the rank whose device gets stuck in a copy")
    parser.add_argument("--skips", type=Wait.__getitem__, help="a wait that it leaves out")
    parser.add_argument("--slices", type=int, default=reference.SLICES, help="0: chosen by the job")
    parser.add_argument("--features", type=lambda text: tuple(text.split(",")) if text else (), default=())
    parser.add_argument("--compute", action="store_true", help="call step.compute instead of a loop over the slices")
    parser.add_argument("--broken", choices=reference.FEATURES, default="")
    parser.add_argument("--raise-at", type=int, default=-1, help="the lowest worker raises in this step")
    options = parser.parse_args()
    if options.no_recovery:
        turn_recovery_off()
    if options.no_undo:
        turn_undo_off()
    device = contextlib.nullcontext()
    if options.lagging is not None:
        rank = os.environ.get("HOLDFAST_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
        stuck_at = STUCK_AT if int(rank) == options.stuck else 0
        device = lagging(seed=options.lagging + int(rank), skips={options.skips}, stuck_at=stuck_at)
    with device:
        holdfast.reinit(lambda: main(options))
