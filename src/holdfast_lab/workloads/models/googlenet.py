"""GoogLeNet, with or without its two auxiliary heads (C. Szegedy et al. 2014)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from holdfast_lab.workloads.models.blocks import SMALL_BELOW, Block, Image, NetworkLayout

_INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Channels of 1x1; of 3x3 and its reduction; of the second 3x3 and its reduction; of the pooling projection (table 1 of
the paper)."""
_POOLED = {"3b": 3, "4e": 2}
"""Inception modules followed by a pooling that halves the images, and the size of that pooling."""
_HEADS = {"4a": "aux1", "4d": "aux2"}
"""Inception modules followed by an auxiliary head."""

_Passed = torch.Tensor | tuple[torch.Tensor, ...]
"""Images; or images, then the scores of the heads so far."""


def googlenet(num_classes: int, image: Image, *, aux: bool = False) -> NetworkLayout:
    """Return GoogLeNet as torchvision builds it: 6,624,904 parameters, 13,004,888 with the auxiliary heads.

    Torchvision's has batch norm after every convolution, and 3x3 where the paper has 5x5. BVLC's, in Caffe, which is
    close to the paper, has 5x5, biases and no batch norm: 6,998,552 parameters, 13,378,280 with the heads. Both are for
    1000 classes.

    The small form begins with one 3x3 convolution of stride 1 to 192 channels and no pooling, instead of three
    convolutions and two poolings: 5,487,530 parameters for 10 classes of 1x28x28, 5,490,986 for 3x32x32, with the heads
    9,838,014 and 9,841,470.

    Args:
        num_classes: Outputs of each head.
        image: Channels and side.
        aux: Whether the auxiliary heads exist. The network then returns, while training, the scores of its last
            head and of both auxiliary heads; from the first of these on, blocks pass such a
            tuple on, too. The weights of the other blocks are the same with and without them.
    """
    channels, side = image
    blocks = [*_small_stem(channels)] if side < SMALL_BELOW else [*_stem(channels)]
    channels = 192
    for name, widths in _INCEPTIONS.items():
        blocks.append(Block(f"inception{name}", partial(_inception, channels, widths, _POOLED.get(name))))
        channels = _width(widths)
        if aux and name in _HEADS:
            blocks.append(Block(_HEADS[name], partial(_head, channels, num_classes)))
    blocks.append(Block("head", partial(_last, channels, num_classes)))
    return NetworkLayout(tuple(blocks), (image[0], side, side))


class SideBranch(nn.Sequential):
    """Layers for the images; the scores of earlier heads pass unchanged."""

    def forward(self, x: _Passed) -> _Passed:
        """Take images, or images and scores, and return the same kind."""
        if isinstance(x, torch.Tensor):
            return _through(self, x)
        return (_through(self, x[0]), *x[1:])


class AuxiliaryHead(nn.Sequential):
    """Layers that score the images while training; the images pass unchanged."""

    def forward(self, x: _Passed) -> _Passed:
        """Take images, or images and scores; add this head's scores when training."""
        if not self.training:
            return x
        passed = (x,) if isinstance(x, torch.Tensor) else x
        return (*passed, _through(self, passed[0]))


class Inception(nn.Module):
    """Four parallel branches whose channels are concatenated.

    Args:
        channels: Input channels.
        widths: As in ``_INCEPTIONS``.
    """

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = widths
        self.one = _normed(channels, one, 1)
        self.three = nn.Sequential(_normed(channels, before_three, 1), _normed(before_three, three, 3, padding=1))
        self.five = nn.Sequential(_normed(channels, before_five, 1), _normed(before_five, five, 3, padding=1))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1, ceil_mode=True), _normed(channels, pooled, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take images of shape ``(samples, channels, height, width)``."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


def _through(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _stem(channels: int) -> Iterator[Block]:
    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    yield Block("conv1", lambda: _drawn(nn.Sequential(_normed(channels, 64, 7, stride=2, padding=3), pool())))
    yield Block("conv2", lambda: _drawn(_normed(64, 64, 1)))
    yield Block("conv3", lambda: _drawn(nn.Sequential(_normed(64, 192, 3, padding=1), pool())))


def _small_stem(channels: int) -> Iterator[Block]:
    yield Block("conv1", lambda: _drawn(_normed(channels, 192, 3, padding=1)))


def _inception(channels: int, widths: tuple[int, ...], pool: int | None) -> nn.Module:
    layers: list[nn.Module] = [Inception(channels, widths)]
    if pool:
        layers.append(nn.MaxPool2d(pool, 2, ceil_mode=True))
    return _drawn(SideBranch(*layers))


def _width(widths: tuple[int, ...]) -> int:
    one, _, three, _, five, pooled = widths
    return one + three + five + pooled


def _head(channels: int, num_classes: int) -> nn.Module:
    return _drawn(
        AuxiliaryHead(
            nn.AdaptiveAvgPool2d(4),
            _normed(channels, 128, 1),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, 1024),
            nn.ReLU(),
            nn.Dropout(0.7),
            nn.Linear(1024, num_classes),
        )
    )


def _last(channels: int, num_classes: int) -> nn.Module:
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
    return _drawn(SideBranch(*pooled, nn.Linear(channels, num_classes)))


def _normed(inputs: int, outputs: int, kernel: int, **options: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, bias=False, **options)  # type: ignore[arg-type]
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU(inplace=True))


def _drawn(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, 0, 0.01, -2, 2)
    return model
