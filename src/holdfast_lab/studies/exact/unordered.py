"""A sum that gives up the bits, for what order costs to be held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from holdfast.comm import Mean, OrderedSum, Span
from holdfast.comm.base import Exchange
from holdfast.errors import ConfigError
from holdfast.session.session import Session


def sum_unordered(session: Session, add: Callable[[torch.Tensor], None]) -> None:
    """Let a session that has not trained yet sum in whatever order ``add`` takes; all else stays as it is.

    Every worker has one slice, and nobody may die: who lives would not end with the same bits.

    Args:
        session: Of a whole model.
        add: Makes a vector the sum over all workers, in place; called by all of them with vectors of one length.

    Raises:
        ConfigError: if the session's model is split.
    """
    world, replica = session._connect(), session._replica
    if not replica.is_replicated:
        raise ConfigError("the session's model is split: only sums of a whole one can be made in any order")
    world.loops.sum = _UnorderedSum(world.comm, replica.size_bytes, add)


class _UnorderedSum(OrderedSum):
    """Needs no memory that others read.

    Args:
        comm: Who takes part.
        size_bytes: Memory of the one slice.
        add: See :func:`sum_unordered`.
    """

    def __init__(self, comm: Exchange, size_bytes: int, add: Callable[[torch.Tensor], None]) -> None:
        super().__init__(comm, "fold", size_bytes, shared_bytes=0)
        self._add = add

    def __call__(self, span: Span, owners: Mapping[int, int], *, mean: Mean | None = None, **_: object) -> torch.Tensor:
        """Return the sum, in place of the term."""
        result = span.of(self.room(0))
        self._add(result)
        if mean is not None:
            result[: mean.numbers].div_(mean.divisor)
        return result
