"""What is not supported is one clear line at the start, never a hang or a wrong number."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from holdfast.config import RESPAWNS, Settings
from holdfast.errors import ConfigError

_NOT_CALLBACKS = {
    Timer: "each worker has its own clock; use max_epochs or max_steps",
    StochasticWeightAveraging: "it trains an epoch without an optimizer; use lightning.pytorch.callbacks.WeightAveraging",
    GradientAccumulationScheduler: "the loader's batch is the mini-batch of a step; give the loader a larger batch_size",
    BaseFinetuning: "the set of trained parameters must not change; freeze them in configure_model",
    ModelPruning: "the set of parameters must not change",
}
"""Callbacks that cannot be used, and why."""

_trainings: list[bool] = []
"""One item for each training of this process."""


def check_settings(options: Mapping[str, Any]) -> None:
    """Check the settings of the job.

    Raises:
        ConfigError: if one needs what a Lightning loop cannot do.
    """
    settings = Settings.from_env(**options)
    is_newcomer = settings.rank >= 0 and str(settings.rank) not in settings.ranks.split(",")
    if is_newcomer or RESPAWNS in os.environ:
        raise _refused("--respawn", "a new worker cannot enter a running trainer.fit; survivors take over the slices")
    if settings.spares:
        raise _refused("--spares", "a spare worker cannot enter a running trainer.fit; survivors take over the slices")
    if settings.strategy not in ("rollback", "forward"):
        raise _refused(f"--strategy {settings.strategy}", "Lightning's loop cannot go back by several steps")
    if settings.guard == "heal":
        raise _refused("--guard heal", "Lightning's loop cannot go back by several steps; use stop or warn")
    if settings.checkpoint_dir or settings.resume:
        option = "--resume" if settings.resume else "--checkpoint-dir"
        raise _refused(option, "use ModelCheckpoint, and trainer.fit(ckpt_path=...) to resume")


def check_first_training() -> None:
    """Check that this is the first training of a worker; a single process may train again.

    Raises:
        ConfigError: if it is not.
    """
    is_worker = any(name in os.environ for name in ("HOLDFAST_RUN_DIR", "OMPI_COMM_WORLD_RANK"))
    if is_worker and _trainings:
        raise _refused("a second trainer.fit in a job", "workers connect once; start a job for each training")
    _trainings.append(True)


def check_trainer(trainer: Trainer) -> None:
    """Check what the trainer is asked to do.

    Raises:
        ConfigError: if it is more than Holdfast supports.
    """
    module: Any = trainer.lightning_module
    if not module.automatic_optimization:
        raise _refused(
            "manual optimization", "the strategy runs the optimizer; use holdfast.prepare in a loop of your own"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise _refused("training_step(dataloader_iter)", "a step needs its batch")
    if trainer.accumulate_grad_batches != 1:
        raise _refused(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            "the loader's batch is the mini-batch of a step, computed in slices; give the loader a larger batch_size",
        )
    if trainer.accelerator.__class__.__name__ != "CPUAccelerator":
        raise _refused("a device other than the CPU", "pass accelerator='cpu'")
    if getattr(trainer._accelerator_connector, "_layer_sync", None) is not None:
        raise _refused("sync_batchnorm=True", "each slice is normalised by itself")
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise _refused("val_check_interval as a time", "each worker has its own clock; give a number of batches")
    _check_callbacks(trainer)


def check_loader(loader: Any) -> None:
    """Check that mini-batches of a training loader can be cut into slices.

    Raises:
        ConfigError: if it is not a ``DataLoader``, or has a sampler of its own.
    """
    if not isinstance(loader, DataLoader):
        raise _refused(f"a training loader of type {type(loader).__name__}", "it must be a torch DataLoader")
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    is_plain = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement
    )
    if isinstance(loader.dataset, IterableDataset):
        raise _refused(
            "an IterableDataset", "a mini-batch is cut into slices by index; give a data set with len and []"
        )
    if not is_plain or type(batch_sampler) is not BatchSampler:
        own = type(batch_sampler if is_plain else sampler).__name__
        raise _refused(f"the sampler {own}", "the order is that of shuffle=True or shuffle=False, known to survivors")


def check_same_data(position: Mapping[str, Any], loader: Any, options: Mapping[str, Any]) -> None:
    """Check that a job continues in the order of samples, and in the slices, of the checkpoint that it resumes from.

    Raises:
        ConfigError: if something that decides them has changed.
    """
    settings = Settings.from_env(**options)
    now = {
        "num_samples": len(loader.dataset),
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "shuffle": isinstance(loader.sampler, RandomSampler),
        "seed": settings.seed,
        "slices": settings.slices or position["slices"],
    }
    for name, value in now.items():
        if position[name] != value:
            raise ConfigError(
                f"the checkpoint was made with {name}={position[name]} and this run has {value}: the run would not be the"
                " same; give the old value, or load the weights only"
            )


def check_one_loader(trainer: Trainer) -> None:
    """Check that there is one training loader.

    Raises:
        ConfigError: if there are several.
    """
    count = len(getattr(trainer.fit_loop._combined_loader, "flattened", [None]))
    if count != 1:
        raise _refused(f"{count} training loaders", "a step needs one training loader; combine their data sets")


def _check_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:
        for kind, why in _NOT_CALLBACKS.items():
            if isinstance(callback, kind):
                name = "max_time" if kind is Timer else type(callback).__name__
                raise _refused(name, why)
        interval = getattr(callback, "_train_time_interval", None)
        if isinstance(callback, ModelCheckpoint) and isinstance(interval, datetime.timedelta):
            raise _refused(
                "ModelCheckpoint(train_time_interval)", "each worker has its own clock; use every_n_train_steps"
            )


def _refused(what: str, why: str) -> ConfigError:
    return ConfigError(f'strategy="holdfast" does not support {what}: {why}')
