"""The process group that torch calls: maps each collective of ``torch.distributed`` to its implementation."""

# mypy: disable-error-code="override, assignment"
# (torch's stubs give each method two signatures, one of which it never calls on a group made in Python.)

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch.distributed import ProcessGroup, Work

from holdfast.base import notice
from holdfast.base.torch_private import check_version, is_profiling
from holdfast.distributed.comm_thread import get_engine
from holdfast.distributed.debug_mode import debug_wanted
from holdfast.distributed.group_base import Tensors
from holdfast.distributed.members import WORLD
from holdfast.distributed.monitored import wait_for_all
from holdfast.distributed.moves import MoveCollectives
from holdfast.distributed.reductions import ReduceCollectives
from holdfast.distributed.solo import BEFORE_REGISTER, SoloCollectives
from holdfast.distributed.staged import StagedCollectives
from holdfast.distributed.staging import current_staging
from holdfast.distributed.tasks import P2PTransfer, nothing
from holdfast.distributed.tensors import bytes_of, one, overwrite
from holdfast.distributed.work import PendingWork
from holdfast.errors import ConfigError

_TAGS = 1 << 29
"""Tags of groups lie below it, those of point-to-point messages above."""


def create(options: Any) -> HoldfastGroup:
    """Return the group for torch's ``_DistributedBackendOptions``; ``ConfigError`` if the launcher's ranks disagree."""
    notice.decline()  # a preemption notice is of no use here: this backend saves nothing
    engine = get_engine(debug=debug_wanted())
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    me, size = ranks[options.group_rank], engine.world.first_size
    is_newcomer = not engine.joining.is_seated
    if me != engine.joining.seat or max(ranks) >= size:
        raise ConfigError(
            f"RANK and WORLD_SIZE say rank {me} of {options.group_size}, the launcher says rank {engine.joining.seat} "
            f"of {size}: unset RANK and WORLD_SIZE"
        )
    if engine.world.members[:1] == (me,):
        check_version()
    if ranks != tuple(sorted(ranks)):
        raise ConfigError(f"the ranks of a group must be ascending, got {', '.join(map(str, ranks))}")
    name = str(options.group_id)
    key = WORLD
    if options.global_ranks_in_group:
        if is_newcomer:
            raise ConfigError(f"new_group is not possible {BEFORE_REGISTER}")
        key = 2 + xxhash.xxh3_64_intdigest(f"{name} {ranks}".encode()) % (_TAGS - 2)
    kind = NewcomerGroup if is_newcomer else HoldfastGroup
    return kind(engine, engine.add_group(key, ranks), options.group_rank, options.timeout.total_seconds())


class HostGroup(ReduceCollectives, MoveCollectives):
    """All collectives of tensors in host memory."""

    # -- coalesced collectives

    def all_gather_single_coalesced(self, outs: Tensors, parts: Tensors, options: Any = None) -> Work:
        """All-gather several tensors, each into one."""
        begin = [functools.partial(self.all_gather_single, *each) for each in zip(outs, parts, strict=True)]
        return self._coalesce(begin, parts, list(outs), "all_gather_into_tensor_coalesced")

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any = None) -> Work:
        """All-gather several tensors; ``outputs`` has one list per rank."""
        begin = [
            functools.partial(self.allgather, [[row[i] for row in outputs]], [part]) for i, part in enumerate(inputs)
        ]
        return self._coalesce(begin, inputs, [t for row in outputs for t in row], "all_gather_coalesced")

    def reduce_scatter_single_coalesced(self, outs: Tensors, wholes: Tensors, options: Any = None) -> Work:
        """Reduce-scatter several tensors."""
        pairs = zip(outs, wholes, strict=True)
        begin = [functools.partial(self.reduce_scatter_single, *each, options) for each in pairs]
        return self._coalesce(begin, wholes, list(outs), "reduce_scatter_tensor_coalesced")

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _get_backend(self, device: Any) -> ProcessGroup:
        """Return the backend of a device, which torch >= 2.14 requests before a batch of messages: the group itself."""
        return self

    def _start_coalescing(self, device: Any = None) -> None:
        self._pending = None

    def _end_coalescing(self, device: Any = None) -> Work:
        last = self._pending
        if last is not None:
            return last
        return self.barrier()

    # -- point-to-point

    def send(self, tensors: Tensors, rank: int, tag: int) -> Work:
        """Send a tensor to one rank."""
        return self._transfer(one(tensors, "send"), f"send to rank {rank}", rank, tag, sends=True)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Work:
        """Receive a tensor from one rank."""
        return self._transfer(one(tensors, "recv"), f"recv from rank {rank}", rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from the rank that sends first."""
        return self._transfer(one(tensors, "recv"), "recv from any rank", None, tag)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks have called it; see :func:`~holdfast.distributed.monitored.wait_for_all`."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._monitored += 1
        wait_for_all(self, self._monitored - 1, limit_s, all_ranks=wait_all_ranks)

    _monitored = 0
    """Monitored barriers that this rank has called."""

    def _transfer(self, tensor: torch.Tensor, what: str, rank: int | None, tag: int, *, sends: bool = False) -> Work:
        length = tensor.numel() * tensor.element_size()
        staging = current_staging()
        if staging is not None:
            data = bytes_of(tensor)  # a twin, which nothing else uses
        else:
            data = bytes_of(tensor).clone() if sends else torch.empty(length, dtype=torch.uint8)
        if rank is not None and not 0 <= rank < self.size():
            raise ValueError(f"{what}: the rank must be in the group, 0 to {self.size() - 1}")
        members, world = self._members, self._engine.world
        number = _TAGS + xxhash.xxh3_64_intdigest(f"{members.key} {tag}".encode()) % _TAGS

        def begin() -> Any:
            if rank is not None:
                self._check_alive(rank, what)
            peer = None if rank is None else members.ranks[rank]
            if peer is None or not sends:
                return world.start_receive(data, peer, number)
            return world.start_send(data, peer, number)

        finish = nothing if sends or staging is not None else functools.partial(overwrite, tensor, data)
        result = [tensor]
        if staging is not None:
            begin, finish = staging.after_copies(begin), staging.before_copies(finish, [] if sends else [tensor])
            result = staging.originals(result)
        # It delays no collective.
        work = PendingWork(result, what, self._timeout_s, lambda _: None, staging=staging)
        if is_profiling():
            work.profile([tensor])
        return self._engine.submit(P2PTransfer(members, what, begin, finish, work))


class HoldfastGroup(StagedCollectives, HostGroup):
    """A group of ranks whose collectives survive failures, or report which ranks failed."""


class NewcomerGroup(SoloCollectives, HoldfastGroup):
    """The group of all ranks on a newcomer: on its own until it has taken a seat, like any other afterwards."""
