"""The ``Trainer`` of Transformers on a Holdfast session.

To Transformers, each process trains alone on the mini-batch of the whole job. Its loop requests a step at a time; the
session computes it slice by slice, on all workers, and again after a failure. Once ``training_step`` returns, the step is
committed on every worker and parameters have their mean gradients: clipping, the optimizer and the scheduler follow as
in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.trainer
from torch import optim
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_callback import EarlyStoppingCallback

from holdfast.engine.start_rank import leads_at_start, rank_at_start
from holdfast.errors import ConfigError
from holdfast.integrations import transformers_checks as checks
from holdfast.integrations.alone import train_alone
from holdfast.integrations.transformers_files import kept_state, read_job
from holdfast.integrations.transformers_saving import SavingTrainer
from holdfast.session.prepared_loop import PreparedLoop, SliceLoss
from holdfast.session.prepared_objects import PreparedOptimizer
from holdfast.session.session import Session

_FLOPS, _TOKENS = "flops", "tokens"
_FIGURES = (_FLOPS, _TOKENS)
"""What each slice adds to the state of the Trainer besides its loss."""

_IGNORED = -100
"""The label that losses leave out."""

train_alone()


class _Steps:
    """What the Trainer has for a data loader: yields each step of an epoch once."""

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self._trainer = trainer
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Yield the steps of one epoch."""
        return self._trainer.steps_of_epoch(self.loader)

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the data loader."""
        return getattr(self.__dict__["loader"], name)


class Trainer(SavingTrainer):
    """A ``transformers.Trainer`` that survives the loss of workers with the bits of the undisturbed run.

    The mini-batch of the job has ``per_device_train_batch_size * gradient_accumulation_steps`` samples, whatever the
    number of workers. With ``dataloader_drop_last``, a mini-batch that is not complete is left out.

    Args:
        *args: Those of ``transformers.Trainer``.
        **kwargs: Likewise.

    Raises:
        ConfigError: if an argument or a setting cannot be used with Holdfast.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._holdfast: PreparedLoop | None = None
        self._accumulate = 1
        self._index = -1
        self._resumed: str | None = None
        self._kept: dict[str, Any] = {}
        self._skips = 0
        self._asks_to_stop = False
        self._owed: dict[str, Callable[[], None]] = {}
        self._best: dict[str, torch.Tensor] | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, before anything is created from them."""
        self._holdfast_settings = checks.check_arguments(self.args)
        self._follow_lead()
        super().create_accelerator_and_postprocess()
        self._accumulate = self.args.gradient_accumulation_steps  # which Accelerate's own settings may have changed

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
        return leads_at_start(self._holdfast_settings)

    def _follow_lead(self) -> None:
        """Let ``args.should_save`` and everything else that asks for the main process name the lead."""
        index = 0 if self._is_lead else max(1, rank_at_start(self._holdfast_settings))
        where = self.args.distributed_state
        where.process_index = where.local_process_index = index
        state = getattr(self, "state", None)
        if state is not None:
            state.is_world_process_zero = state.is_local_process_zero = index == 0
        if index == 0 and self._index > 0:
            self._succeed()
        self._index = index

    def _succeed(self) -> None:
        """Begin to show progress, as the lead before did."""
        for callback in self.callback_handler.callbacks:
            if self.is_in_train and getattr(callback, "training_bar", self) is None:
                callback.on_train_begin(self.args, self.state, self.control)

    # -- training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see ``transformers.Trainer.train``.

        Raises:
            ConfigError: if the data or an argument cannot be used.
        """
        checkpoint = args[0] if args else kwargs.pop("resume_from_checkpoint", None)
        resumes = checkpoint not in (None, False)
        checks.check_training(self._holdfast_settings, has_trained=self._holdfast is not None, resumes=resumes)
        self._accumulate = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = 1  # the mini-batch of a step is one batch here
        try:
            with self._kept_checkpoint() as kept:
                return super().train(kept or checkpoint, *args[1:], **kwargs)
        finally:
            self.args.gradient_accumulation_steps = self._accumulate

    @contextlib.contextmanager
    def _kept_checkpoint(self) -> Iterator[str | None]:
        """Yield a folder with the Trainer's state in the checkpoint of ``--resume``, from which the session takes the rest."""
        if not self._holdfast_settings.resume or self._holdfast is not None:
            yield None
            return
        self._kept = kept_state(self._holdfast_settings)
        if not self._kept:
            yield None
            return
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, transformers.trainer.TRAINER_STATE_NAME).write_text(json.dumps(self._kept["state"]))
            yield folder

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights, unless the session does."""
        if not self._kept:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _describe(self) -> dict[str, Any]:
        """Return what a checkpoint of the session needs to say about the Trainer."""
        self._note_callbacks()
        number, epoch = self.holdfast_loop.session.loop_numbers
        return {"name": "transformers.Trainer", "state": dataclasses.asdict(self.state), "first_epoch": epoch - number}

    def steps_of_epoch(self, loader: Any) -> Iterator[Any]:
        """Yield the steps of one epoch, each once."""
        self.end_loop()
        steps = self.holdfast_loop.steps(loader, hooks=False)
        first = next(steps, None)
        for _ in range(self._skips):  # loops before the one in which the checkpoint of --resume was saved have no steps
            if first is not None:
                break
            steps = self.holdfast_loop.steps(loader, hooks=False)
            first = next(steps, None)
        self._skips = 0
        if first is not None:
            yield first
            yield from steps

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: trials would need a job each.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("hyperparameter_search is not supported: start a job for each trial")

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
        return int(super().get_total_train_batch_size(args)) * (self._accumulate if self.is_in_train else 1)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer, and the session that decides when it runs."""
        optimizer = super().create_optimizer(model)
        if self.is_in_train and self._holdfast is None:
            self.optimizer = optimizer = self._start_session(optimizer)
        if self._holdfast is not None:
            checks.check_model(self.model, self._holdfast.model)
        return optimizer

    def _start_session(self, optimizer: optim.Optimizer) -> PreparedOptimizer:
        checks.check_alone(self._holdfast_settings)
        settings = checks.settings_of(self.args)
        slices = self._slices()
        if slices:
            settings["slices"] = slices
        session = Session(self.model, optimizer, schedule="script", total_steps=sys.maxsize, **settings)
        loop = self._holdfast = PreparedLoop(session, session.part_of_script(), [optimizer], 1)
        session.ends_loop, session.in_framework = self.end_loop, True
        session.begin_at(*self._begins_at, describe=self._describe)
        return PreparedOptimizer(loop, optimizer, 0, 1)

    def _slices(self) -> int:
        """Return the number of slices: that of the checkpoint, or enough that none is larger than a batch of one device.

        0 leaves it to the session.
        """
        settings = self._holdfast_settings
        if settings.slices or settings.auto_slices >= 0 or self._kept:
            return int(settings.slices)
        if self._resumed is not None and (kept := read_job(Path(self._resumed))):
            return int(kept["slices"])
        workers = len(settings.ranks.split(",")) - settings.spares if settings.ranks else settings.workers
        slices = workers * -(-self._accumulate // workers)
        return slices if slices > workers else 0  # one for each worker is the default

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
        if self._asks_to_stop and self.holdfast_loop.step is not None:
            self.holdfast_loop.step.stop()
        made = self.holdfast_loop.compute_items(lambda slice_: self._loss_of(model, slice_), _FIGURES)
        self._owed.clear()  # the lead has voted on this step, so it has written them
        self._follow_lead()
        self.current_flos += made[_FLOPS]
        self.state.num_input_tokens_seen += round(made[_TOKENS])
        return torch.tensor(made["loss"], device=self.args.device)

    def _loss_of(self, model: Any, slice_: Any) -> SliceLoss:
        self._complete_saves()  # weights are those of the last step, also where the lead failed while it saved them
        inputs = self._prepare_inputs(slice_)
        items, expected = self.slice_items(inputs)
        totals = {_FLOPS: float(self.floating_point_ops(inputs)), _TOKENS: self._tokens_of(inputs)}
        if not items:  # the mean over no label is not a number; a sum over none is zero
            return SliceLoss(next(p for p in model.parameters() if p.requires_grad).sum() * 0.0, 0.0, totals)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=expected)
        return SliceLoss(loss, items, totals)

    def slice_items(self, inputs: Mapping[str, Any]) -> tuple[float, Any]:
        """Return how many items the loss of a slice is the mean over: it is the slice's weight in the mean of the step.

        With labels these are the labels other than -100, and samples otherwise. Override it for another loss.

        Args:
            inputs: The inputs of the slice.

        Returns:
            The number of items, and ``num_items_in_batch`` for :meth:`compute_loss`.
        """
        counted = self._get_num_items_in_batch([inputs], self.args.device)
        if counted is not None:
            return float(counted), counted
        labels = inputs.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return float(self.holdfast_loop.slice_samples), None
        if self._shifts_labels:
            labels = labels[..., 1:]
        return float(labels.ne(_IGNORED).sum()), None

    @functools.cached_property
    def _shifts_labels(self) -> bool:
        """Whether the model predicts each label from what precedes it, so that the first one does not count."""
        name = type(self.accelerator.unwrap_model(self.model)).__name__
        return bool(self._loss_shifts_labels) or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

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

    # -- the beginning and the end of a loop

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Return the epoch and the steps in it that a checkpoint begins with."""
        self._resumed = checkpoint
        epoch, steps = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        self._begins_at = (self.state.global_step, epoch, steps * self._train_batch_size * self._accumulate)
        if self._kept:  # the session finds its position itself
            self._begins_at, self._skips = (0, self._kept["first_epoch"], 0), epoch + 1
        self._follow_lead()
        return epoch, steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run one epoch; the session itself begins in the middle of one."""
        skip = transformers.trainer.skip_first_batches
        transformers.trainer.skip_first_batches = lambda loader, _: loader
        try:
            super()._run_epoch(*args, **kwargs)
        finally:
            transformers.trainer.skip_first_batches = skip

    def end_loop(self) -> None:
        """End the loop over the last epoch, together with all workers; does nothing if none is open.

        A worker that has become the lead writes what the previous one has not completed.
        """
        if self._holdfast is None or not self._holdfast.is_open:
            return
        self._holdfast.session.note_busy(busy=False)
        self._holdfast.finish()
        self._follow_lead()
        self._complete_saves()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save after a step, and agree with the other workers on a stop that a callback asks for."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        control, state = self.control, self.state
        if self.holdfast_loop.is_stopping:
            control.should_training_stop = True
        elif control.should_training_stop and state.global_step < state.max_steps and not self._stops_by_metric:
            control.should_training_stop, self._asks_to_stop = False, True  # all stop after the next step

    @property
    def _stops_by_metric(self) -> bool:
        """Whether a metric stops training, which is the same on every worker."""
        return any(isinstance(one, EarlyStoppingCallback) for one in self.callback_handler.callbacks)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Finish training; the loop itself ends with the script, because the lead may still save the model."""
        loop, self._asks_to_stop = self.holdfast_loop, False
        if checks.is_single_process(self._holdfast_settings):
            self.end_loop()
        elif loop.is_open:
            loop.session.note_busy(busy=True)
        return super()._finalize_training(*args, **kwargs)

    # -- evaluating and saving

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Tell the health monitor that this worker may need long."""
        if self._holdfast is None or not self.is_in_train:
            yield
            return
        with self._holdfast.session.busy():
            yield

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; every worker does, with the same result."""
        with self._busy():
            return super().evaluate(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch."""
        if self._holdfast is not None:
            self._holdfast.session.reach("evaluate")
        return super().prediction_step(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; every worker does, with the same result."""
        with self._busy():
            return super().predict(*args, **kwargs)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """A ``transformers.Seq2SeqTrainer`` that survives the loss of workers; see :class:`Trainer`."""
