"""Two small image classifiers, the same for the same seed, quick enough for two cores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from holdfast.errors import ConfigError

MODELS = ("mlp", "cnn")
"""What :func:`make_model` knows."""


def make_model(name: str, image_shape: Sequence[int], num_classes: int = 10, *, seed: int = 0) -> nn.Module:
    """Return the model called ``name``; the same arguments give the same weights.

    Args:
        name: One of :data:`MODELS`.
        image_shape: Channels, height and width of one sample.
        num_classes: Outputs.
        seed: Of the initial weights. The global generator of torch is left as it was.

    Raises:
        ConfigError: if there is no such model.
    """
    if name not in MODELS:
        msg = f"model must be one of {', '.join(MODELS)}, got {name!r}"
        raise ConfigError(msg)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return {"mlp": mlp, "cnn": cnn}[name](image_shape, num_classes)


def mlp(image_shape: Sequence[int], num_classes: int = 10) -> nn.Module:
    """Return two hidden layers with dropout: 26,122 parameters for 8x8 images and 10 classes."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(image_shape), 128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def cnn(image_shape: Sequence[int], num_classes: int = 10) -> nn.Module:
    """Return two convolutions with batch norm, then dropout and two linear layers: 55,114 parameters for 10 classes.

    All norms are over images, not over vectors: a slice of one sample still has a variance there. Sides are
    pooled down to 4, so they must be 4 at least.
    """
    channels, height, width = image_shape
    pooled_height, pooled_width = height // (height // 4), width // (width // 4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d((height // 4, width // 4)),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(32 * pooled_height * pooled_width, 96),
        nn.ReLU(),
        nn.Linear(96, num_classes),
    )
