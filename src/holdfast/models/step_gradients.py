"""The gradients of one step: the terms of the local slices, and the all-reduce results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from holdfast.base.torch_private import scale_each
from holdfast.comm import MeanDivisor
from holdfast.comm.allreduce.adding import SINGLE_ROWS, RowPlan
from holdfast.data.plan import MiniBatch
from holdfast.models.gradients import MAX_METRICS, BucketLayout, SliceGradients

Room = Callable[[int], torch.Tensor]
"""Returns the memory of the first, second, ... local slice of a step."""


class StepGradients:
    """The results of one step so far. Each step has its own object: rolling back a step means to drop it.

    ``rows`` holds the memory of the slices' terms; it is reused from step to step, and grows on demand.
    """

    def __init__(self, buckets: BucketLayout, rows: list[SliceGradients]) -> None:
        self._buckets = buckets
        self._rows = rows
        self._apart: SliceGradients | None = None
        self.current: SliceGradients
        """The terms of the slice that is being computed."""
        self.plan: RowPlan = SINGLE_ROWS
        """Which slices share a row; set before the first slice."""
        self.num_slices = 0
        """Number of local slices computed so far."""
        self.terms: dict[int, SliceGradients] = {}
        """The terms of each local row, by its first slice; while slices are computed, the newest may be part of a row."""
        self.sums: list[torch.Tensor] = []
        """All-reduce results of the first buckets, on the device of the model."""
        self._host_sums: list[torch.Tensor] = []
        """The same in host memory: a number is read there without waiting for the device."""
        self.summed_slices: list[tuple[int, ...]] = []
        """The slices included in each of them."""
        self.samples = 0
        """Number of samples in the last of them, once it is needed to divide by items."""

    # -- slices

    def begin_slice(self, number: int, room: Room, *, is_first: bool) -> None:
        """Rewind to the beginning of the step; the next gradients belong to slice ``number``.

        ``is_first``: it is the first one of the mini-batch, which decides some buffers.
        """
        self._buckets.buffers.begin_slice(is_first=is_first)
        self._buckets.clear()
        self.current = self._terms_of(number, room)
        self._buckets.aim(self.current, is_summed=number in self.plan.first_of)

    def _terms_of(self, number: int, room: Room) -> SliceGradients:
        """Return the terms of the next slice: a row, unless it will be added to the newest row when it is complete."""
        if not self.plan.additions.get(number):
            return self.next_terms(room)
        self._apart = self._apart or self._buckets.terms_apart()
        self._apart.let_go()
        return self._apart

    def next_terms(self, room: Room) -> SliceGradients:
        """Return the memory for the terms of the next local slice."""
        place = len(self.terms)
        if len(self._rows) == place:
            self._rows.append(self._buckets.terms_in(room(place), place))
        return self._rows[place]

    def end_slice(
        self,
        number: int,
        metrics: Mapping[str, torch.Tensor | float],
        samples: int,
        begun: int = 0,
        items: float | None = None,
    ) -> None:
        """Move gradients, buffers and metrics of the slice into its terms; see :meth:`add_up`.

        The all-reduces of the first ``begun`` buckets have begun. The loss is a mean over ``items``, if they are given.
        """
        self._buckets.collect(self.current, begun)
        self._buckets.put_figures(self.current, metrics, samples, items)
        self.terms[number] = self.current
        self.num_slices += 1
        if number not in self.plan.first_of:
            self._buckets.start_copies(self.current)

    def of_slice(self, number: int) -> dict[str, torch.Tensor]:
        """Return the gradients of the slice computed last, by name, before they are added to others."""
        return self._buckets.named(self.terms[number])

    def restart_copies(self, number: int) -> None:
        """Copy the terms of a slice to the host again, because they were altered."""
        if number not in self.plan.first_of:
            self._buckets.restart_copies(self.terms[number])

    def rows_after(self, number: int) -> tuple[list[int], list[SliceGradients]]:
        """Return what slice ``number``, which is being computed, will end with: the rows left, and those to add up first."""
        times = self.plan.additions.get(number, 0)
        rows = {**self.terms, number: self.current}
        return list(rows)[: len(rows) - times], list(rows.values())[-1 - times :] if times else []

    def add_up(self, number: int, begun: int = 0) -> None:
        """Add the newest rows as planned once slice ``number`` is computed; its own gradients are then no longer known.

        The all-reduces of the first ``begun`` buckets have begun, and add these themselves.
        """
        times = self.plan.additions.get(number, 0)
        if times:
            self._buckets.add_up(list(self.terms.values())[-1 - times :], range(begun, len(self._buckets)))
            for _ in range(times):
                self.terms.popitem()
            if self._apart is not None and not begun:  # else a thread may still be about to add it
                self._apart.let_go()
        if number in self.plan.last:
            self._buckets.restart_copies(next(reversed(self.terms.values())))

    def given(self) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield for each computed slice the data that reveals a wrong one: its first bucket, and its metrics."""
        start = self._buckets.layouts[-1].figures_at
        for number, terms in self.terms.items():
            yield number, (terms.flat[0], terms.flat[-1][start : start + 2 * MAX_METRICS])

    def message_of(self, bucket: int, slices: Collection[int], shared: Room) -> dict[str, torch.Tensor]:
        """Return the terms of a bucket for some local slices, in the memory that other workers read: that in ``shared``."""
        slice_terms = {number: terms for number, terms in self.terms.items() if number in slices}
        span = self._buckets.layouts[bucket].span
        return {
            f"slices/{number}/buckets/{bucket}": span.of(shared(terms.row)) for number, terms in slice_terms.items()
        }

    # -- all-reduces

    def mean(self, bucket: int, batch: MiniBatch, slices: Iterable[int], rescale: str) -> MeanDivisor:
        """Return the divisor that turns the sum of ``bucket`` over ``slices`` into mean gradients.

        ``"survivors"`` divides by the samples in the sum, ``"original"`` by those of the complete mini-batch.
        """
        inside = max(1, batch.samples_of(slices))
        divisor = inside if rescale == "survivors" else batch.full_size
        return MeanDivisor(divisor, self._buckets.layouts[bucket].gradients_end)

    def add_sum(self, result: torch.Tensor, slices: Sequence[int], in_host: torch.Tensor | None = None) -> None:
        """Keep the result of the next bucket's all-reduce, which includes ``slices``.

        ``in_host`` is the same in host memory, if the model is on another device.
        """
        self.sums.append(result)
        self._host_sums.append(result if in_host is None else in_host)
        self.summed_slices.append(tuple(slices))

    def missing_slices(self, batch: MiniBatch) -> dict[int, tuple[int, ...]]:
        """Return the buckets that each lost slice is missing from."""
        missing = {
            number: tuple(b for b, slices in enumerate(self.summed_slices) if number not in slices)
            for number in batch.owners
        }
        return {number: buckets for number, buckets in missing.items() if buckets}

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means of the metrics ``names`` and of the loss, after all all-reduces."""
        return self._buckets.read_metrics(self._host_sums[-1], names)

    def figures(self) -> list[float]:
        """Return all metrics of the step, after all all-reduces; see :meth:`BucketLayout.read_figures`."""
        return self._buckets.read_figures(self._host_sums[-1])

    def set_buffers(self) -> None:
        """Set the model's buffers to their mean over the slices of the last all-reduce."""
        self._buckets.set_buffers(self.sums[-1], self._host_sums[-1], max(1, len(self.summed_slices[-1])))

    def count_samples(self, batch: MiniBatch) -> None:
        """Note the samples of the last all-reduce, by which :meth:`set_gradients` finds the mean over items."""
        self.samples = batch.samples_of(self.summed_slices[-1])

    def set_gradients(self, *, private: bool) -> None:
        """Set every parameter's ``.grad`` to the mean; see :meth:`BucketLayout.set_gradients`.

        The all-reduce has divided by samples. The mean over items is larger by the samples per item, and zero without
        items. Slices that count by their samples leave every bit as it is: the factor is 1.
        """
        weight = self._buckets.weight(self._host_sums[-1])
        factor = self.samples / weight if weight > 0 else 0.0
        is_scaled = self.samples > 0 and factor != 1.0
        self._buckets.set_gradients(self.sums, self._host_sums, private=private or is_scaled)
        if is_scaled:
            scale_each([p.grad for p in self._buckets.parameters if p.grad is not None], factor)
