"""The process group that torch talks to: what each collective of ``torch.distributed`` is made of."""

# mypy: disable-error-code="override, assignment"
# (torch's stubs give each method two signatures, one of which it never calls on a group made in Python.)

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed import ProcessGroup, ReduceOp, Work

from holdfast import notice
from holdfast.comm.allreduce.adding import ORDERS, Mean
from holdfast.comm.allreduce.ordered import Span
from holdfast.comm.allreduce.shm import ALIGN
from holdfast.config import debug_wanted
from holdfast.distributed.call_site import Asker
from holdfast.distributed.comm_thread import WORLD, Collective, Engine, Members, Transfer, get_engine
from holdfast.distributed.tensors import (
    ORDER_OF,
    bytes_of,
    check_device,
    factor_of,
    give,
    kind_of,
    name_of,
    of_its_own,
    one,
    plain,
    split,
)
from holdfast.distributed.work import Pending
from holdfast.errors import ConfigError, RanksLost
from holdfast.torch_private import check_version, task_of_backward

_TAGS = 1 << 29
"""Groups have tags below it, messages between two ranks those above."""


def create(options: Any) -> HoldfastGroup:
    """Return the group that torch asks for.

    Args:
        options: torch's ``_DistributedBackendOptions``.

    Raises:
        ConfigError: if this process was not started by mpirun, or with another number than it says.
    """
    notice.decline()  # nothing is saved here that a notice would leave time for
    engine = get_engine(debug=debug_wanted())
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    me = ranks[options.group_rank]
    if engine.world.here != (me,) or max(ranks) >= engine.world.first_size:
        msg = f"RANK and WORLD_SIZE say rank {me} of {options.group_size}, mpirun says rank {engine.world.here[0]} of {engine.world.first_size}"
        raise ConfigError(msg)
    if me == engine.world.members[0]:
        check_version()
    if ranks != tuple(sorted(ranks)):
        msg = f"the ranks of a group must be ascending, got {', '.join(map(str, ranks))}"
        raise ConfigError(msg)
    name = str(options.group_id)
    key = WORLD
    if options.global_ranks_in_group:
        key = 2 + xxhash.xxh3_64_intdigest(f"{name} {ranks}".encode()) % (_TAGS - 2)
    return HoldfastGroup(engine, engine.add_group(key, ranks), options.group_rank, options.timeout.total_seconds())


