"""Dissemination: every process hears from every other, through its peers, in ``ceil(log2(n))`` rounds.

In round ``k`` a process sends what it has heard so far to the process ``2**k`` places after it, and hears from the one
``2**k`` places before it. A process may hear of another twice, so only idempotent operations, such as a maximum, can be
carried out on the way. A process that has completed the last round knows that every other has begun the first.
"""

from __future__ import annotations

from collections.abc import Iterator


def dissemination_rounds(place: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield for each round the place to send to and the place to receive from, of ``count`` places."""
    distance = 1
    while distance < count:
        yield (place + distance) % count, (place - distance) % count
        distance *= 2


def tree_neighbors(place: int, count: int) -> tuple[int | None, list[int]]:
    """Return the parent (None at the root, place 0) and the children of a place in a binomial tree of ``count`` places.

    A reduction and a broadcast through the tree take ``2 * ceil(log2(n))`` hops instead of half as many, but only
    ``2 * (n - 1)`` messages instead of ``n * log2(n)``.
    """
    children, distance = [], 1
    while distance < count and not place & distance:
        if place + distance < count:
            children.append(place + distance)
        distance *= 2
    return (None if place == 0 else place - distance), children
