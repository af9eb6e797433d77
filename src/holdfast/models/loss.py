"""The signature of a script's loss function, where the session calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.base.torch_private import tree_map
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.media import Media

Loss = Callable[..., torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]]
"""Maps the model's output and the other items of the batch to the mean loss, or to that and a dict of metrics."""

Forward = Callable[[torch.Tensor], torch.Tensor]
"""The model, or a function that calls it."""


def loss_of(loss: Loss, output: torch.Tensor, targets: Sequence[Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss of a slice, which must be a scalar, and its other metrics."""
    made = loss(output, *targets)
    value, more = made if isinstance(made, tuple) else (made, {})
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ScriptError("the loss must return a scalar, the mean over its slice")
    for name in more:
        check_name(name)
    return value, {name: figure for name, figure in more.items() if name != "loss"}


def check_name(name: str) -> None:
    """Check that the name of a metric can be encoded as UTF-8, for the records."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"a metric name must be encodable as UTF-8, but {name!r} has a lone surrogate") from error


def figure_of(value: torch.Tensor | float) -> torch.Tensor | float:
    """Return the value to keep of a metric that a script logs."""
    if isinstance(value, Media):
        raise ScriptError("an image or a histogram must be logged with step.log, in the loop over the slices of a step")
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


def checked(inputs: Any) -> Sequence[Any]:
    """Return the inputs of a slice; the first must be a tensor for the model."""
    if isinstance(inputs, list | tuple) and len(inputs) > 0 and isinstance(inputs[0], torch.Tensor):
        return inputs
    raise ScriptError(
        f"step.compute and step.evaluate need a dataset of tuples, the model's input first, got {type(inputs).__name__}"
    )


def on_device(inputs: Any, device: torch.device) -> Any:
    """Return the inputs of a slice with all tensors on ``device``; samples are loaded into host memory."""
    if device.type == "cpu":
        return inputs
    return tree_map(lambda item: item.to(device) if isinstance(item, torch.Tensor) else item, inputs)
