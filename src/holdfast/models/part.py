"""A module with its optimizer: a complete model, or one part of a model-parallel one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.base.torch_private import zero_each
from holdfast.data.plan import MiniBatch
from holdfast.errors import CheckpointError, ConfigError
from holdfast.faults.flips import optimizer_state, weights
from holdfast.models.divergent import DivergentReplicas
from holdfast.models.gradients import BucketLayout, SliceGradients
from holdfast.models.optimizers import may_write_gradients
from holdfast.models.step_gradients import StepGradients
from holdfast.models.training_state import clone, model_tensors, state_sha256


class Stateful(Protocol):
    """Anything whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state."""


class ModelPart:
    """A module with its optimizer, scheduler, scaler and average; :attr:`gradients` holds the current step's results.

    Args:
        scheduler: Stepped after the optimizer, once per step or once per epoch.
        schedule: ``"step"``, ``"epoch"``, or ``"script"``: then the script steps the scheduler and updates the average.
        scaler: A ``torch.amp.GradScaler``; unscales after the all-reduce.
        clip_grad_norm: Maximum norm of the mean gradient.
        lay_out: Returns the layout of the module's gradients.
        average: An average of the weights; updated after each step.

    Raises:
        ConfigError: if the optimizer has parameters that the model does not have, or a layer needs other workers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any,
        schedule: str,
        scaler: Any,
        clip_grad_norm: float | None,
        lay_out: Callable[[nn.Module], BucketLayout],
        average: AveragedModel | None = None,
    ) -> None:
        super().__init__()
        _check_layers(model)
        parameter_ids = {id(p) for p in model.parameters()}
        if any(id(p) not in parameter_ids for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "the optimizer has parameters that are not the model's; pass the session the model that they belong to"
            )
        self.model = model
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._schedule = schedule
        self._scaler = scaler
        self.average = average
        self._clip_grad_norm = clip_grad_norm
        self.buckets = lay_out(model)
        self.num_buckets = len(self.buckets)
        self.size_bytes = self.buckets.size_bytes
        self.device = self.buckets.layouts[0].device
        self.numel = sum(p.numel() for p in model.parameters())
        self.own = DivergentReplicas(model, optimizer)
        self._rows: list[SliceGradients] = []
        self.gradients = StepGradients(self.buckets, self._rows)
        """The gradients of the step in progress."""
        self.norm_of_all: torch.Tensor | None = None
        """Norm of the gradient of the whole model, if this is a part of it."""
        self.updater: Callable[[], None] | None = None
        """Runs the optimizer on the gradients that :meth:`show_gradients` has set, in a loop that the script owns."""
        self.unlogged: tuple[str, ...] = ()
        """Metrics that the records leave out."""

    def check_device(self) -> None:
        """Check that the parameters are still on the device for which their gradients are laid out.

        Raises:
            ConfigError: if the script has moved them since.
        """
        if moved := {str(p.device) for p in self.model.parameters() if p.requires_grad and p.device != self.device}:
            raise ConfigError(
                f"the model was moved from {self.device} to {', '.join(sorted(moved))} after it was passed to the session:"
                " move it before"
            )

    # -- a step

    def begin(self) -> None:
        """Begin a step: discard the previous one, and save the buffers that a forward pass may change."""
        self._drop_step()
        self.buckets.buffers.begin_step()

    def discard(self) -> None:
        """Undo everything that the current attempt changed."""
        self._drop_step()
        self.buckets.buffers.rewind()

    def _drop_step(self) -> None:
        self.gradients = StepGradients(self.buckets, self._rows)
        self.buckets.clear()

    def forget_room(self) -> None:
        """Discard views of slice memory, because slices get other memory from now on."""
        self._rows.clear()

    def backward(self, loss: torch.Tensor, weight: float, midway: Callable[[], None] | None) -> None:
        """Accumulate gradients of the *sum* over the slice, because slices may differ in size.

        ``weight`` is the number of samples, or of items, that the loss is the mean over. With 0 gradients are zero,
        even if the loss, a mean over nothing, is not a number. ``midway`` is called when half of the parameters have
        their gradient.
        """
        total = self.total(loss, weight)
        parameters = self.buckets.parameters
        hook = None
        if midway is not None:
            hook = parameters[len(parameters) // 2].register_post_accumulate_grad_hook(lambda _: midway())
        try:
            total.backward()
        finally:
            if hook is not None:
                hook.remove()
        if not weight:
            zero_each([p.grad for p in parameters if p.grad is not None])

    def total(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Return the value to differentiate: the loss summed over the slice, scaled if there is a scaler."""
        total = loss * weight
        return total if self._scaler is None else self._scaler.scale(total)

    def add_sum(self, result: torch.Tensor, slices: Sequence[int], in_host: torch.Tensor | None = None) -> None:
        """Keep the result of the next bucket's all-reduce, which includes ``slices``; see :meth:`StepGradients.add_sum`."""
        self.gradients.add_sum(result, slices, in_host)

    def wait_updated(self) -> None:
        """Wait until no parameter update is running; returns immediately unless the optimizer is overlapped."""

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may overflow: then the step is skipped."""
        return self._scaler is not None

    def apply(
        self, batch: MiniBatch, names: Sequence[str], known: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Run the optimizer on the mean gradient, and return the metrics of the step; see :meth:`Trainable.apply`.

        Pass them as ``known`` if they were not all-reduced with these gradients.
        """
        self.gradients.set_buffers()
        self.gradients.count_samples(batch)
        metrics = self.gradients.metrics(names) if known is None else dict(known)
        for name in self.unlogged:
            metrics.pop(name, None)
        self._update()
        self._drop_step()
        self._step_scheduler(batch, metrics)
        self._update_average()
        return metrics

    def show_gradients(self, batch: MiniBatch) -> None:
        """Set every parameter's ``.grad`` to a copy of its mean gradient, which the script may modify."""
        self.gradients.count_samples(batch)
        self.gradients.set_gradients(private=True)

    def _update(self) -> None:
        if self.updater is not None:
            self.updater()
            return
        self.gradients.set_gradients(private=self._may_write())
        self.optimize()

    def _may_write(self) -> bool:
        """Return whether clipping, unscaling or the optimizer may modify the gradients, which others may still read."""
        return self._scaler is not None or self._clip_grad_norm is not None or may_write_gradients(self.optimizer)

    def optimize(self) -> None:
        """Run the optimizer on the gradients of the parameters, clipped and unscaled as configured."""
        if self._scaler is not None and not self.gradients.terms:
            # It initialises its state when it scales, and a worker without a slice has not scaled anything.
            self._scaler.scale(torch.zeros((), device=self.device))
        for more in self.own.each():
            self._optimize_one(copy.deepcopy(self._scaler) if more else self._scaler)

    def _optimize_one(self, scaler: Any) -> None:
        if scaler is not None and not self._gradients():
            return  # a scaler raises an error where an optimizer does nothing
        if scaler is not None and self._clip_grad_norm is not None:
            scaler.unscale_(self.optimizer)
        if self._clip_grad_norm is not None:
            norm = self.norm_of_all
            norm = nn.utils.get_total_norm(self._gradients()) if norm is None else norm
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self._clip_grad_norm, norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def norm(self) -> float:
        """Return the norm of the mean gradient in the all-reduce results."""
        self.gradients.set_gradients(private=False)
        norm = float(nn.utils.get_total_norm(self._gradients()))
        self._drop_gradients()
        return norm

    def overflows(self) -> bool:
        """Return whether a mean gradient in the all-reduce results is not finite."""
        self.gradients.set_gradients(private=False)
        has_overflow = any(not bool(gradient.isfinite().all()) for gradient in self._gradients())
        self._drop_gradients()
        return has_overflow

    def _drop_gradients(self) -> None:
        for i in range(self.num_buckets):
            self.buckets.drop_gradients_of(i)

    def _step_scheduler(self, batch: MiniBatch, metrics: dict[str, float]) -> None:
        epoch_ended = batch.after.epoch != batch.epoch
        if self._scheduler is None or self._schedule == "script" or (self._schedule == "epoch" and not epoch_ended):
            return
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if "loss" in metrics:  # not if strategy forward lost every slice of the step
                self._scheduler.step(metrics["loss"])
        else:
            self._scheduler.step()

    def _update_average(self) -> None:
        if self.average is not None and self._schedule != "script":
            self.average.update_parameters(self.model)

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of all parameter groups; a scheduler continues from it."""
        for group in self.optimizer.param_groups:
            group["lr"] = value
            if "initial_lr" in group:
                group["initial_lr"] = value
        if hasattr(self._scheduler, "base_lrs"):
            self._scheduler.base_lrs = [value] * len(self._scheduler.base_lrs)

    # -- the complete state

    def tensors_of(self, target: str, rank: int, here: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the weights or the optimizer state by name, to be altered on one worker."""
        self.own.take(rank, here)
        return weights(self.model) if target == "weights" else optimizer_state(self.model, self.optimizer)

    def beside(self) -> list[tuple[str, torch.Tensor]]:
        """Return the state besides weights and optimizer by name, as it is when a step begins, not copied."""
        average = () if self.average is None else model_tensors(self.average)
        return [*self.buckets.buffers.initial(), *((f"average/{name}", tensor) for name, tensor in average)]

    def state_sha256(self) -> str:
        """Return the sha256 of the model, the average of its weights, and its optimizer state."""
        return state_sha256(self.model, self.optimizer, self.average)

    def model_state(self) -> dict[str, Any]:
        """Return only the model and the average of its weights, if there is one, not copied."""
        average = {} if self.average is None else {"average": self.average.state_dict()}
        return {"model": self.model.state_dict(), "transient": self._transient(), **average}

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Load what :meth:`model_state` returned on another worker."""
        self.own.forget()
        with _writing(self.model):
            self.model.load_state_dict(state["model"])
        for name, buffer in self._transient().items():
            buffer.copy_(state["transient"][name])
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a checkpoint must hold, not copied."""
        return {name: thing.state_dict() for name, thing in self._stateful().items()} | {"transient": self._transient()}

    def load_state_dict(self, state: dict[str, Any], *, keeps: bool = False) -> None:
        """Restore a state; see :meth:`Trainable.load_state_dict`."""
        self.own.forget()
        things = self._stateful()
        transient = self._transient()
        if things.keys() | {"transient"} != state.keys() or transient.keys() != state["transient"].keys():
            raise CheckpointError(
                f"the checkpoint holds {', '.join(sorted(state))}; this session has {', '.join(sorted(things))}"
            )
        for name, thing in things.items():
            try:
                with _writing(self.model) if thing is self.model else nullcontext():
                    thing.load_state_dict(state[name] if keeps else clone(state[name]))
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"the checkpoint's {name} does not fit this session's: {error}") from error

        for name, buffer in transient.items():
            buffer.copy_(state["transient"][name])

    def _transient(self) -> dict[str, torch.Tensor]:
        """Return the non-persistent buffers, which ``state_dict`` leaves out."""
        kept = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in kept}

    def _stateful(self) -> dict[str, Stateful]:
        """Return the objects that have a state, by their name in a checkpoint."""
        things: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if self._scheduler is not None:
            things["scheduler"] = self._scheduler
        if self._scaler is not None:
            things["scaler"] = self._scaler
        if self.average is not None:
            things["average"] = self.average
        return things


def _writing(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context in which torch lets the tensors of a model be written, if some were made in inference mode."""
    tensors = (*model.parameters(), *model.buffers())
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else nullcontext()


def _check_layers(model: nn.Module) -> None:
    """Check that no layer communicates with other workers by itself: a worker that has failed would not answer."""
    for name, module in model.named_modules():
        if any("SyncBatchNorm" in kind.__name__ for kind in type(module).__mro__):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}, which would act as BatchNorm of each slice: leave"
                " convert_sync_batchnorm out to accept the statistics of a slice (fewer, larger slices: --slices), or use"
                " GroupNorm or LayerNorm, which need no other sample"
            )
