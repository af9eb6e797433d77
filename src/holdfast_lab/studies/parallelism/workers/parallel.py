"""Train a network that is replicated, in stages or in shards, as a script for ``holdfast run``.

Each worker that ends leaves a JSON file in ``--notes``: the data that it held, the time to read it, the time of a
step, and a digest of the model's buffers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast_lab.workloads import RECIPES, loss_of, make_model, stages
from holdfast_lab.workloads.train import accuracy

_DECAYS = 3
"""How often the learning rate falls in a run: a schedule that is lost or restored at the wrong place changes the
weights."""
_PATIENCE_S = 2.0
"""Extra seconds of a step while requested workers have not joined."""


class BlockPolicy:
    """The data policy of Amatya and others (2017): a worker holds contiguous blocks of the dataset, read from a file.

    Slice ``i`` of every mini-batch is taken from block ``i``, so a worker needs only the blocks of its slices. Samples
    come in file order. A worker that takes over slices of a dead worker reads their blocks, and drops blocks it no
    longer needs.

    Args:
        folder: The directory of ``x.npy`` and ``y.npy``.
        samples: Number of samples used, a multiple of ``batch``.
        batch: Samples of a mini-batch, a multiple of ``blocks``.
        blocks: Number of blocks, equal to the number of slices.
    """

    def __init__(self, folder: Path, samples: int, batch: int, blocks: int) -> None:
        self._folder = folder
        self._samples = samples
        self._share = batch // blocks
        self._batch = batch
        self._size = samples // blocks
        self.held: dict[int, TensorDataset] = {}
        self.reads: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        step, rest = divmod(place, self._batch)
        block, inside = divmod(rest, self._share)
        return self.held[block][step * self._share + inside]  # type: ignore[no-any-return]

    def hold(self, blocks: Sequence[int], step: int) -> None:
        """Read those of ``blocks`` that are not loaded, and drop all other blocks."""
        self.held = {block: part for block, part in self.held.items() if block in blocks}
        missing = [block for block in blocks if block not in self.held]
        if missing:
            begun_s = time.perf_counter()
            for block in missing:
                self.held[block] = self._read(block)
            took_s = time.perf_counter() - begun_s
            self.reads.append(
                {"step": step, "blocks": missing, "samples": len(missing) * self._size, "seconds": took_s}
            )

    def _read(self, block: int) -> TensorDataset:
        rows = slice(block * self._size, (block + 1) * self._size)
        # A copy of a slice of a memory-mapped file reads only these rows.
        return TensorDataset(
            *(torch.from_numpy(np.load(path, mmap_mode="r")[rows].copy()) for path in _files(self._folder))
        )


class Stopwatch:
    """Times a step: computing, the optimizer, and the rest, which is communication and waiting."""

    def __init__(self) -> None:
        self._optimizer_s = 0.0
        self._begun_s = self._computed_s = 0.0
        self._steps: list[tuple[float, float, float]] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Time the steps of an optimizer; return it."""

        def begins(*_: object) -> None:
            self._optimizer_s -= time.perf_counter()

        def ends(*_: object) -> None:
            self._optimizer_s += time.perf_counter()

        optimizer.register_step_pre_hook(begins)
        optimizer.register_step_post_hook(ends)
        return optimizer

    def begin(self) -> None:
        """Start a step, which ends the one before."""
        now_s = time.perf_counter()
        if self._begun_s:
            self._steps.append((now_s - self._begun_s, self._computed_s - self._begun_s, self._optimizer_s))
        self._begun_s, self._optimizer_s = now_s, 0.0

    def computed(self) -> None:
        """Mark the end of this worker's computation in the step."""
        self._computed_s = time.perf_counter()

    def medians(self) -> dict[str, float]:
        """Return the median seconds of a step; the first step is left out because it includes setup."""
        steps = self._steps[1:] or self._steps
        if not steps:
            return {}
        whole, compute, optimizer = (median(column) for column in zip(*steps, strict=True))
        rest = median(step - computed - ran for step, computed, ran in steps)
        return {"step_s": whole, "compute_s": compute, "optimizer_s": optimizer, "communication_s": rest}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the training that ``arguments`` describe."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # the number of threads may change the bits
    torch.set_deterministic_debug_mode("error")
    holdfast.reinit(lambda: _train(options))  # under reinit, the session and model are rebuilt after a failure


