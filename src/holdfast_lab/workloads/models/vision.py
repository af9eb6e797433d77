"""AlexNet, VGG-16, ResNet-18 and ResNet-50.

For images of 64x64 and more, layers, shapes, initial distributions and numbers of parameters are those of the published
networks (A. Krizhevsky 2014, K. Simonyan and A. Zisserman 2014, K. He et al. 2015) as torchvision builds them. For
smaller ones (28x28, 32x32) each has a small form, described in its function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast_lab.workloads.models.blocks import SMALL_BELOW, Block, Image, NetworkLayout
from holdfast_lab.workloads.models.layers import convolution, draw_normal, he, normed

_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and number of convolutions between two poolings."""


def alexnet(num_classes: int, image: Image, *, width: int = 64) -> NetworkLayout:
    """Return AlexNet with one column: five convolutions, three linear layers, dropout; 61,100,840 parameters.

    (The network of 2012, which Caffe builds, differs: two columns, response normalisation, 60,965,224 parameters.)

    The small form begins with a 3x3 convolution of stride 1 instead of 11x11 of stride 4, ends its convolutions with
    2x2 pixels instead of 6x6, and has linear layers of width 1024 instead of 4096: 4,556,490 parameters for 10 classes
    of 1x28x28, 4,557,642 for 3x32x32.

    Args:
        num_classes: Outputs.
        image: Channels and side of the images.
        width: Channels after the first convolution, as published 64; all other layers scale in proportion.

    Raises:
        ConfigError: if the width is below 1.
    """
    channels, side = image
    small = side < SMALL_BELOW
    _check_width(width)
    first = {"kernel": 3, "padding": 1} if small else {"kernel": 11, "stride": 4, "padding": 2}
    left, hidden = (2, 16 * width) if small else (6, 64 * width)
    pool = partial(nn.MaxPool2d, 3, 2)
    blocks = (
        Block("conv1", lambda: nn.Sequential(*convolution(channels, width, **first), pool())),
        Block("conv2", lambda: nn.Sequential(*convolution(width, 3 * width, 5, padding=2), pool())),
        Block("conv3", lambda: convolution(3 * width, 6 * width, 3, padding=1)),
        Block("conv4", lambda: convolution(6 * width, 4 * width, 3, padding=1)),
        Block(
            "conv5",
            lambda: nn.Sequential(*convolution(4 * width, 4 * width, 3, padding=1), pool(), nn.AdaptiveAvgPool2d(left)),
        ),
        Block(
            "fc6", lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(4 * width * left**2, hidden), nn.ReLU())
        ),
        Block("fc7", lambda: nn.Sequential(nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU())),
        Block("fc8", lambda: nn.Linear(hidden, num_classes)),
    )
    return NetworkLayout(blocks, (channels, side, side))


def vgg16(num_classes: int, image: Image) -> NetworkLayout:
    """Return VGG-16 without batch norm: thirteen convolutions, three linear layers, dropout; 138,357,544 parameters.

    The small form has the same convolutions. They end with one pixel instead of 7x7, and the linear layers have width
    512 instead of 4096: 15,243,978 parameters for 10 classes of 1x28x28, 15,245,130 for 3x32x32.
    """
    channels, side = image
    small = side < SMALL_BELOW
    left, hidden = (1, 512) if small else (7, 4096)
    blocks = []
    for group, (width, count) in enumerate(_VGG16, start=1):
        for place in range(1, count + 1):
            pooled = place == count
            blocks.append(Block(f"conv{group}_{place}", partial(_vgg_convolution, channels, width, pooled=pooled)))
            channels = width
    # torchvision has an average pooling to 7x7 before fc6, which does not change images of 224x224.
    before = partial(nn.Sequential, nn.AdaptiveAvgPool2d(left), nn.Flatten())
    blocks += [
        Block("fc6", lambda: nn.Sequential(*before(), *_vgg_linear(channels * left**2, hidden, small=small))),
        Block("fc7", lambda: _vgg_linear(hidden, hidden, small=small)),
        Block("fc8", lambda: _vgg_drawn(nn.Linear(hidden, num_classes), small=small)),
    ]
    return NetworkLayout(tuple(blocks), (image[0], side, side))


