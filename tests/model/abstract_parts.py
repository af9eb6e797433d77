"""A model that is split over the workers, for the abstract engine: who holds which part, and what is exchanged in a step.

With ``World(split=...)`` a step has no sums of the world. While it is computed there are exchanges, among some workers each:

- a stage hands over to the next one of its chain, and gradients come back. Whoever receives waits until the other has
  sent; whoever sends waits for nobody, and may be several ahead;
- the workers of a chain gather what each of them has of the parts, as shards do;
- the gradients of a part are summed among all its holders, mirrors too. Like gathering, this is symmetric among these alone.

All enter them in one order. An exchange fails like a sum: once a member is dead, or the communicator revoked. Who waits in
one for the living is not sure to see a death elsewhere, before somebody revokes.

What is one move here although it is several in life: *sending is no move*, because that it was done early only allows others
more; whoever fails there fails as well in what it waits for next.

The weights of a part are how many steps are in it; what was put in is in the log of all, and nobody may put in anything else.
Those of a part that was restored also say by whom: nobody may have it from somebody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.recovery.messages import Action
from holdfast.recovery.placement import (
    PartTransfer,
    Placement,
    PlacementShape,
    initial_placement,
    next_placement,
    restorations,
    transfers,
)
from model.abstract_members import Lapse
from model.abstract_memory import ranks

ABSENT = -3
"""Steps in the weights of a part that a worker does not have."""
RESTORED = 1 << 8
"""In the weights of a part, times one more than the rank of who restored it; more than the steps of any job."""
UNKNOWN = -1
"""Number of the homes of a worker that does not know who holds what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the model is split, and what is exchanged in a step.

    Args:
        shape: Of the homes.
        transfers: How often each stage hands over to the next in a step, and gets gradients back.
        gathers: How often the workers of a chain gather in a step.
    """

    shape: PlacementShape
    transfers: int = 1
    gathers: int = 0


# ---------------------------------------------------------------------------------------------
# Not orders of the protocol, but what a worker waits in while it carries one out


@dataclass(frozen=True, slots=True)
class Transfer(Action):
    """``giver`` hands over to ``taker``, who computes the next part of ``chain``, or the one before ``part``."""

    step: int
    number: int
    chain: int
    part: int
    giver: int
    taker: int


@dataclass(frozen=True, slots=True)
class Gather(Action):
    """The workers of ``chain`` gather what each has."""

    step: int
    number: int
    chain: int
    among: int


@dataclass(frozen=True, slots=True)
class SumPart(Action):
    """The gradients of ``part`` are summed."""

    step: int
    part: int
    among: int


@dataclass(frozen=True, slots=True)
class Giving(Action):
    """Parts are given, so that homes number ``after`` can come after homes number ``before``."""

    before: int
    after: int
    restores: bool


Exchange = Transfer | Gather | SumPart
EXCHANGES = (Transfer, Gather, SumPart)
"""What some workers do together while a step is computed."""


class Swap(NamedTuple):
    """An exchange that somebody can still complete.

    Args:
        order: Which one.
        what: What all must mean who take part: steps and settings in the weights, the group, the homes.
        entered: Who has entered.
        chains: Whose gradients were brought: a mask of chains.
    """

    order: Exchange
    what: tuple[int, ...]
    entered: int
    chains: int


def concerned(order: Exchange) -> int:
    """Return who takes part in ``order``."""
    match order:
        case Transfer(giver=giver, taker=taker):
            return 1 << giver | 1 << taker
        case Gather(among=among) | SumPart(among=among):
            return among


def needed_by(rank: int, order: Exchange) -> int:
    """Return who must have entered ``order`` before ``rank`` can complete it."""
    match order:
        case Transfer(giver=giver):
            return 1 << giver
        case _:
            return concerned(order)


# ---------------------------------------------------------------------------------------------
# All homes, each kept once


class Registry:
    """Homes by number, equal ones only once, and what follows from them.

    Args:
        split: How the model is split.
        lapses: What is done wrong.
    """

    def __init__(self, split: Split, lapses: Lapse) -> None:
        self._split = split
        self._lapses = lapses
        self._homes: list[Placement] = []
        self._number: dict[Placement, int] = {}
        self._exchanges: dict[tuple[int, int, int], tuple[Exchange, ...]] = {}

    @property
    def parts(self) -> int:
        """How many parts the model has."""
        return self._split.shape.parts

    def homes(self, number: int) -> Placement:
        """Return the homes of this number."""
        return self._homes[number]

    def first(self, members: int) -> int:
        """Return the homes among ``members`` when a checkpoint is loaded."""
        return self._number_of(initial_placement(self._split.shape, [*ranks(members)]))

    def after(self, number: int, members: int) -> int:
        """Return the homes among ``members`` that come after those of this number."""
        return self._number_of(next_placement(self._split.shape, self._homes[number], [*ranks(members)]))

    def gifts(self, giving: Giving, members: int) -> tuple[PartTransfer, ...]:
        """Return what is given; who restores a part gives it also to itself."""
        change = self._homes[giving.before], self._homes[giving.after], [*ranks(members)]
        found = [*transfers(*change)]
        for this in restorations(*change) if giving.restores else ():
            each = Lapse.EACH_RESTORES in self._lapses
            takers = self._homes[giving.after].holders(this.part)
            found += [PartTransfer(this.part, taker if each else this.restorer, taker) for taker in takers]
        return tuple(found)

    def held_by(self, number: int, rank: int) -> tuple[int, ...]:
        """Return the parts that ``rank`` holds."""
        return self._homes[number].held_by((rank,))

    def all_chains(self, number: int) -> int:
        """Return all chains, as a mask."""
        return (1 << len(self._homes[number].chains)) - 1

    def computing(self, number: int, part: int, rank: int = -1) -> int:
        """Return the chains, as a mask, in which ``rank`` computes ``part``; anybody with -1."""
        chains = self._homes[number].chains
        return sum(1 << c for c, chain in enumerate(chains) if rank in (-1, chain[part]))

    def is_lost(self, number: int, members: int) -> bool:
        """Return whether nobody among ``members`` holds some part."""
        return bool(self._homes[number].lost([*ranks(members)]))

    def exchanges(self, number: int, rank: int, step: int) -> tuple[Exchange, ...]:
        """Return the exchanges of a step that concern ``rank``, in their order."""
        key = (number, rank, step)
        if key not in self._exchanges:
            every = self._all_exchanges(self._homes[number], step)
            self._exchanges[key] = tuple(order for order in every if concerned(order) & 1 << rank)
        return self._exchanges[key]

    def _all_exchanges(self, homes: Placement, step: int) -> Iterator[Exchange]:
        stages = range(homes.parts - 1)
        for number in range(self._split.gathers):
            for c, chain in enumerate(homes.chains):
                yield Gather(step, number, c, _mask(chain))
        for forward in (True, False):
            for number in range(self._split.transfers):
                for c, chain in enumerate(homes.chains):
                    for part in stages if forward else reversed(stages):
                        giver, taker = (chain[part], chain[part + 1])[:: 1 if forward else -1]
                        if giver != taker:
                            yield Transfer(step, number, c, part + (not forward), giver, taker)
        if Lapse.SUMS_LATE in self._lapses:
            return
        for part in range(homes.parts):
            computing = _mask(chain[part] for chain in homes.chains)
            yield SumPart(step, part, computing if Lapse.MIRRORS_LATE in self._lapses else _mask(homes.holders(part)))

    def _number_of(self, homes: Placement) -> int:
        number = self._number.setdefault(homes, len(self._homes))
        if number == len(self._homes):
            self._homes.append(homes)
        return number


def _mask(members: Iterator[int] | tuple[int, ...]) -> int:
    return sum(1 << rank for rank in set(members))
