"""Common parts of the collectives of ``torch.distributed``: a group of ranks, its communication thread, and checks."""

# mypy: disable-error-code="override, assignment"
# (torch's stubs give each method two signatures, one of which it never calls on a group made in Python.)

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from holdfast.base.torch_private import is_profiling, task_of_backward
from holdfast.distributed.call_site import CallSite
from holdfast.distributed.comm_thread import CommThread
from holdfast.distributed.members import GroupMembers
from holdfast.distributed.parts import Fate, seen
from holdfast.distributed.staging import current_staging
from holdfast.distributed.tasks import Collective, CollectiveCall
from holdfast.distributed.tensors import WrongArgument, check_device
from holdfast.distributed.work import PendingWork
from holdfast.errors import RanksLost, ScriptError

Tensors = Sequence[torch.Tensor]


class GroupBase(ProcessGroup):
    """A group of ranks whose collectives run in the communication thread; ``rank`` is the rank in the group."""

    def __init__(self, engine: CommThread, members: GroupMembers, rank: int, timeout_s: float) -> None:
        super().__init__(rank, len(members.ranks))  # type: ignore[call-arg]
        self._engine = engine
        self._members = members
        self._index = rank
        self._timeout_s = timeout_s
        self._name = ""
        self._description = ""
        self._pending: PendingWork | None = None
        self._is_profiled = True
        self._is_released = False
        self._policy = engine.recorder.settings.empty_seats

    # -- attributes

    @property
    def engine(self) -> CommThread:
        """The communication thread of this process."""
        return self._engine

    @property
    def timeout_s(self) -> float:
        """Default timeout of a wait."""
        return self._timeout_s

    @property
    def alive_places(self) -> list[int]:
        """Ranks in the group that are alive, ascending."""
        return [place for place, rank in enumerate(self._members.ranks) if rank in self._members.alive]

    @property
    def alive(self) -> tuple[int, ...]:
        """Global ranks that are alive, ascending."""
        return self._members.alive

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        """Return the backend name for ``init_process_group``."""
        return "holdfast"

    def size(self) -> int:
        """Return the initial number of ranks, including failed ones."""
        return len(self._members.ranks)

    getSize = size  # noqa: N815 - torch calls it so

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._index

    getRank = rank  # noqa: N815 - torch calls it so

    @property
    def group_name(self) -> str:
        """The group's name, set by torch."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The group's description, set by torch."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def set_timeout(self, timeout: Any) -> None:
        """Set the default timeout of a wait."""
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Release the group; the process leaves the job when its script ends."""
        self._is_released = True
        self._engine.drop_group(self._members)

    abort = shutdown

    # -- common parts

    def _submit(self, call: CollectiveCall) -> Work:
        what, root = call.what, call.root
        if self._is_released:  # DDP holds on to its group; the other ranks would wait for this one without end
            raise ScriptError(f"{what}: its process group was destroyed by destroy_process_group; call that at the end")
        for tensor in call.result:
            check_device(tensor, what, call.layout)
        if root is not None and not 0 <= root < self.size():
            raise WrongArgument(f"{what}: the root must be a rank of the group, 0 to {self.size() - 1}, got {root}")
        staging = current_staging()
        if staging is not None:
            call = dataclasses.replace(
                call,
                result=staging.originals(call.result),
                exchange=staging.after_copies(call.exchange),
                finish=staging.before_copies(call.finish, call.result),
            )
        work = PendingWork(call.result, what, self._timeout_s, self._engine.give_up, call.deliver, staging)
        if self._is_profiled and is_profiling():
            work.profile(call.profiled)
        self._pending = work
        return self._engine.submit(Collective(self._members, call, work))

    def _coalesce(
        self, begin: Sequence[Callable[[], Work]], inputs: Tensors, result: list[torch.Tensor], what: str
    ) -> Work:
        """Begin works that complete in order, and return one that completes when all have, which profilers see."""
        if len(begin) == 1:
            return begin[0]()
        self._is_profiled = False
        try:
            works = [each() for each in begin]
        finally:
            self._is_profiled = True
        fate = Fate(recovers=True)  # the error, if any, is that of one of them
        return self._submit(CollectiveCall(what, result, _wait_for(works), fate=fate, inputs=inputs, is_batch=True))

    def _exchange_rows(self, send: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Send row ``i`` to the ``i``-th surviving rank, and store the received rows in ``rows``.

        This comes before the last barrier: if that fails here and succeeded on another rank, the result is complete.
        """
        out = torch.empty_like(send)
        if send.numel():
            self._members.comm.alltoall(send, out)
        rows[:] = list(out)
        self._members.comm.barrier()

    def _call_site(self) -> CallSite:
        """Return which part of torch or of the script calls this collective."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__package__") == __package__:
            frame = frame.f_back
        return CallSite(frame, task_of_backward())

    def _fate(self, call_site: CallSite, tensors: Tensors = (), *, gathers: bool = False) -> Fate:
        """Return what becomes of a collective after a failure; see :meth:`~holdfast.distributed.parts.Evidence.fate`."""
        staging = current_staging()
        tensors = tensors if staging is None else staging.originals(tensors)
        spans_job = self.size() == self._engine.world.first_size
        return seen.fate(call_site, tensors, self._policy, spans_job=spans_job, gathers=gathers)

    def _note_scaled(self, what: str, place: str) -> None:
        """Say and record on one rank, in the communication thread, that a sum of the script was scaled, if it has a place."""
        members = self._members
        if place and members.ranks[self._index] == members.alive[0]:
            self._engine.recorder.scaled(what, place, members.dead, len(members.ranks))

    def _check_alive(self, rank: int, what: str, fate: Fate = Fate()) -> None:  # noqa: B008 - frozen
        members, needed = self._members, self._members.ranks[rank]
        if needed not in members.alive:
            raise RanksLost(
                f"{what} needs rank {needed}, which has failed; alive:"
                f" {', '.join(map(str, members.alive))}{fate.advice(members.dead, root=needed)}",
                members.dead,
                members.alive,
            )

    def _check_count(self, parts: Tensors, what: str) -> None:
        # Ranks may fail at any moment: the number of survivors is compared later, on all ranks alike.
        if not 0 < len(parts) <= self.size() or (len(parts) < self.size() and not self._members.dead):
            raise WrongArgument(f"{what} needs one tensor per rank of the group, {self.size()}, got {len(parts)}")

    def _check_list(self, parts: Tensors, like: torch.Tensor, what: str) -> None:
        self._check_count(parts, what)
        for part in parts:
            self._check_like(part, like, what)

    @staticmethod
    def _check_like(part: torch.Tensor, like: torch.Tensor, what: str) -> None:
        if part.dtype != like.dtype or part.numel() != like.numel():
            raise WrongArgument(
                f"{what} needs tensors of one dtype and size, got {part.dtype} {tuple(part.shape)} and"
                f" {like.dtype} {tuple(like.shape)}"
            )

    def _parts(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return ``whole`` cut into pieces of the size of ``part``, one per rank."""
        count = whole.numel() // part.numel() if part.numel() and self._members.dead else self.size()
        if whole.dtype != part.dtype or whole.numel() != count * part.numel():
            raise WrongArgument(
                f"{what} of {count} ranks needs {count} x {part.numel()} elements of {part.dtype}, got"
                f" {whole.numel()} of {whole.dtype}"
            )
        if whole.is_contiguous():
            return list(whole.view(count, part.numel()))
        if not whole.dim() or whole.shape[0] % count:
            raise WrongArgument(f"{what} needs a contiguous tensor, or a first dimension divisible by {count} ranks")
        return list(whole.split(whole.shape[0] // count))

    def _check_fits(self, parts: Tensors | None, what: str, fate: Fate) -> None:
        """Make sure that each rank that passes one tensor per rank has one for each surviving rank.

        If it recovers, one for each initial rank will do. Some ranks have no list, such as all but the root of a
        gather. So after a failure the ranks compare, and all raise ``RanksLost``: if one rank raised alone, the others
        would wait forever.
        """
        members, fills = self._members, fate.recovers
        fits = parts is None or len(parts) == len(members.alive) or (fills and len(parts) == self.size())
        if self._engine.world.generation and members.comm.maximum([int(not fits)])[0]:
            alive = ", ".join(map(str, members.alive))
            count = "as many tensors as ranks were alive before" if fills else "one tensor per initial rank"
            raise RanksLost(
                f"{what} did not complete: it got {count}, but only {len(members.alive)} ranks are alive ({alive})"
                f"{fate.advice(members.dead)}. A call with one tensor for each surviving rank would be over these",
                members.dead,
                members.alive,
            )


def _wait_for(works: Sequence[Work]) -> Callable[[], None]:
    def check() -> None:
        for work in works:
            work.wait()  # already complete: they were submitted before

    return check
