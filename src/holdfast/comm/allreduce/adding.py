"""Additions in an order that is fixed for the job.

Floating-point addition is not associative. So that an all-reduce gives the same bits whichever ranks own the slices,
terms are added in slice order, never in rank order or order of arrival.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.base.orders import UNITS, base_of, is_rounded, rounded_order, unit_of
from holdfast.comm.allreduce.checksums import Altered, ChecksummedVector, ignore_corruption

_HALF = (torch.float16, torch.bfloat16)
_WIDE = "-wide"

Terms = Sequence[tuple[int, torch.Tensor]]
"""Slice number and term, ascending by slice."""


@dataclass(frozen=True, slots=True)
class MeanDivisor:
    """Divides the first ``numbers`` elements of a reduced vector while they are in the cache; the rest stay sums."""

    divisor: float
    numbers: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """A tile of a vector: its terms, the tensor for their sum, and its offset in the vector.

    With checksums, ``checked`` has the terms with theirs, and ``sealed`` the sum if it gets a checksum.
    """

    terms: Terms
    out: torch.Tensor
    start: int
    checked: list[tuple[int, ChecksummedVector]]
    sealed: ChecksummedVector | None


class TiledSum:
    """The addition of some terms, split into tiles once and carried out many times.

    Args:
        terms: ``(slice, vector)``, ascending by slice; all as long as ``out``. Those with checksums are verified.
        out: Receives the sum, and its checksums if it has any; tiles have the size of those of the terms.
        start: Offset of ``out`` in the whole vector.
        order: One of :data:`ORDERS`. ``"fold-wide"`` and ``"tree-wide"`` also divide 16-bit floats in float32; those
            that round to bfloat16 round the result, too. Where ``out`` has 16 bits and the terms have 32, the sum is
            rounded once.
    """

    def __init__(
        self, terms: Sequence[tuple[int, ChecksummedVector]], out: ChecksummedVector, start: int, order: str
    ) -> None:
        self._add = ORDERS[order]
        self._is_wide = out.numbers.dtype in _HALF and (
            order.endswith(_WIDE) or is_rounded(order) or any(term.numbers.dtype == torch.float32 for _, term in terms)
        )
        self._is_rounded = is_rounded(order) and not self._is_wide
        self.out = out
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
    def __call__(self, mean: MeanDivisor | None = None, altered: Altered = ignore_corruption) -> None:
        """Add, and divide by ``mean``; call ``altered`` for each tile of a term that does not match its checksum."""
        for tile in self._tiles:
            for number, term in tile.checked:
                if not term.is_intact():
                    altered(number)
            total = torch.empty_like(tile.out, dtype=torch.float32) if self._is_wide else tile.out
            self._add(tile.terms, total)
            if mean is not None and mean.numbers > tile.start:
                total[: mean.numbers - tile.start].div_(mean.divisor)
            if self._is_wide:
                tile.out.copy_(total)  # the only rounding to 16 bits
            elif self._is_rounded:
                tile.out.copy_(tile.out.bfloat16())
            if tile.sealed is not None:
                tile.sealed.seal()


def fold(terms: Terms, out: torch.Tensor) -> None:
    """Add ``((0+1)+2)+3`` into ``out``, the order of gradient accumulation.

    The first term is not added to zero, because 0.0 + -0.0 would lose a sign. For the same reason an empty sum is -0.0.
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
    """Return the groups of slices that an owner may add before the all-reduce in :func:`tree` order, changing no bit.

    They are the largest subtrees whose slices have one owner. In the complete tree, the sum of such a group replaces
    any one of its slices, because the slices of a group are added together before any other. Slices that are not in
    ``holders`` do not take part and leave no gap: their neighbour moves up. Groups are in slice order.
    """
    level: list[tuple[int, list[tuple[int, ...]]]] = [(number, [(number,)]) for number in sorted(holders)]
    while len(level) > 1:
        paired: list[tuple[int, list[tuple[int, ...]]]] = []
        for number, subtrees in level:
            if paired and paired[-1][0] == number // 2:
                paired[-1] = (number // 2, _join(paired[-1][1], subtrees, holders))
            else:
                paired.append((number // 2, subtrees))
        level = paired
    return level[0][1] if level else []


def _join(
    left: list[tuple[int, ...]], right: list[tuple[int, ...]], holders: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Return the groups below a node of the tree; a side with a single group is complete."""
    if len(left) == len(right) == 1 and holders[left[0][0]] == holders[right[0][0]]:
        return [left[0] + right[0]]
    return left + right


def addable(holders: Mapping[int, int], order: str) -> list[tuple[int, ...]]:
    """Return which slices an owner may add locally before the all-reduce, without changing a bit of the result.

    In ``tree`` order these are all aligned groups, in ``fold`` order the leading slices of the first owner, otherwise
    none. A slice that is added to no other forms a group of one. Groups are in slice order, and the sum of a group
    takes the position of its first slice.

    In the orders that round to bfloat16, no group is larger than a unit.
    """
    if order == "tree":
        return groups(holders)
    numbers = sorted(holders)
    if unit := unit_of(order):
        units = (list(some) for _, some in itertools.groupby(numbers, lambda n: n // unit))
        return [group for some in units for group in groups({n: holders[n] for n in some})]
    ahead = list(itertools.takewhile(lambda n: holders[n] == holders[numbers[0]], numbers)) if order == "fold" else []
    return [tuple(ahead)] * bool(ahead) + [(n,) for n in numbers[len(ahead) :]]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which slices of a step are added by their owner as soon as they are computed, and share a row of memory.

    A row is a term of the all-reduce: one slice, or the sum of a group that :func:`addable` allows. While a group is
    computed, its rows are a stack, like the digits of a binary counter: ``k`` slices in ``tree`` order need
    ``log2(k) + 1`` rows, in ``fold`` order two.

    Args:
        first_of: The first slice of the group of each slice that is not alone in its row.
        last: The last slice of each of these groups.
        additions: How often the two newest rows are added once a slice is computed; 0 if it is not listed.
    """

    first_of: Mapping[int, int]
    last: frozenset[int]
    additions: Mapping[int, int]

    def rows(self, owners: Mapping[int, int]) -> dict[int, int]:
        """Return the owner of each row, by the first slice of the row."""
        return {n: rank for n, rank in owners.items() if self.first_of.get(n, n) == n}


SINGLE_ROWS = RowPlan({}, frozenset(), {})
"""Each slice has its own row."""


def plan_rows(holders: Mapping[int, int], order: str) -> RowPlan:
    """Return which slices share a row, the same on every process.

    ``holders`` are those of :func:`addable`. One whose rows would not become fewer, as with two slices, keeps single rows:
    adding costs time.
    """
    of_holder: dict[int, list[tuple[int, ...]]] = {}
    for group in addable(holders, order):
        of_holder.setdefault(holders[group[0]], []).append(group)
    chosen = [
        group
        for groups_here in of_holder.values()
        if _most_rows(groups_here, order) < sum(map(len, groups_here))
        for group in groups_here
        if len(group) > 1
    ]
    return RowPlan(
        {n: group[0] for group in chosen for n in group},
        frozenset(group[-1] for group in chosen),
        {n: times for group in chosen for n, times in _additions(group, order).items()},
    )


def _additions(group: Sequence[int], order: str) -> dict[int, int]:
    """Return how often the two newest rows are added after each slice of a group, so that one row is left."""
    if base_of(order) != "tree":
        return dict.fromkeys(group[1:], 1)
    counts: dict[int, int] = {}
    level = [(number, number) for number in group]  # a node of the tree, and the last slice below it
    while len(level) > 1:
        paired: list[tuple[int, int]] = []
        for number, last in level:
            if paired and paired[-1][0] == number // 2:
                paired[-1] = (number // 2, last)
                counts[last] = counts.get(last, 0) + 1
            else:
                paired.append((number // 2, last))
        level = paired
    return counts


def _most_rows(groups_here: Sequence[Sequence[int]], order: str) -> int:
    """Return how many rows a holder of these groups needs at most at a time."""
    rows = most = 0
    for group in groups_here:
        additions = _additions(group, order)
        for number in group:
            rows += 1
            most = max(most, rows)
            rows -= additions.get(number, 0)
    return most


def wide(terms: Terms, out: torch.Tensor) -> None:
    """Add like :func:`fold`, but 16-bit floats in float32, rounded once at the end unless ``out`` is float32, too."""
    if len(terms) < 2 or terms[0][1].dtype not in _HALF:
        fold(terms, out)
        return
    total = out.copy_(terms[0][1]) if out.dtype == torch.float32 else terms[0][1].float()
    for _, term in terms[1:]:
        total.add_(term)
    if total is not out:
        out.copy_(total)


def wide_tree(terms: Terms, out: torch.Tensor) -> None:
    """Add like :func:`tree`, but 16-bit floats as in :func:`wide`."""
    if len(terms) < 2 or terms[0][1].dtype not in _HALF:
        tree(terms, out)
        return
    total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    tree([(number, term.float()) for number, term in terms], total)
    if total is not out:
        out.copy_(total)


def _round(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers that are those of bfloat16 nearest to these, ties to even."""
    return numbers.bfloat16().float()


def fold_rounded(terms: Terms, out: torch.Tensor) -> None:
    """Add like :func:`fold` in float32, each term rounded to bfloat16; terms may be of either type."""
    fold([(number, _round(term)) for number, term in terms], out)


def _tree_rounded(unit: int) -> Callable[[Terms, torch.Tensor], None]:
    """Return a function that adds like :func:`tree` in float32, the sum of each unit rounded to bfloat16.

    A term may be the sum of some slices of a unit, in float32, or that of all of them, of either type.
    """

    def add(terms: Terms, out: torch.Tensor) -> None:
        sums: list[tuple[int, torch.Tensor]] = []
        for number, some in itertools.groupby(terms, lambda term: term[0] // unit):
            unit_terms = [(n, term.float()) for n, term in some]
            total = unit_terms[0][1] if len(unit_terms) == 1 else torch.empty_like(unit_terms[0][1])
            if len(unit_terms) > 1:
                tree(unit_terms, total)
            sums.append((number, _round(total)))
        tree(sums, out)

    return add


def _by(combine: Callable[..., torch.Tensor]) -> Callable[[Terms, torch.Tensor], None]:
    """Return a function that combines terms one after another with ``combine`` instead of addition."""

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
    "fold-wide": wide,
    "tree-wide": wide_tree,
    rounded_order("fold", 1): fold_rounded,
    **{rounded_order("tree", unit): _tree_rounded(unit) for unit in UNITS},
}
"""Reduction orders by name. The session uses those that begin with ``fold`` and ``tree``, ``torch.distributed`` the others."""