def resnet18(num_classes: int, image: Image, *, width: int = 64) -> NetworkLayout:
    """Return ResNet-18: eight blocks of two convolutions, each followed by batch norm; 11,689,512 parameters.

    The small form begins with a 3x3 convolution of stride 1 instead of 7x7 of stride 2, without pooling after it:
    11,172,810 parameters for 10 classes of 1x28x28, 11,173,962 for 3x32x32.

    Args:
        num_classes: Outputs.
        image: Channels and side of the images.
        width: Channels of the first blocks, as published 64; later blocks have two, four and eight times as many.

    Raises:
        ConfigError: if the width is below 1.
    """
    return _resnet(_two, 1, (2, 2, 2, 2), num_classes, image, width)


def resnet50(num_classes: int, image: Image, *, width: int = 64) -> NetworkLayout:
    """Return ResNet-50: sixteen bottlenecks, batch norm after every convolution; 25,557,032 parameters.

    The stride of a bottleneck is in its 3x3 convolution. The small form begins like that of :func:`resnet18`:
    23,519,690 parameters for 10 classes of 1x28x28, 23,520,842 for 3x32x32.

    Args:
        num_classes: Outputs.
        image: Channels and side of the images.
        width: Inner width of the first bottlenecks, as published 64; later ones have two, four and eight times as much.

    Raises:
        ConfigError: if the width is below 1.
    """
    return _resnet(_bottleneck, 4, (3, 4, 6, 3), num_classes, image, width)


class Residual(nn.Module):
    """Convolutions with a shortcut connection; the results are added.

    Args:
        body: The convolutions.
        channels: Input channels.
        outputs: Output channels.
        stride: Stride of the whole body.
    """

    def __init__(self, body: nn.Module, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and channels == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*normed(channels, outputs, 1, stride=stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take images of shape ``(samples, channels, height, width)``."""
        return torch.relu(self.body(x) + self.shortcut(x))


def _resnet(
    body: Callable[[int, int, int], nn.Module],
    widen: int,
    repeats: tuple[int, ...],
    num_classes: int,
    image: Image,
    width: int,
) -> NetworkLayout:
    _check_width(width)
    channels, side = image
    blocks = [Block("stem", partial(_resnet_stem, channels, width, small=side < SMALL_BELOW))]
    channels = width
    for group, count in enumerate(repeats, start=1):
        inside = width * 2 ** (group - 1)
        for place in range(count):
            stride = 2 if place == 0 and group > 1 else 1
            blocks.append(
                Block(f"layer{group}_{place}", partial(_residual, body, channels, inside, inside * widen, stride))
            )
            channels = inside * widen
    head = partial(nn.Sequential, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    blocks.append(Block("head", lambda: nn.Sequential(*head(), nn.Linear(channels, num_classes))))
    return NetworkLayout(tuple(blocks), (image[0], side, side))


def _resnet_stem(channels: int, width: int, *, small: bool) -> nn.Module:
    if small:
        return he(nn.Sequential(*normed(channels, width, 3, padding=1), nn.ReLU()))
    return he(nn.Sequential(*normed(channels, width, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)))


def _residual(
    body: Callable[[int, int, int], nn.Module], channels: int, width: int, outputs: int, stride: int
) -> nn.Module:
    return he(Residual(body(channels, width, stride), channels, outputs, stride))


def _two(channels: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(
        *normed(channels, width, 3, stride=stride, padding=1), nn.ReLU(), *normed(width, width, 3, padding=1)
    )


def _bottleneck(channels: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(
        *normed(channels, width, 1),
        nn.ReLU(),
        *normed(width, width, 3, stride=stride, padding=1),
        nn.ReLU(),
        *normed(width, 4 * width, 1),
    )


def _check_width(width: int) -> None:
    if width < 1:
        raise ConfigError(f"width must be at least 1, got {width}")


def _vgg_convolution(channels: int, width: int, *, pooled: bool) -> nn.Module:
    layers = he(convolution(channels, width, 3, padding=1))
    # Rounding up, 28x28 shrinks to one pixel in five poolings like 32x32; rounding down, it would vanish.
    return nn.Sequential(layers, nn.MaxPool2d(2, ceil_mode=True)) if pooled else layers


def _vgg_linear(inputs: int, outputs: int, *, small: bool) -> nn.Sequential:
    return nn.Sequential(_vgg_drawn(nn.Linear(inputs, outputs), small=small), nn.ReLU(), nn.Dropout())


def _vgg_drawn(layer: nn.Linear, *, small: bool) -> nn.Linear:
    if not small:  # such small values would fade in layers of width 512
        draw_normal(layer.weight, 0.01)
        nn.init.zeros_(layer.bias)
    return layer
