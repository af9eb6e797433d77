"""The data-movement collectives of ``torch.distributed``: broadcast, gather, scatter, all-to-all, barrier."""

# mypy: disable-error-code="override, assignment"
# (torch's stubs give each method two signatures, one of which it never calls on a group made in Python.)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import Work

from holdfast.comm.allreduce.ordered import SlotSpan
from holdfast.comm.allreduce.path import ALIGN
from holdfast.distributed.comm_thread import CommThread
from holdfast.distributed.group_base import GroupBase, Tensors
from holdfast.distributed.members import GroupMembers
from holdfast.distributed.parts import EXCHANGED, Fate, seen
from holdfast.distributed.seats import SeatFiller
from holdfast.distributed.tasks import CollectiveCall
from holdfast.distributed.tensors import WrongArgument, bytes_of, one, overwrite, plain, split


class MoveCollectives(GroupBase):
    """A group's collectives that move tensors unchanged."""

    def __init__(self, engine: CommThread, members: GroupMembers, rank: int, timeout_s: float) -> None:
        super().__init__(engine, members, rank, timeout_s)
        self._filler = SeatFiller()

    def broadcast(self, tensors: Tensors, options: Any) -> Work:
        """Send the root's tensor to every rank."""
        tensor, members, root = one(tensors, "broadcast"), self._members, options.rootRank
        call_site = self._call_site()
        by_ddp = call_site.is_ddp_outside
        fate = self._fate(call_site)
        span = SlotSpan(0, tensor.numel() * tensor.element_size(), torch.uint8)

        def exchange() -> None:
            source = members.ranks[root]
            if not by_ddp:
                self._check_alive(root, "broadcast", fate)
            elif source not in members.alive:
                source = members.alive[0]  # replicas are equal, or are being made equal: any survivor's tensor will do
            if not span.length:
                members.comm.barrier()
                return
            sums = members.adder.up_to(span, "fold")
            if members.ranks[self._index] == source:
                span.of(sums.room(0)).copy_(bytes_of(tensor))
            sums(span, {0: source}, order="fold")
            if not sums.in_place:
                members.comm.barrier()

        def finish() -> None:
            if span.length:
                overwrite(tensor, members.adder.result(span))

        return self._submit(CollectiveCall("broadcast", [tensor], exchange, finish, fate=fate, root=root, like=tensor))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any = None) -> Work:
        """Gather the tensors of all ranks on every rank."""
        outs, part = list(one(outputs, "all_gather")), one(inputs, "all_gather")
        self._check_list(outs, part, "all_gather")
        return self._gather(outs, part, "all_gather", outs)

    def all_gather_single(self, out: torch.Tensor, part: torch.Tensor, options: Any = None) -> Work:
        """Gather the tensors of all ranks on every rank, concatenated."""
        outs = self._parts(out, part, "all_gather_into_tensor")
        return self._gather(outs, part, "all_gather_into_tensor", [out])

    _allgather_base = all_gather_single

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> Work:
        """Gather the tensors of all ranks on the root."""
        part, root = one(inputs, "gather"), options.rootRank
        outs = list(one(outputs, "gather")) if self._index == root else None
        if outs is not None:
            self._check_list(outs, part, "gather")
        return self._gather(outs, part, "gather", outs or [], root)

    def _gather(
        self,
        outs: Tensors | None,
        part: torch.Tensor,
        what: str,
        result: list[torch.Tensor],
        root: int | None = None,
    ) -> Work:
        members, call_site = self._members, self._call_site()
        fate = self._fate(call_site, [part, *result] if root is None else [part], gathers=True)
        if call_site.is_ddp_outside:
            return self._gather_for_ddp(outs or [], part, what, result, fate)
        by_object = call_site.gathers_objects
        is_sizes = by_object and part.dtype == torch.int64
        normalises = call_site.normalises  # a call site holds frames, and with them activations
        rows_by_rank: dict[int, torch.Tensor] = {}
        sources: dict[int, int] = {}

        def exchange() -> None:
            if root is not None:
                self._check_alive(root, what, fate)
            self._check_fits(outs, what, fate)
            sources.clear()
            if fate.recovers and not normalises:
                choose = self._filler.sources
                sources.update(choose(members.dead, members.alive, what, bytes_of_objects=by_object and not is_sizes))
            self._gather_rows(part, rows_by_rank)

        def finish() -> None:
            if outs is None:
                return
            is_filled = len(outs) > len(rows_by_rank)
            filled = sources if is_filled else {}
            ranks = members.ranks if is_filled else tuple(rows_by_rank)
            if is_filled and not filled:  # to SyncBatchNorm, zeros are of a rank that had no samples
                rows_by_rank.update(
                    (rank, torch.zeros_like(plain(part))) for rank in members.ranks if rank not in rows_by_rank
                )
            rows = [rows_by_rank[filled.get(rank, rank)] for rank in ranks]
            for out, row in zip(outs, rows, strict=True):
                overwrite(out, row)
            if is_sizes:
                self._filler.note_sizes(ranks, rows)
            if filled and members.ranks[self._index] == (min(rows_by_rank) if root is None else members.ranks[root]):
                self._engine.recorder.filled(what, filled)

        return self._submit(CollectiveCall(what, result, exchange, finish, fate=fate, root=root, like=part))

    def _gather_for_ddp(
        self, outs: Tensors, part: torch.Tensor, what: str, result: list[torch.Tensor], fate: Fate
    ) -> Work:
        rows_by_rank: dict[int, torch.Tensor] = {}

        def finish() -> None:
            # DDP compares the ranks' values: failed ranks count as agreeing with this one.
            for out, rank in zip(outs, self._members.ranks, strict=True):
                overwrite(out, rows_by_rank.get(rank, plain(part)))

        def exchange() -> None:
            self._gather_rows(part, rows_by_rank)

        return self._submit(CollectiveCall(what, result, exchange, finish, fate=fate, like=part))

    def _gather_rows(self, part: torch.Tensor, rows_by_rank: dict[int, torch.Tensor]) -> None:
        members, own_row = self._members, plain(part)
        whole = torch.empty(len(members.alive), own_row.numel(), dtype=own_row.dtype)
        if own_row.numel():
            members.comm.allgather(own_row, whole)
        rows_by_rank.clear()
        rows_by_rank.update(zip(members.alive, whole, strict=True))
        members.comm.barrier()

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> Work:
        """Send each rank one of the root's tensors."""
        out, root = one(outputs, "scatter"), options.rootRank
        parts = list(one(inputs, "scatter")) if self._index == root else None
        if parts is not None:
            self._check_list(parts, out, "scatter")
        members = self._members
        rows: list[torch.Tensor] = []
        source: list[int] = []

        def exchange() -> None:
            self._check_alive(root, "scatter", EXCHANGED)
            self._check_fits(parts, "scatter", EXCHANGED)
            own_row = plain(out)
            send = torch.zeros(len(members.alive), own_row.numel(), dtype=own_row.dtype)
            if parts is not None:
                send = torch.stack([plain(part) for part in parts])
            source[:] = [members.alive.index(members.ranks[root])]
            self._exchange_rows(send, rows)

        def finish() -> None:
            overwrite(out, rows[source[0]])

        return self._submit(CollectiveCall("scatter", [out], exchange, finish, fate=EXCHANGED, root=root, like=out))

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        """Send one tensor to each rank, and receive one from each."""
        if len(outputs) != len(inputs):
            raise WrongArgument(f"all_to_all needs as many outputs as inputs, got {len(outputs)} and {len(inputs)}")
        self._check_count(inputs, "all_to_all")
        return self._alltoall(list(outputs), list(inputs), "all_to_all", list(outputs))

    def all_to_all_single(
        self,
        out: torch.Tensor,
        whole: torch.Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
        options: Any = None,
    ) -> Work:
        """Send a part of a tensor to each rank, and receive a part from each."""
        what = "all_to_all_single"
        count = len(splits or out_splits or ()) or self.size()
        outs, parts = split(out, out_splits, count, what), split(whole, splits, count, what)
        self._check_count(parts, what)
        return self._alltoall(outs, parts, what, [out])

    alltoall_base = all_to_all_single

    def _alltoall(self, outs: Tensors, parts: Tensors, what: str, result: list[torch.Tensor]) -> Work:
        members = self._members
        received: list[torch.Tensor] = []

        def exchange() -> None:
            self._check_fits(parts, what, EXCHANGED)
            chunks = [bytes_of(part) for part in parts]
            size = members.comm.maximum([max(t.numel() for t in chunks)])[0]
            size = -(-size // ALIGN) * ALIGN  # so that elements of any dtype are aligned
            send = torch.zeros(len(chunks), size, dtype=torch.uint8)
            for row, data in zip(send, chunks, strict=True):
                row[: data.numel()] = data
            self._exchange_rows(send, received)

        def finish() -> None:
            for out, row in zip(outs, received, strict=True):
                overwrite(out, row[: out.numel() * out.element_size()])

        return self._submit(CollectiveCall(what, result, exchange, finish, fate=EXCHANGED))

    def barrier(self, opts: Any = None) -> Work:
        """Block until all ranks have called it."""
        fate = seen.fate_of_barrier(self._policy)
        return self._submit(CollectiveCall("barrier", [], self._members.comm.barrier, fate=fate, like=torch.empty(0)))
