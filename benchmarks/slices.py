"""The cost of smaller slices, and how much of it ``step.compute`` saves. One process, one thread.

A worker's samples in 1 to 16 slices: a session that loops over the slices, with a forward and a backward pass for each,
and one that calls ``step.compute``, which batches all slices into one pass if their results stay bit-identical
(:mod:`holdfast.models.slice_batching`). Both train in turns, and must end with the same weights.

Two other methods of reading the weights less often are compared with the loop, by the share of gradient values that are
bit-identical to it:

- ``vmap``: ``torch.func.vmap`` of the gradient, over the slices;
- ``graph``: one forward pass over all samples, and a backward pass for each slice's loss.

With ``--any-order`` only the exact addition is measured: eight slices beside the same eight backward passes that autograd
accumulates in one gradient, in the same session, as a single slice. That is addition in any order: a worker's samples
are then one term, whatever their number, so the result depends on which worker has them.

    python benchmarks/slices.py [--blocks N] [--models digits mlp cnn transformer] [--any-order]

Times are processor time; ratios are taken within a block, with the 95 % interval of the median by bootstrap.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import ratio
from models import JOBS, loss_of, make_model
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.models.slice_batching import TRIALS

Gradients = list[list[torch.Tensor]]
"""For each slice, the gradient of each parameter."""
COUNTS = (1, 2, 4, 8, 16)
EIGHT = 8
"""Slices of a worker where orders are compared."""
DIGITS = "digits"
"""A network of 26 thousand parameters for images of 8 x 8 numbers, whose cost is in calls and not in arithmetic."""
SAMPLES = 128
"""Samples of the worker in a step; a sixteenth of it for text."""
STEP_S = 0.3
"""Minimum duration of a block in seconds, which decides its number of steps."""


def summed_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss whose gradient a session uses: the sum over the samples."""
    return loss_of(model, x, y) * len(x)


def one_by_one(model: nn.Module, xs: torch.Tensor, ys: torch.Tensor) -> Gradients:
    """Return the gradients of slices that are computed one after another."""
    made = []
    for x, y in zip(xs, ys, strict=True):
        model.zero_grad(set_to_none=True)
        summed_loss(model, x, y).backward()
        made.append([p.grad for p in model.parameters()])
    return made


