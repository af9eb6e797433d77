"""The four measured jobs: a model, its data in memory, its loss. Plain torch, so that every system runs the same.

==============  ===================  ========================================  ===================
name            parameters           one sample                                samples a worker
==============  ===================  ========================================  ===================
``cnn``         0.1 million          28 x 28 numbers, 10 classes               32
``mlp``         8.5 million          28 x 28 numbers, 10 classes               32
``resnet``      25.6 million         3 x 32 x 32 numbers, 1,000 classes        8
``transformer`` 10.7 million         128 characters, each predicts the next    4
==============  ===================  ========================================  ===================

Nothing is random during a step (no dropout), so systems that train on the same samples end with the same
weights, up to the order in which gradients are added.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

CONTEXT = 128
"""Sequence length of the transformer in characters."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model and its data.

    Args:
        model: Creates the model.
        data: Creates a dataset of a given number of samples; a path, or None, gives the text.
        samples: Samples of one worker in a step.
        steps: Steps measured in one block, so that a block is long enough to measure and not longer.
        learning_rate: Small enough that rounding differences do not grow during a benchmark.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int, Path | None], TensorDataset]
    samples: int
    steps: int
    learning_rate: float = 0.01


def make_model(name: str, *, seed: int = 0) -> nn.Module:
    """Return the model of the job ``name``; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return JOBS[name].model()


def optimizer_of(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes the optimizer used by every system, for some parameters."""
    return lambda parameters: torch.optim.SGD(parameters, lr=JOBS[name].learning_rate, momentum=0.9)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model."""
    return optimizer_of(name)(model.parameters())


def mean_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of an output; for text, over all characters."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over a batch."""
    return mean_loss(model(x), y)


# -- data


def images(channels: int, side: int, classes: int, *, seed: int = 0) -> Callable[[int, Path | None], TensorDataset]:
    """Return a function that creates random images and labels."""

    def make(samples: int, text: Path | None) -> TensorDataset:
        del text  # images need no text
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(samples, channels, side, side, generator=generator)
        return TensorDataset(pixels, torch.randint(classes, (samples,), generator=generator))

    return make


def characters(samples: int, text: Path | None) -> TensorDataset:
    """Return excerpts of a text from random positions, and the character that follows each character."""
    content = text.read_text() if text else babble()
    alphabet = {character: number for number, character in enumerate(sorted(set(content)))}
    codes = torch.tensor([alphabet[character] % Transformer.CHARACTERS for character in content])
    places = torch.randint(len(codes) - CONTEXT, (samples,), generator=torch.Generator().manual_seed(0))
    windows = torch.stack([codes[place : place + CONTEXT + 1] for place in places.tolist()])
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def babble(length: int = 100_000, *, seed: int = 0) -> str:
    """Return a text of made-up words, for machines without a text file."""
    rng = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(500)]
    return " ".join(rng.choices(words, k=length // 6))


# -- models


def cnn() -> nn.Module:
    """Return two convolutions with batch norm and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def mlp() -> nn.Module:
    """Return three wide hidden layers: much to communicate, little to compute."""
    widths = (28 * 28, 2048, 2048, 1312)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], 10))


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut, as in ResNet-50.

    Args:
        inside: Input channels.
        width: Channels of the middle convolution; the output has four times as many.
        stride: Stride of the middle convolution.
    """

    EXPANSION = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * self.EXPANSION
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        nn.init.zeros_(self.body[-1].weight)  # starts as the identity; else rounding would soon grow to noise
        self.shortcut: nn.Module = nn.Identity()
        if inside != outside or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the output of the convolutions to the shortcut."""
        return F.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """Return ResNet-50 for 1,000 classes, with first layers for small images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inside, width, stride if number == 0 else 1))
            inside = width * Bottleneck.EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Attention(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a layer norm.

    Args:
        width: Length of the vectors.
        heads: Number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let each position attend to those before it."""
        batch, places, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, places, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, places, width))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Six layers of width 384 that predict the next character, as large as that of a well-known tutorial."""

    CHARACTERS, WIDTH, HEADS, LAYERS = 65, 384, 6, 6

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(self.CHARACTERS, self.WIDTH)
        self.places = nn.Embedding(CONTEXT, self.WIDTH)
        self.layers = nn.Sequential(*(Attention(self.WIDTH, self.HEADS) for _ in range(self.LAYERS)))
        self.norm = nn.LayerNorm(self.WIDTH, bias=False)
        self.head = nn.Linear(self.WIDTH, self.CHARACTERS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of every character at every position."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.layers(self.characters(x) + self.places(places))))


JOBS = {
    "cnn": Job(cnn, images(1, 28, 10), samples=32, steps=20),
    "mlp": Job(mlp, images(1, 28, 10), samples=32, steps=6),
    "resnet": Job(resnet, images(3, 32, 1000), samples=8, steps=2, learning_rate=0.001),
    "transformer": Job(Transformer, characters, samples=4, steps=2),
}
"""The measured jobs, by name."""
