"""What a script's loss takes and returns, where the session calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import ConfigError, ScriptError

Loss = Callable[..., torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]]
"""Takes the model's output, then the rest of the batch; returns the mean over it, and figures to log if it likes."""

Forward = Callable[[torch.Tensor], torch.Tensor]
"""The model, or what calls it."""


def loss_of(loss: Loss, output: torch.Tensor, targets: Sequence[Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss of a slice, which must be a scalar, and what else is to be logged of it."""
    made = loss(output, *targets)
    value, more = made if isinstance(made, tuple) else (made, {})
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ScriptError("the loss must return a scalar, the mean over the slice that it is given")
    for name in more:
        check_name(name)
    return value, {name: figure for name, figure in more.items() if name != "loss"}


def check_name(name: str) -> None:
    """Make sure that the name of a figure can be encoded as UTF-8, to be written down."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a figure must have a name that can be written as UTF-8: {name!r} has a lone surrogate"
        ) from error


def figure_of(value: torch.Tensor | float) -> torch.Tensor | float:
    """Return what is kept of a figure that a script logs."""
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


def checked(inputs: Any) -> Sequence[Any]:
    """Return the inputs of a slice, of which the first must be a tensor for the model."""
    if isinstance(inputs, list | tuple) and len(inputs) > 0 and isinstance(inputs[0], torch.Tensor):
        return inputs
    raise ScriptError(
        f"step.compute and step.evaluate need a dataset of tuples, the model's input first, got {type(inputs).__name__}"
    )
