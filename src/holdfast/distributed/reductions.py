"""The reducing collectives of ``torch.distributed``: all-reduce, reduce, reduce-scatter."""

# mypy: disable-error-code="override, assignment"
# (torch's stubs give each method two signatures, one of which it never calls on a group made in Python.)

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from holdfast.comm.allreduce.adding import ORDERS, MeanDivisor
from holdfast.comm.allreduce.ordered import SlotSpan
from holdfast.distributed.call_site import CallSite
from holdfast.distributed.comm_thread import CommThread
from holdfast.distributed.group_base import Tensors
from holdfast.distributed.members import GroupMembers
from holdfast.distributed.parts import EXCHANGED
from holdfast.distributed.sparse import SparseCollectives
from holdfast.distributed.staging import current_staging
from holdfast.distributed.tasks import CollectiveCall, nothing
from holdfast.distributed.tensors import (
    ORDER_OF,
    factor_of,
    kind_of,
    name_of,
    of_its_own,
    one,
    overwrite,
    plain,
    scaled,
)


class ReduceCollectives(SparseCollectives):
    """A group's reductions, in rank order."""

    def __init__(self, engine: CommThread, members: GroupMembers, rank: int, timeout_s: float) -> None:
        super().__init__(engine, members, rank, timeout_s)
        self._lent_in: object = None
        self._lent_bytes = 0
        self._counted: Work | None = None
        """The newest count of ranks in ``join()``: DDP holds it in C++ alone, and reads it in the backward pass."""

    def allreduce(self, tensors: Tensors, options: Any = None) -> Work:
        """All-reduce a tensor, in place."""
        tensor = one(tensors, "all_reduce")
        if tensor.layout != torch.strided:
            return self._reduce_sparse(tensor, _op_of(options), "all_reduce")
        return self._reduce(tensor, options, "all_reduce")

    def allreduce_coalesced(self, tensors: Tensors, options: Any = None) -> Work:
        """All-reduce several tensors, in place."""
        what = "all_reduce_coalesced"
        begin = [functools.partial(self._reduce, tensor, options, what) for tensor in tensors]
        return self._coalesce(begin, tensors, list(tensors), what)

    def reduce(self, tensors: Tensors, options: Any) -> Work:
        """Reduce a tensor over all ranks; only the root gets the result."""
        return self._reduce(one(tensors, "reduce"), options, "reduce", root=options.rootRank)

    def _reduce(self, tensor: torch.Tensor, options: Any, what: str, root: int | None = None) -> Work:
        op = _op_of(options)
        kind = kind_of(op, tensor)
        what = f"{what}({name_of(op)})"
        members, flat = self._members, plain(tensor)
        span, adder = SlotSpan(0, flat.numel(), flat.dtype), members.adder
        call_site = self._call_site()
        in_ddp = call_site.is_backward
        fate = self._fate(call_site, [tensor])
        place = call_site.place if fate.scales else ""
        step = self._engine.recorder.begin_sum(call_site.task) if in_ddp and call_site.task >= 0 else None
        is_lent = call_site.is_reducer and root is None and kind is ReduceOp.SUM and flat.dtype.is_floating_point
        zero_copy = is_lent and current_staging() is None  # on another device, nothing reads the memory of the result
        factor = factor_of(op) if kind is ReduceOp.PREMUL_SUM else 1
        if zero_copy:
            span, adder = self._behind_the_last(span, call_site), members.lender
        result = [tensor]
        alive = [self.size()]

        def exchange() -> None:
            if root is not None:
                self._check_alive(root, what, fate)
            alive[0] = len(members.alive)
            if not span.length:
                members.comm.barrier()
                return
            sums = adder.up_to(span, ORDER_OF[kind])
            term = span.of(sums.room(0))
            if kind is ReduceOp.PREMUL_SUM:
                torch.mul(flat, factor, out=term)
            else:
                term.copy_(flat)
            owners = {rank: rank for rank in members.alive}
            midway = nothing if step is None else lambda: self._engine.recorder.reach_in_sum(*step)
            mean = self._mean(kind, span, rescales=in_ddp or fate.scales)
            sums(span, owners, order=ORDER_OF[kind], mean=mean, midway=midway)
            if not sums.in_place:
                members.comm.barrier()

        def finish() -> None:
            if zero_copy and span.length:
                result[0] = of_its_own(adder.result(span)).view(tensor.shape)
                return
            total = adder.result(span) if span.length else flat
            is_scaled = fate.scales and kind in _SUMS and span.dtype != torch.bool and alive[0] < self.size()
            if is_scaled and not _is_inexact(span.dtype):
                total = scaled(total, self.size(), alive[0])
            if span.length and (root is None or root == self._index):
                overwrite(tensor, total)
            if is_scaled:
                self._note_scaled(what, place)

        def deliver() -> None:
            if result[0] is not tensor:
                overwrite(tensor, result[0])

        work = self._submit(CollectiveCall(what, result, exchange, finish, deliver, fate, root, like=tensor))
        if call_site.is_join:
            self._counted = work
        return work

    def _behind_the_last(self, span: SlotSpan, asker: CallSite) -> SlotSpan:
        """Return the place of a bucket whose result DDP reads once all buckets of the backward pass are reduced."""
        if self._lent_in != asker.backward:
            self._lent_in, self._lent_bytes = asker.backward, 0
        placed = SlotSpan(self._lent_bytes, span.length, span.dtype)
        self._lent_bytes = placed.end
        return placed

    def _mean(self, kind: Any, span: SlotSpan, *, rescales: bool) -> MeanDivisor | None:
        """Return the divisor: a sum that is divided by the initial size of the group must become a mean over the survivors."""
        alive, first = len(self._members.alive), len(self._members.ranks)
        if kind is ReduceOp.AVG:
            return MeanDivisor(alive, span.length)
        if rescales and alive < first and kind in _SUMS and _is_inexact(span.dtype):
            return MeanDivisor(alive / first, span.length)
        return None

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any = None) -> Work:
        """Reduce a list of tensors over all ranks, and scatter one to each rank."""
        out, parts = one(outputs, "reduce_scatter"), list(one(inputs, "reduce_scatter"))
        return self._reduce_scatter(out, parts, options, "reduce_scatter")

    def reduce_scatter_single(self, out: torch.Tensor, whole: torch.Tensor, options: Any = None) -> Work:
        """Reduce a tensor over all ranks, and scatter a part to each rank."""
        return self._reduce_scatter(
            out, self._parts(whole, out, "reduce_scatter_tensor"), options, "reduce_scatter_tensor"
        )

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, out: torch.Tensor, parts: Tensors, options: Any, what: str) -> Work:
        members, op = self._members, _op_of(options)
        kind = kind_of(op, out)
        self._check_count(parts, what)
        if len(parts) == self.size():
            self._check_like(parts[self._index], out, what)
        factor = factor_of(op) if kind is ReduceOp.PREMUL_SUM else 1
        length = max(part.numel() for part in parts)
        rows: list[torch.Tensor] = []

        def exchange() -> None:
            self._check_fits(parts, what, EXCHANGED)
            send = torch.zeros(len(members.alive), length, dtype=out.dtype)
            for row, part in zip(send, parts, strict=True):
                row[: part.numel()] = plain(part)
            if kind is ReduceOp.PREMUL_SUM:
                send = send * factor
            self._exchange_rows(send, rows)

        def finish() -> None:
            result = torch.empty(out.numel(), dtype=out.dtype)
            ORDERS[ORDER_OF[kind]]([(n, row[: out.numel()]) for n, row in enumerate(rows)], result)
            overwrite(out, result.div_(len(rows)) if kind is ReduceOp.AVG else result)

        return self._submit(CollectiveCall(what, [out], exchange, finish, fate=EXCHANGED, like=out))


_SUMS = (ReduceOp.SUM, ReduceOp.PREMUL_SUM)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _op_of(options: Any) -> Any:
    return ReduceOp.SUM if options is None else options.reduceOp
