"""Networks cut into pipeline stages of whole consecutive blocks, with balanced cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holdfast.errors import ConfigError
from holdfast_lab.workloads.models.blocks import Block, Image, NetworkLayout, build
from holdfast_lab.workloads.models.catalog import layout

BALANCES = ("parameters", "operations")
"""Costs that stages can balance: the bytes of their parameters, or the floating-point operations of a forward pass."""


def stages(
    name: str,
    n: int,
    num_classes: int | None = None,
    *,
    image: Image | None = None,
    by: str | Sequence[float] = "parameters",
    seed: int = 0,
    device: torch.device | str | None = None,
    **options: Any,
) -> list[nn.Sequential]:
    """Return the network ``name`` in ``n`` stages, which in sequence compute the same bits as the whole network.

    Every block is in one stage, under the name and with the weights that it has in ``make_model(name, ...)`` with the
    same arguments. So the union of the stages' ``state_dict()`` keys is that of the network.

    Args:
        name: As all arguments that are not described here, of :func:`~holdfast_lab.workloads.make_model`.
        n: From 1 to the number of blocks.
        num_classes: See there.
        image: See there.
        by: The cost of a block: one of :data:`BALANCES`, or a number for each block in any unit, such as measured
            seconds. The maximum cost of a stage is minimised, then the stages are made as equal as possible.
        seed: See there.
        device: See there.
        **options: See there.

    Raises:
        ConfigError: if the network is unknown, or cannot be cut this way.
    """
    parts = split(layout(name, num_classes, image=image, **options), n, by=by)
    return [build(blocks, seed=seed, device=device) for blocks in parts]


def make_stage(
    name: str,
    n: int,
    index: int,
    num_classes: int | None = None,
    *,
    image: Image | None = None,
    by: str | Sequence[float] = "parameters",
    seed: int = 0,
    device: torch.device | str | None = None,
    **options: Any,
) -> nn.Sequential:
    """Return ``stages(name, n, ...)[index]`` without building weights of the other stages.

    Raises:
        ConfigError: as :func:`stages`, and if the index is out of range.
    """
    parts = split(layout(name, num_classes, image=image, **options), n, by=by)
    if not 0 <= index < n:
        raise ConfigError(f"index must be between 0 and {n - 1} (there are {n} stages), got {index}")
    return build(parts[index], seed=seed, device=device)


def split(network: NetworkLayout, n: int, *, by: str | Sequence[float] = "parameters") -> list[tuple[Block, ...]]:
    """Return the blocks of each of ``n`` stages; only shapes are built.

    Raises:
        ConfigError: if the network cannot be cut this way; see :func:`stages`.
    """
    count = len(network.blocks)
    if not 1 <= n <= count:
        raise ConfigError(f"n must be between 1 and the number of blocks ({count}), got {n}")
    return [network.blocks[start:end] for start, end in pairwise(_cuts(costs(network, by), n))]


def costs(network: NetworkLayout, by: str | Sequence[float]) -> list[float]:
    """Return the cost of each block; see ``by`` of :func:`stages`.

    Raises:
        ConfigError: if ``by`` is neither one of :data:`BALANCES` nor a finite, non-negative number for each block.
    """
    if by == "parameters":
        return [_parameter_bytes(block) for block in build(network.blocks, device="meta")]
    if by == "operations":
        return _operations(network)
    if isinstance(by, str):
        raise ConfigError(f"by must be one of {', '.join(BALANCES)}, or a number for each block, got {by!r}")
    if len(by) != len(network.blocks) or not all(0 <= cost < math.inf for cost in by):
        raise ConfigError(
            f"by must have a finite number, 0 or more, for each of the {len(network.blocks)} blocks, got {list(by)}"
        )
    return list(by)


def _parameter_bytes(block: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in block.parameters())


def _operations(network: NetworkLayout) -> list[float]:
    counted = []
    samples = 2  # batch norm may refuse to train on one sample
    passed = torch.empty((samples, *network.sample), dtype=network.dtype, device="meta")
    for block in build(network.blocks, device="meta"):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            passed = block(passed)
        counted.append(counter.get_total_flops() / samples)
    return counted


def _cuts(costs: Sequence[float], n: int) -> tuple[int, ...]:
    """Return where ``n`` runs of ``costs`` begin, and the end of the last.

    Among all cuts with the smallest maximum cost, one with the smallest sum of squares.
    """
    sums = [0, *accumulate(costs)]
    ends = range(len(sums))
    largest = [0.0] + [math.inf] * len(costs)
    """By end: the smallest maximum cost of as many runs as were added so far."""
    for _ in range(n):
        largest = [
            min((max(largest[start], sums[end] - sums[start]) for start in range(end)), default=math.inf)
            for end in ends
        ]
    best: list[tuple[float, tuple[int, ...]]] = [(0, (0,))] + [(math.inf, ())] * len(costs)
    """By end: the smallest sum of squares, and its cuts."""
    for _ in range(n):
        best = [
            min(
                (
                    (best[start][0] + (sums[end] - sums[start]) ** 2, (*best[start][1], end))
                    for start in range(end)
                    if sums[end] - sums[start] <= largest[-1]
                ),
                default=(math.inf, ()),
            )
            for end in ends
        ]
    return best[-1][1]
