"""A study: gradients added as integers of 64 bits, which needs no order, beside the ordered sum of float32.

    python benchmarks/allreduce/fixed_point.py [--numbers 8500000] [--slices 8] [--steps 60] [--json FILE]

Each term becomes an integer: times a power of two that belongs to the bucket and the step, rounded. Integers are added
exactly, so any algorithm and any grouping gives the same bits. The power of two must be known before the sum: it is that
of the largest number of the step before, with 8 bits of headroom for growth, and log2(slices) for the sum.

It prints three tables: distinct results and errors of sums of real gradients (the digits CNN, its slices in all kinds of
groups and orders; the reference is a sum in float64); how much the largest gradient grows from step to step, which says
how often a step would overflow and be repeated; and the processor time of one sum in one thread, beside the bytes that a
worker sends for each parameter.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from allreduce.sixteen_bits import digits, make_model
from common import cells, command_line, spread, table, take_turns, timed, write_json

from holdfast.comm.allreduce.adding import TiledSum
from holdfast.comm.allreduce.checksums import TILE, ChecksummedVector

HEADROOM_BITS = 8
LARGEST_BITS = 62
"""Largest magnitude of a sum, so that the sign bit stays clear."""

Terms = Sequence[torch.Tensor]


def exponent(largest: float, slices: int) -> int:
    """Return the power of two that numbers up to ``largest`` are multiplied with."""
    return LARGEST_BITS - HEADROOM_BITS - math.ceil(math.log2(slices)) - math.frexp(largest)[1]


def to_integers(term: torch.Tensor, shift: int) -> torch.Tensor:
    """Return a term as integers; exact in float64 but for the final rounding."""
    return (term.double() * 2.0**shift).round_().long()


def from_integers(total: torch.Tensor, shift: int) -> torch.Tensor:
    """Return a sum in float32."""
    return (total.double() * 2.0**-shift).float()


def fixed(terms: Terms, shift: int) -> torch.Tensor:
    """Add as integers, in the given order, tile by tile like the ordered sum."""
    out = torch.empty_like(terms[0])
    for first, *others, into in zip(*(term.split(TILE) for term in terms), out.split(TILE), strict=True):
        total = to_integers(first, shift)
        for term in others:
            total += to_integers(term, shift)
        into.copy_(from_integers(total, shift))
    return out


def ordered(order: str) -> Callable[[Terms], torch.Tensor]:
    """Return the runtime's addition in an order."""

    def add(terms: Terms) -> torch.Tensor:
        out = torch.empty_like(terms[0])
        TiledSum([(n, ChecksummedVector(term)) for n, term in enumerate(terms)], ChecksummedVector(out), 0, order)()
        return out

    return add


