"""The three networks whose checkpoints are measured: AlexNet, ResNet-50, VGG-16, with real layers and random weights.

Layers, shapes and numbers of parameters are those of the published networks (A. Krizhevsky 2014, K. He et al. 2015,
K. Simonyan and A. Zisserman 2014) as torchvision builds them; any image of 64x64 and more goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError

VISION_PARAMETERS = {"alexnet": 61_100_840, "resnet50": 25_557_032, "vgg16": 138_357_544}
"""What :func:`make_vision` knows, and how many parameters each has with 1000 classes."""

_RESNET50 = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and stride of the four stages."""
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of the convolutions; 0 is a pooling."""
_WIDEN = 4  # a bottleneck's output has so many times its width


def make_vision(name: str, num_classes: int = 1000, *, seed: int = 0) -> nn.Module:
    """Return the network called ``name``; the same arguments give the same weights.

    Args:
        name: One of :data:`VISION_PARAMETERS`.
        num_classes: Outputs.
        seed: Of the initial weights. The global generator of torch is left as it was.

    Raises:
        ConfigError: if there is no such network.
    """
    builders = {"alexnet": alexnet, "resnet50": resnet50, "vgg16": vgg16}
    if name not in builders:
        msg = f"network must be one of {', '.join(builders)}, got {name!r}"
        raise ConfigError(msg)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return builders[name](num_classes)


def alexnet(num_classes: int = 1000) -> nn.Module:
    """Return AlexNet with one column: five convolutions, three linear layers, dropout."""
    return nn.Sequential(
        *_convolution(3, 64, 11, stride=4, padding=2),
        nn.MaxPool2d(3, 2),
        *_convolution(64, 192, 5, padding=2),
        nn.MaxPool2d(3, 2),
        *_convolution(192, 384, 3, padding=1),
        *_convolution(384, 256, 3, padding=1),
        *_convolution(256, 256, 3, padding=1),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        *_classifier(256 * 6 * 6, num_classes),
    )


def vgg16(num_classes: int = 1000) -> nn.Module:
    """Return VGG-16 without batch norm: thirteen convolutions, three linear layers, dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for width in _VGG16:
        layers += _convolution(channels, width, 3, padding=1) if width else [nn.MaxPool2d(2)]
        channels = width or channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), *_classifier(channels * 7 * 7, num_classes))


def resnet50(num_classes: int = 1000) -> nn.Module:
    """Return ResNet-50: sixteen bottlenecks, batch norm behind every convolution."""
    layers = [*_normed(3, 64, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, blocks, stride in _RESNET50:
        for place in range(blocks):
            layers.append(Bottleneck(channels, width, stride if place == 0 else 1))
            channels = width * _WIDEN
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut.

    Args:
        channels: That come in.
        width: Of the middle convolution; four times as many channels go out.
        stride: Of the middle convolution.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * _WIDEN
        self.body = nn.Sequential(
            *_normed(channels, width, 1),
            nn.ReLU(),
            *_normed(width, width, 3, stride=stride, padding=1),
            nn.ReLU(),
            *_normed(width, out, 1),
        )
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(channels, out, 1, stride=stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take images of shape ``(samples, channels, height, width)``."""
        return torch.relu(self.body(x) + self.shortcut(x))


def layers_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the layers that hold parameters, in order, as plain data: what another framework needs to build the same.

    ``kind`` is ``"convolution"`` (``inputs``, ``outputs``, ``kernel``, ``stride``, ``padding``, ``bias``), ``"norm"`` (``outputs``) or
    ``"linear"`` (``inputs``, ``outputs``, ``bias``).
    """
    return [described for module in model.modules() if (described := _described(module))]


def _described(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, nn.Conv2d):
        sizes = {"kernel": module.kernel_size[0], "stride": module.stride[0], "padding": module.padding[0]}
        channels = {"inputs": module.in_channels, "outputs": module.out_channels}
        return {"kind": "convolution", **channels, **sizes, "bias": module.bias is not None}
    if isinstance(module, nn.BatchNorm2d):
        return {"kind": "norm", "outputs": module.num_features}
    if isinstance(module, nn.Linear):
        channels = {"inputs": module.in_features, "outputs": module.out_features}
        return {"kind": "linear", **channels, "bias": module.bias is not None}
    return {}


def _convolution(inputs: int, outputs: int, kernel: int, **options: int) -> Sequence[nn.Module]:
    return (nn.Conv2d(inputs, outputs, kernel, **options), nn.ReLU(inplace=True))  # type: ignore[arg-type]


def _normed(inputs: int, outputs: int, kernel: int, **options: int) -> Sequence[nn.Module]:
    return (nn.Conv2d(inputs, outputs, kernel, bias=False, **options), nn.BatchNorm2d(outputs))  # type: ignore[arg-type]


def _classifier(inputs: int, num_classes: int) -> Sequence[nn.Module]:
    hidden = 4096
    return (
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(inputs, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, num_classes),
    )
