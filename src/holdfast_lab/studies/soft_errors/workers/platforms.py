"""One process of a training that runs many times: unmodified torch, as replicas, stages, or both.

Every method is collective: all processes must call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DistributedSampler

from holdfast_lab.studies.soft_errors.setup import SoftErrorSetup
from holdfast_lab.workloads import load_dataset, loss_of, make_model, make_optimizer, make_stage

_CHUNK = 1000
"""Samples per evaluation batch."""
_MOST_DIMENSIONS = 8


class ModelPlatform:
    """A replica of the model, or a stage of one, with its optimizer and schedule.

    Args:
        setup: The training.
        rank: The rank of this process.
        module: The part of the model that this process has.
    """

    def __init__(self, setup: SoftErrorSetup, rank: int, module: nn.Module) -> None:
        self.setup, self.rank = setup, rank
        self.replica, self.stage = divmod(rank, setup.stages)
        self.dtype: torch.dtype = getattr(torch, setup.dtype)
        self.module = module.to(self.dtype)
        self.optimizer = make_optimizer(setup.optimizer, module.parameters())
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=2)
        self.data = _dataset(setup)
        torch.manual_seed(1000 * setup.training_seed + rank)

    def train(self, epoch: int) -> float:
        """Train an epoch; return the mean loss over all processes, so that all step their schedules alike."""
        self.module.train()
        losses = self._losses(epoch)
        told = torch.tensor([sum(map(float, losses)), float(len(losses))], dtype=torch.float64)
        dist.all_reduce(told)
        loss = float(told[0] / told[1])
        self.scheduler.step(loss)
        return loss

    def evaluate(self) -> tuple[float, float]:
        """Return accuracy and mean loss on the test set, for the model that this process holds or holds a stage of."""
        self.module.eval()
        right, loss, count = 0, 0.0, len(self.data.test)
        with torch.no_grad():
            for start in range(0, count, _CHUNK):
                x, labels = self.data.test[slice(start, start + _CHUNK)]
                scores = self._scores(x.to(self.dtype), len(labels))
                if scores is not None:
                    right += int((scores.argmax(1) == labels).sum())
                    loss += float(F.cross_entropy(scores.double(), labels, reduction="sum"))
        return self._shared(right / count, loss / count)

    def _losses(self, epoch: int) -> list[Tensor]:
        """Train an epoch; return the losses that this process knows."""
        return [loss for x, y in self._batches(epoch) if (loss := self._step(x, y)) is not None]

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        replicas, seed = self.setup.replicas, self.setup.training_seed
        places = cast(Any, range(len(self.data.train)))
        sampler: DistributedSampler[Any] = DistributedSampler(places, replicas, self.replica, seed=seed, drop_last=True)
        sampler.set_epoch(epoch)
        order, size = list(sampler), self.setup.batch // replicas
        for start in range(0, len(order) - size + 1, size):
            x, y = self.data.train[order[start : start + size]]
            yield x.to(self.dtype), y

    def _step(self, x: Tensor, y: Tensor) -> Tensor | None:
        raise NotImplementedError

    def _scores(self, x: Tensor, count: int) -> Tensor | None:
        """Return the model's output for ``count`` samples; None if another process has it."""
        scores: Tensor = self.module(x)
        return scores

    def _shared(self, accuracy: float, loss: float) -> tuple[float, float]:
        """Broadcast the result from the process that has it."""
        return accuracy, loss


