"""A replicated model: computing slices, holding the sums of a step, and the step that happens everywhere or nowhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.checkpoint.parts import Wanted
from holdfast.clock import Clock
from holdfast.comm import Communicator, Mean
from holdfast.config import Settings
from holdfast.data.plan import MiniBatch
from holdfast.engine.flips import optimizer_state, weights
from holdfast.errors import CheckpointError, ConfigError
from holdfast.integrity.state_hashes import WholeFingerprint
from holdfast.models.divergent import OwnStates
from holdfast.models.gradients import Buckets, Terms
from holdfast.models.optimizers import may_write_gradients
from holdfast.models.overlap import Eager, Spent
from holdfast.models.training_state import clone, model_sha256, model_tensors, state_sha256
from holdfast.recovery.strategy import REPLICATED
from holdfast.state.transfer import take_lowest


class Stateful(Protocol):
    """Anything whose state can be taken and put back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go back to a state."""
        ...


class Replica:
    """This worker's full copy of the model, with its optimizer.

    Args:
        model: Replicated at every worker.
        optimizer: Of the model's parameters.
        scheduler: Stepped after the optimizer, once a step or once an epoch.
        schedule: ``"step"`` or ``"epoch"``.
        scaler: A ``torch.amp.GradScaler``; unscales after the sum.
        clip_grad_norm: Largest norm of the summed, averaged gradient.
        bucket_bytes: See :class:`~holdfast.models.gradients.Buckets`.
        checked: See there, too.
        average: Of the weights; updated after each step.

    Raises:
        ConfigError: if the optimizer holds parameters that are not the model's.
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
        bucket_bytes: int,
        checked: bool = False,
        average: AveragedModel | None = None,
    ) -> None:
        mine = {id(p) for p in model.parameters()}
        if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "the optimizer holds parameters that are not the model's; give the session the model they belong to"
            )
        self.model = model
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._schedule = schedule
        self._scaler = scaler
        self.average = average
        self._clip_grad_norm = clip_grad_norm
        self.registered: dict[str, Stateful] = {}
        self.buckets = Buckets(model, bucket_bytes, checked=checked)
        self.own = OwnStates(model, optimizer)
        self._rows: list[Terms] = []
        self.terms: dict[int, Terms] = {}
        self.sums: list[torch.Tensor] = []
        self.summed_slices: list[tuple[int, ...]] = []
        self._before: dict[str, Any] = {}
        self.norm_of_all: torch.Tensor | None = None
        """Norm of the gradient of the whole model, where this is a part of it."""
        self.eager: Eager | None = None
        """Updates buckets before the step is closed; see :meth:`update_eagerly`."""

    def update_eagerly(self, clock: Clock, spent: Spent, *, beside: bool) -> None:
        """From now on, update the parameters of a bucket as soon as its sum is known.

        Args:
            clock: For what it takes.
            spent: Is told what it took.
            beside: In a thread, beside the sums that follow.
        """
        if self.eager is None:
            self.eager = Eager(self.buckets, self.optimizer, clock, spent, beside=beside)

    # -- what a training loop asks, whether every worker has all of the model or a part

    is_split = False
    kind = REPLICATED
    """Whether workers hold different parts."""

    @property
    def num_buckets(self) -> int:
        """Buckets that all workers sum in a step."""
        return len(self.buckets)

    @property
    def size_bytes(self) -> int:
        """Memory of a slice in the sum of all workers."""
        return self.buckets.size_bytes

    @property
    def device(self) -> torch.device:
        """Of the gradients."""
        return self.buckets.layouts[0].device

    @property
    def numel(self) -> int:
        """Numbers in the parameters of the whole model."""
        return sum(p.numel() for p in self.model.parameters())

    def is_lost(self, members: Sequence[int]) -> bool:
        """Return whether nobody among ``members`` has some part: never, each has all."""
        return False

    def wanted(self, members: Sequence[int]) -> Wanted | None:
        """Return what a worker needs of a checkpoint; None is all."""
        return None

    def writers(self, comm: Communicator) -> tuple[tuple[int, ...], ...]:
        """Return the processes that write a checkpoint, the lead first."""
        return comm.processes

    def homes(self) -> Any:
        """Return who holds which part, as plain JSON: nothing to say."""
        return None

    def take_homes(self, homes: Any) -> None:
        """Hear, as a newcomer, who holds which part."""

    def fingerprint(self, comm: Communicator, settings: Settings) -> WholeFingerprint:
        """Return what hashes the state before each step, as the settings ask for it."""
        return WholeFingerprint(self, comm, settings)

    def make_equal(self, comm: Communicator) -> None:
        """Give everybody the lowest worker's state, unless all are equal already.

        Raises:
            CheckpointError: if it came damaged.
            PeerFailed: if somebody died meanwhile.
        """
        state = take_lowest(comm, self.state_dict())
        if state is not None:
            self.load_state_dict(state, keeps=True)

    def sha256s(self, here: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Return by worker the sha256 of its model, and that of its model and its optimizer's state."""
        return self.own.of_each(here, lambda: (model_sha256(self.model), self.state_sha256()))

    def state_sha256(self) -> str:
        """Return the sha256 of the model, of the average of its weights, and of its optimizer's state."""
        return state_sha256(self.model, self.optimizer, self.average)

    def beside(self) -> list[tuple[str, torch.Tensor]]:
        """Return what there is besides weights and the optimizer's state, by name, as it is when a step begins, not copied."""
        average = () if self.average is None else model_tensors(self.average)
        return [*self.buckets.buffers.beginning(), *((f"average/{name}", tensor) for name, tensor in average)]

    # -- what may be altered

    def enter(self, rank: int) -> None:
        """Hear that one of those whom this process plays computes; see :meth:`OwnStates.enter`."""
        self.own.enter(rank)

    def rest(self, here: Sequence[int]) -> None:
        """Hear that none of those whom this process plays computes; see :meth:`OwnStates.rest`."""
        self.own.rest(here)

    def tensors_of(self, target: str, rank: int, here: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the weights, or what the optimizer keeps, by name, to be altered at one worker.

        Args:
            target: ``"weights"`` or ``"optimizer"``.
            rank: The worker.
            here: All whom this process plays.
        """
        self.own.take(rank, here)
        return weights(self.model) if target == "weights" else optimizer_state(self.model, self.optimizer)

    # -- a step

    def begin_step(self) -> None:
        """Forget the step before, and remember what a forward pass may change."""
        self._reset()
        self.buckets.buffers.begin_step()
        self._before = {name: clone(thing.state_dict()) for name, thing in self.registered.items()}

    def discard_step(self) -> None:
        """Take back all that the attempt changed."""
        if self.eager is not None:
            self.eager.undo()
        self._reset()
        self.buckets.buffers.rewind()
        for name, state in self._before.items():
            self.registered[name].load_state_dict(clone(state))
        self._before = {}

    def _reset(self) -> None:
        self.terms, self.sums, self.summed_slices = {}, [], []
        self.buckets.clear()

    def begin_slice(self, room: Callable[[int], torch.Tensor]) -> None:
        """Start from the step's beginning.

        Args:
            room: Gives the memory of the first, second, ... slice of the step that is computed here.
        """
        self.buckets.buffers.rewind()
        self.buckets.clear()
        self.buckets.aim(self.next_terms(room))

    def next_terms(self, room: Callable[[int], torch.Tensor]) -> Terms:
        """Return where the next slice that is computed here puts what it gives; see :meth:`begin_slice`."""
        return self.row(len(self.terms), room)

    def row(self, number: int, room: Callable[[int], torch.Tensor]) -> Terms:
        """Return where a slice of the step puts what it gives, the first that is computed here being number 0."""
        while len(self._rows) <= number:
            self._rows.append(self.buckets.terms_in(room(len(self._rows))))
        return self._rows[number]

    def forget_room(self) -> None:
        """Hear that slices will have other memory than before."""
        self._rows = []

    def backward(self, loss: torch.Tensor, samples: int, midway: Callable[[], None] | None) -> None:
        """Add up gradients of the *sum* over the slice, because slices may differ in size.

        Args:
            loss: Mean over the slice.
            samples: Size of the slice.
            midway: Called when half of the parameters have their gradient.
        """
        total = self.total(loss, samples)
        if midway is None:
            total.backward()
            return
        parameters = self.buckets.parameters
        hook = parameters[len(parameters) // 2].register_post_accumulate_grad_hook(lambda _: midway())
        total.backward()
        hook.remove()

    def total(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """Return what is differentiated: the sum over the slice, scaled if it is to be."""
        total = loss * samples
        return total if self._scaler is None else self._scaler.scale(total)

    def end_slice(self, number: int, metrics: Mapping[str, torch.Tensor | float], samples: int) -> None:
        """Take gradients, buffers and figures of the slice away, as its term of the sums."""
        terms = self._rows[len(self.terms)]
        self.put(terms, metrics, samples)
        self.terms[number] = terms

    def put(self, terms: Terms, metrics: Mapping[str, torch.Tensor | float], samples: int) -> None:
        """Move the gradients that parameters have, the buffers, and what a slice logged into ``terms``."""
        self.buckets.collect(terms)
        self.buckets.put_figures(terms.flat[-1], metrics, samples)

    def gradients_of(self, number: int) -> dict[str, torch.Tensor]:
        """Return the gradients of a slice that was computed, by name, where the sum finds them."""
        return self.buckets.named(self.terms[number])

    def message_of(self, bucket: int, slices: Collection[int]) -> dict[str, torch.Tensor]:
        """Return what is given to the sum of a bucket for some slices that were computed here."""
        mine = {number: terms for number, terms in self.terms.items() if number in slices}
        return {f"slices/{number}/buckets/{bucket}": terms.flat[bucket] for number, terms in mine.items()}

    def add_sum(self, result: torch.Tensor, slices: Sequence[int]) -> None:
        """Keep the sum of the next bucket, in which ``slices`` are."""
        self.sums.append(result)
        self.summed_slices.append(tuple(slices))
        if (eager := self._early) is not None:
            eager.update(len(self.sums) - 1, result)

    @property
    def _early(self) -> Eager | None:
        """What updates buckets as they come; nothing, where workers that this process plays have weights of their own."""
        return None if self.own.differ else self.eager

    def wait_updated(self) -> None:
        """Return when no parameter is being updated any more."""
        if self.eager is not None:
            self.eager.wait()

    def loss(self) -> float | None:
        """Return the mean loss of the step, all sums of which are known; None if no slice is in the last."""
        return self.buckets.read_metrics(self.sums[-1], ()).get("loss")

    def figures(self) -> list[float]:
        """Return all figures of the step, whose sums are known; see :meth:`Buckets.read_figures`."""
        return self.buckets.read_figures(self.sums[-1])

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may be too large for their type: then the step is left out."""
        return self._scaler is not None

    def missing_slices(self, batch: MiniBatch) -> dict[int, tuple[int, ...]]:
        """Return the buckets that each lost slice is missing from."""
        missing = {
            number: tuple(b for b, slices in enumerate(self.summed_slices) if number not in slices)
            for number in batch.owners
        }
        return {number: buckets for number, buckets in missing.items() if buckets}

    def mean(self, bucket: int, batch: MiniBatch, slices: Sequence[int], rescale: str) -> Mean:
        """Return what the sum of ``bucket`` is divided by, so that its gradients are means.

        Args:
            bucket: Which.
            batch: The mini-batch of the step.
            slices: Those that are in the sum.
            rescale: ``"survivors"`` divides by the samples in the sum, ``"original"`` by those that the mini-batch would
                have with everybody alive.
        """
        inside = max(1, batch.samples_of(slices))
        divisor = inside if rescale == "survivors" else batch.full_size
        return Mean(divisor, self.buckets.layouts[bucket].gradients_end)

    def apply(
        self, batch: MiniBatch, names: Sequence[str], known: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Run the optimizer on the mean gradient, and return the figures of the step.

        Args:
            batch: The mini-batch of the step.
            names: Of the figures that were logged here.
            known: Figures that are known already, where they were not summed with these gradients.
        """
        self.buckets.take_buffers(self.sums[-1], max(1, len(self.summed_slices[-1])))
        metrics = self.buckets.read_metrics(self.sums[-1], names) if known is None else dict(known)
        if (eager := self._early) is not None:
            eager.keep()
        else:
            self.buckets.give_gradients(self.sums, private=self._may_write())
            self._optimize()
        self._reset()
        self._step_scheduler(batch, metrics)
        self._update_average()
        return metrics

    def _may_write(self) -> bool:
        """Return whether what comes may write the gradients, which others may still read."""
        return self._scaler is not None or self._clip_grad_norm is not None or may_write_gradients(self.optimizer)

    def _optimize(self) -> None:
        if self._scaler is not None and not self.terms:
            # It sets itself up when it scales, and a worker without a slice had nothing to scale.
            self._scaler.scale(torch.zeros((), device=self.buckets.layouts[0].device))
        for more in self.own.each():
            self._optimize_one(copy.deepcopy(self._scaler) if more else self._scaler)

    def _optimize_one(self, scaler: Any) -> None:
        if scaler is not None and not self._gradients():
            return  # a scaler refuses what an optimizer takes for nothing to do
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
        """Return the norm of the mean gradient in the sums."""
        self.buckets.give_gradients(self.sums, private=False)
        norm = float(nn.utils.get_total_norm(self._gradients()))
        self._drop_gradients()
        return norm

    def overflows(self) -> bool:
        """Return whether a mean gradient in the sums is not a finite number."""
        self.buckets.give_gradients(self.sums, private=False)
        found = any(not bool(gradient.isfinite().all()) for gradient in self._gradients())
        self._drop_gradients()
        return found

    def _drop_gradients(self) -> None:
        for i in range(self.num_buckets):
            self.buckets.drop_gradients_of(i)

    def _step_scheduler(self, batch: MiniBatch, metrics: dict[str, float]) -> None:
        epoch_ended = batch.after.epoch != batch.epoch
        if self._scheduler is None or (self._schedule == "epoch" and not epoch_ended):
            return
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if "loss" in metrics:  # not when forward lost every slice of the step
                self._scheduler.step(metrics["loss"])
        else:
            self._scheduler.step()

    def _update_average(self) -> None:
        if self.average is not None:
            self.average.update_parameters(self.model)

    def set_learning_rate(self, value: float) -> None:
        """Go on with another learning rate in all parameter groups; a scheduler goes on from it."""
        for group in self.optimizer.param_groups:
            group["lr"] = value
            if "initial_lr" in group:
                group["initial_lr"] = value
        if hasattr(self._scheduler, "base_lrs"):
            self._scheduler.base_lrs = [value] * len(self._scheduler.base_lrs)

    def model_state(self) -> dict[str, Any]:
        """Return all of the model, and the average of its weights if there is one, and nothing else, not copied."""
        average = {} if self.average is None else {"average": self.average.state_dict()}
        return {"model": self.model.state_dict(), "transient": self._transient(), **average}

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`model_state` returned elsewhere."""
        self.own.forget()
        self.model.load_state_dict(state["model"])
        for name, buffer in self._transient().items():
            buffer.copy_(state["transient"][name])
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    # -- the state as a whole

    def shared_state(self) -> dict[str, Any]:
        """Return what all workers have: everything."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a checkpoint must hold, not copied."""
        return {name: thing.state_dict() for name, thing in self._parts().items()} | {"transient": self._transient()}

    def load_state_dict(self, state: dict[str, Any], *, keeps: bool = False) -> None:
        """Go back to a state.

        Args:
            state: What :meth:`state_dict` returned.
            keeps: Its tensors may become those of this replica; otherwise they are copied.

        Raises:
            CheckpointError: if the state is of other parts than this replica has.
        """
        self.own.forget()
        parts = self._parts()
        transient = self._transient()
        if parts.keys() | {"transient"} != state.keys() or transient.keys() != state["transient"].keys():
            raise CheckpointError(
                f"the checkpoint holds {', '.join(sorted(state))}; this session has {', '.join(sorted(parts))}"
            )
        for name, thing in parts.items():
            try:
                thing.load_state_dict(state[name] if keeps else clone(state[name]))
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"the checkpoint's {name} does not fit this session's: {error}") from error

        for name, buffer in transient.items():
            buffer.copy_(state["transient"][name])

    def _transient(self) -> dict[str, torch.Tensor]:
        """Return the buffers that ``state_dict`` leaves out, because the model calls them not persistent."""
        kept = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in kept}

    def _parts(self) -> dict[str, Stateful]:
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if self._scheduler is not None:
            parts["scheduler"] = self._scheduler
        if self._scaler is not None:
            parts["scaler"] = self._scaler
        if self.average is not None:
            parts["average"] = self.average
        return parts | {f"registered.{name}": thing for name, thing in self.registered.items()}
