"""The ``Trainer`` of Transformers on a Holdfast session.

To Transformers, each process trains alone on the mini-batch of the whole job. Its loop requests a step at a time; the
session computes it slice by slice, on all workers, and again after a failure. Once ``training_step`` returns, the step is
committed on every worker and parameters have their mean gradients: clipping, the optimizer and the scheduler follow as
in one process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import optim

from holdfast.comm.launchers import chosen
from holdfast.config import Settings
from holdfast.integrations import transformers_checks as checks
from holdfast.session.prepared import PreparedLoop, SliceLoss
from holdfast.session.prepared_objects import PreparedOptimizer
from holdfast.session.session import Session

_FLOPS, _TOKENS = "flops", "tokens"
_FIGURES = (_FLOPS, _TOKENS)
"""What each slice adds to the state of the Trainer besides its loss."""

_ONE_PROCESS = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "PMI_SIZE": "1"}


def train_alone() -> None:
    """Let Accelerate, which reads the environment, see one process; does nothing outside of a Holdfast job."""
    if chosen(Settings.from_env().fabric) == "virtual":
        return
    os.environ.update(_ONE_PROCESS)
    os.environ.pop("LOCAL_RANK", None)


train_alone()


class _Steps:
    """What the Trainer has for a data loader: yields each step of an epoch once."""

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self._trainer = trainer
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Yield the steps of one epoch."""
        return self._trainer.holdfast_loop.steps(self.loader)

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the data loader."""
        return getattr(self.__dict__["loader"], name)


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` that survives the loss of workers with the bits of the undisturbed run.

    The mini-batch of the job has ``per_device_train_batch_size * gradient_accumulation_steps`` samples, whatever the
    number of workers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._holdfast: PreparedLoop | None = None
        self._accumulate = 1
        super().__init__(*args, **kwargs)
        checks.check_trainer(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, before anything is created from them."""
        self._holdfast_settings = checks.check_arguments(self.args)
        self._follow_lead()
        super().create_accelerator_and_postprocess()

    @property
    def holdfast_loop(self) -> PreparedLoop:
        """The loop that computes steps; exists once training has begun."""
        assert self._holdfast is not None
        return self._holdfast

    # -- the lead

    @property
    def _is_lead(self) -> bool:
        if self._holdfast is not None:
            return self._holdfast.session.is_lead
        settings = self._holdfast_settings
        first = min((int(rank) for rank in settings.ranks.split(",")), default=0) if settings.ranks else 0
        return checks.rank_of(settings) in (-1, first)

    def _follow_lead(self) -> None:
        """Let ``args.should_save`` and everything else that asks for the main process name the lead."""
        index = 0 if self._is_lead else max(1, checks.rank_of(self._holdfast_settings))
        where = self.args.distributed_state
        where.process_index = where.local_process_index = index
        state = getattr(self, "state", None)
        if state is not None:
            state.is_world_process_zero = state.is_local_process_zero = index == 0

    # -- training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see ``transformers.Trainer.train``."""
        self._accumulate = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = 1  # the mini-batch of a step is one batch here
        try:
            return super().train(*args, **kwargs)
        finally:
            self.args.gradient_accumulation_steps = self._accumulate

    def get_train_dataloader(self) -> Any:
        """Return the data loader; during training it yields steps."""
        if not self.is_in_train:
            return super().get_train_dataloader()
        self._train_batch_size *= self._accumulate
        prepare, self.accelerator.prepare = self.accelerator.prepare, lambda loader: loader
        try:
            loader = super().get_train_dataloader()
        finally:
            self.accelerator.prepare = prepare
            self._train_batch_size //= self._accumulate
        checks.check_loader(loader)
        return _Steps(self, loader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the size of the mini-batch of the job."""
        return int(super().get_total_train_batch_size(args)) * self._accumulate

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer, and the session that decides when it runs."""
        optimizer = super().create_optimizer(model)
        if self.is_in_train and self._holdfast is None:
            self.optimizer = optimizer = self._start_session(optimizer)
        return optimizer

    def _start_session(self, optimizer: optim.Optimizer) -> PreparedOptimizer:
        session = Session(
            self.model, optimizer, schedule="script", total_steps=sys.maxsize, **checks.settings_of(self.args)
        )
        loop = self._holdfast = PreparedLoop(session, session.part_of_script(), [optimizer], 1)
        session.ends_loop = loop.finish
        return PreparedOptimizer(loop, optimizer, 0, 1)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the scheduler; its state is restored with the model's."""
        scheduler = super().create_scheduler(*args, **kwargs)
        if self._holdfast is not None:
            self._holdfast.session.register(scheduler=scheduler)
        return scheduler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the next step; its items are counted slice by slice."""
        step = next(epoch_iterator, None)
        return ([] if step is None else [step]), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the step on all workers, again after each failure, and leave the mean gradients in the model."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        made = self.holdfast_loop.compute_items(lambda slice_: self._loss_of(model, slice_), _FIGURES)
        self._follow_lead()
        self.current_flos += made[_FLOPS]
        self.state.num_input_tokens_seen += round(made[_TOKENS])
        return torch.tensor(made["loss"], device=self.args.device)

    def _loss_of(self, model: Any, slice_: Any) -> SliceLoss:
        inputs = self._prepare_inputs(slice_)
        items, expected = self.slice_items(inputs)
        totals = {_FLOPS: float(super().floating_point_ops(inputs)), _TOKENS: self._tokens_of(inputs)}
        if not items:  # the mean over no label is not a number; a sum over none is zero
            return SliceLoss(next(p for p in model.parameters() if p.requires_grad).sum() * 0.0, 0.0, totals)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=expected)
        return SliceLoss(loss, items, totals)

    def slice_items(self, inputs: Mapping[str, Any]) -> tuple[float, Any]:
        """Return the number of items that the loss of a slice is the mean over, and ``num_items_in_batch`` for it.
        """
        counted = super()._get_num_items_in_batch([inputs], self.args.device)
        if counted is not None:
            return float(counted), counted
        return float(self.holdfast_loop.slice_samples), None

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of a batch; those of a step are counted slice by slice."""
        return int(super().floating_point_ops(inputs)) if isinstance(inputs, Mapping) else 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Do nothing: the tokens of a step are counted slice by slice."""

    def _tokens_of(self, inputs: Mapping[str, Any]) -> float:
        """Return the number of tokens of a slice that ``num_input_tokens_seen`` counts."""
        if self.args.include_num_input_tokens_seen == "no":
            return 0.0
        before, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen, 0
        try:
            super()._track_num_input_tokens(inputs)
            return float(self.state.num_input_tokens_seen)
        finally:
            self.state.num_input_tokens_seen = before

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.holdfast_loop.finish()
        self._follow_lead()
        return super()._finalize_training(*args, **kwargs)

    # -- evaluating and saving

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        if self._holdfast is None:
            yield
            return
        with self._holdfast.session.busy():
            yield

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; every worker does, with the same result."""
        with self._busy():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; every worker does, with the same result."""
        with self._busy():
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model; the lead does."""
        self._follow_lead()
        with self._busy():
            super().save_model(*args, **kwargs)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """A ``transformers.Seq2SeqTrainer`` that survives the loss of workers; see :class:`Trainer`."""