def _train(options: argparse.Namespace) -> None:
    held, data = _data(options)
    watch = Stopwatch()
    session, module = _session(options, watch)
    steps: Any = session.steps(data, options.batch, options.epochs, shuffle=not options.blocks)
    for step in steps:
        if held is not None:
            held.hold(step.slices, step.number)
        if options.wanted:
            _gather(options, session, step.number)
        watch.begin()
        if options.kind == "pipeline":
            step.compute()
        else:
            for x, y in step:
                loss, figures = _loss(module(x), y)
                step.backward(loss)
                step.log(**figures)
        watch.computed()
    whole: nn.Module = (
        module.module if options.kind == "pipeline" else module
    )  # the whole model has been gathered by now
    test = TensorDataset(*(torch.from_numpy(np.load(path)) for path in _files(options.data, "test-")))
    _note(options.notes, session, held, watch, whole)
    session.log(accuracy=accuracy(whole, test))


def _gather(options: argparse.Namespace, session: holdfast.Session, number: int) -> None:
    """Request more workers when due; prolong the steps until they have started and joined."""
    if options.ask and number == options.since and session.is_lead:
        launcher = os.environ["HOLDFAST_LAUNCHER"].split()[0]
        words = [sys.executable, "-m", "holdfast", "scale", str(options.wanted), "--job", launcher]
        with session.busy():
            subprocess.run(words, check=True)
    if number > options.since and session.world_size < options.wanted:
        time.sleep(_PATIENCE_S)


def _data(options: argparse.Namespace) -> tuple[BlockPolicy | None, Any]:
    if options.blocks:
        blocks = BlockPolicy(options.data, options.samples, options.batch, options.blocks)
        return blocks, blocks
    arrays = (np.load(path, mmap_mode="r")[: options.samples].copy() for path in _files(options.data))
    return None, TensorDataset(*map(torch.from_numpy, arrays))


def _session(options: argparse.Namespace, watch: Stopwatch) -> tuple[holdfast.Session, Any]:
    """Return the session and the model: the pipeline, or the module that computes a slice."""
    seed = holdfast.Settings.from_env().seed
    image = tuple(np.load(_files(options.data)[0], mmap_mode="r").shape[1:3])
    settings = {"bucket_bytes": options.bucket_bytes}
    schedule = _scheduler(options)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return watch.watch(_optimizer(options.network, parameters))

    if options.kind == "pipeline":
        made = stages(options.network, options.parts, 10, image=image, seed=seed)
        pipeline = holdfast.Pipeline(made, _loss)
        return holdfast.Session(pipeline, optimizer, scheduler=schedule, **settings), pipeline
    model = make_model(options.network, 10, image=image, seed=seed)
    if options.kind == "sharded":
        sharded = holdfast.Sharded(model, shards=options.parts)
        return holdfast.Session(sharded, optimizer, scheduler=schedule, **settings), model
    runs = optimizer(model.parameters())
    return holdfast.Session(model, runs, scheduler=schedule(runs), **settings), model


def _optimizer(network: str, parameters: Any) -> torch.optim.Optimizer:
    if network in RECIPES:
        return RECIPES[network].optimizer(parameters)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _scheduler(options: argparse.Namespace) -> Callable[[torch.optim.Optimizer], Any]:
    """Return a factory of the schedule, which lowers the rate a few times in a run by the recipe's factor."""
    steps = options.epochs * -(-options.samples // options.batch)
    gamma = RECIPES[options.network].gamma if options.network in RECIPES else 0.5
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, max(1, steps // (_DECAYS + 1)), gamma)


def _loss(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and a random number; a worker whose random state was lost logs a different one."""
    return loss_of(output, labels), {"noise": torch.rand(())}


def _files(folder: Path, prefix: str = "") -> tuple[Path, Path]:
    return folder / f"{prefix}x.npy", folder / f"{prefix}y.npy"


def _note(
    folder: Path, session: holdfast.Session, held: BlockPolicy | None, watch: Stopwatch, whole: nn.Module
) -> None:
    notes: dict[str, Any] = {"rank": session.rank, **watch.medians(), "buffers_sha256": _digest(whole.named_buffers())}
    if held is not None:
        notes |= {"held": sorted(held.held), "reads": held.reads}
    (folder / f"notes-{session.rank}.json").write_text(json.dumps(notes))


def _digest(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for _, tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parallel.py", description=__doc__)
    parser.add_argument("kind", choices=("replicated", "pipeline", "sharded"))
    parser.add_argument("--network", default="cnn")
    parser.add_argument("--data", type=Path, required=True, help="folder with x.npy, y.npy, test-x.npy, test-y.npy")
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument(
        "--blocks",
        type=int,
        default=0,
        help="the paper's data policy with this many blocks, equal to the number of slices",
    )
    parser.add_argument(
        "--wanted", type=int, default=0, help="number of workers to wait for, in the steps after --since"
    )
    parser.add_argument("--since", type=int, default=0)
    parser.add_argument("--ask", action="store_true", help="request them with `holdfast scale`, in step --since")
    parser.add_argument(
        "--bucket-bytes",
        type=int,
        help="size of a bucket; a huge one gives one all-reduce of all gradients, as in 2017",
    )
    return parser


if __name__ == "__main__":
    main()
