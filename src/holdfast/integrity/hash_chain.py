"""The certificate of a training run: a hash chain with one link per committed step. Pure functions, so that anyone can recompute it.

A link is the SHA-256 of the previous link and of the step's content: its samples, its metrics, and a part of the state that it
started from. Altering, dropping or repeating anything breaks all later links, and training again from the same
state gives the same links. ``docs/explanation/exactness.md`` says what they prove and what they do not.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence

_LETTERS = 32
"""Number of hexadecimal digits of a link, and of a digest of samples or metrics."""

WHOLE_EVERY = 256
"""The whole state is hashed in steps divisible by this number."""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_LETTERS]


GENESIS = _sha256(b"holdfast certificate 1")
"""The link before the first step."""


def digest_of_ids(slices: Iterable[tuple[int, bytes]]) -> str:
    """Return the digest of a step's samples, by committed slice, ascending: sample ids in order, as little-endian int64."""
    return _sha256(b"".join(struct.pack("<qq", number, len(ids) // 8) + ids for number, ids in slices))


def digest_of_figures(values: Sequence[float]) -> str:
    """Return the digest of a step's metrics, loss first: one half covers the loss, which every worker knows, the other half the rest.

    Every NaN counts as the same.
    """
    return "".join(_sha256(_exact(half))[: _LETTERS // 2] for half in (values[:1], values[1:]))


def _exact(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *(math.nan if math.isnan(value) else value for value in values))


def fits(figures: str, metrics: Mapping[str, float]) -> bool:
    """Return whether a digest matches named metrics; the loss alone is enough if a worker knew no other."""
    digest = digest_of_figures(in_order(metrics))
    half = _LETTERS // 2
    return figures == digest or (set(metrics) == {"loss"} and figures[:half] == digest[:half])


def in_order(metrics: Mapping[str, float]) -> list[float]:
    """Return the values of named metrics in the order that :func:`digest_of_figures` expects."""
    loss = [metrics["loss"]] if "loss" in metrics else []
    return [*loss, *(metrics[name] for name in sorted(metrics) if name != "loss")]


def digest_of_tensors(tensors: Mapping[str, str]) -> str:
    """Return the digest of a whole state from the digests of its tensors by path."""
    return _sha256("".join(f"{path}\n{digest}\n" for path, digest in tensors.items()).encode())[:16]


def number_of_tensors(tensors: Mapping[str, str]) -> int:
    """Return :func:`digest_of_tensors` as an integer for the commit vote, from 0 to 2**62 - 1."""
    return int(digest_of_tensors(tensors), 16) >> 2


def digest_of_parts(parts: Sequence[int]) -> int:
    """Return the digest of the state of a pipeline or sharded model, from 0 to 2**62 - 1, from the two votes on each part.

    They are the integers of a :class:`~holdfast.recovery.vote.MinMax`.
    """
    return int(_sha256(struct.pack(f"<{len(parts)}q", *parts))[:16], 16) >> 2


def link_of(before: str, *, step: int, epoch: int, samples: int, ids: str, figures: str, state: str) -> str:
    """Return the link of a step, computed from the previous link, or :data:`GENESIS`, and from the step's content.

    The content: step number, epoch and number of samples; digests of the sample ids, of the metrics, and of a part of the state before it.
    """
    return _sha256("\n".join([before, str(step), str(epoch), str(samples), ids, figures, state]).encode())
