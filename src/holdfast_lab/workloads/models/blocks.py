"""Blocks: the named pieces of a network, each built independently."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Image = tuple[int, int]
"""Channels, and side in pixels."""

SMALL_BELOW = 64
"""Images with shorter sides get the small form of a network: nearly all of its layers, without the early
downsampling."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a network that is never split.

    Args:
        name: Unique in the network; prefix of its parameter names, and source of its seed.
        make: Builds the module, drawing its weights from torch's global generator. The module has parameters and takes
            the output of the block before it, which it must not change in place: the stage still needs what it
            received.
    """

    name: str
    make: Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class NetworkLayout:
    """The description of a network before it is built.

    Args:
        blocks: The blocks, in the order in which they run.
        sample: Shape of one input sample.
        dtype: Data type of its values.
    """

    blocks: tuple[Block, ...]
    sample: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def build(blocks: Sequence[Block], *, seed: int = 0, device: torch.device | str | None = None) -> nn.Sequential:
    """Return ``blocks`` in sequence, under their names.

    A block draws its weights from the seed :func:`block_seed`, so they do not depend on the other blocks that are
    built or on the device: they are drawn on the CPU. The global generator of torch is left
    as it was.

    Args:
        blocks: All blocks of a network or of a stage.
        seed: Seed of the network.
        device: Device of the weights; None: torch's default device. On ``"meta"`` there are shapes and no weights.
    """
    place = torch.get_default_device() if device is None else torch.device(device)
    return nn.Sequential(OrderedDict((block.name, _built(block, seed, place)) for block in blocks))


def block_seed(seed: int, name: str) -> int:
    """Return the seed of the block ``name`` in a network with ``seed``: 63 bits of their SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def _built(block: Block, seed: int, place: torch.device) -> nn.Module:
    with torch.device("meta" if place.type == "meta" else "cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(block_seed(seed, block.name))
        return block.make().to(place)
