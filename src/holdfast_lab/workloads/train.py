"""Train a model on a dataset, both chosen by name, and log the accuracy on its test set.

Run as one worker with ``python -m holdfast_lab.workloads.train``, as several with
``holdfast run -n 4 src/holdfast_lab/workloads/train.py --epochs 3``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

import holdfast
from holdfast_lab.workloads import OPTIMIZERS, load_dataset, make_model, make_optimizer
from holdfast_lab.workloads.data import IMAGE_DATASETS, DatasetPart
from holdfast_lab.workloads.models import IMAGE_MODELS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the training that ``arguments`` describe; the settings of the session come from the environment."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # the number of threads may change the bits
    torch.set_deterministic_debug_mode("error")
    dataset = load_dataset(options.dataset, options.data, limit=options.limit, size=options.size)
    channels, side, _ = dataset.shape
    seed = holdfast.Settings.from_env().seed
    model = make_model(options.model, dataset.num_classes, image=(channels, side), seed=seed)
    optimizer = make_optimizer(options.optimizer, model.parameters())
    session = holdfast.Session(model, optimizer, bucket_bytes=options.bucket_bytes)
    for step in session.steps(dataset.train, batch_size=options.batch_size, epochs=options.epochs):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    session.log(accuracy=accuracy(model, dataset.test))


def accuracy(model: torch.nn.Module, test: DatasetPart) -> float:
    """Return the fraction of ``test``, images and labels, that ``model`` classifies correctly.

    The model is left in its training or evaluation mode.
    """
    was_training = model.training
    model.eval()
    right = 0
    with torch.no_grad():
        for chunk in (slice(start, start + 1000) for start in range(0, len(test), 1000)):
            images, labels = test[chunk]
            right += int((model(images).argmax(1) == labels).sum())
    model.train(was_training)
    return right / len(test)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast_lab.workloads.train", description=__doc__)
    parser.add_argument("--dataset", choices=IMAGE_DATASETS, default="digits")
    parser.add_argument("--model", choices=IMAGE_MODELS, default="cnn")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step, over all workers")
    parser.add_argument("--data", type=Path, metavar="DIR", help="directory of datasets that are read from files")
    parser.add_argument("--limit", type=int, metavar="N", help="train on only the first N samples")
    parser.add_argument("--size", type=int, metavar="N", help="scale images to N x N pixels")
    parser.add_argument("--bucket-bytes", type=int, metavar="N", help="size of a gradient bucket")
    return parser


if __name__ == "__main__":
    main()
