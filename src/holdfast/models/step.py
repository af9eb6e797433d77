"""The step that the session yields: one mini-batch, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch

from holdfast.base.torch_private import drop_graph
from holdfast.data.plan import MiniBatch
from holdfast.errors import PeerFailed, ScriptError
from holdfast.models.loss import Forward, Loss, check_name, checked, figure_of, loss_of
from holdfast.models.media import Histogram, Image

_Made = TypeVar("_Made")


class _StepWork(Protocol):
    """The session's part in every step; implemented by :class:`~holdfast.models.trainable.Runner`."""

    def ask_to_stop(self) -> None: ...


class _SliceWork(_StepWork, Protocol):
    """The session's work around each slice; see :class:`~holdfast.models.slice_runner.SliceRunner`."""

    def begin_slice(self, batch: MiniBatch, number: int) -> Any: ...
    def backward(
        self, loss: torch.Tensor, batch: MiniBatch, number: int, *, is_only: bool = True, items: float | None = None
    ) -> None: ...
    def end_slice(
        self, batch: MiniBatch, number: int, metrics: dict[str, torch.Tensor | float], items: float | None = None
    ) -> None: ...
    def between_slices(self, batch: MiniBatch) -> None: ...
    def log_media(self, batch: MiniBatch, number: int, name: str, media: Image | Histogram) -> None: ...
    def free_memory(self, error: RuntimeError, batch: MiniBatch, number: int) -> bool: ...
    def on_device(self, inputs: Any) -> Any: ...


class _UncountedWork(Protocol):
    """A slice of another worker, whose results are dropped; see :class:`~holdfast.models.slice_runner.SliceRunner`."""

    def begin_uncounted(self, batch: MiniBatch) -> Any: ...
    def end_uncounted(self) -> None: ...


class _StagedWork(_StepWork, Protocol):
    """The session's work for pipeline stages; see :class:`~holdfast.models.stages.StageRunner`."""

    def compute(self, batch: MiniBatch) -> None: ...
    def evaluate(self, batch: MiniBatch, dataset: Any, batch_size: int, *, averaged: bool) -> dict[str, float]: ...


