"""Metrics that ``training_step`` logs for each slice become means over the mini-batch, equal on every worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer

from holdfast.errors import ScriptError
from holdfast.session.prepared_loop import PreparedLoop

_MEANS = ("mean", "avg", torch.mean)


@dataclass(frozen=True, slots=True)
class _Logged:
    """How a metric was logged."""

    fx: str
    name: str
    dtype: torch.dtype
    options: dict[str, Any]


class SliceMetrics:
    """Takes the place of the trainer's results while slices are computed, and passes their means on afterwards.

    Args:
        trainer: The trainer.
        loop: The loop whose slices log.
    """

    def __init__(self, trainer: Trainer, loop: PreparedLoop) -> None:
        self._trainer = trainer
        self._loop = loop
        self._logged: dict[str, _Logged] = {}
        self._results: Any = None
        self._means: dict[str, float] = {}
        self._samples = 0

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is logged with the slice in progress."""
        self._logged = {}
        self._results = self._trainer._results
        self._results.log = self._keep
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Log as usual again; for hooks that see the mean gradients."""
        if self._results is not None:
            del self._results.log
            self._results = None

    def _keep(self, fx: str, name: str, value: Any, *, reduce_fx: Any = "mean", **options: Any) -> None:
        if not isinstance(value, torch.Tensor):
            raise ScriptError(
                f"self.log({name!r}) in training_step got a torchmetrics object, which would count this worker's slices"
                " only: log torchmetrics.functional values there, or use the object in validation_step"
            )
        if reduce_fx not in _MEANS:
            raise ScriptError(
                f'self.log({name!r}, reduce_fx={reduce_fx}) in training_step is not supported under strategy="holdfast":'
                " slices are combined by their mean"
            )
        key = name if fx == "training_step" and name != "loss" else f"{fx}/{name}"
        assert self._loop.step is not None
        self._samples = self._loop.step.samples
        self._logged[key] = _Logged(fx, name, value.dtype, options | {"batch_size": self._samples})
        self._loop.log(key, value)

    def log_means(self) -> None:
        """Log the means over the mini-batch of the step that is committed now."""
        self._means = self._loop.metrics(list(self._logged))
        for key, kept in self._logged.items():
            if key in self._means:
                value = torch.tensor(self._means[key], dtype=kept.dtype)
                self._trainer._results.log(kept.fx, kept.name, value, **kept.options)

    def set_loss(self, loss: torch.Tensor | None) -> None:
        """Set the loss that hooks after the batch receive to the mean over the mini-batch."""
        if loss is not None and "loss" in self._means:
            loss.fill_(self._means["loss"])
