"""The reference's training as an application that can be rebuilt: ``train_reinit.py [--die WHEN:RANK]... [--leak]``."""

import argparse
import os
import signal
import sys
import time
import weakref
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import holdfast
from holdfast.engine.reinit_context import application

parser = argparse.ArgumentParser()
parser.add_argument("--die", action="append", default=[], help="build:RANK or load:RANK, in the second application")
parser.add_argument("--leak", action="store_true", help="keep the first model")
parser.add_argument("--forget", action="store_true", help="negative control: the snapshot lacks the optimizer's state")
parser.add_argument("--await-at", type=int, default=-1, metavar="STEP", help="wait for a newcomer in this step")
options = parser.parse_args()

models = []
leaked = []


def die(when, rank):
    if len(models) == 2 and f"{when}:{rank}" in options.die:
        os.kill(os.getpid(), signal.SIGKILL)


class Bomb:
    """An object with state, at whose loading a worker may die."""

    def __init__(self, session):
        self._session = session

    def state_dict(self):
        return {"nothing": 0}

    def load_state_dict(self, state):
        die("load", self._session.rank)


def main():
    model = reference.make_model("cnn")
    optimizer = reference.make_optimizer("adam", model)
    if any(model() is not None for model in models):
        print("an old model is still there")
    models.append(weakref.ref(model))
    if options.leak:
        leaked.append(model)
    if options.forget and len(models) == 2:
        application.job.rebuilds.snapshot.state["replica"]["optimizer"]["state"] = {}
    session = holdfast.Session(model, optimizer, seed=reference.SEED, slices=reference.SLICES, bucket_bytes=4096)
    session.register(bomb=Bomb(session))
    die("build", session.rank)
    for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, reference.EPOCHS):
        if step.number == options.await_at:
            with session.busy():
                while not session._job.comm.newcomers(session._job.loop):
                    time.sleep(0.01)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    if session.is_lead:
        print(f"state {reference.state_hash(model, optimizer)} after {len(models)} applications")


torch.set_num_threads(1)
torch.set_deterministic_debug_mode("error")
holdfast.reinit(main)
