"""Training in which bits flip in one worker's memory: ``train_flip.py [--flip RANK:STEP:WHAT:BIT]...``.

WHAT is a parameter, such as 1.weight, or one of its optimizer tensors, such as 1.weight/exp_avg; the bit flips in its
last number, once, just before the step is computed: after its fingerprint is taken. The model is so large that its
fingerprints take several steps.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

BATCH, EPOCHS = 32, 4
STEPS = EPOCHS * -(-reference.SAMPLES // BATCH)


def flip(model, optimizer, what, bit):
    """Alter one bit of the last number of a tensor, in place."""
    name, _, key = what.partition("/")
    parameter = dict(model.named_parameters())[name]
    tensor = optimizer.state[parameter][key] if key else parameter.data
    numbers = tensor.view(-1).view(torch.int32)
    numbers[-1] ^= -(1 << 31) if bit == 31 else 1 << bit


def train(flips=(), sticky=False, lr=1e-3, epochs=EPOCHS, pause=0.0, **settings):
    """Train; return the session and the hash of the state."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    session = holdfast.Session(model, optimizer, seed=7, slices=4, bucket_bytes=65536, **settings)
    left = list(flips)
    for step in session.steps(TensorDataset(*reference.data()), BATCH, epochs):
        for due in [each for each in left if each[:2] == (session.rank, step.number)]:
            if not sticky:
                left.remove(due)
            flip(model, optimizer, *due[2:])
        time.sleep(pause)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    return session, reference.state_hash(model, optimizer)


def parse(text):
    rank, step, what, bit = text.split(":")
    return int(rank), int(step), what, int(bit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--flip", action="append", default=[], type=parse)
    parser.add_argument("--sticky", action="store_true", help="the bit flips whenever its step is begun")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, so that newcomers can join")
    options = parser.parse_args()
    session, state = train(options.flip, options.sticky, pause=options.pause)
    if session.is_lead:
        print(f"state {state}")
