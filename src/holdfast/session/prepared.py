"""``holdfast.prepare``: sessions for training loops that the script owns.

The loop stays as it is. The loader yields this worker's slices of a mini-batch, one per iteration. ``loss.backward()``
keeps their gradients; that of the last slice also all-reduces them and holds the commit vote. After it, parameters have
the mean gradients of the mini-batch, and the loop clips, unscales and steps as in one process. If a worker fails
before the vote, ``optimizer.step()`` does nothing and the loader yields the slices of the same step again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import ConfigError, ScriptError
from holdfast.models.buffers import BufferChoices
from holdfast.models.media import Histogram, Image
from holdfast.models.part import Stateful
from holdfast.session.prepared_loop import LoopPhase, PreparedLoop
from holdfast.session.prepared_objects import (
    OptimizerGroup,
    PreparedAverage,
    PreparedOptimizer,
    PreparedScaler,
    PreparedScheduler,
)
from holdfast.session.session import Session


class PreparedLoader:
    """Yields this worker's slices of the mini-batches of a loader; each ``for`` loop over it is one epoch.

    Everything else is that of the script's loader, such as ``dataset`` and ``len``, the number of mini-batches.
    """

    def __init__(self, loop: PreparedLoop, loader: Any) -> None:
        self._loop = loop
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Yield one slice after another."""
        return self._loop.iterate(self._loader)

    def __len__(self) -> int:
        """Return the number of mini-batches of an epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the script's loader."""
        return getattr(self._loader, name)

    @property
    def step(self) -> int:
        """Number of optimizer steps committed and applied so far, over the whole job."""
        return self._loop.session.step

    @property
    def attempt(self) -> int:
        """Number of earlier attempts at this step, 0 for the first attempt."""
        return 0 if self._loop.step is None else self._loop.step.attempt

    @property
    def epoch(self) -> int:
        """Epoch of the current step, counted over the whole job."""
        return 0 if self._loop.step is None else self._loop.step.epoch

    @property
    def last(self) -> bool:
        """Whether the current slice is this worker's last one in the step."""
        step = self._loop.step
        return step is not None and step.is_at_last_slice

    @property
    def stopped(self) -> bool:
        """Whether a worker has called :meth:`stop`, after the loop that it ended."""
        return self._loop.has_stopped

    @property
    def committed(self) -> bool:
        """Whether the step was committed and applied in this iteration; what must happen once per step belongs here."""
        return self._loop.phase is LoopPhase.APPLIED

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the mini-batch of the last committed step, equal on every worker: ``loss``, and what was logged."""
        return self._loop.session.metrics

    @property
    def session(self) -> Session:
        """The session beneath, for ``rank``, ``is_lead`` and ``log`` after training."""
        return self._loop.session

    def log(self, **metrics: torch.Tensor | float | Image | Histogram) -> None:
        """Log means over the slice, before ``loss.backward()``; they become means over the step.

        An image or a histogram is logged as by :meth:`Step.log`.

        Raises:
            ScriptError: if the slice is complete, or there is none.
            ConfigError: if a name cannot be encoded.
        """
        for name, value in metrics.items():
            self._loop.log(name, value)

    def mean_over(self, items: float | torch.Tensor) -> None:
        """Say what the loss of this slice is the mean over, if not its samples, before ``loss.backward()``.

        ::

            for ids, labels in loader:
                loader.mean_over((labels != -100).sum())
                loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
                loss.backward()

        Args:
            items: The number of labelled tokens, of pairs, or of pixels in the slice, ``>= 0``. Slices then count by their
                items; see ``items`` of :meth:`Step.backward`. Call it in every slice or in none.

        Raises:
            ScriptError: if the slice is complete, there is none, or the number is not allowed.
        """
        self._loop.weigh(items)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left to train; see :meth:`Session.epochs`.

        ::

            for epoch in loader.epochs(12):
                for inputs, targets in loader:
                    ...
                evaluate(model)

        After :meth:`stop` it yields no more.

        Raises:
            ConfigError: if ``count`` is below 1.
            ScriptError: if the previous loop was left in the middle of a step, or the checkpoint does not say which epoch
                it is of.
        """
        for epoch in self._loop.session.epochs(count):
            yield epoch
            if self.stopped:
                break

    def stop(self) -> None:
        """End training on all workers once the current step is committed, whichever worker calls it.

        Later loops over the loader yield nothing.

        Raises:
            ScriptError: if the step is decided already.
        """
        if self._loop.step is None or self._loop.phase not in (LoopPhase.SLICE, LoopPhase.WAITING):
            raise ScriptError("loader.stop must be called inside the loop, before the last loss.backward() of the step")
        self._loop.step.stop()

    def finish(self) -> None:
        """End a loop that was left with ``break``. The next loop and the end of the script do so, too.

        Raises:
            ScriptError: if it was left in the middle of a step.
        """
        self._loop.finish()


