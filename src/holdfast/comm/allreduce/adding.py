"""Adding in an order that belongs to the job.

Floating-point addition is not associative. So that a sum has the same bits whoever holds which slice, its terms are
added in the order of the slices, never in the order of ranks or of arrival.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.comm.allreduce.checksums import Altered, Vector, nobody_listens

Terms = Sequence[tuple[int, torch.Tensor]]
"""Each with its slice, ascending by slice."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Turns sums into means, while they are in the cache: divides the first ``numbers`` of the vector; the rest stays a sum."""

    divisor: float
    numbers: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """A part of a vector: its terms, where their sum goes, and where that begins in the vector.

    Where there are checksums, ``checked`` has the terms with them, and ``sealed`` the sum if it is to have one.
    """

    terms: Terms
    out: torch.Tensor
    start: int
    checked: list[tuple[int, Vector]]
    sealed: Vector | None


class Addition:
    """Terms, and where their sum goes, cut into tiles once and added many times.

    Args:
        terms: ``(slice, vector)``, ascending by slice; all of the length of ``out``. Those with checksums are looked at.
        out: Where the sum goes, and its checksums if it is to have some; in tiles of the size of those of the terms.
        start: Where ``out`` begins in the whole vector.
        order: ``"fold"``, ``"tree"``, or ``"wide"`` (``fold`` that adds numbers of 16 bits in 32).
    """

    def __init__(self, terms: Sequence[tuple[int, Vector]], out: Vector, start: int, order: str) -> None:
        self._add = ORDERS[order]
        cut = [(number, term.split()) for number, term in terms]
        self._tiles = [
            _Tile(
                [(number, tiles[i].numbers) for number, tiles in cut],
                tile.numbers,
                start + i * out.tile,
                [(number, tiles[i]) for number, tiles in cut if tiles[i].checksums is not None],
                tile if tile.checksums is not None else None,
            )
            for i, tile in enumerate(out.split())
        ]

    @torch.no_grad()
    def __call__(self, mean: Mean | None = None, altered: Altered = nobody_listens) -> None:
        """Add, and divide what ``mean`` says; call ``altered`` for each tile of a term that is not what was given."""
        for tile in self._tiles:
            for number, term in tile.checked:
                if not term.is_intact():
                    altered(number)
            self._add(tile.terms, tile.out)
            if mean is not None and mean.numbers > tile.start:
                tile.out[: mean.numbers - tile.start].div_(mean.divisor)
            if tile.sealed is not None:
                tile.sealed.seal()


def fold(terms: Terms, out: torch.Tensor) -> None:
    """Add ``((0+1)+2)+3`` into ``out``, the order of plain accumulation.

    The first term is not added to zero: 0.0 + -0.0 would lose a sign. For the same reason a sum of nothing is -0.0.
    """
    match len(terms):
        case 0:
            out.fill_(-0.0)
        case 1:
            out.copy_(terms[0][1])
        case _:
            torch.add(terms[0][1], terms[1][1], out=out)
            for _, term in terms[2:]:
                out.add_(term)


def tree(terms: Terms, out: torch.Tensor) -> None:
    """Add in a balanced binary tree over slice numbers: ``(0+1)+(2+3)``."""
    level = list(terms)
    while len(level) > 1:
        paired: list[tuple[int, torch.Tensor]] = []
        for number, term in level:
            if paired and paired[-1][0] == number // 2:
                paired[-1] = (number // 2, paired[-1][1] + term)
            else:
                paired.append((number // 2, term))
        level = paired
    fold(level, out)


def groups(holders: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return which slices a holder of several may add before anybody else's, by :func:`tree`, without changing a bit.

    They are the largest subtrees whose slices are all in one hand. In the tree over everything, the sum of such a group
    takes the place of any one of its slices, because all of them meet before any other joins them. Slices that do not take
    part, and so are not in ``holders``, leave no gap: what is beside them moves up. All are in the order of the slices.
    """
    level: list[tuple[int, list[tuple[int, ...]]]] = [(number, [(number,)]) for number in sorted(holders)]
    while len(level) > 1:
        paired: list[tuple[int, list[tuple[int, ...]]]] = []
        for number, found in level:
            if paired and paired[-1][0] == number // 2:
                paired[-1] = (number // 2, _join(paired[-1][1], found, holders))
            else:
                paired.append((number // 2, found))
        level = paired
    return level[0][1] if level else []


def _join(
    left: list[tuple[int, ...]], right: list[tuple[int, ...]], holders: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Return the groups below a node; a side that is a single group is whole."""
    if len(left) == len(right) == 1 and holders[left[0][0]] == holders[right[0][0]]:
        return [left[0] + right[0]]
    return left + right


def addable(holders: Mapping[int, int], order: str) -> list[tuple[int, ...]]:
    """Return which slices their holder may add before they meet the others', without changing a bit of the sum.

    In the order ``tree`` these are all aligned groups, in ``fold`` the slices that come before anybody else's, otherwise
    none. A slice that is added to no other is a group by itself. All are in the order of the slices, and the sum of a
    group stands where its first slice would.
    """
    if order == "tree":
        return groups(holders)
    numbers = sorted(holders)
    ahead = list(itertools.takewhile(lambda n: holders[n] == holders[numbers[0]], numbers)) if order == "fold" else []
    return [tuple(ahead)] * bool(ahead) + [(n,) for n in numbers[len(ahead) :]]


def wide(terms: Terms, out: torch.Tensor) -> None:
    """Add like :func:`fold`; numbers of 16 bits in float32, rounded once at the end."""
    if out.dtype not in (torch.float16, torch.bfloat16) or len(terms) < 2:
        fold(terms, out)
        return
    total = terms[0][1].float()
    for _, term in terms[1:]:
        total.add_(term)
    out.copy_(total)


def _by(combine: Callable[..., torch.Tensor]) -> Callable[[Terms, torch.Tensor], None]:
    """Return what combines terms one after another, by something else than addition."""

    def combine_all(terms: Terms, out: torch.Tensor) -> None:
        if len(terms) < 2:
            fold(terms, out)
            return
        combine(terms[0][1], terms[1][1], out=out)
        for _, term in terms[2:]:
            combine(out, term, out=out)

    return combine_all


ORDERS: dict[str, Callable[[Terms, torch.Tensor], None]] = {
    "fold": fold,
    "tree": tree,
    "wide": wide,
    "product": _by(torch.mul),
    "min": _by(torch.minimum),
    "max": _by(torch.maximum),
    "and": _by(torch.bitwise_and),
    "or": _by(torch.bitwise_or),
    "xor": _by(torch.bitwise_xor),
}
"""How terms become a result, by name. The session's are ``fold`` and ``tree``; the others serve collectives."""
