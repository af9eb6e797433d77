"""Two small image classifiers, fast enough for two cores."""

from __future__ import annotations

from torch import nn

from holdfast_lab.workloads.models.blocks import Block, Image, NetworkLayout


def mlp(num_classes: int, image: Image) -> NetworkLayout:
    """Return two hidden layers with dropout: 26,122 parameters for 8x8 images and 10 classes."""
    channels, side = image
    blocks = (
        Block(
            "layer1",
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(channels * side**2, 128), nn.ReLU(), nn.Dropout(0.1)),
        ),
        Block("layer2", lambda: nn.Sequential(nn.Linear(128, 128), nn.ReLU())),
        Block("head", lambda: nn.Linear(128, num_classes)),
    )
    return NetworkLayout(blocks, (channels, side, side))


def cnn(num_classes: int, image: Image) -> NetworkLayout:
    """Return two convolutions with batch norm, then dropout and two linear layers: 55,114 parameters for 10 classes.

    All norms are over images and not over vectors, so a slice of one sample still has a variance. Images are
    pooled down to a side of 4, or up to 7 if 4 does not divide it, so the side must be at least 4.
    """
    channels, side = image
    shrink = side // 4
    inputs = 32 * (side // shrink) ** 2
    blocks = (
        Block("conv1", lambda: _convolution(channels, 16)),
        Block("conv2", lambda: nn.Sequential(*_convolution(16, 32), nn.MaxPool2d(shrink), nn.Dropout(0.25))),
        Block("layer1", lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, 96), nn.ReLU())),
        Block("head", lambda: nn.Linear(96, num_classes)),
    )
    return NetworkLayout(blocks, (channels, side, side))


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
