"""A scaler for pipelines: the last stage scales the loss, each unscales its gradients, and all skip a step or none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from holdfast.models.part import ModelPart


class PipelineScaler:
    """The scaler of a pipeline, in the same state on all workers, whichever stages they hold."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._of_all = nn.Parameter(torch.zeros(1))
        self._nothing = torch.optim.SGD([self._of_all], lr=0.0)
        self.skips = False
        """Whether a gradient of some stage overflows, so that all stages skip the step in progress."""

    @property
    def is_enabled(self) -> bool:
        """Whether it scales the loss and checks gradients."""
        return bool(self._scaler.is_enabled())

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, the start of the backward pass."""
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place, with the bits of the scaler's own ``unscale_``."""
        inverse = torch.tensor(1.0 / self._scaler.get_scale(), dtype=torch.float64).float().item()
        for gradient in gradients:
            gradient.mul_(inverse)

    def update(self, device: torch.device) -> None:
        """Update the scale with the result of all stages, passed to the scaler as the gradient of one parameter."""
        self._scaler.scale(torch.zeros((), device=device))  # initialises it, where it has scaled no loss
        self._of_all.grad = torch.full((1,), math.inf if self.skips else 0.0)
        self._scaler.step(self._nothing)
        self._scaler.update()


class ScaledStage(ModelPart):
    """A stage of a pipeline, whose gradients may come from a scaled loss."""

    scaling: PipelineScaler | None = None

    def norm(self) -> float:
        """Return the unscaled norm of the mean gradient in the all-reduce results."""
        if self.scaling is None:
            return super().norm()
        self.gradients.set_gradients(private=True)
        self.scaling.unscale(self._gradients())
        norm = float(nn.utils.get_total_norm(self._gradients()))
        self._drop_gradients()
        return norm

    def _may_write(self) -> bool:
        return self.scaling is not None or super()._may_write()

    def optimize(self) -> None:
        """Run the optimizer, unless a gradient of some stage is not finite."""
        if self.scaling is not None:
            if self.scaling.skips:
                return
            self.scaling.unscale(self._gradients())
        super().optimize()