class HoldfastGroup(ProcessGroup):
    """A group of ranks whose collectives survive, or say who died.

    Args:
        engine: Carries everything out.
        members: The group, as the engine sees it.
        rank: This rank, in the group.
        timeout_s: How long a wait lasts at most.
    """

    def __init__(self, engine: Engine, members: Members, rank: int, timeout_s: float) -> None:
        super().__init__(rank, len(members.ranks))  # type: ignore[call-arg]
        self._engine = engine
        self._members = members
        self._place = rank
        self._timeout_s = timeout_s
        self._name = ""
        self._description = ""
        self._pending: Pending | None = None
        self._lent_in: object = None
        self._lent_bytes = 0

    # -- what it is

    @property
    def alive(self) -> tuple[int, ...]:
        """Global ranks that are alive, ascending."""
        return self._members.alive

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        """Return the word for ``init_process_group``."""
        return "holdfast"

    def getSize(self) -> int:  # noqa: N802 - torch calls it so
        """Return how many ranks the group was made with, dead ones too."""
        return len(self._members.ranks)

    def size(self) -> int:
        """Return how many ranks the group was made with, dead ones too."""
        return len(self._members.ranks)

    def getRank(self) -> int:  # noqa: N802 - torch calls it so
        """Return this rank, in the group."""
        return self._place

    def rank(self) -> int:
        """Return this rank, in the group."""
        return self._place

    @property
    def group_name(self) -> str:
        """The name that torch gave it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description that torch gave it."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def set_timeout(self, timeout: Any) -> None:
        """Set how long a wait lasts at most."""
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Forget the group; the process leaves the job when its script ends."""
        self._engine.drop_group(self._members)

    def abort(self) -> None:
        """Forget the group."""
        self.shutdown()

    # -- reductions

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Work:
        """Reduce a tensor over all ranks, in place."""
        op = ReduceOp.SUM if options is None else options.reduceOp
        return self._reduce(one(tensors, "all_reduce"), op, "all_reduce")

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Work:
        """Reduce several tensors over all ranks, in place."""
        op = ReduceOp.SUM if options is None else options.reduceOp
        works = [self._reduce(tensor, op, "all_reduce_coalesced") for tensor in tensors]
        return self._last_of(works, list(tensors), "all_reduce_coalesced")

    def reduce(self, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        """Reduce a tensor over all ranks; the root has the result."""
        return self._reduce(one(tensors, "reduce"), options.reduceOp, "reduce", root=options.rootRank)

    def _reduce(self, tensor: torch.Tensor, op: Any, what: str, root: int | None = None) -> Work:
        kind = kind_of(op, tensor)
        what = f"{what}({name_of(op)})"
        members, flat = self._members, plain(tensor)
        span, adder = Span(0, flat.numel(), flat.dtype), members.adder
        asker = self._asker()
        in_ddp = asker.is_backward
        step = self._engine.witness.begin_sum(asker.task) if in_ddp and asker.task >= 0 else None
        lends = asker.is_reducer and root is None and kind is ReduceOp.SUM and flat.dtype.is_floating_point
        if lends:
            span, adder = self._behind_the_last(span, asker), members.lender
        result = [tensor]

        def exchange() -> None:
            if root is not None:
                self._check_alive(root, what)
            if not span.length:
                members.comm.barrier()
                return
            sums = adder.up_to(span, ORDER_OF[kind])
            term = span.of(sums.room(0))
            if kind is ReduceOp.PREMUL_SUM:
                torch.mul(flat, factor_of(op), out=term)
            else:
                term.copy_(flat)
            owners = {rank: rank for rank in members.alive}
            midway = _nothing if step is None else lambda: self._engine.witness.reach_in_sum(*step)
            sums(span, owners, order=ORDER_OF[kind], mean=self._mean(kind, span, in_ddp=in_ddp), midway=midway)
            if not sums.in_place:
                members.comm.barrier()

        def finish() -> None:
            if lends and span.length:
                result[0] = of_its_own(adder.result(span)).view(tensor.shape)
            elif span.length and (root is None or root == self._place):
                give(tensor, adder.result(span))

        def deliver() -> None:
            if result[0] is not tensor:
                give(tensor, result[0])

        return self._submit(what, result, exchange, finish, deliver=deliver, like=tensor, root=root, recovers=in_ddp)

    def _behind_the_last(self, span: Span, asker: Asker) -> Span:
        """Return where a bucket goes of which DDP reads the sum when all buckets of the backward pass are summed."""
        if self._lent_in != asker.backward:
            self._lent_in, self._lent_bytes = asker.backward, 0
        placed = Span(self._lent_bytes, span.length, span.dtype)
        self._lent_bytes = placed.end
        return placed

    def _mean(self, kind: Any, span: Span, *, in_ddp: bool) -> Mean | None:
        """Return what to divide by: DDP has divided by all ranks, and the mean is to be that over the survivors."""
        alive, first = len(self._members.alive), len(self._members.ranks)
        if kind is ReduceOp.AVG:
            return Mean(alive, span.length)
        if in_ddp and alive < first and kind is ReduceOp.SUM and span.dtype.is_floating_point:
            return Mean(alive / first, span.length)
        return None

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], options: Any = None
    ) -> Work:
        """Reduce a list of tensors over all ranks, and give each rank one of them."""
        out, parts = one(outputs, "reduce_scatter"), list(one(inputs, "reduce_scatter"))
        op = ReduceOp.SUM if options is None else options.reduceOp
        return self._reduce_scatter(out, parts, op, "reduce_scatter")

    def reduce_scatter_single(self, out: torch.Tensor, whole: torch.Tensor, options: Any = None) -> Work:
        """Reduce a tensor over all ranks, and give each rank a part of it."""
        op = ReduceOp.SUM if options is None else options.reduceOp
        return self._reduce_scatter(out, self._parts(whole, out, "reduce_scatter_tensor"), op, "reduce_scatter_tensor")

    def _reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: Any, what: str) -> Work:
        members = self._members
        kind = kind_of(op, out)
        self._check_count(parts, what)
        if len(parts) == self.size():
            self._check_like(parts[self._place], out, what)
        length = max(part.numel() for part in parts)
        rows: list[torch.Tensor] = []

        def exchange() -> None:
            self._check_fits(parts, what)
            send = torch.zeros(len(members.alive), length, dtype=out.dtype)
            for row, part in zip(send, parts, strict=True):
                row[: part.numel()] = plain(part)
            if kind is ReduceOp.PREMUL_SUM:
                send = send * factor_of(op)
            self._exchange_rows(send, rows)

        def finish() -> None:
            result = torch.empty(out.numel(), dtype=out.dtype)
            ORDERS[ORDER_OF[kind]]([(n, row[: out.numel()]) for n, row in enumerate(rows)], result)
            give(out, result.div_(len(rows)) if kind is ReduceOp.AVG else result)

        return self._submit(what, [out], exchange, finish, like=out)

    # -- moving data

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        """Give every rank the root's tensor."""
        tensor, members, root = one(tensors, "broadcast"), self._members, options.rootRank
        by_ddp = self._asker().is_ddp_outside
        span = Span(0, tensor.numel() * tensor.element_size(), torch.uint8)

        def exchange() -> None:
            source = members.ranks[root]
            if not by_ddp:
                self._check_alive(root, "broadcast")
            elif source not in members.alive:
                source = members.alive[0]  # replicas are equal, or are being made so: any survivor's will do
            if not span.length:
                members.comm.barrier()
                return
            sums = members.adder.up_to(span, "fold")
            if members.ranks[self._place] == source:
                span.of(sums.room(0)).copy_(bytes_of(tensor))
            sums(span, {0: source}, order="fold")
            if not sums.in_place:
                members.comm.barrier()

        def finish() -> None:
            if span.length:
                give(tensor, members.adder.result(span))

        return self._submit("broadcast", [tensor], exchange, finish, like=tensor, root=root, recovers=by_ddp)

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], options: Any = None
    ) -> Work:
        """Give every rank the tensors of all."""
        outs, part = list(one(outputs, "all_gather")), one(inputs, "all_gather")
        self._check_list(outs, part, "all_gather")
        return self._gather(outs, part, "all_gather", outs)

    def all_gather_single(self, out: torch.Tensor, part: torch.Tensor, options: Any = None) -> Work:
        """Give every rank the tensors of all, one behind the other."""
        outs = self._parts(out, part, "all_gather_into_tensor")
        return self._gather(outs, part, "all_gather_into_tensor", [out])

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], options: Any) -> Work:
        """Give the root the tensors of all."""
        part, root = one(inputs, "gather"), options.rootRank
        outs = list(one(outputs, "gather")) if self._place == root else None
        if outs is not None:
            self._check_list(outs, part, "gather")
        return self._gather(outs, part, "gather", outs or [], root)

    def _gather(
        self,
        outs: Sequence[torch.Tensor] | None,
        part: torch.Tensor,
        what: str,
        result: list[torch.Tensor],
        root: int | None = None,
    ) -> Work:
        members = self._members
        by_ddp = self._asker().is_ddp_outside
        given: dict[int, torch.Tensor] = {}

        def exchange() -> None:
            if root is not None:
                self._check_alive(root, what)
            if not by_ddp:
                self._check_fits(outs, what)
            mine = plain(part)
            whole = torch.empty(len(members.alive), mine.numel(), dtype=mine.dtype)
            if mine.numel():
                members.comm.allgather(mine, whole)
            given.clear()
            given.update(zip(members.alive, whole, strict=True))
            members.comm.barrier()

        def finish() -> None:
            if outs is None:
                return
            rows = list(given.values())
            if by_ddp:  # it compares what the ranks say: the dead agree with this one
                rows = [given.get(rank, plain(part)) for rank in members.ranks]
            for out, row in zip(outs, rows, strict=True):
                give(out, row)

        return self._submit(what, result, exchange, finish, like=part, root=root, recovers=by_ddp)

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], options: Any) -> Work:
        """Give every rank one of the root's tensors."""
        out, root = one(outputs, "scatter"), options.rootRank
        parts = list(one(inputs, "scatter")) if self._place == root else None
        if parts is not None:
            self._check_list(parts, out, "scatter")
        members = self._members
        rows: list[torch.Tensor] = []
        source: list[int] = []

        def exchange() -> None:
            self._check_alive(root, "scatter")
            self._check_fits(parts, "scatter")
            mine = plain(out)
            send = torch.zeros(len(members.alive), mine.numel(), dtype=mine.dtype)
            if parts is not None:
                send = torch.stack([plain(part) for part in parts])
            source[:] = [members.alive.index(members.ranks[root])]
            self._exchange_rows(send, rows)

        def finish() -> None:
            give(out, rows[source[0]])

        return self._submit("scatter", [out], exchange, finish, like=out, root=root)

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None) -> Work:
        """Give every rank one tensor, and take one from each."""
        if len(outputs) != len(inputs):
            msg = f"all_to_all needs as many outputs as inputs, got {len(outputs)} and {len(inputs)}"
            raise ValueError(msg)
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
        """Give every rank a part of a tensor, and take a part from each."""
        what = "all_to_all_single"
        count = len(splits or out_splits or ()) or self.size()
        outs, parts = split(out, out_splits, count, what), split(whole, splits, count, what)
        self._check_count(parts, what)
        return self._alltoall(outs, parts, what, [out])

    def _alltoall(
        self, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], what: str, result: list[torch.Tensor]
    ) -> Work:
        members = self._members
        received: list[torch.Tensor] = []

        def exchange() -> None:
            self._check_fits(parts, what)
            mine = [bytes_of(part) for part in parts]
            size = members.comm.maximum([max(t.numel() for t in mine)])[0]
            size = -(-size // ALIGN) * ALIGN  # so that numbers of any type begin where they may
            send = torch.zeros(len(mine), size, dtype=torch.uint8)
            for row, data in zip(send, mine, strict=True):
                row[: data.numel()] = data
            self._exchange_rows(send, received)

        def finish() -> None:
            for out, row in zip(outs, received, strict=True):
                give(out, row[: out.numel() * out.element_size()])

        return self._submit(what, result, exchange, finish)

    def barrier(self, opts: Any = None) -> Work:
        """Return when all ranks have called it."""
        return self._submit("barrier", [], self._members.comm.barrier, _nothing, like=torch.empty(0))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it; say so if they do not in time."""
        self.barrier().wait(*([timeout] if timeout else []))

    # -- several at once

    def all_gather_single_coalesced(
        self, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], options: Any = None
    ) -> Work:
        """Gather several tensors, each into one."""
        works = [self.all_gather_single(out, part) for out, part in zip(outs, parts, strict=True)]
        return self._last_of(works, list(outs), "all_gather_into_tensor_coalesced")

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], options: Any = None
    ) -> Work:
        """Gather several tensors; ``outputs`` has a list a rank."""
        works = [self.allgather([[row[i] for row in outputs]], [part]) for i, part in enumerate(inputs)]
        return self._last_of(works, [t for row in outputs for t in row], "all_gather_coalesced")

    def reduce_scatter_single_coalesced(
        self, outs: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], options: Any = None
    ) -> Work:
        """Reduce and scatter several tensors."""
        works = [self.reduce_scatter_single(out, whole, options) for out, whole in zip(outs, wholes, strict=True)]
        return self._last_of(works, list(outs), "reduce_scatter_tensor_coalesced")

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _get_backend(self, device: Any) -> ProcessGroup:
        """Return what works for a device, as torch >= 2.14 asks before a batch of messages: no part of this group, but all of it."""
        return self

    def _start_coalescing(self, device: Any = None) -> None:
        self._pending = None

    def _end_coalescing(self, device: Any = None) -> Work:
        last = self._pending
        if last is not None:
            return last
        return self.barrier()

    def _last_of(self, works: Sequence[Work], result: list[torch.Tensor], what: str) -> Work:
        """Return a work that is over when all of ``works`` are, which are over in their order."""
        if len(works) == 1:
            return works[0]
        return self._submit(what, result, _wait_for(works), _nothing, counts=False)

    # -- between two ranks

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        """Give a tensor to one rank."""
        data = bytes_of(one(tensors, "send")).clone()
        return self._transfer(tensors, f"send to rank {rank}", rank, tag, data, _nothing)

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        """Take a tensor from one rank."""
        tensor = one(tensors, "recv")
        data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        return self._transfer(tensors, f"recv from rank {rank}", rank, tag, data, lambda: give(tensor, data))

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Work:
        """Take a tensor from whoever sends first."""
        tensor = one(tensors, "recv")
        data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        return self._transfer(tensors, "recv from any rank", None, tag, data, lambda: give(tensor, data))

    def _transfer(
        self,
        tensors: Sequence[torch.Tensor],
        what: str,
        rank: int | None,
        tag: int,
        data: torch.Tensor,
        finish: Callable[[], None],
    ) -> Work:
        if rank is not None and not 0 <= rank < self.size():
            msg = f"{what}: there are ranks 0 to {self.size() - 1} in the group"
            raise ValueError(msg)
        members, world = self._members, self._engine.world
        sends = what.startswith("send")
        number = _TAGS + xxhash.xxh3_64_intdigest(f"{members.key} {tag}".encode()) % _TAGS

        def begin() -> Any:
            if rank is not None:
                self._check_alive(rank, what)
            peer = None if rank is None else members.ranks[rank]
            if sends:
                assert peer is not None
                return world.start_send(data, peer, number)
            return world.start_receive(data, peer, number)

        work = Pending(list(tensors), what, self._timeout_s, _nothing_to_give_up)
        return self._engine.submit(Transfer(members, what, begin, finish, work))

    # -- common parts

    def _submit(
        self,
        what: str,
        result: list[torch.Tensor],
        exchange: Callable[[], None],
        finish: Callable[[], None],
        *,
        deliver: Callable[[], None] | None = None,
        like: torch.Tensor | None = None,
        root: int | None = None,
        recovers: bool = False,
        counts: bool = True,
    ) -> Work:
        for tensor in result:
            check_device(tensor, what)
        if root is not None and not 0 <= root < self.size():
            msg = f"{what}: the root must be a rank of the group, 0 to {self.size() - 1}, got {root}"
            raise ValueError(msg)
        work = Pending(result, what, self._timeout_s, self._engine.give_up, deliver)
        signature = what
        if like is not None:
            signature += f" {like.dtype} {tuple(like.shape)}" + ("" if root is None else f" root {root}")
        job = Collective(self._members, what, exchange, finish, recovers, work, signature if counts else "")
        self._pending = work
        return self._engine.submit(job)

    def _exchange_rows(self, send: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Give row ``i`` to the ``i``-th of those alive, and put what they gave into ``rows``.

        Before the last barrier: if that fails here and has returned elsewhere, the collective has its result.
        """
        out = torch.empty_like(send)
        if send.numel():
            self._members.comm.alltoall(send, out)
        rows[:] = list(out)
        self._members.comm.barrier()

    def _asker(self) -> Asker:
        """Return which part of torch or of the script asks for this collective."""
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
            frame = frame.f_back
        return Asker(frame, task_of_backward())

    def _check_alive(self, rank: int, what: str) -> None:
        members = self._members
        if members.ranks[rank] not in members.alive:
            msg = (
                f"{what} needs rank {members.ranks[rank]}, which has died; alive: {', '.join(map(str, members.alive))}"
            )
            raise RanksLost(msg, members.dead, members.alive)

    def _check_count(self, parts: Sequence[torch.Tensor], what: str) -> None:
        # Who is alive changes under our hands: how many that makes is compared later, at all ranks alike.
        if not 0 < len(parts) <= self.size() or (len(parts) < self.size() and not self._members.dead):
            msg = f"{what} needs one tensor for each of the {self.size()} ranks of the group, got {len(parts)}"
            raise ValueError(msg)

    def _check_list(self, parts: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
        self._check_count(parts, what)
        for part in parts:
            self._check_like(part, like, what)

    @staticmethod
    def _check_like(part: torch.Tensor, like: torch.Tensor, what: str) -> None:
        if part.dtype != like.dtype or part.numel() != like.numel():
            msg = f"{what} needs tensors of one kind, got {part.dtype} {tuple(part.shape)} and {like.dtype} {tuple(like.shape)}"
            raise ValueError(msg)

    def _parts(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return ``whole`` cut into pieces of the size of ``part``, one a rank."""
        count = whole.numel() // part.numel() if part.numel() and self._members.dead else self.size()
        if whole.dtype != part.dtype or whole.numel() != count * part.numel():
            msg = f"{what} of {count} ranks needs {count} x {part.numel()} numbers of {part.dtype}, got {whole.numel()} of {whole.dtype}"
            raise ValueError(msg)
        if whole.is_contiguous():
            return list(whole.view(count, part.numel()))
        if not whole.dim() or whole.shape[0] % count:
            msg = f"{what} needs a contiguous tensor, or one whose first dimension {count} ranks divide"
            raise ValueError(msg)
        return list(whole.split(whole.shape[0] // count))

    def _check_fits(self, parts: Sequence[torch.Tensor] | None, what: str) -> None:
        """Make sure that everybody who gives or takes a tensor a rank has one for each rank alive.

        Some have no list, such as all but the root of a gather. So the ranks tell each other, once somebody has died: who
        raised alone would leave the others waiting.

        Raises:
            RanksLost: at all ranks, if one has another number.
        """
        members = self._members
        fits = parts is None or len(parts) == len(members.alive)
        if self._engine.world.generation and members.comm.maximum([int(not fits)])[0]:
            msg = (
                f"{what} was given another number of tensors than the {len(members.alive)} ranks that are alive "
                f"({', '.join(map(str, members.alive))}): what the dead ranks {', '.join(map(str, members.dead))} "
                "held, such as shards of parameters, is lost; give one tensor for each rank alive, or load a checkpoint"
            )
            raise RanksLost(msg, members.dead, members.alive)


def _nothing() -> None:
    pass


def _nothing_to_give_up(_: Pending) -> None:
    """A message that does not come holds nobody up."""


def _wait_for(works: Sequence[Work]) -> Callable[[], None]:
    def check() -> None:
        for work in works:
            work.wait()  # over already: they were submitted before

    return check
