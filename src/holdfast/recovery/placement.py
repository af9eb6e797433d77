"""Placement of a split model: which worker holds which part, and how parts move when workers fail or join. Pure.

A *part* is a stage of a pipeline or a shard. A *chain* is a complete model replica: one worker for each part. Several
chains are replicas of each other, and the same part in another chain is its *twin*. A *mirror* is a hot standby: it
holds a part and applies the same steps to it, but computes nothing with it. A worker that has a part is its *holder*,
and any surviving holder can send it. A *backup* is a delta standby and not a holder: it has the part in a state some
steps old, and can restore it if no holder survives.

All workers know the placement and the members, so they derive the same new placement without a message. Parts are sent
first; the new placement takes effect once every worker knows that every worker has its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementShape:
    """The placement that a job aims for while it has enough workers.

    Args:
        parts: Parts of the model, ``>= 1``.
        chains: Maximum number of model replicas, ``>= 1``.
        copies: Number of workers that hold each part, ``>= 1``; all of them if the job has fewer.
        lazy: A worker that holds a part and computes nothing with it is a delta standby, not a hot standby.

    Raises:
        ConfigError: if a number is not allowed.
    """

    parts: int
    chains: int
    copies: int
    lazy: bool = False

    def __post_init__(self) -> None:
        """Check that each number is at least 1."""
        for name in ("parts", "chains", "copies"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a split model must be at least 1, got {getattr(self, name)}")

    def chains_of(self, workers: int) -> int:
        """Return how many model replicas ``workers`` can make; any number of workers makes at least one."""
        return max(1, min(self.chains, workers // self.parts))

    def copies_of(self, workers: int) -> int:
        """Return how many of ``workers`` hold each part."""
        return min(workers, max(self.copies, self.chains_of(workers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which worker holds which part.

    Args:
        chains: For each model replica, the worker that computes each part.
        mirrors: For each part, the hot standbys that hold it, ascending.
        backups: For each part, its delta standbys; those that have served longest come first.
    """

    chains: tuple[tuple[int, ...], ...]
    mirrors: tuple[tuple[int, ...], ...]
    backups: tuple[tuple[int, ...], ...]

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.mirrors)

    def holders(self, part: int) -> tuple[int, ...]:
        """Return the workers that hold ``part``, ascending."""
        return tuple(sorted({chain[part] for chain in self.chains} | set(self.mirrors[part])))

    def held_by(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return the parts that at least one of ``ranks`` holds."""
        return tuple(part for part in range(self.parts) if not set(ranks).isdisjoint(self.holders(part)))

    def computed_by(self, ranks: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Return the positions, (chain, part), at which one of ``ranks`` computes."""
        return tuple(
            (c, part) for c, chain in enumerate(self.chains) for part in range(self.parts) if chain[part] in ranks
        )

    def lost(self, members: Collection[int]) -> tuple[int, ...]:
        """Return the parts that no worker of ``members`` holds."""
        return tuple(part for part in range(self.parts) if set(members).isdisjoint(self.holders(part)))

    def to_json(self) -> list[list[list[int]]]:
        """Return the placement as plain JSON."""
        return [[list(ranks) for ranks in rows] for rows in (self.chains, self.mirrors, self.backups)]

    @staticmethod
    def from_json(value: Sequence[Sequence[Sequence[int]]]) -> Placement:
        """Return the placement that :meth:`to_json` encoded."""
        chains, mirrors, backups = (tuple(tuple(map(int, row)) for row in rows) for rows in value)
        return Placement(chains=chains, mirrors=mirrors, backups=backups)


@dataclass(frozen=True, slots=True)
class PartTransfer:
    """The transfer of a part from one worker to another."""

    part: int
    giver: int
    taker: int


@dataclass(frozen=True, slots=True)
class Restoration:
    """A part without a surviving holder, the worker that restores it, and the other workers that will hold it."""

    part: int
    restorer: int
    takers: tuple[int, ...]


def initial_placement(shape: PlacementShape, members: Sequence[int]) -> Placement:
    """Return the placement of a job that starts, or loads a checkpoint; a function of the members alone.

    Args:
        shape: The shape of the job.
        members: Ascending. If there are fewer members than parts, each computes neighbouring parts.
    """
    count, parts = shape.chains_of(len(members)), shape.parts
    if len(members) < parts:
        chains: list[list[int]] = [[members[part * len(members) // parts] for part in range(parts)]]
    else:
        chains = [list(members[c * parts : (c + 1) * parts]) for c in range(count)]
    return _with_standbys(shape, members, chains, [()] * parts)


def next_placement(shape: PlacementShape, placement: Placement, members: Sequence[int]) -> Placement:
    """Return the placement for the surviving ``members`` that moves little data.

    A failed worker is replaced, in this order of preference, by an idle holder of the part, by an idle worker, by a
    busy holder of the part, by the worker that computes the fewest parts. A worker that computes several parts gives
    some to idle workers. If the workers no longer suffice for all replicas, the replica that lost most workers is
    dissolved, and its survivors fill the gaps in other replicas. When they suffice again, a replica is added.

    Args:
        shape: The shape of the job.
        placement: The previous placement.
        members: The workers that are alive, ascending, including newcomers.
    """
    alive = set(members)
    kept = sorted(placement.chains, key=lambda chain: -sum(rank in alive for rank in chain))[
        : shape.chains_of(len(members))
    ]
    kept = [chain for chain in placement.chains if chain in kept]
    vacant = (-1,) * shape.parts
    chains = [[rank if rank in alive else -1 for rank in chain] for chain in kept]
    chains += [list(vacant) for _ in range(shape.chains_of(len(members)) - len(chains))]
    holders = [tuple(rank for rank in placement.holders(part) if rank in alive) for part in range(shape.parts)]
    backups = [tuple(rank for rank in ranks if rank in alive) for ranks in placement.backups]
    for chain, part in _empty(chains):
        chain[part] = _next_holder(chains, members, holders[part] or backups[part])
    _relieve(chains, members, holders)
    return _with_standbys(shape, members, chains, backups if shape.lazy else holders)


def restorations(before: Placement, after: Placement, members: Collection[int]) -> tuple[Restoration, ...]:
    """Return the worker that restores each part without a holder: its first delta standby, else its first new holder.

    Args:
        before: The previous placement, including failed workers.
        after: The new placement.
        members: The workers that are alive, ascending.
    """
    results = []
    for part in before.lost(members):
        restorer = next((rank for rank in before.backups[part] if rank in members), after.holders(part)[0])
        results.append(Restoration(part, restorer, tuple(rank for rank in after.holders(part) if rank != restorer)))
    return tuple(results)


def transfers(before: Placement, after: Placement, members: Collection[int]) -> tuple[PartTransfer, ...]:
    """Return the transfers that lead to ``after``, without parts that no survivor holds.

    Args:
        before: The previous placement, including failed workers.
        after: The new placement.
        members: The workers that are alive.
    """
    moves = []
    for part in range(before.parts):
        givers = [rank for rank in before.holders(part) if rank in members]
        takers = [rank for rank in after.holders(part) if rank not in givers]
        moves += [PartTransfer(part, givers[i % len(givers)], taker) for i, taker in enumerate(takers) if givers]
    return tuple(moves)


def _empty(chains: list[list[int]]) -> Iterator[tuple[list[int], int]]:
    for chain in chains:
        for part, rank in enumerate(chain):
            if rank < 0:
                yield chain, part


def _next_holder(chains: list[list[int]], members: Sequence[int], having: Collection[int]) -> int:
    """Return the worker that will compute, at a vacant position, the part that the workers of ``having`` have.

    With several replicas there is a worker for every position, so no worker takes the same part twice.
    """
    load = {rank: sum(chain.count(rank) for chain in chains) for rank in members}
    return min(members, key=lambda rank: (load[rank] > 0, rank not in having, load[rank], rank))


def _relieve(chains: list[list[int]], members: Sequence[int], holders: Sequence[Collection[int]]) -> None:
    """Move parts from workers that compute several to idle workers."""
    places = [rank for chain in chains for rank in chain]
    idle = [rank for rank in members if rank not in places]
    for chain in chains:
        for part, rank in enumerate(chain):
            if idle and places.count(rank) > 1:
                holding = [other for other in idle if other in holders[part]]
                chain[part] = min(holding or idle)
                idle.remove(chain[part])
                places.remove(rank)


def _with_standbys(
    shape: PlacementShape, members: Sequence[int], chains: list[list[int]], having: Sequence[Sequence[int]]
) -> Placement:
    """Return the placement with these replicas, and with hot or delta standbys up to the number of copies.

    A worker that has a copy keeps it first; the workers of ``having`` keep their order.
    """
    copies: list[tuple[int, ...]] = []
    held = {rank: sum(chain.count(rank) for chain in chains) for rank in members}
    for part in range(shape.parts):
        computing = {chain[part] for chain in chains}
        wanted = shape.copies_of(len(members)) - len(computing)
        candidates = [rank for rank in members if rank not in computing]
        candidates.sort(
            key=lambda rank: (rank not in having[part], held[rank], (rank - min(computing)) % (max(members) + 1))
        )
        chosen = candidates[: max(0, wanted)]
        for rank in chosen:
            held[rank] += 1
        kept = [rank for rank in having[part] if rank in chosen]
        copies.append((*kept, *(rank for rank in chosen if rank not in kept)))
    none: tuple[tuple[int, ...], ...] = ((),) * shape.parts
    mirrors = none if shape.lazy else tuple(tuple(sorted(ranks)) for ranks in copies)
    return Placement(chains=tuple(map(tuple, chains)), mirrors=mirrors, backups=tuple(copies) if shape.lazy else none)
