"""What of the Trainer works under Holdfast, checked at the start: everything else is refused in one line."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler

from holdfast.comm.launchers import chosen
from holdfast.config import Settings
from holdfast.errors import ConfigError


def rank_of(settings: Settings) -> int:
    """Return this worker's rank, -1 if it has none yet."""
    if settings.rank >= 0:
        return settings.rank
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", "-1"))


def is_single_process(settings: Settings) -> bool:
    """Return whether all workers of the job are in this process."""
    return chosen(settings.fabric) == "virtual"


def settings_of(args: Any) -> dict[str, Any]:
    """Return the settings of the session that follow from the arguments of the Trainer."""
    if "HOLDFAST_SEED" in os.environ:
        return {}
    return {"seed": args.seed if args.data_seed is None else args.data_seed}


def check_arguments(args: Any) -> Settings:
    """Check arguments and settings; return the settings of this process.

    Raises:
        ConfigError: if one of them cannot be used.
    """
    if args.world_size > 1:
        raise ConfigError("import Trainer from holdfast.integrations.transformers before TrainingArguments is created")
    return Settings.from_env(**settings_of(args))


def check_trainer(trainer: Any) -> None:
    """Check what only a complete Trainer shows."""


def check_loader(loader: Any) -> None:
    """Check that the session can read the data in the loader's order."""
    sampler = loader.sampler
    if not isinstance(sampler, RandomSampler | SequentialSampler):
        raise ConfigError(f"sampler {type(sampler).__name__}")