class ReplicatedPlatform(ModelPlatform):
    """The whole model, under DistributedDataParallel."""

    def __init__(self, setup: SoftErrorSetup, rank: int) -> None:
        super().__init__(setup, rank, make_model(setup.network, **options_of(setup)))
        self._wrapped = DistributedDataParallel(self.module)

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self._wrapped(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class StagedPlatform(ModelPlatform):
    """A stage of the model under torch.distributed.pipelining (GPipe), and under DDP if there are several pipelines."""

    def __init__(self, setup: SoftErrorSetup, rank: int) -> None:
        stages, replicas = setup.stages, setup.replicas
        made = make_stage(setup.network, stages, rank % stages, **options_of(setup))
        super().__init__(setup, rank, made)
        # Every process must create all groups, in the same order.
        pipelines = [dist.new_group([r * stages + s for s in range(stages)]) for r in range(replicas)]
        peers = [dist.new_group([r * stages + s for r in range(replicas)]) for s in range(stages)]
        self._pipeline = pipelines[self.replica]
        whole = self.module
        if replicas > 1:
            # Without this, DDP rebuilds its buckets in the second forward pass and fails, because each microbatch had
            # one.
            whole = DistributedDataParallel(whole, process_group=peers[self.stage], find_unused_parameters=True)
        # Without given shapes, torch infers them by a pass over uninitialised memory, which would stay in running
        # statistics.
        taken, given = _shapes(setup, self.stage, self.dtype)
        stage = PipelineStage(whole, self.stage, stages, torch.device("cpu"), taken, given, group=self._pipeline)
        self._schedule = ScheduleGPipe(stage, setup.microbatches, loss_fn=loss_of)
        self._is_first, self._is_last = self.stage == 0, self.stage == stages - 1

    def _step(self, x: Tensor, y: Tensor) -> Tensor | None:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self._is_last:
            self._schedule.step(target=y, losses=losses)
        else:
            self._schedule.step(*((x,) if self._is_first else ()))
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None

    def _scores(self, x: Tensor, count: int) -> Tensor | None:
        passed: Tensor = self.module(x if self._is_first else _receive(self.rank - 1, self.dtype))
        if self._is_last:
            return passed
        _send(passed, self.rank + 1)
        return None

    def _shared(self, accuracy: float, loss: float) -> tuple[float, float]:
        told = torch.tensor([accuracy, loss], dtype=torch.float64)
        dist.broadcast(told, (self.replica + 1) * self.setup.stages - 1, group=self._pipeline)
        return float(told[0]), float(told[1])


def make_platform(setup: SoftErrorSetup, rank: int) -> ModelPlatform:
    """Return this process's part of the training; the default process group must exist."""
    return StagedPlatform(setup, rank) if setup.stages > 1 else ReplicatedPlatform(setup, rank)


def _dataset(setup: SoftErrorSetup) -> Any:
    data = Path(setup.data) if setup.data else None
    return load_dataset(setup.dataset, data, limit=setup.limit, test_limit=setup.test_limit, size=setup.size)


def options_of(setup: SoftErrorSetup) -> dict[str, Any]:
    """Return the keyword arguments that build the network."""
    dataset = _dataset(setup)
    channels, side, _ = dataset.shape
    return {"num_classes": dataset.num_classes, "image": (channels, side), "seed": setup.training_seed}


def _shapes(setup: SoftErrorSetup, stage: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the input and output of a stage for one microbatch, as tensors without values."""
    options = options_of(setup)
    channels, side = options["image"]
    pieces = setup.replicas * setup.microbatches
    taken = given = torch.empty(setup.batch // pieces, channels, side, side, dtype=dtype, device="meta")
    for index in range(stage + 1):
        part = make_stage(setup.network, setup.stages, index, device="meta", **options).to(dtype)
        taken, given = given, part(given)
    return taken, given


def _send(tensor: Tensor, to: int) -> None:
    shape = torch.zeros(_MOST_DIMENSIONS, dtype=torch.int64)
    shape[: tensor.dim()] = torch.tensor(tensor.shape)
    dist.send(shape, to)
    dist.send(tensor.contiguous(), to)


def _receive(source: int, dtype: torch.dtype) -> Tensor:
    shape = torch.zeros(_MOST_DIMENSIONS, dtype=torch.int64)
    dist.recv(shape, source)
    tensor = torch.empty([size for size in shape.tolist() if size], dtype=dtype)
    dist.recv(tensor, source)
    return tensor
