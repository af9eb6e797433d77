"""Gloo for the ``torch.distributed`` backend: non-blocking messages, and a revoke from other threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.base.torch_private import source_of
from holdfast.comm.base import Message
from holdfast.comm.c10d import C10dCommunicator
from holdfast.comm.groups import ThreadedWork, as_peer_failure
from holdfast.comm.memory import as_bytes
from holdfast.comm.waiting import waiting
from holdfast.errors import PeerFailed
from holdfast.membership import Store
from holdfast.membership.scope import store_scope

_SCOPE = "dist/"
"""A session in the same script has agreements of its own, in the same store."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A message of the process group: Gloo reports its end only to a thread that waits for it."""

    wait: ThreadedWork
    source: Callable[[], int]


class C10dMessageCommunicator(C10dCommunicator):
    """See :class:`~holdfast.comm.base.MessageCommunicator`.

    Args:
        store: The membership store.
        rank: This worker.
        first_members: The workers that the job starts with; a worker that is not among them joins the job.
    """

    def __init__(self, store: Store, rank: int, first_members: Sequence[int]) -> None:
        is_first = rank in first_members
        super().__init__(store_scope(store, _SCOPE), rank, first_members if is_first else None)
        if not is_first:
            with waiting:
                self._roster.join_at_once()
            self._begin_generation()
            return
        with contextlib.suppress(PeerFailed):  # the next collective raises it again
            self.barrier()

    def start_send(self, data: torch.Tensor, rank: int, tag: int) -> Message:
        place = self._index(rank)
        return self._start(lambda group: group.send([as_bytes(data)], place, tag), lambda _: -1, data)

    def start_receive(self, data: torch.Tensor, rank: int | None, tag: int) -> Message:
        if rank is None:
            members = self.members
            return self._start(
                lambda group: group.recv_anysource([as_bytes(data)], tag), lambda work: members[source_of(work)], data
            )
        place = self._index(rank)
        return self._start(lambda group: group.recv([as_bytes(data)], place, tag), lambda _: rank, data)

    def _start(self, begin: Callable[[Any], Any], source: Callable[[Any], int], data: torch.Tensor) -> Message:
        begun: list[Any] = []
        self._with_group(lambda group: begun.append(begin(group)))
        (work,) = begun
        return Message(_Request(ThreadedWork(work.wait, keep=data), lambda: source(work)), data)

    def test(self, message: Message) -> int | None:
        self._check_thread()
        request: _Request = message.request
        if not request.wait.is_completed():
            self.check_failures()
            return None
        with as_peer_failure():
            request.wait.wait()
        return request.source()

    def abandon(self, message: Message) -> None:
        """Do nothing: the thread that waits for a message keeps its memory; see :meth:`MessageCommunicator.abandon`."""

    def is_revoked(self) -> bool:
        return self._roster.is_revoked()

    def revoke_from_outside(self) -> None:
        self._roster.revoke()
