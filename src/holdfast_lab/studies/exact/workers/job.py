"""Train a small network on digits with an extra delay per sample; a script for ``holdfast run``.

The delay is a sleep, so it needs no core: each worker behaves as if it had its own device.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast_lab.workloads import load_dataset, loss_of, make_model, make_optimizer


def main() -> None:
    """Train with the options of the command line; the settings of the session come from the environment."""
    options = _parse()
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    data = load_dataset("digits", None)
    index = torch.arange(options.steps * options.batch) % len(data.train)
    samples = TensorDataset(*data.train[index])
    channels, side, _ = data.shape
    model = make_model("mlp", data.num_classes, image=(channels, side), seed=holdfast.Settings.from_env().seed)
    session = holdfast.Session(model, make_optimizer("sgd", model.parameters()))
    for step in session.steps(samples, options.batch):
        for x, y in step:
            time.sleep(len(y) * options.sample_s)
            step.backward(loss_of(model(x), y))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of a mini-batch")
    parser.add_argument("--sample-s", type=float, required=True, help="delay per sample, seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
