"""Who holds which part of a split model, and who takes over when somebody dies or comes. Pure.

A *part* is a stage of a pipeline or a shard. A *chain* is one worker for each part: a whole model. Several chains are
replicas of each other, and the same part in another chain is its *twin*. A *mirror* holds a part too, and applies the
same steps to it, but computes nothing with it. Whoever has a part is its *holder*, and any living holder can give it.
A *backup* is no holder: it has a part as it was some steps before, and can restore it where nobody holds it any more.

All workers know the homes and the members, so they come to the same new homes without a message. Parts are given
first, and the new homes count when everybody knows that everybody has its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the homes of a job look like as long as there are workers enough.

    Args:
        parts: Parts of the model, ``>= 1``.
        chains: The most chains, ``>= 1``.
        copies: How many workers are to hold each part, ``>= 1``; as many as there are if there are fewer.
        lazy: Who holds a part and computes nothing with it is a backup, not a mirror.

    Raises:
        ConfigError: if a number is not allowed.
    """

    parts: int
    chains: int
    copies: int
    lazy: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("parts", "chains", "copies"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a split model must be at least 1, got {getattr(self, name)}")

    def chains_of(self, workers: int) -> int:
        """Return how many chains ``workers`` can make; one is made by however few there are."""
        return max(1, min(self.chains, workers // self.parts))

    def copies_of(self, workers: int) -> int:
        """Return how many of ``workers`` hold each part."""
        return min(workers, max(self.copies, self.chains_of(workers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Who holds which part.

    Args:
        chains: Of each chain, the worker that computes each part.
        mirrors: Of each part, the other workers that hold it, ascending.
        backups: Of each part, the workers that have it as it was; those first who have been for longer.
    """

    chains: tuple[tuple[int, ...], ...]
    mirrors: tuple[tuple[int, ...], ...]
    backups: tuple[tuple[int, ...], ...]

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return len(self.mirrors)

    def holders(self, part: int) -> tuple[int, ...]:
        """Return who holds ``part``, ascending."""
        return tuple(sorted({chain[part] for chain in self.chains} | set(self.mirrors[part])))

    def held_by(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return the parts that one of ``ranks`` holds."""
        return tuple(part for part in range(self.parts) if not set(ranks).isdisjoint(self.holders(part)))

    def computed_by(self, ranks: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Return the places, (chain, part), in which one of ``ranks`` computes."""
        return tuple(
            (c, part) for c, chain in enumerate(self.chains) for part in range(self.parts) if chain[part] in ranks
        )

    def lost(self, members: Collection[int]) -> tuple[int, ...]:
        """Return the parts that nobody among ``members`` holds."""
        return tuple(part for part in range(self.parts) if set(members).isdisjoint(self.holders(part)))

    def to_json(self) -> list[list[list[int]]]:
        """Return the homes as plain JSON."""
        return [[list(ranks) for ranks in rows] for rows in (self.chains, self.mirrors, self.backups)]

    @staticmethod
    def from_json(value: Sequence[Sequence[Sequence[int]]]) -> Homes:
        """Return the homes that :meth:`to_json` made."""
        chains, mirrors, backups = (tuple(tuple(map(int, row)) for row in rows) for rows in value)
        return Homes(chains=chains, mirrors=mirrors, backups=backups)


@dataclass(frozen=True, slots=True)
class Gift:
    """A part that one worker gives to another."""

    part: int
    giver: int
    taker: int


@dataclass(frozen=True, slots=True)
class Restoration:
    """A part that nobody holds any more, who restores it, and the others who are then to hold it."""

    part: int
    restorer: int
    takers: tuple[int, ...]


def first_homes(shape: Shape, members: Sequence[int]) -> Homes:
    """Return the homes of a job that begins, or loads what was saved; a function of the members alone.

    Args:
        shape: Of the job.
        members: Ascending. With fewer than there are parts, each computes neighbouring ones.
    """
    count, parts = shape.chains_of(len(members)), shape.parts
    if len(members) < parts:
        chains: list[list[int]] = [[members[part * len(members) // parts] for part in range(parts)]]
    else:
        chains = [list(members[c * parts : (c + 1) * parts]) for c in range(count)]
    return _with_copies(shape, members, chains, [()] * parts)


def new_homes(shape: Shape, homes: Homes, members: Sequence[int]) -> Homes:
    """Return who is to hold what now that the living are ``members``, so that little has to be given.

    Who is dead is replaced, in this order, by who has the part and computes nothing, by who computes nothing, by who
    has the part, by who computes the fewest. Who computes several parts gives some to those who compute nothing. Where
    workers are too few for another chain, the chain that lost most is given up: those who are left of it take the places
    in the others. Where there are enough again, one is added.

    Args:
        shape: Of the job.
        homes: As they were.
        members: The living, ascending; newcomers among them.
    """
    alive = set(members)
    kept = sorted(homes.chains, key=lambda chain: -sum(rank in alive for rank in chain))[
        : shape.chains_of(len(members))
    ]
    kept = [chain for chain in homes.chains if chain in kept]
    nobody = (-1,) * shape.parts
    chains = [[rank if rank in alive else -1 for rank in chain] for chain in kept]
    chains += [list(nobody) for _ in range(shape.chains_of(len(members)) - len(chains))]
    holders = [tuple(rank for rank in homes.holders(part) if rank in alive) for part in range(shape.parts)]
    backups = [tuple(rank for rank in ranks if rank in alive) for ranks in homes.backups]
    for chain, part in _empty(chains):
        chain[part] = _who_takes(chains, members, holders[part] or backups[part])
    _relieve(chains, members, holders)
    return _with_copies(shape, members, chains, backups if shape.lazy else holders)


def restorations(before: Homes, after: Homes, members: Collection[int]) -> tuple[Restoration, ...]:
    """Return who restores the parts that nobody alive holds: their first backup, else the first who is to hold them.

    Args:
        before: Who holds what, the dead too.
        after: Who is to hold what.
        members: The living, ascending.
    """
    found = []
    for part in before.lost(members):
        restorer = next((rank for rank in before.backups[part] if rank in members), after.holders(part)[0])
        found.append(Restoration(part, restorer, tuple(rank for rank in after.holders(part) if rank != restorer)))
    return tuple(found)


def gifts(before: Homes, after: Homes, members: Collection[int]) -> tuple[Gift, ...]:
    """Return what must be given so that ``after`` is true, and by whom; parts that nobody alive holds are not in it.

    Args:
        before: Who holds what, the dead too.
        after: Who is to hold what.
        members: The living.
    """
    found = []
    for part in range(before.parts):
        givers = [rank for rank in before.holders(part) if rank in members]
        takers = [rank for rank in after.holders(part) if rank not in givers]
        found += [Gift(part, givers[i % len(givers)], taker) for i, taker in enumerate(takers) if givers]
    return tuple(found)


def _empty(chains: list[list[int]]) -> Iterator[tuple[list[int], int]]:
    for chain in chains:
        for part, rank in enumerate(chain):
            if rank < 0:
                yield chain, part


def _who_takes(chains: list[list[int]], members: Sequence[int], having: Collection[int]) -> int:
    """Return who is to compute, in an empty place, the part that those of ``having`` have.

    With several chains there is a worker for every place, so nobody becomes a twin of itself.
    """
    load = {rank: sum(chain.count(rank) for chain in chains) for rank in members}
    return min(members, key=lambda rank: (load[rank] > 0, rank not in having, load[rank], rank))


def _relieve(chains: list[list[int]], members: Sequence[int], holders: Sequence[Collection[int]]) -> None:
    """Let who computes nothing take over from who computes several parts."""
    places = [rank for chain in chains for rank in chain]
    idle = [rank for rank in members if rank not in places]
    for chain in chains:
        for part, rank in enumerate(chain):
            if idle and places.count(rank) > 1:
                holding = [other for other in idle if other in holders[part]]
                chain[part] = min(holding or idle)
                idle.remove(chain[part])
                places.remove(rank)


def _with_copies(
    shape: Shape, members: Sequence[int], chains: list[list[int]], having: Sequence[Sequence[int]]
) -> Homes:
    """Return the homes with these chains, and with mirrors or backups up to the number of copies.

    Who has a copy keeps it first; those of ``having`` stay in the order in which they stand there.
    """
    copies: list[tuple[int, ...]] = []
    held = {rank: sum(chain.count(rank) for chain in chains) for rank in members}
    for part in range(shape.parts):
        computing = {chain[part] for chain in chains}
        wanted = shape.copies_of(len(members)) - len(computing)
        others = [rank for rank in members if rank not in computing]
        others.sort(
            key=lambda rank: (rank not in having[part], held[rank], (rank - min(computing)) % (max(members) + 1))
        )
        chosen = others[: max(0, wanted)]
        for rank in chosen:
            held[rank] += 1
        kept = [rank for rank in having[part] if rank in chosen]
        copies.append((*kept, *(rank for rank in chosen if rank not in kept)))
    nobody: tuple[tuple[int, ...], ...] = ((),) * shape.parts
    mirrors = nobody if shape.lazy else tuple(tuple(sorted(ranks)) for ranks in copies)
    return Homes(chains=tuple(map(tuple, chains)), mirrors=mirrors, backups=tuple(copies) if shape.lazy else nobody)
