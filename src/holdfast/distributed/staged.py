"""The collectives of ``torch.distributed`` for tensors on any device that the backend supports."""

# mypy: disable-error-code="override, assignment"
# (torch's stubs give each method two signatures, one of which it never calls on a group made in Python.)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.distributed.group_base import GroupBase
from holdfast.distributed.staging import staged

READS: dict[str, tuple[int, ...]] = {
    "allreduce": (0,),
    "allreduce_coalesced": (0,),
    "reduce": (0,),
    "broadcast": (0,),
    "send": (0,),
    "recv": (),
    "recv_anysource": (),
    **dict.fromkeys(
        (
            "allgather",
            "all_gather_single",
            "all_gather_single_coalesced",
            "allgather_into_tensor_coalesced",
            "allgather_coalesced",
            "gather",
            "scatter",
            "alltoall",
            "all_to_all_single",
            "alltoall_base",
            "reduce_scatter",
            "reduce_scatter_single",
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
        ),
        (1,),
    ),
}
"""Every method with tensors, which are in its first two arguments, and which of the two it reads."""


def _staged(name: str) -> Callable[..., Any]:
    def collective(self: StagedCollectives, *args: Any, **kwargs: Any) -> Any:
        return staged(getattr(super(StagedCollectives, self), name), name, args, kwargs, READS[name])

    collective.__name__ = name
    collective.__doc__ = f"``{name}``, of tensors on the CPU or on a device; see :mod:`~holdfast.distributed.staging`."
    return collective


class StagedCollectives(GroupBase):
    """Stages the tensors of each collective through host memory if they are on a device."""

    _allgather_base = _staged("all_gather_single")
    _reduce_scatter_base = _staged("reduce_scatter_single")


for _name in READS:
    setattr(StagedCollectives, _name, _staged(_name))
