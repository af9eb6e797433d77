"""Ray: a trainer whose workers survive the loss of nodes, which Ray replaces.

::

    from holdfast.integrations.ray import HoldfastTrainer, RunConfig, ScalingConfig

    trainer = HoldfastTrainer(
        train_fn, ScalingConfig(num_workers=(2, 4)), RunConfig(name="mnist", storage_path="/shared/runs")
    )
    result = trainer.fit()

On each node an actor runs the launcher of ``holdfast run``, and ``train_fn`` uses :class:`holdfast.Session` as a script
does. ``ScalingConfig`` and ``RunConfig`` of ``ray.train`` are accepted, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy
from holdfast.errors import TrainingFailed
from holdfast.integrations.ray.configs import RunConfig, ScalingConfig

if TYPE_CHECKING:
    from holdfast.integrations.ray.trainer import HoldfastTrainer, Result

__all__ = ["HoldfastTrainer", "Result", "RunConfig", "ScalingConfig", "TrainingFailed"]

_TRAINER = "holdfast.integrations.ray.trainer"

__getattr__ = lazy(__name__, {"HoldfastTrainer": _TRAINER, "Result": _TRAINER})  # workers do not need them
