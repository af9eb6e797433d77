"""Times steps with deterministic all-reduce, unordered all-reduce, a plain MPI loop, DDP, and no all-reduce.

Started by ``mpirun``. All variants train in the same processes and take turns, block by block, in a different order
each round. They start from the same weights and use the same mini-batches in the same slices. After the first steps
their weights are compared, so that no variant is fast because it computes something else.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.base.torch_private import logging_data
from holdfast_lab.studies.exact.unordered import sum_unordered
from holdfast_lab.workloads import loss_of, make_model, make_optimizer

FOLD, TREE, CERTIFICATE = ORDERED = ("fold", "tree", "fold, certificate")
MPI, MEMORY = ANY_ORDER = ("MPI Allreduce", "shared memory")
PLAIN, DDP, ALONE, WHOLE = "plain loop, MPI Allreduce", "DDP", "no sum", "no sum, one slice a worker"
VARIANTS = (*ORDERED, *ANY_ORDER, PLAIN, DDP, ALONE, WHOLE)

_WARM_UP_STEPS = 3
_MOST_STEPS = 40
_BATCHES = {"mlp": 2, "cnn": 16, "gpt": 16}
"""Number of mini-batches for each network; they are used repeatedly."""
_TOLERANCE = 1e-3
"""Largest allowed distance between two variants' weights after the first steps, relative to their total movement."""


