"""Chooses the :class:`~holdfast.models.trainable.Trainable` for a script's model; the only module that knows all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.models.buffers import BufferChoices, check_choices
from holdfast.models.factories import PartFactories
from holdfast.models.gradients import BucketLayout
from holdfast.models.overlap import check_overlap
from holdfast.models.pipeline import PipelineModel
from holdfast.models.replicated import ReplicatedModel
from holdfast.models.sharded import ShardedModel
from holdfast.models.specs import Pipeline, Sharded
from holdfast.models.trainable import Trainable


def make_trainable(
    model: nn.Module | Pipeline | Sharded,
    optimizer: optim.Optimizer | Callable[[Any], optim.Optimizer],
    settings: Settings,
    *,
    scheduler: Any,
    schedule: str,
    scaler: Any,
    average: AveragedModel | Callable[[nn.Module], AveragedModel] | None,
    clip_grad_norm: float | None,
    buffers: BufferChoices,
) -> Trainable:
    """Return the model as training loops see it; for the arguments see :class:`~holdfast.session.session.Session`.

    Raises:
        ConfigError: if they are incompatible.
    """
    whole = model if isinstance(model, nn.Module) else model.module
    check_choices(buffers, None if whole is None else [name for name, _ in whole.named_buffers()])
    lay_out = functools.partial(
        BucketLayout, bucket_bytes=settings.bucket_bytes, figures_apart=settings.rounds, choices=buffers
    )
    if not isinstance(model, Pipeline | Sharded):
        own, averaged = _optimizer_of(optimizer), _average_of(average)
        if settings.overlap_optimizer:
            check_overlap(own, scaler=scaler, clip_grad_norm=clip_grad_norm)
        return ReplicatedModel(
            model,
            own,
            scheduler=scheduler,
            schedule=schedule,
            scaler=scaler,
            clip_grad_norm=clip_grad_norm,
            lay_out=functools.partial(lay_out, checked=settings.guard_sums),
            average=averaged,
        )
    make_optimizer, make_average = _makers(type(model).__name__, optimizer, average, settings)
    makers = PartFactories(
        optimizer=make_optimizer,
        scheduler=scheduler,
        schedule=schedule,
        average=make_average,
        lay_out=lay_out,
    )
    if isinstance(model, Sharded):
        return ShardedModel(model, makers, scaler, clip_grad_norm, settings)
    return PipelineModel(model, makers, scaler, clip_grad_norm, settings)


def _optimizer_of(optimizer: Any) -> optim.Optimizer:
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer of the model's parameters, got {type(optimizer).__name__}"
        )
    return optimizer


def _average_of(average: Any) -> AveragedModel | None:
    if average is not None and not isinstance(average, AveragedModel):
        raise ConfigError(
            f"average must be a torch.optim.swa_utils.AveragedModel of the model, got {type(average).__name__}"
        )
    return average


def _makers(kind: str, optimizer: Any, average: Any, settings: Settings) -> tuple[Any, Any]:
    """Return what makes the optimizer and the average of each part; raise if they are those of a replicated model."""
    if settings.overlap_optimizer:
        raise ConfigError(f"overlap_optimizer needs a replicated model, got a {kind}")
    if isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"a {kind} needs a function that returns an optimizer, as lambda p: torch.optim.Adam(p); got an optimizer"
        )
    if isinstance(average, nn.Module):
        raise ConfigError(
            f"a {kind} needs a function that returns an average, such as lambda m: AveragedModel(m); got an average"
        )
    return optimizer, average
