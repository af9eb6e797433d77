"""The maximum of a few integers over all members of a generation, made of messages between pairs of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from holdfast.comm.dissemination import dissemination_rounds, tree_neighbors
from holdfast.errors import InternalError

_MANY = 8
"""Up to this many members a tree saves too few messages to make up for its hops."""


class Exchange(Protocol):
    """Sends a message to each of some ranks, and returns the next one from each of some ranks."""

    def __call__(self, send: Sequence[tuple[int, bytes]], sources: Sequence[int]) -> list[bytes]:
        """Return the messages in the order of ``sources``."""


def maximum_over(
    exchange: Exchange, members: Sequence[int], me: int, values: Sequence[int], *, few_messages: bool
) -> list[int]:
    """Return the maximum of each 64-bit integer; no member has it without the integers of all.

    Args:
        exchange: Moves the messages.
        members: All ranks, ascending.
        me: One of them, that of this process.
        values: Its integers.
        few_messages: Many members use a tree. It is faster where they share few cores, and slower where each has its
            own. The same for all members.
    """
    largest = np.array(values, dtype=np.int64)
    place, count = members.index(me), len(members)

    def hear(messages: Sequence[bytes]) -> None:
        for message in messages:
            if len(message) != largest.nbytes:
                raise InternalError(f"a member takes the maximum of {len(message)} bytes, this one of {largest.nbytes}")
            np.maximum(largest, np.frombuffer(message, dtype=np.int64), out=largest)

    if few_messages and count > _MANY:
        parent, children = tree_neighbors(place, count)
        below = [members[child] for child in children]
        hear(exchange([], below))
        if parent is not None:
            hear(exchange([(members[parent], largest.tobytes())], [members[parent]]))
        exchange([(rank, largest.tobytes()) for rank in below], [])
    else:
        for to, source in dissemination_rounds(place, count):
            hear(exchange([(members[to], largest.tobytes())], [members[source]]))
    result: list[int] = largest.tolist()
    return result
