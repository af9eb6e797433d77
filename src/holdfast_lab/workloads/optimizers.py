"""Two optimizers, with settings that suit the models of this package."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.errors import ConfigError

OPTIMIZERS = ("sgd", "adam")
"""Names that :func:`make_optimizer` accepts."""


def make_optimizer(name: str, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer called ``name``: ``"sgd"`` with momentum 0.9, or ``"adam"``.

    Raises:
        ConfigError: if the name is unknown.
    """
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, lr=1e-3)
        case _:
            raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