def by_vmap(model: nn.Module, xs: torch.Tensor, ys: torch.Tensor) -> Gradients:
    """Return the gradients of slices, computed by batched kernels."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = torch.func.functional_call(model, (values, buffers), (x,))
        return F.cross_entropy(scores.flatten(0, -2), y.flatten()) * len(x)

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(values, xs, ys)
    return [[together[name][i] for name in values] for i in range(len(xs))]


def by_graph(model: nn.Module, xs: torch.Tensor, ys: torch.Tensor) -> Gradients:
    """Return the gradients of slices that share a forward pass."""
    scores = model(xs.flatten(0, 1)).unflatten(0, xs.shape[:2])
    parameters = list(model.parameters())
    losses = [F.cross_entropy(part.flatten(0, -2), y.flatten()) * len(y) for part, y in zip(scores, ys, strict=True)]
    return [list(torch.autograd.grad(loss, parameters, retain_graph=True)) for loss in losses]


def equal_share(made: Gradients, expected: Gradients) -> float:
    """Return the share of values that are bit-identical."""
    same = total = 0
    for mine, theirs in zip(made, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            same += int((a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)).sum())
            total += a.numel()
    return same / total


class Training:
    """One worker's session, which trains a few steps at a time.

    Args:
        name: Name of the model.
        slices: Slices of each step.
        computes: Whether ``step.compute`` is used instead of a loop.
        folder: Folder for the records.
        order: The order of addition.
        passes: Backward passes of each slice.
    """

    def __init__(
        self, name: str, slices: int, folder: Path, *, computes: bool, order: str = "auto", passes: int = 1
    ) -> None:
        self.model = model_of(name)
        self._computes, self._passes = computes, passes
        self._records = folder / f"{name}-{slices}-{computes}-{order}-{passes}"
        self._records.mkdir()
        x, y = samples_of(name)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        session = holdfast.Session(
            self.model, optimizer, slices=slices, workers=1, order=order, run_dir=str(self._records)
        )
        self._steps = session.steps(TensorDataset(x, y), len(x), 1 << 20, shuffle=False)

    def advance(self, steps: int) -> float:
        """Train some steps; return the processor time of one, in seconds."""
        begun_s = time.process_time()
        for _ in range(steps):
            step = next(self._steps)
            if self._computes:
                step.compute(self.model, mean_loss)
                continue
            for x, y in step:
                *others, last = zip(x.chunk(self._passes), y.chunk(self._passes), strict=True)
                for xs, ys in others:
                    (mean_loss(self.model(xs), ys) * len(ys)).backward()
                step.backward(mean_loss(self.model(last[0]), last[1]) * (len(last[1]) / len(y)))
        return (time.process_time() - begun_s) / steps

    def why_not(self) -> str:
        """Return why slices are not batched, "" if they are."""
        lines = [json.loads(line) for path in self._records.glob("records-*") for line in path.read_text().splitlines()]
        return next((str(line["why_not"]) for line in lines if line["event"] == "SlicesTried"), "there is one slice")

    def close(self) -> None:
        """End the session before the end of training."""
        self._steps.close()


def mean_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a slice."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def model_of(name: str) -> nn.Module:
    """Return a model, with the same weights each time."""
    if name != DIGITS:
        return make_model(name)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def samples_of(name: str) -> tuple[torch.Tensor, ...]:
    """Return the samples of a worker."""
    if name != DIGITS:
        return JOBS[name].data(SAMPLES // 8 if name == "transformer" else SAMPLES, None).tensors
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 64, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)


def against(taken_s: list[float], other_s: list[float]) -> str:
    """Return the ratio of the times, with the 95 % interval."""
    found = ratio(taken_s, other_s, paired=True)
    return f"{found['ratio']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def other_ways(name: str, slices: int) -> None:
    """Print the share of gradient values that are bit-identical to those of one slice after another."""
    model, (x, y) = model_of(name), samples_of(name)
    xs, ys = x.unflatten(0, (slices, -1)), y.unflatten(0, (slices, -1))
    mixes = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())
    ways = {"vmap": by_vmap} if mixes else {"vmap": by_vmap, "graph": by_graph}
    for way, call in ways.items():
        try:
            share = equal_share(call(model, xs, ys), one_by_one(model, xs, ys))
        except RuntimeError as error:
            print(f"{name}, {len(x)} samples in {slices} slices, {way}: {str(error).splitlines()[0]}")
        else:
            print(f"{name}, {len(x)} samples in {slices} slices, {way}: {share:.2%} of the numbers have the same bits")


def measure(name: str, counts: list[int], blocks: int, folder: Path) -> None:
    """Print the cost of slices, and how much of it is saved."""
    loops = {slices: Training(name, slices, folder, computes=False) for slices in counts}
    calls = {slices: Training(name, slices, folder, computes=True) for slices in counts if slices > 1}
    trainings = {("loop", slices): one for slices, one in loops.items()}
    trainings |= {("compute", slices): one for slices, one in calls.items()}
    each_s = min(one.advance(TRIALS + 2) for one in trainings.values())
    times: dict[tuple[str, int], list[float]] = {which: [] for which in trainings}
    for _ in range(blocks):
        for which in random.sample(list(trainings), len(trainings)):
            times[which].append(trainings[which].advance(max(2, round(STEP_S / each_s))))
    for (way, slices), taken_s in times.items():
        more = ""
        if way == "compute":
            pairs = zip(loops[slices].model.parameters(), calls[slices].model.parameters(), strict=True)
            assert all(torch.equal(mine, other) for mine, other in pairs), "other weights"
            more = f", to the loop {against(taken_s, times['loop', slices])}; {calls[slices].why_not() or 'batched'}"
        median_ms = statistics.median(taken_s) * 1e3
        print(
            f"{name}, {way}, {slices} slices: {median_ms:.2f} ms, to 1 slice {against(taken_s, times['loop', 1])}{more}"
        )
    for one in trainings.values():
        one.close()


def measure_any_order(name: str, blocks: int, folder: Path) -> None:
    """Print the times of exact addition, to those of addition in any order."""
    made: dict[str, Training] = {"any order": Training(name, 1, folder, computes=False, passes=EIGHT)}
    for order in ("fold", "tree"):
        made[f"loop, {order}"] = Training(name, EIGHT, folder, computes=False, order=order)
        made[f"step.compute, {order}"] = Training(name, EIGHT, folder, computes=True, order=order)
    each_s = min(one.advance(TRIALS + 2) for one in made.values())
    times: dict[str, list[float]] = {way: [] for way in made}
    for _ in range(blocks):
        for way in random.sample(list(made), len(made)):
            times[way].append(made[way].advance(max(2, round(STEP_S / each_s))))
    for way, taken_s in times.items():
        how = f"; {made[way].why_not() or 'batched'}" if "compute" in way else ""
        print(
            f"{name}, {EIGHT} slices, {way}: {statistics.median(taken_s) * 1e3:.2f} ms,"
            f" to any order {against(taken_s, times['any order'])}{how}",
            flush=True,
        )
    for one in made.values():
        one.close()


def main() -> None:
    """Print the bits and the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--blocks", type=int, default=20, metavar="N", help="0 compares only the bits of the other methods"
    )
    names = [DIGITS, "mlp", "cnn", "transformer"]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--any-order", action="store_true", help="compare with addition in any order, and nothing else")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        if given.any_order:
            with tempfile.TemporaryDirectory() as folder:
                measure_any_order(name, given.blocks, Path(folder))
            continue
        counts = [slices for slices in COUNTS if slices <= len(samples_of(name)[0])]
        for slices in counts[1:]:
            other_ways(name, slices)
        with tempfile.TemporaryDirectory() as folder:
            if given.blocks:
                measure(name, counts, given.blocks, Path(folder))


if __name__ == "__main__":
    main()