class Step:
    """One training step, with the slices that this worker computes.

    Iterating yields the inputs of one slice after another. After a failure the session yields the same step again,
    possibly with more slices; nothing of the failed attempt remains.
    """

    _work: _SliceWork

    def __init__(self, work: _SliceWork, batch: MiniBatch, mine: list[int], attempt: int) -> None:
        self._work = work
        self._begin(work, batch, mine, attempt)

    def _begin(self, work: _StepWork, batch: MiniBatch, mine: list[int], attempt: int) -> None:
        self._ask_to_stop = work.ask_to_stop
        self._batch = batch
        self._mine = mine
        self._attempt = attempt
        self._current = -1
        self._pending: list[int] = list(mine)
        self._metrics: dict[str, torch.Tensor | float] = {}
        self._items: float | None = None
        self._counts_items: bool | None = None
        self._in_loop = False
        self._repeats = False
        self._repeated = -1
        self.failure: PeerFailed | None = None
        """The failure that ended the computation early; the session handles it."""

    @property
    def number(self) -> int:
        """Optimizer steps committed before this one, over the whole job."""
        return self._batch.step

    @property
    def epoch(self) -> int:
        """Epoch of the samples, counted over the whole job."""
        return self._batch.epoch

    @property
    def samples(self) -> int:
        """Number of samples in the mini-batch, over all workers."""
        return len(self._batch.ids)

    @property
    def slices(self) -> tuple[int, ...]:
        """Slices that this worker computes."""
        return tuple(self._mine)

    @property
    def slice_samples(self) -> int:
        """Number of samples in the current slice, which is another worker's if this one has none."""
        return len(self._batch.slices[self._current if self._current >= 0 else min(self._batch.owners)])

    @property
    def is_at_last_slice(self) -> bool:
        """Whether no slice of this worker follows the current one."""
        return len(self._pending) <= int(self._current >= 0)

    @property
    def attempt(self) -> int:
        """Number of earlier consecutive attempts at this step, 0 for the first attempt."""
        return self._attempt

    def __iter__(self) -> Iterator[Any]:
        """Yield the inputs of each slice of this worker: a tuple for a dataset of tuples.

        A slice is yielded once more if its device ran out of memory in :meth:`backward`.
        """
        while self._pending:
            inputs = self.begin_slice()
            self._in_loop = True
            yield inputs
            self._in_loop = False
            if self._repeats:
                self._repeats, self._current = False, -1
            else:
                self.end_slice()
        self.end()

    def end(self) -> None:
        """Mark the end of this worker's slices; random numbers that the script draws from here on are equal everywhere."""
        self._work.between_slices(self._batch)

    def begin_slice(self) -> Any:
        """Return the inputs of the next slice of this worker; for loops that do not iterate over the step."""
        self._metrics, self._items = {}, None
        self._current = -1
        inputs = self._work.begin_slice(self._batch, self._pending[0])
        self._current = self._pending[0]
        return inputs

    def end_slice(self) -> bool:
        """Keep the gradients and metrics of the slice; return whether it was this worker's last one.

        Raises:
            ScriptError: if the slice has no loss, or its items are counted and those of the previous slice are not, or the
                other way round.
        """
        number, counts_items = self._pending[0], self._items is not None
        if "loss" not in self._metrics:
            raise ScriptError(f"slice {number} of step {self.number} ended without step.backward(loss)")
        if self._counts_items not in (None, counts_items):
            raise ScriptError(
                f"slice {number} of step {self.number} has {'a' if counts_items else 'no'} number of items, and the previous"
                f" one has {'none' if counts_items else 'one'}: pass it in every slice or in none"
            )
        self._counts_items = counts_items
        self._work.end_slice(self._batch, number, self._metrics, self._items)
        self._pending.pop(0)
        self._current = -1
        return not self._pending

    def begin_uncounted(self) -> Any:
        """Return the inputs of another worker's slice, for a script that must see one in every step; nothing of it is kept."""
        return cast("_UncountedWork", self._work).begin_uncounted(self._batch)

    def end_uncounted(self) -> None:
        """Drop everything that the uncounted slice computed."""
        cast("_UncountedWork", self._work).end_uncounted()

    def add_loss(self, root: torch.Tensor, value: torch.Tensor, *, is_only: bool = False) -> None:
        """Compute the gradients of ``root``, and add ``value`` to the logged loss of the slice.

        Args:
            root: What to differentiate: the loss, scaled if the script uses a ``GradScaler``.
            value: The loss, the mean over the slice, detached.
            is_only: The slice has no other backward pass.
        """
        before = self._metrics.get("loss")
        self._metrics["loss"] = value if before is None else before + value
        self._work.backward(root, self._batch, self._current, is_only=is_only, items=self._items)

    def weigh(self, items: float | torch.Tensor) -> None:
        """Let the slice count by a number of items, before its backward pass; see :meth:`backward`."""
        count = float(items)
        if not 0 <= count < math.inf:
            raise ScriptError(f"the number of items of a slice must be at least 0, and finite, got {count:g}")
        if "loss" in self._metrics and count != self._items:
            raise ScriptError(
                f"the items of slice {self._current} of step {self.number} were counted after its first backward pass, which"
                " counts by another number: all losses of a slice must be means over the same items; count them before it"
            )
        self._items = count

    def backward(self, loss: torch.Tensor, *, items: float | torch.Tensor | None = None) -> None:
        """Compute the gradients of the slice that was yielded last, and log the loss.

        Replaces ``loss.backward()``. Slices are weighted by size: the step uses the mean over the mini-batch. If a GPU
        runs out of memory here, memory is freed, and the loop over the step gets the same slice once more.

        Args:
            loss: The mean over the slice, a scalar.
            items: What the loss is the mean over, if not the samples: the number of labelled tokens, of pairs, or of
                pixels in the slice, ``>= 0``. Slices then count by their items, so that loss and gradient are those of
                the whole mini-batch, for any number of slices. A slice without items counts as nothing, even if its loss
                is not a number; a step without items has zero gradients and no loss. Pass it in every slice or in none.

        Raises:
            ScriptError: if it is called outside the loop, twice for a slice, or an argument is not allowed.
            ConfigError: if ``items`` is used with ``--overlap-optimizer``.
        """
        self._check_in_slice("backward")
        if "loss" in self._metrics:
            raise ScriptError(
                f"step.backward was called twice for slice {self._current} of step {self.number}: add up the losses"
            )
        if loss.numel() != 1:
            raise ScriptError(f"the loss must be a scalar, the mean over the slice, got shape {tuple(loss.shape)}")
        if items is not None:
            self.weigh(items)
        self._metrics["loss"] = loss.detach()
        try:
            self._work.backward(loss, self._batch, self._current, items=self._items)
        except RuntimeError as error:
            if not self._repeats_slice(error):
                raise
            drop_graph(loss)

    def _repeats_slice(self, error: RuntimeError) -> bool:
        """Return whether the loop over the step gets the slice once more: its backward pass ran out of memory.

        What it has computed cannot be used: the pass has freed a part of its graph. The loop computes the slice again.
        """
        number = self._current
        if not self._in_loop or self._repeated == number or not self._work.free_memory(error, self._batch, number):
            return False
        self._repeats, self._repeated = True, number
        return True

    def log(self, **metrics: torch.Tensor | float | Image | Histogram) -> None:
        """Log means over the slice. They become means over the step, reduced in slice order like the gradients.

        Every slice must log the same names. Of a :class:`holdfast.Image` or a :class:`holdfast.Histogram`, that of the
        first slice stands for the step; ``holdfast run --log-to`` passes it on, and without that it is dropped.

        Raises:
            ScriptError: if it is called outside the loop over the slices.
            ConfigError: if a name cannot be encoded.
        """
        self._check_in_slice("log")
        for name, value in metrics.items():
            check_name(name)
            if isinstance(value, Image | Histogram):
                self._work.log_media(self._batch, self._current, name, value)
            else:
                self.keep_metric(name, figure_of(value))

    def keep_metric(self, name: str, value: torch.Tensor | float) -> None:
        """Keep a metric of the slice, except the loss, which the session knows."""
        if name != "loss":
            self._metrics[name] = value

    def compute(self, forward: Forward, loss: Loss) -> None:
        """Compute all slices of this worker: the loop over the step in one call, with inputs moved to the model's device.

        ::

            for step in session.steps(dataset, batch_size=128, epochs=3):
                step.compute(model, F.cross_entropy)

        Args:
            forward: The model, or a function that calls it; receives the first item of a batch, on the model's device.
            loss: Receives the output, then the other items of the batch; returns the mean over the slice, a scalar, or
                that and a dict of metrics to log; see :meth:`log`. Enter ``torch.autocast`` inside both.

        Raises:
            ScriptError: if it is called within the loop over the slices, or the loss is not a scalar.
        """
        if self._current >= 0:
            raise ScriptError("step.compute computes all slices: call it instead of `for ... in step`")
        while self._pending:
            self._compute_slice(forward, loss)
        self.end()

    def _compute_slice(self, forward: Forward, loss: Loss) -> None:
        """Compute the next slice, once more if its device runs out of memory: it may hold memory that nothing needs."""
        try:
            self._try_slice(forward, loss)
        except RuntimeError as error:
            if not self._work.free_memory(error, self._batch, self._pending[0]):
                raise
        else:
            return
        self._current = -1
        self._try_slice(forward, loss)

    def _try_slice(self, forward: Forward, loss: Loss) -> None:
        first, *targets = checked(self._work.on_device(self.begin_slice()))
        value, more = loss_of(loss, forward(first), targets)
        self.backward(value)
        self.log(**more)
        self.end_slice()

    def stop(self) -> None:
        """End training on all workers once this step is committed, whichever worker calls it."""
        self._ask_to_stop()

    def check_computed(self) -> None:
        """Check that the script computed every slice.

        Raises:
            ScriptError: if a slice was skipped.
        """
        if self._pending:
            raise ScriptError(
                f"slice {self._pending[0]} of step {self.number} was not computed: loop over the whole step"
            )

    def _check_in_slice(self, name: str) -> None:
        if self._current < 0:
            raise ScriptError(f"step.{name} must be called inside `for ... in step`, after a slice was yielded")