def gradients(slices: int, steps: int) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients of each slice of the steps of a training, flat."""
    images, labels = digits()
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[:128]
        terms = []
        for part in chosen.chunk(slices):
            found = torch.autograd.grad(F.cross_entropy(model(images[part]), labels[part]), [*model.parameters()])
            terms.append(torch.cat([gradient.flatten() for gradient in found]))
        yield terms
        mean = torch.stack(terms).mean(0).split([p.numel() for p in model.parameters()])
        for parameter, numbers in zip(model.parameters(), mean, strict=True):
            parameter.grad = numbers.view_as(parameter)
        optimizer.step()


def in_groups(terms: Terms, rng: random.Random, add: Callable[[Terms], torch.Tensor]) -> torch.Tensor:
    """Add terms in a random order and in random groups, as workers that come and go would."""
    left = list(terms)
    rng.shuffle(left)
    while len(left) > 1:
        count = rng.randint(2, len(left))
        left = [*left[count:], add(left[:count])]
        rng.shuffle(left)
    return left[0]


def bits(numbers: torch.Tensor) -> bytes:
    """Return the bits of a result."""
    return numbers.numpy().tobytes()


def study_errors(every: Sequence[Terms], tries: int) -> dict[str, dict[str, float]]:
    """Return distinct results in random groups, and errors relative to the largest and to each number, by kind of sum."""
    rng, found = random.Random(0), {}
    names = ("fixed point", "fold", "tree", "fold, any groups")
    errors: dict[str, list[float]] = {name: [] for name in names}
    tiny: dict[str, list[float]] = {name: [] for name in names}
    distinct = dict.fromkeys(names, 1)
    for terms in every:
        right = sum(term.double() for term in terms)
        shift = exponent(max(float(term.abs().max()) for term in terms), len(terms))
        integers = [to_integers(term, shift) for term in terms]

        def add_integers(some: Terms) -> torch.Tensor:
            return sum(some[1:], some[0])

        sums = {"fixed point": from_integers(add_integers(integers), shift)}
        sums |= {order: ordered(order)(terms) for order in ("fold", "tree")}
        sums["fold, any groups"] = in_groups(terms, rng, ordered("fold"))
        for name, total in sums.items():
            error = (total.double() - right).abs()
            errors[name].append(float(error.norm() / right.norm()))
            small = right.abs() > 0
            tiny[name].append(float((error[small] / right[small].abs()).max()))
        results = {bits(from_integers(in_groups(integers, rng, add_integers), shift)) for _ in range(tries)}
        distinct["fixed point"] = max(distinct["fixed point"], len(results | {bits(sums["fixed point"])}))
        results = {bits(in_groups(terms, rng, ordered("fold"))) for _ in range(tries)}
        distinct["fold, any groups"] = max(distinct["fold, any groups"], len(results))
    for name in names:
        found[name] = {"distinct": distinct[name], "error": statistics.median(errors[name]), "worst": max(tiny[name])}
    return found


def study_growth(every: Sequence[Terms]) -> dict[str, float]:
    """Return by how many bits the largest gradient of a step exceeds that of the step before."""
    largest = [max(float(term.abs().max()) for term in terms) for terms in every]
    return spread([math.log2(after / before) for before, after in itertools.pairwise(largest)])


def study_time(numbers: int, slices: int, rounds: int) -> dict[str, list[float]]:
    """Return the processor time of a sum, ms, by kind."""
    terms = [torch.randn(numbers, generator=torch.Generator().manual_seed(n)) for n in range(slices)]
    shift = exponent(8.0, slices)
    kinds = {"fold": ordered("fold"), "tree": ordered("tree"), "fixed point": lambda terms: fixed(terms, shift)}
    kinds |= {name: ordered(name) for name in ("fold-bf16", f"tree-bf16-{slices}")}
    sums = {name: lambda add=add: 1e3 * timed(lambda: add(terms), time.process_time) for name, add in kinds.items()}
    return take_turns(sums, rounds, warm_up=0)


def sent_bytes(kind: str, slices_each: int) -> float:
    """Return the bytes that a worker of many sends for each parameter, with so many slices a worker."""
    match kind:
        case "fixed point":
            return 8 + 4
        case "fold":
            return 4 * slices_each + 4
        case "tree":
            return 4 + 4
        case "fold-bf16":
            return 2 * slices_each + 2
        case _:  # a tree whose units are the slices of a worker
            return 2 + 2


def main() -> None:
    """Measure and print everything."""
    options = command_line(
        __doc__, numbers=8_500_000, slices=8, steps=60, tries=(20, "random groupings of each step"), rounds=7
    ).parse_args()
    torch.set_num_threads(1)
    every = list(gradients(options.slices, options.steps))
    errors, growth = study_errors(every, options.tries), study_growth(every)
    times = study_time(options.numbers, options.slices, options.rounds)
    rows = [[name, f"{its['distinct']}", f"{its['error']:.1e}", f"{its['worst']:.1e}"] for name, its in errors.items()]
    title = f"sums of {options.slices} slices, {options.steps} steps, {options.tries} groupings of each"
    print(table(title, ["sum", "distinct results", "relative error", "worst of a number"], rows), "\n")
    grown = [f"{growth[key]:+.2f}" for key in ("p50", "p99", "max")]
    print(table("growth of the largest gradient from step to step, bits", ["p50", "p99", "max"], [grown]), "\n")
    rows = []
    for name, taken in times.items():
        p50, p10, p90 = cells(taken, 1)
        rows.append([name, p50, f"{p10}-{p90}", *(f"{sent_bytes(name, k):g}" for k in (1, 2, 8))])
    head = ["sum", "ms p50", "p10-p90", "bytes, 1 slice a worker", "2", "8"]
    print(table(f"{options.numbers:,} numbers, {options.slices} slices, processor time of one thread", head, rows))
    write_json(options.json, errors=errors, growth=growth, times={name: spread(taken) for name, taken in times.items()})


if __name__ == "__main__":
    main()
