"""How a vector is divided among processes that exchange it, each of which finishes the sum of its part. Pure.

A process sends its rows, except of its own part, and the result of its part. With as many rows each, even parts make
all send alike. After a loss some hold more rows than others, and with even parts one that sends two rows would send
1.5 times as much as before. So such a process gets a larger part, and sends the result of each piece of it to one other
process only, which *relays* it to the rest. With ``N`` workers before a loss, each then sends at most ``1 + 1/N`` times
what a ring all-reduce sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

BALANCED_BYTES = 2 << 20
"""Shorter vectors are divided evenly: there a relay would cost more time than bytes."""

_WORTHWHILE = 0.95
"""Largest ratio of the bytes of the busiest process with balanced and with even parts, for a relay to be made."""


class RelayedPiece(NamedTuple):
    """A piece of the result that process ``source`` sends to ``by`` alone, which sends it to the others."""

    source: int
    by: int
    piece: slice


class Division(NamedTuple):
    """The part of each process, ascending; parts may be empty. The results of some are relayed."""

    parts: list[slice]
    relays: list[RelayedPiece]


def divide(length: int, line: int, loads: Sequence[float], *, balanced: bool = True) -> Division:
    """Return how to divide a vector so that no process sends much more than another.

    Args:
        length: Number of elements; parts begin at multiples of ``line``.
        line: Number of elements.
        loads: What each process sends of an element before the reduction, as a multiple of the element of a result.
        balanced: Whether parts may be uneven.
    """
    shares = _balanced_shares([max(1.0, load) for load in loads]) if balanced else None
    if shares is None:
        return Division(_even(0, length, len(loads), line), [])
    cuts = [round(sum(shares[:i]) * length / line) * line for i in range(len(loads))]
    cuts = [*(min(cut, length) for cut in cuts), length]
    parts = [slice(start, stop) for start, stop in pairwise(cuts)]
    lights = _lights(loads)
    relays = [
        RelayedPiece(source, by, piece)
        for source in range(len(loads))
        if source not in lights and len(loads) > 2
        for by, piece in zip(lights, _even(parts[source].start, parts[source].stop, len(lights), line), strict=True)
        if piece.start < piece.stop
    ]
    return Division(parts, relays)


def _lights(loads: Sequence[float]) -> list[int]:
    """Return the processes with the least to send, which relay results of the others."""
    least = max(1.0, min(loads))
    return [i for i, load in enumerate(loads) if load <= least]


def _even(start: int, stop: int, count: int, line: int) -> list[slice]:
    """Return even parts of a range; the last ones may be short, or empty."""
    size = -(-(stop - start) // (count * line)) * line
    return [slice(min(start + i * size, stop), min(start + (i + 1) * size, stop)) for i in range(count)]


def _balanced_shares(loads: Sequence[float]) -> list[float] | None:
    """Return the share of each process with which the busiest sends least; None if even shares are about as good."""
    count, least = len(loads), min(loads)
    if max(loads) == least:
        return None
    if count == 2:  # there is no third process that a result could be relayed to
        return [(load - 1) / (sum(loads) - 2) for load in loads]
    if least >= count - 1:
        return None
    low, high = least, max(loads) + count
    for _ in range(50):
        level = (low + high) / 2
        low, high = (level, high) if sum(_shares_at(level, loads)) < 1 else (low, level)
    if high > _WORTHWHILE * (max(loads) + 1) * (count - 1) / count:
        return None
    shares = _shares_at(high, loads)
    return [share / sum(shares) for share in shares]


def _shares_at(level: float, loads: Sequence[float]) -> list[float]:
    """Return the share with which each process sends ``level`` vectors: its rows, its results, and what it relays.

    One with a larger load sends ``load * (1 - share) + share``, the others ``load * (1 - share) + share * (count - 1)``
    and their part of the relays.
    """
    count, least = len(loads), min(loads)
    heavy = [max(0.0, (load - level) / (load - 1)) if load > least else 0.0 for load in loads]
    relayed = sum(heavy) * (count - 2) / sum(load == least for load in loads)
    light = max(0.0, (level - least - relayed) / (count - 1 - least))
    return [light if load == least else share for load, share in zip(loads, heavy, strict=True)]
