"""``Fabric(strategy="holdfast")``: the loop of the script, which receives slices and steps the optimizer once per step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn, optim

from holdfast.config import Settings
from holdfast.engine.start_rank import leads_at_start
from holdfast.errors import ConfigError, ScriptError
from holdfast.integrations.lightning.checkpoint_io import HoldfastCheckpointIO
from holdfast.integrations.lightning.duties import LeadDuties
from holdfast.integrations.lightning.environment import HoldfastEnvironment
from holdfast.integrations.lightning.support import check_first_training, check_settings
from holdfast.session.prepared import PreparedLoader
from holdfast.session.prepared_loop import LoopPhase, PreparedLoop
from holdfast.session.prepared_objects import OptimizerGroup, PreparedScheduler
from holdfast.session.session import Session


class _FabricLoader:
    """A data loader that yields slices where the model is trained, and whole batches where it is evaluated."""

    def __init__(self, strategy: HoldfastFabricStrategy, loader: Any) -> None:
        self._strategy = strategy
        self._loader = loader
        self.holdfast = _StepView(strategy, loader)
        """``committed``, ``metrics``, ``log`` and the other attributes of a loader of ``holdfast.prepare``."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the slices of a pass, or its batches with gradients disabled or the model in ``eval`` mode."""
        return self._strategy.pass_over(self._loader)

    def __len__(self) -> int:
        """Return the number of mini-batches."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader itself."""
        return getattr(self.__dict__["_loader"], name)


