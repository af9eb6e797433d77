"""A pipeline as a script: ``train_pipeline.py [--stages N] [--await STEP]...``."""

import argparse
import functools
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent))

import reference
import train_split

LIMIT_S = 120
SAMPLES = 193
"""Chosen so that the last mini-batch of an epoch has one sample, and most slices none."""


def stages(count):
    """The stages of train_split, joined into ``count``: 1, 2 or 4."""
    made = train_split.stages()
    size = len(made) // count
    join = lambda first: nn.Sequential(*(make() for make in made[first : first + size]))  # noqa: E731
    return [functools.partial(join, first) for first in range(0, len(made), size)]


def train(count, awaited=(), **settings):
    """Train; return the session.

    Args:
        count: Number of stages.
        awaited: Steps in which the lead waits for a newcomer.
        **settings: Settings of the session.
    """
    torch.set_num_threads(1)
    model = holdfast.Pipeline(stages(count), train_split.loss)
    settings = {"seed": reference.SEED, "slices": 4, "bucket_bytes": 4096} | settings
    session = holdfast.Session(model, lambda p: torch.optim.Adam(p, lr=1e-3), **settings)
    for step in session.steps(
        TensorDataset(*(whole[:SAMPLES] for whole in reference.data())), reference.BATCH, reference.EPOCHS
    ):
        if step.number in awaited and step.attempt == 0 and session.is_lead:
            wait_for_newcomer(session)
        step.compute()
    return session


def wait_for_newcomer(session):
    """Wait for a newcomer; the other workers wait for this worker meanwhile."""
    ends_s = time.monotonic() + LIMIT_S
    with session.busy():
        while not session._job.comm.newcomers(session._job.loop):
            if time.monotonic() > ends_s:
                raise TimeoutError("no newcomer came")
            time.sleep(0.01)


@functools.cache
def undisturbed(count):
    """The hash of an undisturbed run with one worker."""
    return train(count, workers=1, fabric="virtual")._trainable.sha256s((0,))[0][1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--await", type=int, action="append", default=[], dest="awaited", metavar="STEP")
    options = parser.parse_args()
    train(options.stages, options.awaited)
