"""The gradients of one step: what each slice gives that is computed here, and the sums over all workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from holdfast.comm import Mean
from holdfast.data.plan import MiniBatch
from holdfast.models.gradients import MAX_METRICS, Buckets, Terms

Room = Callable[[int], torch.Tensor]
"""Gives the memory of the first, second, ... slice of a step that is computed here."""


class StepGradients:
    """What one step has computed so far. There is one of these a step: to roll a step back is to drop it.

    In ``rows`` slices of earlier steps put what they gave; the same memory is used again, and more is added.
    """

    def __init__(self, buckets: Buckets, rows: list[Terms]) -> None:
        self._buckets = buckets
        self._rows = rows
        self.terms: dict[int, Terms] = {}
        """By slice that is computed here: its terms of the sums."""
        self.sums: list[torch.Tensor] = []
        """Of the first buckets, as many as are summed."""
        self.summed_slices: list[tuple[int, ...]] = []
        """The slices in each of them."""

    # -- slices

    def begin_slice(self, room: Room) -> None:
        """Start from the step's beginning; the gradients that come next are those of one more slice."""
        self._buckets.buffers.rewind()
        self._buckets.clear()
        self._buckets.aim(self.next_terms(room))

    def next_terms(self, room: Room) -> Terms:
        """Return where the next slice that is computed here puts what it gives."""
        return self.row(len(self.terms), room)

    def row(self, number: int, room: Room) -> Terms:
        """Return where a slice of the step puts what it gives, the first that is computed here being number 0."""
        while len(self._rows) <= number:
            self._rows.append(self._buckets.terms_in(room(len(self._rows))))
        return self._rows[number]

    def end_slice(self, number: int, metrics: Mapping[str, torch.Tensor | float], samples: int) -> None:
        """Take gradients, buffers and figures of the slice away, as its term of the sums."""
        terms = self._rows[len(self.terms)]
        self._buckets.put(terms, metrics, samples)
        self.terms[number] = terms

    def of_slice(self, number: int) -> dict[str, torch.Tensor]:
        """Return the gradients of a slice that was computed, by name, where the sum finds them."""
        return self._buckets.named(self.terms[number])

    def given(self) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield by slice that was computed what tells it from a wrong one: its first bucket, and what it logged."""
        start = self._buckets.layouts[-1].figures_at
        for number, terms in self.terms.items():
            yield number, (terms.flat[0], terms.flat[-1][start : start + 2 * MAX_METRICS])

    def message_of(self, bucket: int, slices: Collection[int]) -> dict[str, torch.Tensor]:
        """Return what is given to the sum of a bucket for some slices that were computed here."""
        mine = {number: terms for number, terms in self.terms.items() if number in slices}
        return {f"slices/{number}/buckets/{bucket}": terms.flat[bucket] for number, terms in mine.items()}

    # -- sums

    def mean(self, bucket: int, batch: MiniBatch, slices: Sequence[int], rescale: str) -> Mean:
        """Return what the sum of ``bucket`` over ``slices`` is divided by, so that its gradients are means.

        They are rescaled to the samples of ``"survivors"``, those in the sum, or to the ``"original"`` ones of the mini-batch, as it
        is with all workers alive.
        """
        inside = max(1, batch.samples_of(slices))
        divisor = inside if rescale == "survivors" else batch.full_size
        return Mean(divisor, self._buckets.layouts[bucket].gradients_end)

    def add_sum(self, result: torch.Tensor, slices: Sequence[int]) -> None:
        """Keep the sum of the next bucket, in which ``slices`` are."""
        self.sums.append(result)
        self.summed_slices.append(tuple(slices))

    def missing_slices(self, batch: MiniBatch) -> dict[int, tuple[int, ...]]:
        """Return the buckets that each lost slice is missing from."""
        missing = {
            number: tuple(b for b, slices in enumerate(self.summed_slices) if number not in slices)
            for number in batch.owners
        }
        return {number: buckets for number, buckets in missing.items() if buckets}

    def loss(self) -> float | None:
        """Return the mean loss of the step, all sums of which are known; None if no slice is in the last."""
        return self.metrics(()).get("loss")

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means of what was logged under ``names`` here, and the loss, once all sums are known."""
        return self._buckets.read_metrics(self.sums[-1], names)

    def figures(self) -> list[float]:
        """Return all figures of the step, whose sums are known; see :meth:`Buckets.read_figures`."""
        return self._buckets.read_figures(self.sums[-1])

    def take_buffers(self) -> None:
        """Set the model's buffers to their mean over the slices in the last sum."""
        self._buckets.take_buffers(self.sums[-1], max(1, len(self.summed_slices[-1])))

    def give(self, *, private: bool) -> None:
        """Set every parameter's ``.grad`` to the mean; see :meth:`Buckets.give_gradients`."""
        self._buckets.give_gradients(self.sums, private=private)
