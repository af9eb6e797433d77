"""An unordered all-reduce without bit-identical results, as the baseline for the cost of the deterministic one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from holdfast.comm import MeanDivisor, OrderedAllReduce, SlotSpan
from holdfast.comm.base import Collectives
from holdfast.errors import ConfigError
from holdfast.session.session import Session


def sum_unordered(session: Session, add: Callable[[torch.Tensor], None]) -> None:
    """Make a session use ``add`` as its all-reduce, in any order; everything else stays unchanged.

    Call it before the first step. Every worker has one slice. No worker may fail, because the survivors would not end
    with the same bits.

    Args:
        session: The session of a replicated model.
        add: All-reduces a vector (sum) in place; called by all workers with vectors of the same length.

    Raises:
        ConfigError: if the session's model is split.
    """
    world, replica = session._connect(), session._trainable
    if not replica.is_replicated:
        raise ConfigError("an unordered all-reduce needs a replicated model, got a session whose model is split")
    world.loops.sum = _UnorderedSum(world.comm, replica.size_bytes, add)


class _UnorderedSum(OrderedAllReduce):
    """An all-reduce without shared memory.

    Args:
        comm: The communicator.
        size_bytes: Bytes of the worker's slice.
        add: See :func:`sum_unordered`.
    """

    def __init__(self, comm: Collectives, size_bytes: int, add: Callable[[torch.Tensor], None]) -> None:
        super().__init__(comm, "fold", size_bytes, shared_bytes=0)
        self._add = add

    def __call__(
        self, span: SlotSpan, owners: Mapping[int, int], *, mean: MeanDivisor | None = None, **_: object
    ) -> torch.Tensor:
        """Return the sum over all workers, computed in place."""
        result = span.of(self.room(0))
        self._add(result)
        if mean is not None:
            result[: mean.numbers].div_(mean.divisor)
        return result
