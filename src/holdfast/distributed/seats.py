"""Values for the empty seats of a gather: which survivor stands in for each failed rank.

A gather by a script that was written for a fixed number of ranks has one place for each rank of the start. With
``--empty-seats fill`` or ``survivors``, the place of a failed rank gets the value of the lowest survivor. Only metrics
may be filled: parts of one state cannot be replaced by another part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.errors import RanksLost


class SeatFiller:
    """Chooses the survivors that stand in for failed ranks, in all gathers of one group.

    torch gathers objects in two gathers, of their sizes and of their bytes. If a rank fails between the two, the bytes
    in its seat are read with the size that the first one had there. Pickled objects may be followed by other bytes, but
    must not be cut, so an object of at most that size stands in.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def sources(
        self, dead: Sequence[int], alive: Sequence[int], what: str, *, bytes_of_objects: bool
    ) -> dict[int, int]:
        """Return the rank that stands in for each failed rank; the same on all survivors.

        Raises:
            RanksLost: if each survivor's object is larger than the size that was gathered for a failed rank.
        """
        if not bytes_of_objects:
            return dict.fromkeys(dead, alive[0])
        candidates = {rank: next((r for r in alive if self._sizes[r] <= self._sizes[rank]), None) for rank in dead}
        sources = {rank: source for rank, source in candidates.items() if source is not None}
        if len(sources) < len(dead):
            lost = ", ".join(str(rank) for rank in dead if rank not in sources)
            raise RanksLost(
                f"{what} did not complete: the object of failed rank {lost} is lost, and that of each survivor is larger",
                tuple(dead),
                tuple(alive),
            )
        return sources

    def note_sizes(self, ranks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Note the gathered sizes of the objects, whose bytes are gathered next."""
        self._sizes = {rank: int(row[0]) for rank, row in zip(ranks, rows, strict=True)}
