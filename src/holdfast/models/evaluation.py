"""Evaluation of a pipeline during a step: forward passes through the stages of several workers.

Micro-batches go to the pipeline replicas in turn. After as many as keep all stages busy, all workers receive the
metrics, and no worker starts more of them earlier. So no worker runs ahead of later stages, and memory is reused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.comm import Communicator, Mailbox
from holdfast.errors import ScriptError
from holdfast.models.loss import loss_of, on_device
from holdfast.models.resident_parts import ResidentParts
from holdfast.models.specs import Pipeline
from holdfast.state.transfer import as_message, broadcast, of_message

_AHEAD = 4
"""Micro-batches in flight per stage: then every stage is busy at least four fifths of the time."""
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation, in which all workers take part."""

    model: Pipeline
    parts: ResidentParts
    comm: Communicator
    mailbox: Mailbox
    sizes: Sequence[int]  # samples of each micro-batch
    load: Callable[[int], Sequence[Any]]  # returns the inputs of a micro-batch, checked
    # called with micro-batch and stage before it is computed, to seed the generators
    begin: Callable[[int, int], None]
    averaged: bool  # evaluate the averaged weights

    def figures(self) -> Figures:
        """Return the means over all samples: the same bits on every worker, for any number of workers."""
        modules = {part: self._module(part) for part in self.parts.held}
        at_once = _AHEAD * len(self.parts.now.chains) * self.parts.now.parts
        totals: Figures = {}
        with self._evaluating(modules.values()):
            for first in range(0, len(self.sizes), at_once):
                numbers = range(first, min(first + at_once, len(self.sizes)))
                metrics = self._share(numbers, self._compute(numbers, modules))
                for number in numbers:
                    for name, value in metrics[number].items():
                        totals[name] = totals.get(name, 0.0) + value * self.sizes[number]
                self.comm.barrier()  # all messages have been read, so their memory may be reused
                self.mailbox.begin()
        return {name: total / sum(self.sizes) for name, total in totals.items()}

    def _module(self, part: int) -> nn.Module:
        held = self.parts.held[part]
        if not self.averaged:
            return held.model
        if held.average is None:
            raise ScriptError(
                "step.evaluate(averaged=True) needs an average: pass the session average=lambda m: AveragedModel(m)"
            )
        return held.average.module

    @contextlib.contextmanager
    def _evaluating(self, modules: Any) -> Iterator[None]:
        """Switch modules to evaluation mode, and begin and end with the buffers of the step's beginning."""
        modes = [(module, module.training) for root in modules for module in root.modules()]
        self._rewind()
        for module, _ in modes:
            module.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            self._rewind()

    def _rewind(self) -> None:
        for held in self.parts.held.values():
            held.buckets.buffers.rewind()

    def _chain(self, number: int) -> tuple[int, ...]:
        chains = self.parts.now.chains
        return chains[number % len(chains)]

    def _compute(self, numbers: range, modules: dict[int, nn.Module]) -> dict[int, Figures]:
        """Return the metrics of the micro-batches whose last stage is computed on this worker."""
        metrics: dict[int, Figures] = {}
        last = self.parts.now.parts - 1
        kept: dict[int, torch.Tensor] = {}  # between two stages on this worker
        for number in numbers:
            chain = self._chain(number)
            for part in (part for part in range(last + 1) if chain[part] in self.comm.local_ranks):
                device = self.parts.held[part].device
                inputs: Sequence[Any] = on_device(self.load(number), device) if part in (0, last) else ()
                stage_input = inputs[0] if part == 0 else self._take(chain, number, part, kept).to(device)
                self.begin(number, part)
                self.parts.held[part].own.enter(chain[part])
                output = modules[part](stage_input)
                if part == last:
                    loss, more = loss_of(self.model.loss, output, inputs[1:])
                    metrics[number] = {name: float(value) for name, value in {**more, "loss": loss}.items()}
                elif chain[part + 1] in self.comm.local_ranks:
                    kept[number] = output
                else:
                    self.mailbox.send(chain[part + 1], output.contiguous())
        return metrics

    def _take(self, chain: tuple[int, ...], number: int, part: int, kept: dict[int, torch.Tensor]) -> torch.Tensor:
        giver = chain[part - 1]
        return kept.pop(number) if giver in self.comm.local_ranks else self.mailbox.receive(giver)

    def _share(self, numbers: range, mine: dict[int, Figures]) -> dict[int, Figures]:
        """Return the metrics of all these micro-batches, sent by the workers of the last stages."""
        metrics = dict(mine)
        for teller in dict.fromkeys(self._chain(number)[-1] for number in numbers):
            metrics |= dict(
                of_message(broadcast(self.mailbox, self.comm, teller, lambda: as_message(list(mine.items()))))
            )
        return metrics
