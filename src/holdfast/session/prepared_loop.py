"""One loop of a script over a prepared loader: where the script is in it, and what the session does then."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim

from holdfast.base.torch_private import version_of
from holdfast.engine.loop import Pause
from holdfast.errors import InternalError, ScriptError
from holdfast.models.loss import check_name, figure_of
from holdfast.models.media import Histogram, Image, Media
from holdfast.models.part import ModelPart
from holdfast.models.step import Step
from holdfast.session import gradient_hook
from holdfast.session.opened import OpenedLoop
from holdfast.session.script_end import save_at_end
from holdfast.session.session import Session


class LoopPhase(enum.Enum):
    """Where the script is in its loop."""

    OUTSIDE = enum.auto()
    """Not in a loop over a prepared loader."""
    SLICE = enum.auto()
    """A slice was yielded, and its gradients are not complete."""
    WAITING = enum.auto()
    """The slice is complete. More slices follow, or the step is computed again."""
    DECIDED = enum.auto()
    """The step is committed; parameters have their mean gradients."""
    APPLIED = enum.auto()
    """The optimizer has run on them."""


@dataclass(frozen=True, slots=True)
class SliceLoss:
    """The loss of a slice that counts by its number of items, such as tokens, and not by its number of samples.

    Args:
        loss: The mean over the items of the slice, a scalar.
        items: Number of items.
        totals: Other figures, which add up over the slices of a step; the same names in every slice.
    """

    loss: torch.Tensor
    items: float
    totals: Mapping[str, float] = field(default_factory=dict)


class PreparedLoop:
    """One loop of the script at a time, over a prepared loader. Drives the session, and knows where the script is.

    Args:
        session: The session.
        part: The model with its optimizer.
        optimizers: The script's optimizers; with several, all run once the last of them is stepped.
        accumulate: Factor for losses that the script divides because it accumulates gradients.
    """

    def __init__(
        self, session: Session, part: ModelPart, optimizers: Sequence[optim.Optimizer], accumulate: int
    ) -> None:
        self.session = session
        self.scaler: Any = None
        self.phase = LoopPhase.OUTSIDE
        self.step: Step | None = None
        self.is_open = False
        self._is_left = False
        self.has_stopped = False
        self._part = part
        self._optimizers = optimizers
        self._accumulate = accumulate
        self._opened: OpenedLoop | None = None
        self._driver: Iterator[Step | Pause] = iter(())
        self._is_counted = True
        self._captured: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        self._versions: dict[int, int] = {}

    # -- the loop over the loader

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Yield this worker's slices of all mini-batches of one pass over ``loader``."""
        self.finish()  # first: the loop that this worker has left may end training for all
        if self.has_stopped:
            return
        self._open(loader, hooks=True)
        try:
            while self._next_step():
                yield from self._slices()
            self._close()
        except GeneratorExit:  # the script has left the loop, and may evaluate for a long time before it ends it
            self._is_left = self.phase is LoopPhase.APPLIED
            if self._is_left:
                self.session.note_busy(busy=True)
                assert self._opened is not None
                assert self._opened.run is not None
                self._opened.run.keep_end()
            raise

    def _open(self, loader: Any, *, hooks: bool) -> None:
        self.finish()
        self._opened = self.session.open_loop(loader)
        self._driver = self.session.drive(self._opened)
        self.is_open = True
        if hooks:
            gradient_hook.install(self)

    def steps(self, loader: Any, *, hooks: bool) -> Iterator[Step]:
        """Yield each step of one pass over ``loader`` once, for a framework that computes and applies it.

        The framework may leave the loop after a step, at the same one on every worker, and end it with :meth:`finish`.

        Args:
            loader: The loader.
            hooks: The framework loops over :meth:`slices` and calls ``loss.backward()`` itself; otherwise it calls
                :meth:`compute_items`, which receives the loss.
        """
        self._open(loader, hooks=hooks)
        while self._next_step():
            assert self.step is not None
            yield self.step
            if self.phase is not LoopPhase.APPLIED:
                raise ScriptError(f"step {self.number} ended without an optimizer step")
        self._close()

    def compute_items(self, loss_of: Callable[[Any], SliceLoss], names: Sequence[str]) -> dict[str, float]:
        """Compute the step, whose loss is a mean over items and not over samples, again after each failure until it is committed.

        Then parameters have their mean gradients; see :meth:`Step.backward`.

        Args:
            loss_of: Receives the inputs of a slice. It is called once a slice and attempt, with the random generators
                seeded for that slice.
            names: Names of the ``totals`` of every slice.

        Returns:
            The mean loss over the items of the mini-batch as ``loss``, and the totals; equal on all workers.
        """
        for inputs in self._inputs_until_decided():
            made = loss_of(inputs)
            assert self.step is not None
            if self._is_counted:
                for name, total in made.totals.items():
                    self.step.keep_metric(name, total / self.step.slice_samples)
                self.step.weigh(made.items)
            self.backward(made.loss)
        means = self.metrics(names)
        self._part.unlogged = tuple(names)
        assert self.step is not None
        # Without a loss there was no item; or strategy forward lost every slice of the step.
        loss = means.get("loss", 0.0 if self._part.gradients.samples else math.nan)
        return {"loss": loss, **{name: means.get(name, 0.0) * self.step.samples for name in names}}

    def _inputs_until_decided(self) -> Iterator[Any]:
        """Yield the inputs of this worker's slices, again after each failure, until the step is committed."""
        while self.phase is not LoopPhase.DECIDED:
            if self.step is None and not self._next_step():
                assert self._opened is not None
                save_at_end(self._opened.job)  # the script ends here, and its steps would be lost
                raise ScriptError(
                    f"a worker has left the loop after step {self.number - 1}, and this one is in the next step"
                )
            yield from self._inputs_of_step()

    def _next_step(self) -> bool:
        """Begin the next step, or the same one again; return False at the end of the pass."""
        self.step = None
        while (item := self._resume()) is not None:
            if isinstance(item, Step):
                self.step = item
                return True
            if item is Pause.BEFORE_UPDATE:
                raise InternalError("a step was committed that this worker has not computed")
        return False

    def _resume(self) -> Step | Pause | None:
        """Let the session continue until it needs the script; return None at the end of the pass."""
        try:
            return next(self._driver, None)
        except BaseException:  # training has stopped, or the application is torn down
            self._close()
            raise

    def _slices(self) -> Iterator[Any]:
        for inputs in self._inputs_of_step():
            yield inputs
            self._check_iteration()

    def slices(self) -> Iterator[Any]:
        """Yield the inputs of slices, again after each failure, until the step is committed.

        After the last slice, parameters have the mean gradients of the step, and :meth:`apply` is due.

        Raises:
            ScriptError: if a slice ended without a backward pass.
        """
        for inputs in self._inputs_until_decided():
            yield inputs
            if self.phase is LoopPhase.SLICE:
                raise ScriptError(f"a slice of step {self.number} ended without loss.backward()")

    def log(self, name: str, value: torch.Tensor | float | Image | Histogram) -> None:
        """Keep a metric of the slice in progress, a mean over its samples; or log an image or a histogram."""
        if self.phase is not LoopPhase.SLICE or self.step is None:
            raise ScriptError("a metric of a slice must be logged inside the loop, before loss.backward()")
        check_name(name)
        if isinstance(value, Media):
            self.step.log(**{name: value})
        else:
            self.step.keep_metric(name, figure_of(value))

    def weigh(self, items: float | torch.Tensor) -> None:
        """Let the slice in progress count by its number of items; see :meth:`Step.backward`."""
        if self.phase is not LoopPhase.SLICE or self.step is None:
            raise ScriptError("the items of a slice must be counted inside the loop, before loss.backward()")
        self.step.weigh(items)

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return means over the mini-batch of the step that is committed, and not applied yet, equal on every worker.

        Args:
            names: What the slices logged; a worker without slices has to know it, too.
        """
        return self._part.gradients.metrics(names)

    def position(self) -> dict[str, Any]:
        """Return where the job is after the last committed step; see :meth:`Session.position`.

        Raises:
            ScriptError: if no loop has begun.
        """
        if self._opened is None or self._opened.run is None:
            raise ScriptError("the position in the data is not known before the first step")
        return self.session.position(self._opened)

    def _inputs_of_step(self) -> Iterator[Any]:
        """Yield the inputs of this worker's slices of an attempt, as long as it may succeed."""
        assert self.step is not None
        self._is_counted = bool(self.step.slices)
        self.phase = LoopPhase.WAITING
        while self.step is not None and self.phase is LoopPhase.WAITING:
            inputs = self.step.begin_slice() if self._is_counted else self.step.begin_uncounted()
            self._captured.clear()
            self.phase = LoopPhase.SLICE
            yield inputs

    def _check_iteration(self) -> None:
        """Check that the script did with the slice what every slice needs."""
        if self.phase is LoopPhase.SLICE:
            missing = "loss.backward()" if len(self._optimizers) == 1 else "optimizer.step() of every optimizer"
            raise ScriptError(f"a slice of step {self.number} ended without {missing}")
        if self.phase is LoopPhase.DECIDED:
            raise ScriptError(
                f"step {self.number} ended without optimizer.step(); call it after each loss.backward(), because it does"
                " nothing until the last slice of the step, or call it where `loader.last` is true"
            )

    def finish(self) -> None:
        """End a loop that the script has left with ``break`` after a committed step; does nothing if none is open.

        Raises:
            ScriptError: if the script left it in the middle of a step.
        """
        if not self.is_open:
            return
        if self._is_left:
            self.session.note_busy(busy=False)
            self._is_left = False
        if self.phase is not LoopPhase.APPLIED:
            raise ScriptError(
                f"the loop over the prepared loader was left in step {self.number}; leave it after optimizer.step(), at"
                " the same step on every worker"
            )
        assert self._opened is not None
        assert self._opened.run is not None
        self._opened.run.leave_here()
        if self._next_step():
            raise InternalError(f"step {self.number} was begun after the loop had ended")
        self._close()

    def _close(self) -> None:
        self.is_open, self.step, self.phase = False, None, LoopPhase.OUTSIDE
        if self._opened is not None and self._opened.run is not None:
            self.has_stopped |= self._opened.run.is_stopping
        gradient_hook.remove(self)

    # -- gradients

    def backward(self, root: torch.Tensor) -> None:
        """Compute the gradients of a loss; after the last slice of the step, all-reduce them and vote.

        Args:
            root: A scalar: the mean over the slice, scaled if the script uses a ``GradScaler``.

        Raises:
            ScriptError: if it is not a scalar, or the slice is complete.
        """
        if self.phase is not LoopPhase.SLICE:
            raise ScriptError(
                f"backward was called twice for a slice of step {self.number}: add up the losses, and use"
                " torch.autograd.grad for other gradients"
            )
        if root.numel() != 1:
            raise ScriptError(f"the loss must be a scalar, the mean over the slice, got shape {tuple(root.shape)}")
        assert self.step is not None
        root = root * self._accumulate if self._accumulate > 1 else root
        if self._is_counted:
            value = root.detach()
            value = value if self.scaler is None else value / self.scaler.get_scale()
            self.step.add_loss(root, value, is_only=len(self._optimizers) == 1)
        else:
            root.backward()
        if len(self._optimizers) == 1:
            self._end_slice()
        else:
            self._versions = {id(p): version_of(p.grad) for p in self._part.buckets.parameters if p.grad is not None}

    def capture(self, number: int) -> None:
        """With several optimizers: keep the slice's gradients for optimizer ``number``, which has finished with it.

        Gradients that later losses leave in its parameters do not count, as in a script that clears them before use.
        """
        if self.phase is not LoopPhase.SLICE:
            return
        if number in self._captured:
            raise ScriptError(f"optimizer {number} was stepped twice for a slice of step {self.number}")
        kept = self._captured[number] = []
        for parameter in (p for group in self._optimizers[number].param_groups for p in group["params"]):
            if parameter.grad is not None:
                if self._versions.get(id(parameter)) != version_of(parameter.grad):
                    raise ScriptError(
                        "with several optimizers gradients cannot be modified between backward and step, because they are"
                        " those of one slice: pass clip_grad_norm to holdfast.prepare instead of clipping in the loop"
                    )
                kept.append((parameter, parameter.grad.clone()))
                parameter.grad = None
        if len(self._captured) == len(self._optimizers):
            self._end_captured()

    def _end_captured(self) -> None:
        for parameter in self._part.buckets.parameters:
            parameter.grad = None
        for parameter, gradient in (pair for pairs in self._captured.values() for pair in pairs):
            parameter.grad = gradient
        self._end_slice()
        if self.phase is LoopPhase.DECIDED:
            self.apply(self._part.optimize)

    def _end_slice(self) -> None:
        """Keep the slice; after the last one, reduce and vote: either the step is committed, or it is computed again."""
        assert self.step is not None
        if self._is_counted:
            is_last = self.step.end_slice()
        else:
            self.step.end_uncounted()
            is_last = True
        self.phase = LoopPhase.WAITING
        if not is_last:
            return
        self.step.end()
        if self._resume() is Pause.BEFORE_UPDATE:
            self.phase = LoopPhase.DECIDED
        else:
            self.step = None

    def apply(self, update: Callable[[], Any]) -> None:
        """Run the optimizer by ``update``, once the step is committed; do nothing before.

        Raises:
            ScriptError: if it has run already.
        """
        if self.phase is LoopPhase.APPLIED:
            raise ScriptError(f"optimizer.step() was called twice in step {self.number}")
        if self.phase is LoopPhase.SLICE:
            raise ScriptError(f"optimizer.step() was called before loss.backward() in step {self.number}")
        if self.phase is not LoopPhase.DECIDED:
            return
        self._part.updater = update
        if self._resume() is not Pause.BEFORE_STEP:
            raise InternalError(f"step {self.number} was not applied")
        self.phase = LoopPhase.APPLIED

    @property
    def is_stopping(self) -> bool:
        """Whether the workers have agreed, since one called ``stop`` on a step, that the committed step is the last one."""
        return self._opened is not None and self._opened.run is not None and self._opened.run.is_stopping

    @property
    def model(self) -> nn.Module:
        """The model that the session trains."""
        return self._part.model

    @property
    def slice_samples(self) -> int:
        """Number of samples of the slice that is being computed."""
        assert self.step is not None
        return self.step.slice_samples

    @property
    def is_decided(self) -> bool:
        """Whether the step is committed, and the optimizer has not run yet."""
        return self.phase is LoopPhase.DECIDED

    @property
    def hooks_backward(self) -> bool:
        """Whether a backward pass belongs to a slice."""
        return self.phase not in (LoopPhase.OUTSIDE, LoopPhase.APPLIED)

    @property
    def counts(self) -> bool:
        """Whether what the script does once per step, such as stepping a scheduler, is due in this iteration."""
        return self.phase in (LoopPhase.OUTSIDE, LoopPhase.DECIDED, LoopPhase.APPLIED)

    @property
    def number(self) -> int:
        """Number of the step in progress, or of the one that was applied last."""
        return self.session.step if self.step is None else self.step.number