class _StepView:
    """What a script may ask of the step in progress; see :class:`~holdfast.session.prepared.PreparedLoader`."""

    def __init__(self, strategy: HoldfastFabricStrategy, loader: Any) -> None:
        self._strategy = strategy
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the prepared loader."""
        strategy = self.__dict__["_strategy"]
        return getattr(PreparedLoader(strategy.loop, self.__dict__["_loader"]), name)


class HoldfastFabricStrategy(SingleDeviceStrategy):
    """Runs the body of a Fabric loop once per slice of each mini-batch; a failure costs the step in progress.

    ::

        fabric = Fabric(strategy="holdfast")
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)

    ``optimizer.step()`` and ``scheduler.step()`` act once per step, after its last slice. ``loader.holdfast.committed``
    is true in that iteration, and ``loader.holdfast.metrics`` are means over the mini-batch.

    Args:
        checkpoint_io: Default: :class:`HoldfastCheckpointIO`.
        precision: As of any strategy.
        **settings: Fields of :class:`holdfast.Settings`.
    """

    def __init__(self, *, checkpoint_io: Any = None, precision: Any = None, **settings: Any) -> None:
        self._loop: PreparedLoop | None = None
        self._duties: LeadDuties | None = None
        super().__init__(device="cpu", checkpoint_io=checkpoint_io or HoldfastCheckpointIO(), precision=precision)
        self.cluster_environment = HoldfastEnvironment()
        self._settings = settings
        self._module: nn.Module | None = None
        self._optimizers: list[optim.Optimizer] = []
        self._has_scheduler = False

    @property
    def loop(self) -> PreparedLoop:
        """The loop of the script.

        Raises:
            ScriptError: before ``fabric.setup(model, optimizer)``.
        """
        if self._loop is None:
            raise ScriptError("call fabric.setup(model, optimizer) before the loop over the training loader")
        return self._loop

    # -- setup

    def setup_environment(self) -> None:
        """Check that Holdfast supports what is asked for."""
        check_settings(self._settings)
        if self.accelerator.__class__.__name__ != "CPUAccelerator":
            raise ConfigError('strategy="holdfast" needs models in CPU memory: pass Fabric(accelerator="cpu")')
        self._note_lead()
        super().setup_environment()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[optim.Optimizer], Any]:
        """Prepare a model with its optimizers."""
        if self._loop is not None:
            raise ConfigError('strategy="holdfast" trains one model: call fabric.setup once, with all its optimizers')
        check_first_training()
        self._module, self._optimizers = module, list(optimizers)
        grouped = self._optimizers[0] if len(self._optimizers) == 1 else OptimizerGroup(self._optimizers)
        session = Session(module, grouped, schedule="script", total_steps=sys.maxsize, **self._settings)
        self._loop = PreparedLoop(session, session.part_of_script(), self._optimizers, 1)
        session.ends_loop = self._loop.finish
        if scheduler is None:
            return module, optimizers, None
        self._has_scheduler = True
        session.register(scheduler=scheduler)
        return module, optimizers, PreparedScheduler(self._loop, scheduler)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Keep a model whose optimizer is set up later."""
        self._module = module
        return module

    def setup_optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """Prepare the model that was set up before, with its optimizer."""
        if self._module is None:
            raise ConfigError("call fabric.setup_module(model) before fabric.setup_optimizers(optimizer)")
        self.setup_module_and_optimizers(self._module, [optimizer])
        return optimizer

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let a loader yield slices while the model is trained."""
        return _FabricLoader(self, dataloader)

    def pass_over(self, loader: Any) -> Iterator[Any]:
        """Return one pass over a loader: slices in training, batches in evaluation."""
        is_training = torch.is_grad_enabled() and (self._module is None or self._module.training)
        return self._slices(loader) if is_training else iter(loader)

    def _slices(self, loader: Any) -> Iterator[Any]:
        for inputs in self.loop.iterate(loader):
            if self._duties is None:  # the first slice: this worker has connected to the others
                self._duties = LeadDuties(self.loop.session, self.loop.session.part_of_script().model)
            self._note_lead()
            yield inputs

    # -- a step

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the optimizer if this was the last slice of the step, and the step is committed; else do nothing."""
        if self._loop is None:
            return super().optimizer_step(optimizer, **kwargs)
        if kwargs.get("closure") is not None:
            raise ScriptError('optimizer.step(closure) cannot be used under strategy="holdfast": call it without one')
        if not self._has_scheduler and any("initial_lr" in group for group in optimizer.param_groups):
            raise ConfigError(
                'a scheduler counts slices unless strategy="holdfast" knows it: pass it to'
                " fabric.setup(model, optimizer, scheduler=scheduler), and use the one that this returns"
            )
        self._note_lead()
        if self._duties is not None and self._loop.is_decided:
            self._duties.forget()
        if len(self._optimizers) > 1:
            self._loop.capture(next(i for i, one in enumerate(self._optimizers) if one is optimizer))
        else:
            self._loop.apply(lambda: super(HoldfastFabricStrategy, self).optimizer_step(optimizer))
        return None

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the value, which every process computes by itself; refuse that of a slice."""
        self._check_no_slice("all_reduce")
        return super().all_reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the value, which every process computes by itself; refuse that of a slice."""
        self._check_no_slice("all_gather")
        gathered: torch.Tensor = super().all_gather(tensor, *args, **kwargs)
        return gathered

    def _check_no_slice(self, name: str) -> None:
        if self._loop is not None and self._loop.phase not in (LoopPhase.OUTSIDE, LoopPhase.APPLIED):
            raise ScriptError(
                f'fabric.{name} of a slice is not supported under strategy="holdfast": log it by'
                " loader.holdfast.log(name=value), and read the mean from loader.holdfast.metrics"
            )

    # -- the lead

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes what is written once: the lowest surviving rank."""
        return self._note_lead()

    def _note_lead(self) -> bool:
        is_connected = self._loop is not None and self._duties is not None
        is_lead = (
            self._loop.session.is_lead
            if is_connected and self._loop is not None
            else leads_at_start(Settings.from_env())
        )
        rank_zero_only.rank = 0 if is_lead else 1
        if self._duties is not None and is_lead:
            self._duties.take_over(self.checkpoint_io)
        return is_lead

    @property
    def local_rank(self) -> int:
        """0 where ``fabric.print`` prints: on the lead."""
        return 0 if self._note_lead() else 1

    @local_rank.setter
    def local_rank(self, rank: int) -> None:
        """Ignore the rank that the base class sets."""

    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write a checkpoint, on the lead; all others remember it until the lead has committed the next step."""
        if self._duties is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        self._note_lead()
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        self._duties.save(self.checkpoint_io, converted, path, storage_options)
