"""The names of the orders in which gradients are added.

===========================  =======================================================================================
name                         addition
===========================  =======================================================================================
``fold``, ``tree``           one slice after another; or in pairs, by slice number
``fold-wide``, ``tree-wide`` the same, 16-bit gradients in float32 and rounded once
``fold-bf16``                each slice is rounded to bfloat16, then added in float32; the mean is rounded, too
``tree-bf16-N``              the same with the sum of each *unit*, ``N`` neighbouring slices, in place of each slice
===========================  =======================================================================================

What is rounded in the last two travels between workers in 16 bits. The name says where numbers are rounded, so the
result does not depend on what travels.
"""

from __future__ import annotations

UNITS = tuple(1 << level for level in range(11))
"""The possible sizes of a unit, in slices: subtrees of the tree."""

_FOLD_BF16, _TREE_BF16 = "fold-bf16", "tree-bf16-"
ROUNDED_ORDERS = (_FOLD_BF16, *(f"{_TREE_BF16}{unit}" for unit in UNITS))
"""The orders that round to bfloat16."""
_EXACT = ("fold", "tree", "fold-wide", "tree-wide")
ORDERS = (*_EXACT, *ROUNDED_ORDERS)
"""All orders of a session."""
LISTED_ORDERS = (*_EXACT, _FOLD_BF16, f"{_TREE_BF16}N")
"""The same as they are listed: ``N`` is a unit."""


def rounded_order(base: str, unit: int) -> str:
    """Return the name of order ``base``, ``fold`` or ``tree``, with the sums of units of ``unit`` slices rounded."""
    return _FOLD_BF16 if base == "fold" else f"{_TREE_BF16}{unit}"


def is_rounded(order: str) -> bool:
    """Return whether an order rounds float32 gradients to bfloat16."""
    return order in ROUNDED_ORDERS


def is_tree(order: str) -> bool:
    """Return whether slices are added in pairs, by slice number."""
    return order.startswith("tree")


def base_of(order: str) -> str:
    """Return the order without the rounding to bfloat16."""
    return order.partition("-")[0] if is_rounded(order) else order


def unit_of(order: str) -> int:
    """Return the number of slices whose sum is rounded to bfloat16; 0 if none is rounded."""
    if not is_rounded(order):
        return 0
    return 1 if order == _FOLD_BF16 else int(order.removeprefix(_TREE_BF16))
