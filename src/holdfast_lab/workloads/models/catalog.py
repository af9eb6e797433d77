"""All networks by name, with one set of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast_lab.workloads.models.blocks import Image, NetworkLayout, build
from holdfast_lab.workloads.models.googlenet import googlenet
from holdfast_lab.workloads.models.gpt import gpt
from holdfast_lab.workloads.models.small import cnn, mlp
from holdfast_lab.workloads.models.vision import alexnet, resnet18, resnet50, vgg16


@dataclass(frozen=True, slots=True)
class _Network:
    make: Callable[..., NetworkLayout]
    num_classes: int
    image: Image | None = None
    """None: the network does not read images."""
    least_side: int = 1


_PUBLISHED = (1000, (3, 224), 16)
_NETWORKS = {
    "mlp": _Network(mlp, 10, (1, 8)),
    "cnn": _Network(cnn, 10, (1, 8), 4),
    "alexnet": _Network(alexnet, *_PUBLISHED),
    "vgg16": _Network(vgg16, *_PUBLISHED),
    "resnet18": _Network(resnet18, *_PUBLISHED),
    "resnet50": _Network(resnet50, *_PUBLISHED),
    "googlenet": _Network(googlenet, *_PUBLISHED),
    "gpt": _Network(gpt, 65),
}

MODELS = tuple(_NETWORKS)
"""Names that :func:`make_model` accepts."""
IMAGE_MODELS = tuple(name for name, network in _NETWORKS.items() if network.image)
"""Names of networks that classify images."""


def make_model(
    name: str,
    num_classes: int | None = None,
    *,
    image: Image | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    **options: Any,
) -> nn.Sequential:
    """Return the network ``name``, a sequence of named blocks; the same arguments give the same weights.

    Args:
        name: One of :data:`MODELS`.
        num_classes: Outputs, ``>= 1``: classes of images, or distinct characters of a text. None: as published, 1000;
            10 for ``mlp`` and ``cnn``, 65 for ``gpt``.
        image: Channels and side of the images. None: ``(3, 224)``; ``(1, 8)`` for ``mlp`` and ``cnn``. Sides below 64
            select the network's small form; the smallest side is 16, for ``cnn`` 4, for ``mlp`` 1.
        seed: Seed of the initial weights; each block's seed comes from it and the block's name. The global generator of
            torch is left as it was.
        device: Device of the weights, which are always drawn on the CPU; None: torch's default device. ``"meta"``:
            shapes only.
        **options: ``aux`` of :func:`~holdfast_lab.workloads.models.googlenet.googlenet`; ``width`` of
            :func:`~holdfast_lab.workloads.models.vision.alexnet`, ``resnet18`` and ``resnet50``; ``context``,
            ``layers``, ``heads``, ``width`` and ``dropout`` of :func:`~holdfast_lab.workloads.models.gpt.gpt`.

    Raises:
        ConfigError: if the network is unknown, or an argument is not allowed.
    """
    return build(layout(name, num_classes, image=image, **options).blocks, seed=seed, device=device)


def layout(name: str, num_classes: int | None = None, *, image: Image | None = None, **options: Any) -> NetworkLayout:
    """Return the layout of what :func:`make_model` would build, without building it.

    Raises:
        ConfigError: as :func:`make_model`.
    """
    if name not in _NETWORKS:
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    network = _NETWORKS[name]
    _check_options(name, network, options)
    classes = network.num_classes if num_classes is None else num_classes
    if classes < 1:
        raise ConfigError(f"num_classes must be at least 1, got {classes}")
    if network.image:
        return network.make(classes, _checked(name, network, image or network.image), **options)
    if image is not None:
        raise ConfigError(f"{name} reads text: leave image out, got {image}")
    return network.make(classes, **options)


def _check_options(name: str, network: _Network, options: dict[str, Any]) -> None:
    parameters = inspect.signature(network.make).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ConfigError(f"options of {name} are: {', '.join(known) or 'none'}; got {option!r}")


def _checked(name: str, network: _Network, image: Image) -> Image:
    if len(image) != 2 or image[0] < 1 or image[1] < network.least_side:
        raise ConfigError(f"image of {name} must be (channels, side), at least (1, {network.least_side}), got {image}")
    return image
