"""Shared by several networks: layers, the loss, and a description of a network's layers as plain data."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BESIDE_WEIGHT = 0.3
"""Weight of an auxiliary head's loss (C. Szegedy et al. 2014, section 5)."""


def loss_of(scores: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of any network of this package, over images or characters.

    Args:
        scores: The network's output, of shape ``(..., classes)``; with auxiliary heads, a tuple that
            begins with the last head's scores. Auxiliary heads count 0.3 each.
        labels: Of shape ``(...)``.
    """
    last, *beside = scores if isinstance(scores, tuple) else (scores,)
    losses = (BESIDE_WEIGHT * _cross_entropy(head, labels) for head in beside)
    return sum(losses, start=_cross_entropy(last, labels))


def layers_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the layers of an image network that have parameters, in order, as plain data, to rebuild it elsewhere.

    ``kind`` is ``"convolution"`` (``inputs``, ``outputs``, ``kernel``, ``stride``, ``padding``, ``bias``), ``"norm"``
    (``outputs``) or ``"linear"`` (``inputs``, ``outputs``, ``bias``).
    """
    return [described for module in model.modules() if (described := _described(module))]


def convolution(inputs: int, outputs: int, kernel: int, **options: int) -> nn.Sequential:
    """Return a convolution and a ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, **options), nn.ReLU(inplace=True))  # type: ignore[arg-type]


def normed(inputs: int, outputs: int, kernel: int, **options: int) -> list[nn.Module]:
    """Return a convolution without bias and its batch norm."""
    return [nn.Conv2d(inputs, outputs, kernel, bias=False, **options), nn.BatchNorm2d(outputs)]  # type: ignore[arg-type]


def draw_normal(weight: torch.Tensor, std: float) -> None:
    """Redraw ``weight`` from a normal distribution with mean 0."""
    if not weight.is_meta:  # there is nothing to draw, and torch would spend two seconds importing modules
        nn.init.normal_(weight, 0, std)


def he(model: nn.Module) -> nn.Module:
    """Redraw the weights of all convolutions after K. He et al. 2015 (fan-out), with biases 0; return ``model``."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            draw_normal(module.weight, math.sqrt(2 / (module.out_channels * math.prod(module.kernel_size))))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())


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
