"""``Trainer(strategy="holdfast")``: automatic optimization over slices, computed again after a failure."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies.single_device import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn, optim

from holdfast.config import Settings
from holdfast.engine.start_rank import leads_at_start
from holdfast.errors import STOPPED, ConfigError, InternalError, ScriptError
from holdfast.integrations.lightning.agreement import in_turn
from holdfast.integrations.lightning.checkpoint_io import HoldfastCheckpointIO
from holdfast.integrations.lightning.duties import LeadDuties
from holdfast.integrations.lightning.environment import HoldfastEnvironment
from holdfast.integrations.lightning.loggers import agree_on_versions
from holdfast.integrations.lightning.slice_metrics import SliceMetrics
from holdfast.integrations.lightning.support import (
    check_first_training,
    check_loader,
    check_one_loader,
    check_same_data,
    check_settings,
    check_trainer,
)
from holdfast.session.prepared_loop import PreparedLoop
from holdfast.session.session import Session

_POSITION = "holdfast"
"""Key of the position in the data, in a checkpoint."""


class TrainingRun:
    """One ``trainer.fit``: the session and its loop, and the slices of the mini-batch in progress."""

    def __init__(self, trainer: Trainer, model: LightningModule, settings: Mapping[str, Any]) -> None:
        optimizer, configs = trainer.strategy.optimizers[0], trainer.strategy.lr_scheduler_configs
        self.session = Session(model, optimizer, schedule="script", total_steps=sys.maxsize, **settings)
        self.session.register(**{f"scheduler{i or ''}": config.scheduler for i, config in enumerate(configs)})
        self.loop = PreparedLoop(self.session, self.session.part_of_script(), (optimizer,), 1)
        self.session.ends_loop = self.loop.finish
        self.duties = LeadDuties(self.session, model)
        self.metrics = SliceMetrics(trainer, self.loop)
        self._trainer = trainer
        self._settings = settings
        self._position: Mapping[str, Any] | None = None
        self._slices: Iterator[Any] = iter(())
        self._inputs: Any = None
        self._generators = _generators()
        self._is_first = False
        self.is_computing = False

    def resume_at(self, position: Mapping[str, Any]) -> None:
        """Continue the order of the samples where a checkpoint was saved."""
        self._position = position

    def position(self) -> dict[str, Any] | None:
        """Return the position in the data; None before the first step."""
        return self.loop.position() if self.session.step else None

    def _find_position(self, loader: Any) -> None:
        """Pass the position on in the way Lightning continues: within the epoch, or with the next one."""
        position, self._position = self._position, None
        if position is None:
            return
        check_same_data(position, loader, self._settings)
        batch_size = loader.batch_size
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done == 0 and position["offset"]:  # the epoch was shortened, for example by limit_train_batches
            position = {**position, "epoch": position["epoch"] + 1, "offset": 0}
        if done * batch_size != position["offset"]:
            raise ConfigError(
                f"the checkpoint was saved after {position['offset']} samples of an epoch, but Lightning continues after"
                f" {done} batches of {batch_size}: resume from another checkpoint"
            )
        self.session.begin_at(
            position["step"],
            position["epoch"],
            position["offset"],
            slices=position["slices"],
            order=position["order"],
        )

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield, once per mini-batch, the inputs of this worker's first slice."""
        self._find_position(loader)
        for _ in self.loop.steps(loader, hooks=True):
            self._slices = self.loop.slices()
            inputs = next(self._slices)
            self._begin(inputs, is_first=True)
            yield inputs

    def _begin(self, inputs: Any, *, is_first: bool) -> None:
        self._inputs, self._is_first, self._generators = inputs, is_first, _generators()

    def inputs_of_slice(self, batch: Any, transferred: Callable[[Any], Any]) -> Any:
        """Return the inputs of the slice in progress, with the random generators as they were when it was loaded.

        Args:
            batch: What Lightning passes on: the inputs of the first slice, already transferred.
            transferred: Does with another slice's inputs what Lightning does with a batch.
        """
        inputs = batch if self._is_first else transferred(self._inputs)
        _set_generators(self._generators)  # hooks of callbacks have run since, in the first slice alone
        return inputs

    def compute(self, closure: Callable[[], Any]) -> Any:
        """Run the closure for each slice, again after a failure, until the step is committed; return its last result."""
        self.is_computing = True
        try:
            with self.metrics.kept():
                result = closure()
                # Hooks of zero_grad run once a step: each slice begins without gradients anyway.
                if isinstance(closure, Closure):
                    closure._zero_grad_fn = None
                for inputs in self._slices:
                    self._begin(inputs, is_first=False)
                    result = closure()
        finally:
            self.is_computing = False
            self._inputs = None
        self.metrics.log_means()
        return result


