"""Factories that a script passes to train a Pipeline or Sharded model: each part is built where it is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import ConfigError
from holdfast.models.gradients import BucketLayout
from holdfast.models.part import ModelPart

_Kind = TypeVar("_Kind", bound=ModelPart)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFactories:
    """Builds the optimizer, scheduler and average of a part."""

    optimizer: Callable[[Any], torch.optim.Optimizer]  # from the parameters of a part
    scheduler: Callable[[torch.optim.Optimizer], Any] | None  # a learning-rate scheduler for that optimizer
    schedule: str  # `"step"` or `"epoch"`: how often the scheduler is stepped
    average: Callable[[nn.Module], AveragedModel] | None  # an average of the weights, from the module of a part
    lay_out: Callable[..., BucketLayout]  # the layout of gradients, from the module of a part, `checked` and `prefix`

    def part(
        self,
        kind: type[_Kind],
        what: str,
        module: nn.Module,
        *,
        clip_grad_norm: float | None,
        checked: bool,
        prefix: str = "",
    ) -> _Kind:
        """Return a trainable part, after checking the factories' return types; errors call it ``what``.

        ``prefix`` precedes the names of its buffers in those of the whole model.
        """
        optimizer = self.optimizer(module.parameters())
        _check(optimizer, torch.optim.Optimizer, f"the function that makes the optimizer of a {what}")
        average = None if self.average is None else self.average(module)
        if average is not None:
            _check(average, AveragedModel, f"the function that makes the average of a {what}")
        return kind(
            module,
            optimizer,
            scheduler=None if self.scheduler is None else self.scheduler(optimizer),
            schedule=self.schedule,
            scaler=None,  # one scaler serves all parts
            clip_grad_norm=clip_grad_norm,
            lay_out=functools.partial(self.lay_out, checked=checked, prefix=prefix),
            average=average,
        )


def _check(made: object, kind: type, what: str) -> None:
    if not isinstance(made, kind):
        raise ConfigError(
            f"{what} must return a {kind.__module__.removesuffix('.optimizer')}.{kind.__name__}, got {type(made).__name__}"
        )