class StagedStep(Step):
    """One step of a :class:`~holdfast.Pipeline`: its slices pass through the stages of several workers."""

    def __init__(self, work: _StagedWork, batch: MiniBatch, mine: list[int], attempt: int) -> None:
        self._begin(work, batch, mine, attempt)
        self._stages = work
        self._computed = False

    def __iter__(self) -> Iterator[Any]:
        """Raise ``ScriptError``: no worker has a complete slice.

        Raises:
            ScriptError: always.
        """
        self._check_in_slice("")

    def _check_in_slice(self, name: str) -> NoReturn:
        raise ScriptError(
            "the slices of a Pipeline step pass through the stages of several workers: call step.compute()"
        )

    def compute(self, forward: Forward | None = None, loss: Loss | None = None) -> None:
        """Run the forward and backward passes of the stages that this worker holds.

        After a failure it returns early, and the session yields the same step again.

        Args:
            forward: Leave it out: the Pipeline has its stages.
            loss: Leave it out: the Pipeline has its loss.

        Raises:
            ScriptError: if it is called twice, with an argument, or a stage or the loss returns the wrong type.
        """
        if forward is not None or loss is not None:
            raise ScriptError("a Pipeline has its own stages and loss: call step.compute() without arguments")
        if self._computed:
            raise ScriptError(f"step.compute was called twice in step {self.number}")
        self._computed = True
        if self.failure is None:
            self._try(lambda: self._stages.compute(self._batch))

    def evaluate(self, dataset: Any, batch_size: int, *, averaged: bool = False) -> dict[str, float] | None:
        """Evaluate the model as it is before this step; every worker must call it, at the same place of its loop.

        Args:
            dataset: Anything with ``len`` and ``[]``, with tuples as in training; the same on every worker.
            batch_size: Samples per pass through the stages, ``>= 1``.
            averaged: Evaluate the averaged weights that the session keeps.

        Returns:
            Means over the dataset of the loss and the other metrics that the Pipeline's loss returns, the same bits on
            every worker and for any number of workers; None after a failure: the session yields the step again.

        Raises:
            ConfigError: if the dataset has no length.
            ScriptError: if an argument is not allowed, or the session keeps no average.
        """
        if self.failure is not None:
            return None
        return self._try(lambda: self._stages.evaluate(self._batch, dataset, batch_size, averaged=averaged))

    def _try(self, work: Callable[[], _Made]) -> _Made | None:
        try:
            return work()
        except PeerFailed as failure:
            self.failure = failure.with_traceback(None)
            return None

    def check_computed(self) -> None:
        """Check that the script computed the step.

        Raises:
            ScriptError: if it did not.
        """
        if not self._computed:
            raise ScriptError(f"step {self.number} was not computed: call step.compute()")
