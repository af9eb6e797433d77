"""All-reduces of sparse tensors, as ``DistributedDataParallel`` makes for ``nn.Embedding(sparse=True)``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from holdfast.distributed.group_base import GroupBase
from holdfast.distributed.tasks import CollectiveCall
from holdfast.distributed.tensors import WrongArgument, check_layout, scaled, type_of
from holdfast.errors import ScriptError

_WIDTH = 30
"""Numbers that a rank tells of its tensor: dtype, dimensions, and its shape."""
_DTYPES = sorted({it for it in vars(torch).values() if isinstance(it, torch.dtype)}, key=str)


class SparseCollectives(GroupBase):
    """The one collective of sparse tensors that Gloo has, too: the sum."""

    def _reduce_sparse(self, tensor: torch.Tensor, op: Any, what: str) -> Work:
        """Sum a sparse tensor over all ranks, in place: the terms of an element are added in rank order."""
        check_layout(tensor, what, torch.sparse_coo)
        if tensor.device.type != "cpu":
            raise WrongArgument(f"{what} of a sparse tensor needs it on the CPU, got {tensor.device}")
        if type_of(op) != ReduceOp.SUM:
            raise WrongArgument(f"{what} of sparse tensors is a sum, got {op}")
        call_site = self._call_site()
        in_ddp = call_site.is_backward
        fate = self._fate(call_site, [tensor])
        place = call_site.place if fate.scales else ""
        recorder = self._engine.recorder
        step = recorder.begin_sum(call_site.task) if in_ddp and call_site.task >= 0 else None
        own_term = tensor.detach().coalesce()
        terms: list[torch.Tensor] = []
        result = [tensor]

        def exchange() -> None:
            terms[:] = self._gather_sparse(own_term, what)
            if step is not None:
                recorder.reach_in_sum(*step)
            self._members.comm.barrier()

        def finish() -> None:
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            alive, first = len(terms), len(self._members.ranks)
            # DDP has divided by the initial world size, a script will
            if (in_ddp or fate.scales) and alive < first and total.dtype != torch.bool:
                total = _scaled(total, first, alive)
            result[0] = total.coalesce()
            if fate.scales and alive < first:
                self._note_scaled(what, place)

        def deliver() -> None:
            if result[0] is not tensor:
                with torch.no_grad():
                    tensor.copy_(result[0])

        call = CollectiveCall(what, result, exchange, finish, deliver, fate, inputs=[tensor], layout=torch.sparse_coo)
        return self._submit(call)

    def _gather_sparse(self, own_term: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return the tensor of each surviving rank; ``ScriptError`` on all ranks if their shapes or dtypes differ."""
        comm, indices, values = self._members.comm, own_term.indices(), own_term.values()
        about = [_DTYPES.index(values.dtype), own_term.sparse_dim(), own_term.dim(), *own_term.shape]
        row = torch.tensor([len(values), *about] + [0] * (_WIDTH - len(about)), dtype=torch.int64)
        rows = torch.empty(len(self._members.alive), len(row), dtype=torch.int64)
        comm.allgather(row, rows)
        if len(set(map(tuple, rows[:, 1:].tolist()))) > 1:
            raise ScriptError(f"{what} needs sparse tensors of one dtype and shape on all ranks")
        counts: list[int] = rows[:, 0].tolist()
        longest = max(counts)
        all_indices = torch.empty(len(counts), longest, own_term.sparse_dim(), dtype=torch.int64)
        all_values = torch.empty(len(counts), longest, *values.shape[1:], dtype=values.dtype)
        if longest:
            comm.allgather(_padded(indices.t(), longest), all_indices)
            comm.allgather(_padded(values, longest), all_values)
        return [
            torch.sparse_coo_tensor(index[:count].t(), value[:count], own_term.shape, is_coalesced=True)
            for count, index, value in zip(counts, all_indices, all_values, strict=True)
        ]


def _scaled(total: torch.Tensor, first: int, alive: int) -> torch.Tensor:
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total / (alive / first)
    whole = total.coalesce()
    return torch.sparse_coo_tensor(
        whole.indices(), scaled(whole.values(), first, alive), whole.shape, is_coalesced=True, check_invariants=False
    )


def _padded(part: torch.Tensor, length: int) -> torch.Tensor:
    whole = torch.zeros(length, *part.shape[1:], dtype=part.dtype)
    whole[: len(part)] = part
    return whole
