"""Blocks: the named pieces that a network is a sequence of, each built by itself."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Image = tuple[int, int]
"""Channels, and pixels of a side."""

SMALL_BELOW = 64
"""Images with shorter sides get the small form of a network: nearly all of its layers, without the early shrinking."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a network that is never cut.

    Args:
        name: Of its own in the network; the names of its parameters begin with it, and its seed comes from it.
        make: Builds it, drawing its weights from torch's global generator. It holds parameters, takes what the block
            before it returns and must not change that in place: what a stage was sent is still needed there.
    """

    name: str
    make: Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a network is, before anything of it is built.

    Args:
        blocks: In the order in which they run.
        sample: Shape of one sample that goes in.
        dtype: Of its values.
    """

    blocks: tuple[Block, ...]
    sample: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def build(blocks: Sequence[Block], *, seed: int = 0, device: torch.device | str | None = None) -> nn.Sequential:
    """Return ``blocks`` one behind another, under their names.

    A block draws its weights from the seed :func:`block_seed`, so it has the same ones whichever other blocks are
    built beside it, and whichever device it goes to: they are drawn on the CPU. The global generator of torch is left
    as it was.

    Args:
        blocks: All of a network's, or a stage's.
        seed: Of the network.
        device: Where the weights go; None: torch's default device. On ``"meta"`` there are shapes and no weights.
    """
    place = torch.get_default_device() if device is None else torch.device(device)
    return nn.Sequential(OrderedDict((block.name, _built(block, seed, place)) for block in blocks))


def block_seed(seed: int, name: str) -> int:
    """Return the seed of the block ``name`` in a network of ``seed``: 63 bits of their SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def _built(block: Block, seed: int, place: torch.device) -> nn.Module:
    with torch.device("meta" if place.type == "meta" else "cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(block_seed(seed, block.name))
        return block.make().to(place)
