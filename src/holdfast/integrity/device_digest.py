"""The digest of tensors in the memory of a device, which never leave it: only eight bytes are copied to the host.

Bytes are read as little-endian 64-bit words, the last one padded with zeros. Each word is mixed with its position, and all
mixed words are added modulo 2**64::

    digest = sum over i of mix(word[i] + (i + 1) * STEP)

Integer addition is associative, so the digest does not depend on the order in which a device adds, and a CPU computes the
same. ``mix`` is a bijection (the finalizer of SplitMix64): a change of one word always changes the digest, and an exchange of
two words does almost certainly.

Source: G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

_WORD_BYTES = 8
_CHUNK = 1 << 22
"""Words that are mixed at a time, which bounds the memory of intermediate results to a few times 32 MiB."""


def _signed(value: int) -> int:
    """Return the signed 64-bit integer with these bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


STEP = _signed(0x9E3779B97F4A7C15)
_FACTORS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_SHIFTS = 30, 27, 31


def num_words(tensor: torch.Tensor) -> int:
    """Return the number of words of a tensor."""
    return -(-tensor.nbytes // _WORD_BYTES)


def mixed_sum(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the digest of a tensor, a 0-dimensional int64 on its device; the host waits for nothing.

    Args:
        tensor: Any tensor that is not sparse.
        first: Position of its first word, if it is part of a sequence; digests of parts add up to that of the sequence.
    """
    words = _words(tensor.detach())
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(_CHUNK):
        total = total + _mix(chunk, first).sum()
        first += len(chunk)
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the words of a tensor, copied only where the bytes of a word are not aligned."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    missing = -len(flat) % _WORD_BYTES
    if missing or flat.storage_offset() % _WORD_BYTES:
        flat = F.pad(flat, (0, missing)) if missing else flat.clone()
    return flat.view(torch.int64)


def _mix(words: torch.Tensor, first: int) -> torch.Tensor:
    places = torch.arange(first + 1, first + 1 + len(words), dtype=torch.int64, device=words.device)
    mixed = places.mul_(STEP).add_(words)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        mixed = _shifted(mixed, shift).mul_(factor)
    return _shifted(mixed, _SHIFTS[-1])


def _shifted(value: torch.Tensor, shift: int) -> torch.Tensor:
    """Return ``value ^ (value >>> shift)``; torch shifts in copies of the sign, which are masked out."""
    return value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))


def read(sums: Sequence[torch.Tensor]) -> list[int]:
    """Return digests as integers from 0 to 2**64 - 1: all on one device are copied at once, and the host waits once."""
    digests: dict[int, int] = {}
    for device in dict.fromkeys(total.device for total in sums):
        there = [(number, total) for number, total in enumerate(sums) if total.device == device]
        values = torch.stack([total for _, total in there]).tolist()
        digests.update({number: value % (1 << 64) for (number, _), value in zip(there, values, strict=True)})
    return [digests[number] for number in range(len(sums))]
