"""The certificate of a training: a link for each committed step. Pure, so that anybody can make it again.

A link is the SHA-256 of the link before and of what the step was: which samples, which metrics, and a part of the state that it
began with. Who alters, drops or repeats anything breaks all links that follow; and a training that is done again from the same
state has the same links. ``docs/explanation/exactness.md`` says what they prove and what they do not.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence

_LETTERS = 32
"""Hexadecimal digits of a link, and of a digest of samples or figures."""

WHOLE_EVERY = 256
"""In a step that this divides, all of the state is hashed."""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_LETTERS]


NOTHING = -(1 << 63)
"""What who does not hold a part says of it in the closing sum: less than what anybody else does."""

GENESIS = _sha256(b"holdfast certificate 1")
"""Stands for the link before the first."""


def digest_of_ids(slices: Iterable[tuple[int, bytes]]) -> str:
    """Return the digest of the samples of a step, by slice that is committed, ascending: ids in their order, as little-endian int64."""
    return _sha256(b"".join(struct.pack("<qq", number, len(ids) // 8) + ids for number, ids in slices))


def digest_of_figures(values: Sequence[float]) -> str:
    """Return the digest of the metrics of a step, the loss first: half of it is of the loss, which every worker knows, half of the others.

    Every NaN counts as the same.
    """
    return "".join(_sha256(_exact(half))[: _LETTERS // 2] for half in (values[:1], values[1:]))


def _exact(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *(math.nan if math.isnan(value) else value for value in values))


def fits(figures: str, metrics: Mapping[str, float]) -> bool:
    """Return whether a digest is that of named metrics; the loss alone will do where a worker knew no other."""
    known = digest_of_figures(in_order(metrics))
    half = _LETTERS // 2
    return figures == known or (set(metrics) == {"loss"} and figures[:half] == known[:half])


def in_order(metrics: Mapping[str, float]) -> list[float]:
    """Return the values of named metrics as :func:`digest_of_figures` takes them."""
    loss = [metrics["loss"]] if "loss" in metrics else []
    return [*loss, *(metrics[name] for name in sorted(metrics) if name != "loss")]


def digest_of_tensors(tensors: Mapping[str, str]) -> str:
    """Return the digest of a state as a whole, from those of its tensors by path."""
    return _sha256("".join(f"{path}\n{digest}\n" for path, digest in tensors.items()).encode())[:16]


def number_of_tensors(tensors: Mapping[str, str]) -> int:
    """Return :func:`digest_of_tensors` as workers say it in a closing sum: a number from 0 to 2**62 - 1."""
    return int(digest_of_tensors(tensors), 16) >> 2


def said_of_part(numbers: Collection[int]) -> tuple[int, int]:
    """Return what the closing sum says of a part of a split model: two maxima, which show if its holders differ.

    The numbers are its digests, one of each holder, from 0 to 2**62 - 1; there are none at a worker that holds nothing of it.
    """
    if not numbers:
        return NOTHING, NOTHING
    return max(numbers), max(~number for number in numbers)


def digest_of_parts(said: Sequence[int]) -> int:
    """Return the digest of the state of a split model, from 0 to 2**62 - 1, of what :func:`said_of_part` says of each part."""
    return int(_sha256(struct.pack(f"<{len(said)}q", *said))[:16], 16) >> 2


def link_of(before: str, *, step: int, epoch: int, samples: int, ids: str, figures: str, state: str) -> str:
    """Return the link of a step, which is made of the one before, or :data:`GENESIS`, and of what the step was.

    That is: its number, its epoch and how many samples it has; digests of their ids, of the metrics, and of a part of the state before.
    """
    return _sha256("\n".join([before, str(step), str(epoch), str(samples), ids, figures, state]).encode())
