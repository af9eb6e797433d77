"""A job of some steps that logs: two scalars a step, and one after training."""

import argparse
import time

import torch
from torch.utils.data import TensorDataset

import holdfast


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.randn(6 * options.steps, 2)
    for step in session.steps(TensorDataset(data), 6, epochs=1):
        time.sleep(options.step_s)
        for (x,) in step:
            y = model(x)
            step.log(mean=y.mean())
            step.backward((y - 1).pow(2).mean())
    session.log(accuracy=0.5)


if __name__ == "__main__":
    main()
