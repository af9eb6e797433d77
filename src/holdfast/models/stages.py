"""A pipeline step (GPipe): micro-batches forward through the stages, then backward, then an all-reduce per stage.

Correctness after failures: everything here lies between two commit votes of the whole world. A worker enters the commit
vote only when it has the reduced gradient of every stage that it holds, including hot standbys. So once any worker has
the outcome of the vote, all have everything needed to apply the step; otherwise all discard it.

No deadlock is possible: all workers process (micro-batch, stage) pairs in the same order, forward and then backward;
sending never blocks, and every message that is received was sent earlier in that order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.comm import Mailbox, OrderedAllReduce, Subgroup, checksum, device_of, make_allreduce
from holdfast.comm.allreduce.checksums import note_altered
from holdfast.data.plan import MiniBatch
from holdfast.data.samples import check_dataset
from holdfast.data.seeds import seed_slice
from holdfast.errors import ScriptError
from holdfast.faults.flips import flip_outputs
from holdfast.models.evaluation import Evaluation
from holdfast.models.gradients import SliceGradients
from holdfast.models.loss import checked, loss_of, on_device
from holdfast.models.model_parallel import ModelParallel
from holdfast.models.pipeline_scaler import PipelineScaler
from holdfast.models.specs import Pipeline
from holdfast.models.step import StagedStep, Step
from holdfast.models.trainable import Runner, StepContext
from holdfast.recovery.placement import Placement
from holdfast.recovery.registry import strategy_class
from holdfast.state.transfer import as_message, broadcast, of_message

_BESIDE = -2
"""First number of evaluated micro-batches, descending: slices have numbers from 0 on, code outside them has -1."""


@dataclass(slots=True)
class _Passed:
    """A micro-batch in a stage, between its forward and its backward pass."""

    given: torch.Tensor | None
    output: torch.Tensor
    terms: SliceGradients


@dataclass(slots=True)
class _Work:
    """Intermediate results of one attempt at a step on this worker."""

    passed: dict[tuple[int, int], _Passed] = field(default_factory=dict)
    handed: dict[tuple[int, int, bool], list[torch.Tensor]] = field(default_factory=dict)
    figures: tuple[str, ...] = ()


class StageRunner(Runner):
    """Computes the stages that this worker holds, and all-reduces their gradients among their holders.

    Args:
        context: The training loop's.
        pipelined: The stages of this worker.
        model: What the script has given.
        scaling: Scales the loss, if anything does.
        clips: Updates need the norm of the complete gradient.
    """

    def __init__(
        self,
        context: StepContext,
        pipelined: ModelParallel,
        model: Pipeline,
        scaling: PipelineScaler | None,
        *,
        clips: bool,
    ) -> None:
        super().__init__(context, pipelined)
        self._model = model
        self._scaling = scaling
        self._clips = clips
        self._resident = pipelined.resident
        self._comm = self._job.comm
        self._settings = self._job.settings
        self._faults = self._job.faults
        self.mailbox = Mailbox(self._comm, shared_bytes=self._settings.shared_bytes)
        self._sums: dict[int, tuple[tuple[int, ...], OrderedAllReduce]] = {}
        self._work = _Work()
        self.metrics: dict[str, float] = {}
        """The metrics of the step, after its all-reduces."""

    @property
    def _seed(self) -> int:
        return self._context.position.plan.seed

    def begin_messages(self) -> None:
        """Forget the messages and all-reduces of the attempt before; called by all members."""
        self._work = _Work()
        for part in self._sums.keys() - self._resident.held.keys():
            self._sums.pop(part)[1].close()
        for _, allreduce in self._sums.values():
            allreduce.begin()
        self.mailbox.begin()

    def step(self, batch: MiniBatch, slices: list[int], attempt: int) -> Step:
        return StagedStep(self, batch, slices, attempt)

    def compute(self, batch: MiniBatch) -> None:
        """Run the micro-batches of this worker's pipeline replicas through its stages."""
        reach = self._context.reach
        reach("handover", None)
        for number, part in self._my_work(batch, back=False):
            reach("handover", number)
            self._forward(batch, number, part)
        reach("backward", None)
        for number, part in self._my_work(batch, back=True):
            self._backward(batch, number, part)
        self.between_slices(batch)

    def finish(self, attempt: Step) -> None:
        """All-reduce the gradients of all stages, and share what each worker needs of the others, unless computing failed."""
        super().finish(attempt)
        batch = self.in_progress()
        self._sum(batch)
        self.metrics = self._share_figures(batch)
        self._share_overflow()
        if self._clips:
            self._share_norms()

    def _sum(self, batch: MiniBatch) -> None:
        """All-reduce the gradients of every stage among its holders, the last stage first."""
        placement = self._resident.now
        count = 0
        sums = dict.fromkeys(self._comm.local_ranks, 0)  # all-reduces of each local rank so far
        for part in reversed(self._resident.held):
            stage, adds = self._resident.held[part], self._sum_of(part)
            owners = {number: chain_of(placement, batch, number)[part] for number in sorted(batch.owners)}
            givers = [rank for rank in placement.holders(part) if rank in sums]
            for bucket in range(stage.num_buckets):
                reduced = self._reduce(
                    adds,
                    stage,
                    bucket,
                    owners,
                    mean=stage.gradients.mean(bucket, batch, owners, "survivors"),
                    rows=list(stage.gradients.terms),
                    givers={rank: sums[rank] for rank in givers},
                    name=f"bucket {bucket} of stage {part}",
                    midway=functools.partial(self._context.reach, "allreduce", count),
                )
                stage.add_sum(*reduced)
                sums |= {rank: sums[rank] + 1 for rank in givers}
                count += 1

    def _share_figures(self, batch: MiniBatch) -> dict[str, float]:
        """Return the metrics of the step, which a worker of the last stage of one slice sends to all others.

        This comes before the commit vote: then every worker that may ever apply the step has them.
        """
        last = self._resident.now.parts - 1
        teller = chain_of(self._resident.now, batch, min(batch.owners))[last]

        def figures() -> torch.Tensor:
            return as_message(self._resident.held[last].gradients.metrics(self._work.figures))

        return dict(of_message(broadcast(self.mailbox, self._comm, teller, figures)))

    def _share_overflow(self) -> None:
        """If the loss is scaled, tell every worker whether some stage's gradient overflows: then all skip the step."""
        if self._scaling is not None and self._scaling.is_enabled:
            has_overflow = any(stage.overflows() for stage in self._resident.held.values())
            self._scaling.skips = bool(self._comm.maximum((int(has_overflow),))[0])

    def _share_norms(self) -> None:
        """Give every stage the norm of the complete gradient: the norm of the norms of the stages."""
        held = self._resident.held
        norms = [held[part].norm() if part in held else 0.0 for part in range(self._resident.now.parts)]
        # Bit patterns of non-negative floats are ordered like their values, and NaN comes last.
        bits = self._comm.maximum(torch.tensor(norms, dtype=torch.float64).abs().view(torch.int64).tolist())
        norm = torch.linalg.vector_norm(torch.tensor(bits).view(torch.float64))
        for stage in held.values():
            stage.norm_of_all = norm

    # -- one micro-batch in one stage

    def _my_work(self, batch: MiniBatch, *, back: bool) -> Iterator[tuple[int, int]]:
        """Yield the (slice, stage) pairs that this worker computes, in order."""
        placement, local_ranks = self._resident.now, self._comm.local_ranks
        stages = range(placement.parts)
        for number in sorted(batch.owners):
            chain = chain_of(placement, batch, number)
            for part in reversed(stages) if back else stages:
                if chain[part] in local_ranks:
                    yield number, part

    def _forward(self, batch: MiniBatch, number: int, part: int) -> None:
        stage, last = self._resident.held[part], part == self._resident.now.parts - 1
        targets: Sequence[Any] = ()
        activation = None
        if part == 0 or last:
            first, *targets = on_device(checked(self._fetch(batch, number)), stage.device)
        if part == 0:
            inputs = first
        else:
            activation = inputs = (
                self._receive(batch, number, part - 1, part, back=False).to(stage.device).requires_grad_()
            )
        stage.buckets.buffers.lend(is_first=number == min(batch.owners))
        seed_slice(self._seed, batch.step, number, part)
        rank = chain_of(self._resident.now, batch, number)[part]
        stage.own.enter(rank)
        with flip_outputs(stage.model, self._faults.flips("activations", batch.step, rank), self._faults, f"{part}."):
            output = stage.model(inputs)
        _check_output(output, part)
        samples = len(batch.slices[number])
        metrics: Mapping[str, Any] = {"loss": 0.0}
        if last:
            loss, metrics = self._loss(output, targets)
            output = loss * samples
        else:
            self._send(batch, number, part, part + 1, output.detach(), back=False)
        terms = stage.gradients.next_terms(self._sum_of(part).room)
        stage.buckets.put_figures(terms, metrics, samples)
        stage.gradients.terms[number] = terms
        self._work.passed[number, part] = _Passed(activation, output, terms)

    def _fetch(self, batch: MiniBatch, number: int) -> Any:
        self._job.beacon.mark("forward", batch.step, number, batch.slices[number])
        return self._loading(self._seed, batch, number)

    def _loss(self, output: torch.Tensor, targets: Sequence[Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, more = loss_of(self._model.loss, output, targets)
        metrics = {"loss": loss.detach(), **more}
        names = tuple(metrics)
        if self._work.figures not in ((), names):
            raise ScriptError(
                f"every micro-batch must log the same metrics: {', '.join(names)}, not {', '.join(self._work.figures)}"
            )
        self._work.figures = names
        return loss, metrics

    def _backward(self, batch: MiniBatch, number: int, part: int) -> None:
        stage, passed = self._resident.held[part], self._work.passed.pop((number, part))
        rank = chain_of(self._resident.now, batch, number)[part]
        stage.own.enter(rank)
        stage.buckets.clear()
        stage.buckets.aim(passed.terms)
        if part == self._resident.now.parts - 1:
            (passed.output if self._scaling is None else self._scaling.scale(passed.output)).backward()
        else:
            passed.output.backward(self._receive(batch, number, part + 1, part, back=True).to(stage.device))
        if passed.given is not None:
            if passed.given.grad is None:
                raise ScriptError(
                    f"in a Pipeline the output of stage {part} ignores its input: stage {part - 1} gets no gradient"
                )
            self._send(batch, number, part, part - 1, passed.given.grad, back=True)
        stage.buckets.collect(passed.terms)
        for due in self._faults.flips("gradients", batch.step, rank):
            named = stage.buckets.named(passed.terms).items()
            self._faults.carry_out(due, {f"{part}.{name}": gradient for name, gradient in named})

    def _handed(self, step: int, rank: int, part: int, output: torch.Tensor) -> torch.Tensor:
        """Return the message to the next stage: the output, with any planned flip."""
        for due in self._faults.flips("handover", step, rank):
            output = output.clone()
            self._faults.carry_out(due, {f"{part}.output": output})
        return output

    # -- between stages

    def _send(self, batch: MiniBatch, number: int, part: int, to: int, data: torch.Tensor, *, back: bool) -> None:
        chain = chain_of(self._resident.now, batch, number)
        messages = [data]
        if self._settings.guard_sums:
            messages.append(torch.tensor([checksum(data)]))
        if not back:
            messages[0] = self._handed(batch.step, chain[part], part, data)
        if chain[to] in self._comm.local_ranks:
            self._work.handed[number, to, back] = messages
        else:
            for message in messages:
                self.mailbox.send(chain[to], message.contiguous())

    def _receive(self, batch: MiniBatch, number: int, source: int, part: int, *, back: bool) -> torch.Tensor:
        giver = chain_of(self._resident.now, batch, number)[source]
        if giver in self._comm.local_ranks:
            messages = self._work.handed.pop((number, part, back))
        else:
            messages = [self.mailbox.receive(giver) for _ in range(1 + self._settings.guard_sums)]
        if self._settings.guard_sums and checksum(messages[0]) != int(messages[1]):
            note_altered(self._job.altered, f"the message from stage {source} to stage {part}", {number: giver}, number)
        return messages[0]

    # -- evaluation

    def evaluate(self, batch: MiniBatch, dataset: Any, batch_size: int, *, averaged: bool) -> dict[str, float]:
        """Return means over a dataset, with the stages as of before the step."""
        check_dataset(dataset)
        if batch_size < 1 or len(dataset) < 1:
            raise ScriptError(
                f"step.evaluate needs at least 1 sample and batch_size >= 1, got {len(dataset)} and {batch_size}"
            )
        source, seed = dataclasses.replace(self._context.source, dataset=dataset), self._seed
        parts = np.array_split(np.arange(len(dataset)), range(batch_size, len(dataset), batch_size))

        def begin(number: int, part: int) -> None:
            self._context.log.mark("forward")  # shows the health monitor that this worker makes progress
            seed_slice(seed, batch.step, _BESIDE - number, part)

        evaluation = Evaluation(
            model=self._model,
            parts=self._resident,
            comm=self._comm,
            mailbox=self.mailbox,
            sizes=list(map(len, parts)),
            load=lambda number: checked(source.load(seed, batch.step, _BESIDE - number, parts[number])),
            begin=begin,
            averaged=averaged,
        )
        figures = evaluation.figures()
        self.between_slices(batch)
        return figures

    # -- memory

    def _sum_of(self, part: int) -> OrderedAllReduce:
        """Return the all-reduce for the gradients of a stage, among its current holders."""
        holders = self._resident.now.holders(part)
        entry = self._sums.get(part)
        if entry is None or entry[0] != holders:
            size_bytes = self._resident.held[part].buckets.size_bytes
            allreduce = make_allreduce(
                Subgroup(self._comm, holders),
                self._job.loops.order,
                size_bytes,
                device=device_of(self._resident.held[part].device),
                shared_bytes=self._settings.shared_bytes,
                between_hosts=self._settings.between_hosts,
            )
            allreduce.keeps_terms = strategy_class(self._settings.strategy).continues_steps
            if entry is not None:
                entry[1].close()
            entry = self._sums[part] = (holders, allreduce)
            self._resident.held[part].forget_room()
        return entry[1]


def chain_of(placement: Placement, batch: MiniBatch, number: int) -> tuple[int, ...]:
    """Return the pipeline replica that computes a slice: replicas have contiguous runs of slices."""
    return placement.chains[number * len(placement.chains) // len(batch.slices)]


def _check_output(output: Any, part: int) -> None:
    if not isinstance(output, torch.Tensor):
        raise ScriptError(f"a stage must return one tensor, stage {part} returned {type(output).__name__}")
    if not output.requires_grad:
        raise ScriptError(
            f"the output of stage {part} of a Pipeline requires no gradient: look for a detach or no_grad in it"
        )