class CostTraining:
    """The training of a variant: a new model, its optimizer, and the slices of this worker.

    Args:
        options: The parsed command line.
        rank: Rank of this worker.
        slices: Slices of a mini-batch, a multiple of the number of workers.
    """

    def __init__(self, options: argparse.Namespace, rank: int, slices: int) -> None:
        self.batch, self.workers, self.slices = options.batch, options.workers, slices
        self.model = _make(options.network)
        self.dataset = _noise(options.network, _BATCHES[options.network] * options.batch)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # random masks would hide differences between the all-reduces
        self.optimizer = make_optimizer("sgd", self.model.parameters())
        self._rank = rank
        self._begun = self._sample()

    def mine(self, step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the samples of this worker's slices, slice by slice."""
        size = self.batch // self.slices
        count = self.slices // self.workers
        first = step * self.batch % len(self.dataset) + self._rank * count * size
        for start in range(first, first + count * size, size):
            index = torch.arange(start, start + size)
            yield tuple(tensor[index] for tensor in self.dataset.tensors)

    def moved(self) -> list[float]:
        """Return how far training has moved a few sampled values of each parameter."""
        return [after - before for after, before in zip(self._sample(), self._begun, strict=True)]

    def _sample(self) -> list[float]:
        flat = [parameter.detach().flatten() for parameter in self.model.parameters()]
        return [value for one in flat for value in one[:: max(1, len(one) // 16)].tolist()]


_SIDE = {"mlp": 256, "cnn": 28}
"""Side of the images in pixels."""
_CHARACTERS, _CONTEXT = 65, 64


def _make(network: str) -> nn.Module:
    if network == "gpt":
        return make_model("gpt", _CHARACTERS, seed=0, context=_CONTEXT, layers=2, heads=4, width=128, dropout=0.0)
    return make_model(network, 10, image=(1, _SIDE[network]), seed=0)


@functools.cache
def _noise(network: str, samples: int) -> TensorDataset:
    """Return random samples: only the step time matters."""
    generator = torch.Generator().manual_seed(0)
    if network == "gpt":
        text = torch.randint(_CHARACTERS, (samples, _CONTEXT + 1), generator=generator)
        return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    images = torch.randn(samples, 1, _SIDE[network], _SIDE[network], generator=generator)
    return TensorDataset(images, torch.randint(10, (samples,), generator=generator))


# -- the variants: endless generators that yield before each step, when the previous update is complete


def ordered(training: CostTraining, **settings: Any) -> Iterator[None]:
    """Train with a session and its deterministic all-reduce, slice by slice."""
    for step in _session_steps(training, slices=training.slices, **settings):
        yield
        for x, y in step:
            step.backward(loss_of(training.model(x), y))


def unordered(training: CostTraining, add: Callable[[torch.Tensor], None] | None = None) -> Iterator[None]:
    """Train with a session in which each worker accumulates the gradients of its own slices before the all-reduce.

    It is the same session with another order of summation. Gradients of further backward passes are accumulated in the
    buffer that the session provides for the first.

    Args:
        training: The training.
        add: All-reduce over workers; default: the session's own, through shared memory.
    """
    count = training.slices // training.workers
    for step in _session_steps(training, add, slices=training.workers):
        yield
        for x, y in step:
            pieces = list(zip(x.chunk(count), y.chunk(count), strict=True))
            for piece, labels in pieces[:-1]:
                (loss_of(training.model(piece), labels) * len(labels)).backward()
            piece, labels = pieces[-1]
            step.backward(loss_of(training.model(piece), labels) / count)


def _session_steps(
    training: CostTraining, add: Callable[[torch.Tensor], None] | None = None, **settings: Any
) -> Iterator[Any]:
    settings = {"certificate": False} | settings
    session = holdfast.Session(training.model, training.optimizer, fabric="ulfm", guard="off", **settings)
    if add is not None:
        sum_unordered(session, add)
    return session.steps(training.dataset, training.batch, epochs=1_000_000_000, shuffle=False)


def plain(training: CostTraining, add: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Train in a plain loop: accumulate the gradients of the slices in one vector, and all-reduce it with ``add``."""
    parameters = list(training.model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = flat.split([parameter.numel() for parameter in parameters])
    views = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
    is_first = True

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        (views[parameter].copy_ if is_first else views[parameter].add_)(parameter.grad)  # type: ignore[index]
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
    assert hooks
    step = 0
    while True:
        yield
        for number, (x, y) in enumerate(training.mine(step)):
            is_first = number == 0
            (loss_of(training.model(x), y) * (len(y) / training.batch)).backward()
        add(flat)
        for parameter, view in views.items():
            parameter.grad = view
        training.optimizer.step()
        training.optimizer.zero_grad()
        step += 1


def ddp(training: CostTraining, wrapped: nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """Train with DDP, which all-reduces during the last slice of a worker (``no_sync`` before)."""
    count, step = training.slices // training.workers, 0
    while True:
        yield
        for number, (x, y) in enumerate(training.mine(step)):
            with contextlib.nullcontext() if number == count - 1 else wrapped.no_sync():
                loss = loss_of(wrapped(x), y) * (len(y) * training.workers / training.batch)
                loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        step += 1


# -- the timed comparison


class CostRace:
    """All variants in this process, with MPI to the other workers.

    Args:
        options: The parsed command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        module = nn.Linear(1, 1)
        first = holdfast.Session(module, make_optimizer("sgd", module.parameters()), fabric="ulfm")
        self.rank = first.rank  # a session must initialize MPI, with its own settings, before the import below
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self._sum_in_place = MPI.IN_PLACE
        self._options = options
        self._steps: dict[str, Iterator[None]] = {}
        self._trainings: dict[str, CostTraining] = {}
        self.bytes: dict[str, dict[str, int]] = {}
        """Bytes of the all-reduce on the whole machine, by variant and kind of memory."""
        self.parameters = 0

    def begin(self) -> None:
        """Create each variant, warm it up, and record its allocated memory."""
        for variant in self._options.variants:
            slices = self._options.workers if variant == WHOLE else self._options.slices
            training = CostTraining(self._options, self.rank, slices)
            before = shared_segments()
            self._steps[variant], wrapped = self._make(variant, training)
            for _ in range(1 + _WARM_UP_STEPS):
                next(self._steps[variant])
            self._trainings[variant] = training
            self._note_bytes(variant, training, before, wrapped)
        self.parameters = sum(p.numel() for p in self._trainings[FOLD].model.parameters())

    def _make(self, variant: str, training: CostTraining) -> tuple[Iterator[None], Any]:
        if variant in ORDERED:
            order, certified = variant.split(",")[0], variant == CERTIFICATE
            return ordered(training, order=order, certificate=certified), None
        if variant in ANY_ORDER:
            return unordered(training, self._allreduce if variant == MPI else None), None
        if variant == PLAIN:
            return plain(training, self._allreduce), None
        if variant == DDP:
            wrapped = self._wrap(training)
            return ddp(training, wrapped), wrapped
        return plain(training, lambda _: None), None

    def _allreduce(self, flat: torch.Tensor) -> None:
        self._comm.Allreduce(self._sum_in_place, flat.numpy())

    def _wrap(self, training: CostTraining) -> nn.parallel.DistributedDataParallel:
        store = f"file://{self._options.out}.store"
        workers = self._options.workers
        torch.distributed.init_process_group("gloo", init_method=store, rank=self.rank, world_size=workers)
        return nn.parallel.DistributedDataParallel(training.model)

    def _note_bytes(self, variant: str, training: CostTraining, before: Mapping[int, int], wrapped: Any) -> None:
        mine: dict[str, int] = {}
        if variant in ORDERED:
            segments = {
                number: size for found in self._comm.allgather(shared_segments()) for number, size in found.items()
            }
            mine = {"slots and result": sum(size for number, size in segments.items() if number not in before)}
        if wrapped is not None:
            told = logging_data(wrapped)
            buckets = sum(int(size) for size in re.findall(r"\d+", str(told["bucket_sizes"])))
            gradients = sum(4 * parameter.numel() for parameter in training.model.parameters())
            mine = {"buckets": self._comm.allreduce(buckets), "gradients": self._comm.allreduce(gradients)}
        self.bytes[variant] = mine

    def unlike(self) -> str:
        """Return an error message if the weights of a variant with an all-reduce differ from the reference, else ""."""
        reference = self._trainings[FOLD].moved()
        for variant, training in self._trainings.items():
            apart = math.dist(training.moved(), reference) / math.hypot(*reference)
            if variant not in (ALONE, WHOLE) and not apart < _TOLERANCE:
                return (
                    f"the weights of {variant} differ from those of {FOLD} by {apart:.2g} of the distance that "
                    f"training moved them, expected less than {_TOLERANCE:g}"
                )
        return ""

    def run(self, rounds: int, block_s: float) -> dict[str, list[float]]:
        """Return the mean step time of each block in seconds, by variant; blocks of one round have the same index."""
        slowest = max(self._time_block(variant, 2) for variant in self._options.variants)
        steps = max(1, min(_MOST_STEPS, math.ceil(block_s / slowest)))
        rng = random.Random(0)
        blocks: dict[str, list[float]] = {variant: [] for variant in self._options.variants}
        for _ in range(rounds):
            for variant in rng.sample(self._options.variants, len(self._options.variants)):
                blocks[variant].append(self._time_block(variant, steps))
        return blocks

    def _time_block(self, variant: str, steps: int) -> float:
        """Return the mean step time of a block over all workers; a barrier precedes it."""
        self.meet()
        next(self._steps[variant])
        begun_s = time.perf_counter()
        for _ in range(steps):
            next(self._steps[variant])
        took_s = (time.perf_counter() - begun_s) / steps
        return statistics.fmean(self._comm.allgather(took_s))

    def meet(self) -> None:
        """Wait for all workers (MPI barrier)."""
        self._comm.Barrier()


def shared_segments() -> dict[int, int]:
    """Return the allocated bytes of all shared-memory segments that this process has open, by inode number."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the directory itself is closed by now
            if "memfd:holdfast" in os.readlink(entry):  # a memfd has no path, so only readlink shows its name
                status = entry.stat()
                found[status.st_ino] = 512 * status.st_blocks
    return found


def main() -> None:
    """Time all variants in turns; rank 0 writes block times and allocated memory."""
    options = _parse()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    race = CostRace(options)
    race.begin()
    found: dict[str, Any] = {"failed": race.unlike(), "bytes": race.bytes, "parameters": race.parameters}
    if options.rounds and not found["failed"]:
        found["blocks"] = race.run(options.rounds, options.block_s)
    if race.rank == 0:
        Path(options.out).write_text(json.dumps(found))
    race.meet()  # no process may exit before all have finished
    os._exit(0)  # the generators never end


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=("mlp", "cnn", "gpt"), required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--slices", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--block-s", type=float, default=0.3)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
