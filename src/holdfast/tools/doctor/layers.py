"""Common layers, large enough that their kernels take the same paths as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

from holdfast.data.seeds import seed_of, seeded
from holdfast.tools.doctor.target import DoctorTarget

_SAMPLES = 16


def usual_subjects(device: str = "cpu") -> list[DoctorTarget]:
    """Return the common layers on a device, with inputs and weights that depend only on this module."""
    with seeded(seed_of("usual layers")):
        made = [*_dense(), *_images(), *_sequences(), *_indexed(), *_losses(), *_optimizers()]
    return made if device == "cpu" else [subject.on(torch.device(device)) for subject in made]


def _of(name: str, compute: Callable[..., Any], *args: Any, rows: int | None = 0) -> DoctorTarget:
    return DoctorTarget(name=name, compute=compute, args=args, rows=rows)


def _dense() -> list[DoctorTarget]:
    wide, one, two = torch.randn(_SAMPLES, 515), torch.randn(_SAMPLES, 33, 65), torch.randn(_SAMPLES, 65, 47)
    return [
        DoctorTarget.of("linear", nn.Linear(515, 300), wide),
        DoctorTarget.of("layer norm", nn.LayerNorm(515), wide),
        DoctorTarget.of("GELU", nn.GELU(), wide),
        _of("softmax", lambda x: x.softmax(-1), wide),
        _of("log-softmax", lambda x: x.log_softmax(-1), wide),
        DoctorTarget.of("dropout", nn.Dropout(0.3), wide, rows=None),  # random numbers depend on the number of samples
        _of("bmm", torch.bmm, one, two),
        _of("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), one, two),
        _of("sum", lambda x: x.sum(), torch.randn(200_003), rows=None),
        _of("norm", lambda x: x.norm(), torch.randn(200_003), rows=None),
        _of("cumsum", lambda x: x.cumsum(-1), wide),
    ]


def _images() -> list[DoctorTarget]:
    image, signal = torch.randn(_SAMPLES, 8, 19, 21), torch.randn(_SAMPLES, 8, 130)
    return [
        DoctorTarget.of("conv1d", nn.Conv1d(8, 12, 5), signal),
        DoctorTarget.of("conv2d", nn.Conv2d(8, 12, 3, padding=1), image),
        DoctorTarget.of("grouped conv2d", nn.Conv2d(8, 8, 3, padding=1, groups=8), image),
        DoctorTarget.of("conv3d", nn.Conv3d(2, 4, 3), torch.randn(_SAMPLES, 2, 8, 9, 10)),
        DoctorTarget.of("transposed conv", nn.ConvTranspose2d(8, 6, 3, stride=2), image),
        DoctorTarget.of("batch norm", nn.BatchNorm2d(8), image),
        DoctorTarget.of("batch norm (eval)", nn.BatchNorm2d(8).eval(), image),
        DoctorTarget.of("group norm", nn.GroupNorm(4, 8), image),
        DoctorTarget.of("max pool", nn.MaxPool2d(2), image),
        DoctorTarget.of("average pool", nn.AvgPool2d(3), image),
        DoctorTarget.of("adaptive pool", nn.AdaptiveAvgPool2d(5), image),
        DoctorTarget.of("interpolate", nn.Upsample(scale_factor=1.7, mode="bilinear", align_corners=False), image),
    ]


def _sequences() -> list[DoctorTarget]:
    words = torch.randn(_SAMPLES, 24, 32)
    heads = [torch.randn(_SAMPLES, 4, 40, 16) for _ in range(3)]
    return [
        DoctorTarget.of(
            "LSTM", nn.LSTM(32, 24, batch_first=True), words, rows=None
        ),  # its states have the sample dimension elsewhere
        DoctorTarget.of("GRU", nn.GRU(32, 24, batch_first=True), words, rows=None),
        DoctorTarget.of("attention", nn.MultiheadAttention(32, 4, batch_first=True), words, words, words),
        _of("SDPA", F.scaled_dot_product_attention, *heads),
        _of("causal SDPA", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *heads),
    ]


def _indexed() -> list[DoctorTarget]:
    ids = torch.randint(50, (_SAMPLES, 64))  # with many repetitions
    places, source = torch.randint(40, (6000,)), torch.randn(6000, 16)
    columns, offsets = places[:, None].expand(-1, 16), torch.arange(0, ids.numel(), 8)
    return [
        DoctorTarget.of("embedding", nn.Embedding(50, 96), ids),
        DoctorTarget.of("embedding bag", nn.EmbeddingBag(50, 96), ids),
        DoctorTarget.of(
            "embedding bag (sum, offsets)", nn.EmbeddingBag(50, 96, mode="sum"), ids.flatten(), offsets, rows=None
        ),
        _of("index_add", lambda x, to: torch.zeros_like(x[:40]).index_add(0, to, x), source, places, rows=None),
        _of("scatter_add", lambda x, to: torch.zeros_like(x[:40]).scatter_add(0, to, x), source, columns, rows=None),
        _of("gather by repeated ids", lambda x, ids: x[ids], torch.randn(16, 300), places % 16, rows=None),
    ]


def _losses() -> list[DoctorTarget]:
    scores, labels = torch.randn(64, 515), torch.randint(515, (64,))
    spoken = torch.randn(50, 8, 20).log_softmax(-1)
    texts, lengths = torch.randint(1, 20, (8, 12)), torch.full((8,), 12)
    return [
        _of("cross-entropy", F.cross_entropy, scores, labels, rows=None),
        _of("cross-entropy of each", lambda x, y: F.cross_entropy(x, y, reduction="none"), scores, labels),
        _of("NLL", lambda x, y: F.nll_loss(x.log_softmax(-1), y), scores, labels, rows=None),
        _of("MSE", F.mse_loss, scores, torch.randn(64, 515), rows=None),
        _of("CTC", lambda x, y: F.ctc_loss(x, y, torch.full((8,), 50), lengths), spoken, texts, rows=None),
    ]


def _optimizers() -> list[DoctorTarget]:
    weights = [torch.randn(300, 120), torch.randn(7), torch.randn(41_003)]
    gradients = [torch.randn_like(weight) for weight in weights]

    def steps(make: Callable[[list[nn.Parameter]], optim.Optimizer]) -> Callable[..., Any]:
        def compute(weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
            trained = [nn.Parameter(weight.detach().clone()) for weight in weights]
            optimizer = make(trained)
            for _ in range(2):
                for weight, gradient in zip(trained, gradients, strict=True):
                    weight.grad = gradient.detach().clone()
                optimizer.step()
            return [weight.detach() for weight in trained]

        return compute

    ways: dict[str, dict[str, Any]] = {
        "": {"foreach": False},
        " (foreach)": {"foreach": True},
        " (fused)": {"fused": True},
    }
    made: list[DoctorTarget] = []
    for way, how in ways.items():
        sgd = steps(lambda p, how=how: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4, **how))  # type: ignore[misc]
        adam = steps(lambda p, how=how: optim.Adam(p, lr=0.01, **how))  # type: ignore[misc]
        made += [
            _of(f"{name}{way}", one, weights, gradients, rows=None) for name, one in (("SGD", sgd), ("Adam", adam))
        ]
    return made