def _generators() -> tuple[torch.Tensor, Any, Any]:
    """Return the states of the global generators, for this process alone."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_generators(states: tuple[torch.Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


class _SlicedLoader:
    """A training data loader whose iterator yields the first slice of each mini-batch; otherwise the loader itself."""

    def __init__(self, strategy: HoldfastStrategy, loader: Any) -> None:
        self._strategy = strategy
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Begin one pass, once the first batch is requested: Lightning creates the iterator before training."""
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        try:
            for inputs in self._strategy.run.batches(self._loader):
                self._strategy.follow_lead()
                yield inputs
        except SystemExit as stopped:
            if stopped.code == STOPPED:
                self._strategy.save_stopped()
            raise

    def __len__(self) -> int:
        """Return the number of mini-batches."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader itself."""
        return getattr(self.__dict__["_loader"], name)


class HoldfastStrategy(SingleDeviceStrategy):
    """Trains each mini-batch slice by slice on all workers; a failure costs the step in progress, which is repeated.

    ::

        trainer = Trainer(strategy="holdfast")

    To Lightning each process trains alone, on the mini-batches of the whole job. ``training_step`` receives one slice at
    a time. Metrics that it logs become means over the mini-batch, equal on every worker.

    Args:
        checkpoint_io: Default: :class:`HoldfastCheckpointIO`.
        precision_plugin: As of any strategy.
        **settings: Fields of :class:`holdfast.Settings`.
    """

    strategy_name = "holdfast"

    def __init__(self, *, checkpoint_io: Any = None, precision_plugin: Any = None, **settings: Any) -> None:
        super().__init__(
            device="cpu", checkpoint_io=checkpoint_io or HoldfastCheckpointIO(), precision_plugin=precision_plugin
        )
        self.cluster_environment = HoldfastEnvironment()
        self._settings = settings
        self._run: TrainingRun | None = None
        self._session: Session | None = None
        self._loaded_position: Mapping[str, Any] | None = None

    @property
    def run(self) -> TrainingRun:
        """The training in progress."""
        if self._run is None:
            raise InternalError("the training data loader is read outside of trainer.fit")
        return self._run

    # -- setup

    def setup_environment(self) -> None:
        """Check that Holdfast supports what is asked for, before anything is written."""
        trainer = self._trainer()
        check_settings(self._settings)
        self._note_lead()
        if trainer.state.fn == TrainerFn.FITTING:
            check_trainer(trainer)
            check_first_training()
            agree_on_versions(trainer.loggers)
        for source in (trainer.lightning_module, trainer.datamodule):
            if source is not None:
                source.prepare_data = in_turn(source.prepare_data)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Create the optimizers, and connect to the other workers."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1:
            raise ConfigError(
                f'strategy="holdfast" needs one optimizer from configure_optimizers, got {len(self.optimizers)}:'
                " several optimizers need manual optimization, so use holdfast.prepare in a loop of your own"
            )
        if isinstance(self.optimizers[0], optim.LBFGS):
            raise ConfigError('strategy="holdfast" cannot be used with LBFGS, which computes a step more than once')
        model = self.lightning_module
        assert model is not None
        self._run = TrainingRun(trainer, model, self._settings)
        self._session = self._run.session
        if self._loaded_position is not None:
            self._run.resume_at(self._loaded_position)
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            self._loaded_position = None
        self._note_lead()
        self._run.duties.begin(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let the training loader yield slices; others stay as they are, and are read in full by every process."""
        if not self._trainer().training:
            return dataloader
        check_loader(dataloader)
        return _SlicedLoader(self, dataloader)

    def on_train_start(self) -> None:
        """Check that there is one training loader."""
        super().on_train_start()
        check_one_loader(self._trainer())

    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # -- the lead

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes what is written once: the lowest surviving rank."""
        return self._note_lead()

    def save_stopped(self) -> None:
        """Save what Lightning needs to resume, because all workers stop."""
        trainer = self._trainer()
        path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
        trainer.save_checkpoint(path)
        if self._note_lead():
            sys.stderr.write(f'holdfast: resume with trainer.fit(..., ckpt_path="{path}")\n')

    def follow_lead(self) -> None:
        """Write from here on if the lead has failed and this worker is the next one."""
        self._note_lead()

    def _note_lead(self) -> bool:
        is_lead = leads_at_start(Settings.from_env()) if self._session is None else self._session.is_lead
        rank_zero_only.rank = 0 if is_lead else 1
        if self._run is not None and is_lead:
            self._run.duties.take_over(self.checkpoint_io)
        return is_lead

    # -- a step

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` on the slice in progress."""
        if self._run is None:
            return super().training_step(batch, *args, **kwargs)
        if not self._run.is_computing:
            raise ScriptError(
                "optimizer_step of the LightningModule must pass its closure on: optimizer.step(closure=optimizer_closure)"
            )
        output = super().training_step(self._run.inputs_of_slice(batch, self._transferred), *args, **kwargs)
        if output is None:
            raise ScriptError('training_step returned None; under strategy="holdfast" every slice needs a loss')
        return output

    def _transferred(self, inputs: Any) -> Any:
        """Return a slice's inputs as Lightning passes a batch to ``training_step``."""
        model = self.lightning_module
        assert model is not None
        inputs = self.precision_plugin.convert_input(inputs)
        return self.batch_to_device(model._on_before_batch_transfer(inputs, dataloader_idx=0), dataloader_idx=0)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the gradients of the slice; hooks after it run once per step, on the mean gradients."""
        if self._run is None:
            loss: torch.Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        model = self.lightning_module
        assert model is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, model)
        self.precision_plugin.backward(closure_loss, model, optimizer, *args, **kwargs)
        if self._run.loop.is_decided:
            self._run.metrics.pause()
            closure_loss = self.precision_plugin.post_backward(closure_loss, model)
        return closure_loss

    def optimizer_step(
        self,
        optimizer: optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the slices until the step is committed; then clip the mean gradients, and run the optimizer once."""
        run = self._run
        if run is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = run.compute(closure)
        if isinstance(closure, Closure) and closure._result is not None:
            run.metrics.set_loss(closure._result.loss)
        self._note_lead()
        run.duties.forget()
        run.loop.apply(lambda: super(HoldfastStrategy, self).optimizer_step(optimizer, lambda: result, model, **kwargs))
        return result

    # -- between steps

    def on_validation_start(self) -> None:
        """Tell the health monitor that this worker is busy with its own evaluation."""
        super().on_validation_start()
        if self._run is not None:
            self._run.session.note_busy(busy=True)

    def on_validation_end(self) -> None:
        """Tell the health monitor that it is over."""
        super().on_validation_end()
        if self._run is not None:
            self._run.session.note_busy(busy=False)

    def on_train_end(self) -> None:
        """End the last loop together with the other workers; then do what a lead that failed at the end left undone."""
        super().on_train_end()
        if self._run is not None:
            self._run.loop.finish()
            self._note_lead()

    def teardown(self) -> None:
        """Leave the model as Lightning does."""
        self._run = None
        super().teardown()

    # -- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, on the lead; all others remember it until the lead has committed the next step."""
        if self._run is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            checkpoint[_POSITION] = self._run.position()
            self._run.duties.save(self.checkpoint_io, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint; ``trainer.fit`` continues the order of the samples at its position."""
        options = {} if weights_only is None else {"weights_only": weights_only}  # Lightning 2.5 does not have it
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, **options)
        if self._trainer().state.fn == TrainerFn.FITTING:
            self._loaded_position = loaded.get(_POSITION)
            if self._loaded_position is None and loaded.get("global_step"):
                raise ConfigError(
                    f'{checkpoint_path} was not saved under strategy="holdfast": the position in its order of samples is'
                    " unknown; load the weights with MODULE.load_from_checkpoint instead"
                )
        return loaded

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, on the lead."""
        if self._run is None:
            super().remove_checkpoint(filepath)
        else:
            self._run.duties.remove(self.checkpoint_io, filepath)
