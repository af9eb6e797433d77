"""Models that are not replicated on every worker: pipelines and sharded models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from holdfast.comm.device import DEVICES, device_of
from holdfast.data.seeds import seed_of, seeded
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.loss import Loss


class Pipeline:
    """A model split into stages, each computed by another worker (GPipe, Huang et al. 2019).

    ::

        model = holdfast.Pipeline([lambda: nn.Sequential(...), lambda: nn.Linear(512, 10)], F.cross_entropy)
        session = holdfast.Session(model, lambda parameters: torch.optim.Adam(parameters))
        for step in session.steps(dataset, batch_size=128, epochs=3):
            step.compute()

    The slices of a step are the micro-batches. Twice as many workers as stages form two pipeline replicas, which share
    the slices, and so on. After training every worker has the complete model: :attr:`module`.

    Args:
        stages: Factories of the stages, each called only where its stage is needed, with the global generators seeded
            by the job's seed and the stage; or the stages themselves, identical on all workers, which then keep all of
            them in memory throughout. A stage maps one tensor to one tensor. It gets its input on its own device.
        loss: See :data:`holdfast.models.loss.Loss`; it receives the output of the last stage.

    Raises:
        ConfigError: if there is no stage.
    """

    def __init__(self, stages: Sequence[Callable[[], nn.Module] | nn.Module] | nn.Sequential, loss: Loss) -> None:
        self._stages = list(stages)
        self.loss = loss
        self.module: nn.Module | None = None
        """The complete model, once training has ended."""
        self.averaged: nn.Module | None = None
        """The complete model with averaged weights, once training has ended, if the session keeps an average."""
        if not self._stages:
            raise ConfigError("a Pipeline must have at least 1 stage, got none")

    @property
    def parts(self) -> int:
        """Number of stages."""
        return len(self._stages)

    def build(self, part: int, seed: int) -> nn.Module:
        """Return a stage in its initial state."""
        made = _made(self._stages[part], seed_of("part", seed, part))
        check_device(made, f"stage {part} of a Pipeline")
        return made

    def check_devices(self) -> None:
        """Check that the stages that were passed as modules can be trained on their devices."""
        for part, stage in enumerate(self._stages):
            if isinstance(stage, nn.Module):
                check_device(stage, f"stage {part} of a Pipeline")


class Sharded:
    """A model whose parameters and optimizer state are sharded over workers (ZeRO, Rajbhandari et al. 2020).

    ::

        session = holdfast.Session(holdfast.Sharded(model), lambda parameters: torch.optim.Adam(parameters))
        for step in session.steps(dataset, batch_size=128, epochs=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))

    Every worker computes slices with the complete model, as if it were replicated, with the same bits. Between steps a
    worker keeps only its own shards. The others are lent to it, read-only, while it computes; on one host without a
    copy. After training every worker has all parameters.

    Fewer shards than workers form groups (HSDP, Zhao et al. 2023): with two shards on four workers each worker holds
    one shard, and its hot standby is the worker at the same place in the other group.

    Args:
        model: The complete model; it must be built identically on all workers.
        shards: Number of shards, ``>= 1``, fixed for the job; 0: the number of workers that the job starts with.

    Raises:
        ConfigError: if there are more shards than parameters.
    """

    def __init__(self, model: nn.Module, shards: int = 0) -> None:
        count = sum(1 for _ in model.parameters())
        if shards < 0 or shards > count:
            raise ConfigError(
                f"shards must be from 1 to {count}, the number of parameter tensors of the model, or 0, got {shards}"
            )
        self.module = model
        self.averaged: nn.Module | None = None
        """A copy of the model with averaged weights, once training has ended, if the session keeps an average."""
        self.shards = shards

    def shard_names(self, shards: int) -> list[list[str]]:
        """Return the parameter names of each of ``shards`` shards: neighbours, of balanced size, at least one each."""
        named = list(self.module.named_parameters())
        if shards > len(named):
            raise ConfigError(
                f"{shards} workers cannot each hold a shard of {len(named)} parameter tensors:"
                f" pass Sharded(model, shards={len(named)})"
            )
        total = sum(p.numel() for _, p in named)
        groups: list[list[str]] = [[] for _ in range(shards)]
        seen = 0
        for i, (name, parameter) in enumerate(named):
            middle = seen + parameter.numel() / 2
            at = min(int(middle * shards / max(1, total)), shards - 1)
            at = max(at, shards - (len(named) - i))  # leave at least one for each later shard
            first_empty = next((g for g, group in enumerate(groups) if not group), shards)
            groups[min(at, first_empty)].append(name)
            seen += parameter.numel()
        return groups


def check_device(module: nn.Module, what: str) -> None:
    """Check that a module is on one device, and can be trained there.

    Raises:
        ConfigError: if not.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if tensor.device.type not in DEVICES:
            raise ConfigError(f"{what} must be on {' or '.join(DEVICES)}, got {name} on {tensor.device}: move it there")
        if tensor.device != named[0][1].device:
            raise ConfigError(
                f"{what} must be on one device, got {named[0][0]} on {named[0][1].device} and {name} on {tensor.device}"
            )
        device_of(tensor.device)


def _made(stage: Callable[[], nn.Module] | nn.Module, seed: int) -> nn.Module:
    if isinstance(stage, nn.Module):
        return copy.deepcopy(stage)
    with seeded(seed):
        made: Any = stage()
    if not isinstance(made, nn.Module):
        raise ScriptError(f"a stage must be an nn.Module or a function that returns one, got {type(made).__name__}")
    return made
