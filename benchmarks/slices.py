"""What smaller slices cost, and whether several could be computed together without changing a bit. One process, one thread.

A worker's samples in 1, 2, 4 and 8 slices, each a forward and a backward pass of its own, as a session computes them: time
against one slice. Then the same slices in three ways that read the weights less often, each of which must give, slice by
slice, the gradients of the first way to the last bit to be of any use:

- ``vmap``: ``torch.func.vmap`` of the gradient, over the slices;
- ``graph``: one forward pass over all samples, and a backward pass for each slice's loss;
- ``rows``: one forward pass and one backward pass over all samples for what goes from layer to layer, whose rows do not mix;
  the gradients of the parameters slice by slice, from each layer's input and the gradient of its output.

Where a layer looks at all samples of a slice (batch norm), the last two compute something else; they are left out there.

    python benchmarks/slices.py [--blocks N] [--repeat N] [--models mlp cnn transformer]

Ways whose bits differ are not timed. Times are processor time; ratios are taken within a block, with the 95 % interval of the
median by bootstrap.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import ratio
from models import JOBS, loss_of, make_model
from torch import nn

Gradients = list[list[torch.Tensor]]
"""Of each slice, of each parameter."""
COUNTS = (1, 2, 4, 8)


def summed_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss that a session takes the gradient of: the sum over the samples."""
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
    """Return the gradients of slices that go through batched kernels."""
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


def by_rows(model: nn.Module, xs: torch.Tensor, ys: torch.Tensor) -> Gradients:
    """Return the gradients of slices that share both passes but for the gradients of parameters."""
    seen: dict[nn.Module, list[torch.Tensor]] = {}

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        seen[layer] = [inputs[0].detach()]
        output = output if output.requires_grad else output.requires_grad_()
        output.register_hook(lambda gradient: seen[layer].append(gradient))
        return output

    layers = [layer for layer in model.modules() if list(layer.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    model.requires_grad_(False)
    try:
        scores = model(xs.flatten(0, 1)).unflatten(0, xs.shape[:2])
        losses = [
            F.cross_entropy(part.flatten(0, -2), y.flatten()) * len(y) for part, y in zip(scores, ys, strict=True)
        ]
        torch.stack(losses).sum().backward()
    finally:
        model.requires_grad_(True)
        for hook in hooks:
            hook.remove()
    made: Gradients = [[] for _ in xs]
    for layer in layers:
        inputs, gradients = (t.chunk(len(xs)) for t in seen[layer])
        for mine, x, gradient in zip(made, inputs, gradients, strict=True):
            mine += _of_parameters(layer, x, gradient)
    return made


def _of_parameters(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of a layer's parameters, by the formulas of autograd."""
    match layer:
        case nn.Linear():
            x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
            weight = gradient.t().mm(x)
            return [weight] if layer.bias is None else [weight, gradient.sum(0)]
        case nn.LayerNorm():
            shape, eps = list(layer.normalized_shape), layer.eps
            _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, layer.weight, layer.bias, eps)
            return [
                torch.ops.aten.native_layer_norm_backward(
                    gradient, x, shape, mean, rstd, layer.weight, layer.bias, [False, True, False]
                )[1]
            ]
        case nn.Embedding():
            return [torch.ops.aten.embedding_dense_backward(gradient, x, layer.num_embeddings, -1, False)]
    msg = f"no formula for {layer}"
    raise TypeError(msg)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], Gradients]] = {
    "vmap": by_vmap,
    "graph": by_graph,
    "rows": by_rows,
}


def data(name: str, slices: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a worker in so many slices, shapes ``(slices, samples / slices, ...)``."""
    x, y = JOBS[name].data(samples, None).tensors
    return x.unflatten(0, (slices, -1)), y.unflatten(0, (slices, -1))


def equal_share(made: Gradients, expected: Gradients) -> float:
    """Return the share of numbers with the same bits."""
    same = total = 0
    for mine, theirs in zip(made, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            same += int((a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)).sum())
            total += a.numel()
    return same / total


def is_separable(model: nn.Module) -> bool:
    """Return whether no layer looks at more than one sample."""
    return not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())


def seconds(call: Callable[[], object], repeat: int) -> float:
    """Return the processor time of a call, seconds."""
    begun_s = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - begun_s) / repeat


def against(taken_s: list[float], other_s: list[float]) -> str:
    """Return how many times as long it takes, with the 95 % interval."""
    found = ratio(taken_s, other_s, paired=True)
    return f"{found['ratio']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def main() -> None:
    """Print the bits and the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, metavar="N", help="0 compares bits alone")
    parser.add_argument("--repeat", type=int, default=2, metavar="N", help="calls of a block")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer"], choices=JOBS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        model, samples = make_model(name), 4 * JOBS[name].samples
        ways = {way: call for way, call in WAYS.items() if way == "vmap" or is_separable(model)}
        calls: dict[str, Callable[[], object]] = {}
        for slices in COUNTS:
            xs, ys = data(name, slices, samples)
            calls[f"{slices} slices"] = functools.partial(one_by_one, model, xs, ys)
            for way, call in ways.items() if slices > 1 else ():
                try:
                    share = equal_share(call(model, xs, ys), one_by_one(model, xs, ys))
                except RuntimeError as error:
                    print(f"{name}, {samples} samples in {slices} slices, {way}: {str(error).splitlines()[0]}")
                    continue
                print(
                    f"{name}, {samples} samples in {slices} slices, {way}: {share:.2%} of the numbers have the same bits"
                )
                if share == 1:  # else it is of no use, however fast
                    calls[f"{slices} slices, {way}"] = functools.partial(call, model, xs, ys)
        times: dict[str, list[float]] = {what: [] for what in calls}
        for _ in range(given.blocks):
            for what in random.sample(list(calls), len(calls)):
                times[what].append(seconds(calls[what], given.repeat))
        for what, taken_s in times.items() if given.blocks else ():
            alone = against(taken_s, times["1 slices"])
            same = against(taken_s, times[what.partition(",")[0]])
            print(
                f"{name}, {what}: {statistics.median(taken_s) * 1e3:.1f} ms, to 1 slice {alone}, to one by one {same}"
            )


if __name__ == "__main__":
    main()
