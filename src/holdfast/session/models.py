"""What a script gives the session in the place of a model that every worker has a copy of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from holdfast.data.seeds import seed_of, seeded
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.loss import Loss


class Pipeline:
    """A model cut into stages, each of which another worker computes (GPipe, Huang et al. 2019).

    ::

        model = holdfast.Pipeline([lambda: nn.Sequential(...), lambda: nn.Linear(512, 10)], F.cross_entropy)
        session = holdfast.Session(model, lambda parameters: torch.optim.Adam(parameters))
        for step in session.steps(dataset, batch_size=128, epochs=3):
            step.compute()

    The slices of a step are the micro-batches. With twice as many workers as stages there are two chains, which share the
    slices, and so on. When training is over every worker has the whole model: :attr:`module`.

    Args:
        stages: Functions that make the stages, each called only where it is needed, with the global generators seeded by
            the job's seed and the stage; or the stages, alike at all workers, each of which then has all in its memory from the beginning to the
            end. A stage takes and returns one tensor, and is in the memory of the CPU.
        loss: See :data:`holdfast.models.loss.Loss`; it is given what the last stage returns.

    Raises:
        ConfigError: if there is no stage.
    """

    def __init__(self, stages: Sequence[Callable[[], nn.Module] | nn.Module] | nn.Sequential, loss: Loss) -> None:
        self._stages = list(stages)
        self.loss = loss
        self.module: nn.Module | None = None
        """The whole model, once training is over."""
        self.averaged: nn.Module | None = None
        """The whole model with the average of its weights, once training is over, if the session keeps one."""
        if not self._stages:
            raise ConfigError("a Pipeline must have at least 1 stage, got none")

    @property
    def parts(self) -> int:
        """Stages."""
        return len(self._stages)

    def build(self, part: int, seed: int) -> nn.Module:
        """Return a stage as it is at the beginning of training, in the memory of the CPU."""
        made = _made(self._stages[part], seed_of("part", seed, part))
        check_on_cpu(made, f"stage {part} of a Pipeline")
        return made

    def check_devices(self) -> None:
        """Make sure that the stages that are made already are in the memory of the CPU."""
        for part, stage in enumerate(self._stages):
            if isinstance(stage, nn.Module):
                check_on_cpu(stage, f"stage {part} of a Pipeline")


class Sharded:
    """A model whose parameters, and their optimizer's state, are spread over workers (ZeRO, Rajbhandari et al. 2020).

    ::

        session = holdfast.Session(holdfast.Sharded(model), lambda parameters: torch.optim.Adam(parameters))
        for step in session.steps(dataset, batch_size=128, epochs=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))

    Every worker computes slices with the whole model, as if it were replicated, and ends with the same bits. Between steps
    each has only the shards that it holds: the others are lent to it while it computes, on one host without a copy. They
    are read-only. When training is over every worker has all parameters.

    With fewer shards than workers there are groups (HSDP, Zhao et al. 2023): of two shards at four workers each holds one, and
    its mirror is the worker in the same place of the other group.

    Args:
        model: The whole model, in the memory of the CPU; it must be made alike at all workers.
        shards: Number of shards, ``>= 1``, fixed for the job; 0: the workers that the job starts with.

    Raises:
        ConfigError: if there are more shards than parameters.
    """

    def __init__(self, model: nn.Module, shards: int = 0) -> None:
        count = sum(1 for _ in model.parameters())
        if shards < 0 or shards > count:
            raise ConfigError(
                f"shards must be from 1 to {count}, the tensors of parameters of the model, or 0, got {shards}"
            )
        self.module = model
        self.averaged: nn.Module | None = None
        """A copy of the model with the average of its weights, once training is over, if the session keeps one."""
        self.shards = shards

    def cut(self, shards: int) -> list[list[str]]:
        """Return the names of the parameters in each of ``shards`` shards: neighbours, of about the same size together; one at least."""
        named = list(self.module.named_parameters())
        if shards > len(named):
            raise ConfigError(
                f"{shards} workers cannot each hold a shard of {len(named)} tensors of parameters: give Sharded(model, shards={len(named)})"
            )
        total = sum(p.numel() for _, p in named)
        groups: list[list[str]] = [[] for _ in range(shards)]
        seen = 0
        for i, (name, parameter) in enumerate(named):
            middle = seen + parameter.numel() / 2
            at = min(int(middle * shards / max(1, total)), shards - 1)
            at = max(at, shards - (len(named) - i))  # one at least for each that comes later
            first_empty = next((g for g, group in enumerate(groups) if not group), shards)
            groups[min(at, first_empty)].append(name)
            seen += parameter.numel()
        return groups


def check_on_cpu(module: nn.Module, what: str) -> None:
    """Make sure that a module is in CPU memory: parts of a split model are lent and handed over there.

    Raises:
        ConfigError: if a parameter or a buffer is on another device.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"{what} must be in the memory of the CPU, got {name} on {tensor.device}: move it there with .to('cpu')"
            )


def _made(stage: Callable[[], nn.Module] | nn.Module, seed: int) -> nn.Module:
    if isinstance(stage, nn.Module):
        return copy.deepcopy(stage)
    with seeded(seed):
        made: Any = stage()
    if not isinstance(made, nn.Module):
        raise ScriptError(f"a stage must be an nn.Module or a function that makes one, got {type(made).__name__}")
    return made