def prepare(
    model: nn.Module | Sequence[nn.Module],
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    loader: Any,
    scheduler: Any = None,
    *,
    scaler: Any = None,
    average: AveragedModel | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    register: Mapping[str, Stateful] | None = None,
    buffers: BufferChoices | None = None,
    **settings: Any,
) -> tuple[Any, ...]:
    """Make an existing training loop fault-tolerant; put the returned objects in the place of the given ones.

    ::

        model, optimizer, loader = holdfast.prepare(model, optimizer, loader)
        for batch, target in loader:
            loss = F.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The loader's batch is the mini-batch of the whole job; each iteration gets one slice of it. Every worker runs the
    loop's body once per slice, and all workers end with the same weights, which are those of one process. Guarantees,
    strategies and settings are those of :class:`~holdfast.Session`.

    Args:
        model: The model, or several. They stay as they are.
        optimizer: Its optimizer. With several, each belongs to parameters of its own, and all run after the last slice
            of the step: a loss of a later optimizer sees the weights from before the step.
        loader: A ``DataLoader``, or any other data that :meth:`Session.steps` takes.
        scheduler: A learning-rate scheduler, or several. ``step`` counts once per optimizer step inside the loop.
        scaler: A ``torch.amp.GradScaler``, used in the loop as usual.
        average: A ``torch.optim.swa_utils.AveragedModel``; ``update_parameters`` counts once per optimizer step.
        clip_grad_norm: Maximum norm of the mean gradient of all parameters, with several optimizers. With one, call
            ``torch.nn.utils.clip_grad_norm_`` in the loop.
        accumulate: By what the loop divides the loss because it accumulates gradients over that many slices. The
            loader's batch is then still one optimizer step.
        register: Other objects with a state to save, by name.
        buffers: How changes of the model's buffers are combined, as in :class:`~holdfast.Session`. With several models
            the names begin with the number of the model: ``"1.queue"``.
        **settings: Fields of :class:`holdfast.Settings`.

    Returns:
        The model, optimizer and loader, and after them ``scheduler``, ``scaler`` and ``average`` where they were given.

    Raises:
        ConfigError: if an argument is not allowed.
    """
    models, optimizers = _several(model), _several(optimizer)
    _check(models, optimizers, scaler, clip_grad_norm, accumulate)
    more = {"average": average, "clip_grad_norm": clip_grad_norm, "buffers": buffers}
    session = _session(models, optimizers, **more, **settings)
    loop = PreparedLoop(session, session.part_of_script(), optimizers, accumulate)
    _register(session, () if scheduler is None else _several(scheduler), scaler, register or {})
    loop.scaler, session.ends_loop = scaler, loop.finish
    return model, _stepped(loop, optimizer), PreparedLoader(loop, loader), *_once(loop, scheduler, scaler, average)


def _session(models: Sequence[nn.Module], optimizers: Sequence[optim.Optimizer], **more: Any) -> Session:
    """Return a session of a script's loop, in which all models are one, and all optimizers."""
    whole = models[0] if len(models) == 1 else nn.ModuleList(models)
    grouped = optimizers[0] if len(optimizers) == 1 else OptimizerGroup(optimizers)
    return Session(whole, grouped, schedule="script", total_steps=sys.maxsize, **more)


def _register(session: Session, schedulers: Sequence[Any], scaler: Any, more: Mapping[str, Stateful]) -> None:
    """Save what the loop changes besides the model and its optimizers, too."""
    named = {f"scheduler{number or ''}": one for number, one in enumerate(schedulers)}
    session.register(**named, **({} if scaler is None else {"scaler": scaler}), **more)


def _stepped(loop: PreparedLoop, optimizer: Any) -> Any:
    """Return the script's optimizers for the loop, in a list or tuple where they were given in one."""
    several = _several(optimizer)
    optimizers = [PreparedOptimizer(loop, one, number, len(several)) for number, one in enumerate(several)]
    return type(optimizer)(optimizers) if isinstance(optimizer, list | tuple) else optimizers[0]


def _once(loop: PreparedLoop, scheduler: Any, scaler: Any, average: AveragedModel | None) -> Iterator[Any]:
    """Yield what acts once per step, as far as it was given."""
    if scheduler is not None:
        wrapped = [PreparedScheduler(loop, one) for one in _several(scheduler)]
        yield type(scheduler)(wrapped) if isinstance(scheduler, list | tuple) else wrapped[0]
    if scaler is not None:
        yield PreparedScaler(loop, scaler)
    if average is not None:
        yield PreparedAverage(loop, average)


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _check(
    models: Sequence[Any], optimizers: Sequence[Any], scaler: Any, clip_grad_norm: float | None, accumulate: int
) -> None:
    for one in models:
        if not isinstance(one, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module or a list of them, got {type(one).__name__}")
        if isinstance(one, nn.parallel.DistributedDataParallel):
            raise ConfigError("model is wrapped in DistributedDataParallel: pass the module itself, model.module")
    for one in optimizers:
        if not isinstance(one, optim.Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(one).__name__}")
    owners: dict[int, int] = {}
    for number, one in enumerate(optimizers):
        for parameter in (p for group in one.param_groups for p in group["params"]):
            if owners.setdefault(id(parameter), number) != number:
                raise ConfigError(f"optimizers {owners[id(parameter)]} and {number} have a parameter in common")
    if len(optimizers) > 1 and scaler is not None:
        raise ConfigError("a GradScaler with several optimizers is not supported: use bfloat16 autocast without one")
    if len(optimizers) == 1 and clip_grad_norm is not None:
        raise ConfigError("with one optimizer call torch.nn.utils.clip_grad_norm_ in the loop, not clip_grad_norm")
    if accumulate < 1:
        raise ConfigError(f"accumulate must be at least 1, got {accumulate}")
