"""What of the Trainer works under Holdfast, checked at the start: everything else is refused in one line."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler

from holdfast.comm.launchers import chosen
from holdfast.config import RESPAWNS, Settings
from holdfast.errors import ConfigError

_started: list[Settings] = []
"""The jobs that Trainers of this process have joined."""

_STRATEGIES = ("rollback", "forward")


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
    settings = Settings.from_env(**settings_of(args))
    for why in (_refused_arguments(args), _refused_settings(settings)):
        if why:
            raise ConfigError(f"holdfast.integrations.transformers: {why}")
    return settings


def _refused_arguments(args: Any) -> str:
    """Return why an argument is refused; "" if none is."""
    optim = str(getattr(args.optim, "value", args.optim))
    refused = {
        "TrainingArguments has joined a process group: import Trainer from holdfast.integrations.transformers before"
        " TrainingArguments is created": args.world_size > 1,
        "fp16 is not supported, because its GradScaler is Accelerate's: use bf16=True": args.fp16,
        "deepspeed is not supported: it distributes the model itself": args.deepspeed,
        "fsdp is not supported: every worker has the whole model": args.fsdp,
        "parallelism_config is not supported: every worker has the whole model": args.parallelism_config,
        "torch_compile is not supported: compile the parts of the model instead": args.torch_compile,
        "auto_find_batch_size is not supported: a batch that does not fit would fail on one worker only": (
            args.auto_find_batch_size
        ),
        "push_to_hub is not supported: call trainer.push_to_hub() after training": args.push_to_hub,
        "save_on_each_node is not supported: only the lead saves": args.save_on_each_node,
        "enable_jit_checkpoint is not supported: on SIGTERM a worker leaves, and the others continue": (
            args.enable_jit_checkpoint
        ),
        f"optim={optim} is not supported: it updates weights before the step is committed": (
            "lomo" in optim or "layerwise" in optim
        ),
        f"{args.n_gpu} GPUs in one process are not supported: select one with CUDA_VISIBLE_DEVICES, or set use_cpu=True": (
            args.n_gpu > 1
        ),
    }
    return next((why for why, is_asked in refused.items() if is_asked), "")


def _refused_settings(settings: Settings) -> str:
    """Return why a setting is refused; "" if none is."""
    refused = {
        f"--strategy {settings.strategy} is not supported: the Trainer cannot repeat committed steps; use"
        f" {' or '.join(_STRATEGIES)}": settings.strategy not in _STRATEGIES,
        "--guard heal is not supported: the Trainer cannot repeat committed steps; use --guard stop": (
            settings.guard == "heal"
        ),
        "--batch local is not supported: the Trainer has counted the steps of an epoch": settings.batch == "local",
        "--respawn is not supported: a new worker cannot join the loop of the Trainer; use --spares": (
            os.environ.get(RESPAWNS)
        ),
    }
    return next((why for why, is_asked in refused.items() if is_asked), "")


def check_training(settings: Settings, *, has_trained: bool, resumes: bool) -> None:
    """Check one call of ``train``.

    Raises:
        ConfigError: if it is to resume twice, or is not the first one in this process.
    """
    if settings.resume and resumes:
        raise ConfigError("--resume and resume_from_checkpoint name two states to resume from: leave out one of them")
    if has_trained and resumes:
        raise ConfigError("resume_from_checkpoint is only supported in the first call of train in a process")


def check_alone(settings: Settings) -> None:
    """Check that no other Trainer of this process is part of the job.

    Raises:
        ConfigError: if one is: after a failure, a second one would wait for workers that are lost.
    """
    if _started and not is_single_process(settings):
        raise ConfigError("a second Trainer in one process is not supported: train its model in a job of its own")
    _started.append(settings)


def check_model(model: Any, session_model: Any) -> None:
    """Check that the model is still the one that the session trains.

    Raises:
        ConfigError: if it is not.
    """
    if model is not session_model:
        raise ConfigError("the model was replaced, as by model_init: train another model in another process")


def check_loader(loader: Any) -> None:
    """Check that the session can read the data in the loader's order.

    Raises:
        ConfigError: if the loader has a sampler of its own.
    """
    sampler = getattr(loader, "sampler", None)
    if type(sampler) not in (RandomSampler, SequentialSampler) or loader.batch_size is None:
        name = type(sampler if loader.batch_size is not None else loader.batch_sampler).__name__
        raise ConfigError(
            f"a {name} is not supported: Holdfast reads a map-style dataset in random or sequential order; set"
            " train_sampling_strategy to 'random' or 'sequential'"
        )
