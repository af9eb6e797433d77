"""Delta standbys: copies of parts as they were some steps ago, in the memory of workers that do not hold them.

The first holder of a part keeps a running checkpoint of it (:mod:`holdfast.checkpoint.priority`) and sends every save
to the standbys, which apply it to their copy. This happens between two steps, so a save is of a committed step. A part
is saved completely before the first step with a new placement. A save counts on a standby once it has arrived
completely. State outside the blocks, such as buffers, is sent completely with every save. So is the optimizer state if
it is to be kept; it is then sent before every step, whether blocks are saved in it or not. The first standby also
writes its copy to disk (:mod:`holdfast.models.standby_files`).

Source: Qiao et al., "Fault tolerance in iterative-convergent machine learning", ICML 2019 (SCAR).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.format import flatten, unflatten
from holdfast.checkpoint.priority import PartialSave, PriorityPolicy, RunningCheckpoint
from holdfast.comm import Communicator, Mailbox
from holdfast.models.flat_params import FlatParams
from holdfast.models.resident_parts import ResidentParts
from holdfast.models.standby_files import StandbyFiles
from holdfast.models.training_state import clone
from holdfast.state.context import JobContext
from holdfast.state.transfer import as_message, of_message, pack_state, room_for

OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class RestoredPart:
    """A restored part."""

    state: dict[str, Any]
    ages: torch.Tensor  # steps since each of its blocks was saved; int64, shape (blocks,)
    optimizer_age: int | None = None  # the same for its optimizer state; None if that is as old as the blocks


@dataclass(slots=True)
class _Copy:
    """A copy of a part: the tensors in rows, and the rest, which is of one step."""

    rows: RunningCheckpoint
    layout: list[list[Any]]
    rest: dict[str, Any]
    rest_at: int
    kept_by: frozenset[int]
    """The local ranks that have it in memory."""

    def restore(self, step: int, *, keeps_optimizer: bool) -> RestoredPart:
        blocks = torch.arange(len(self.rows.saved_at))
        rows = [row.reshape(-1) for row in self.rows.recover(blocks, step)]
        age = step - self.rest_at if keeps_optimizer else None
        return RestoredPart(_together(self.layout, rows, self.rest), step - self.rows.saved_at, age)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows.state_dict(), "layout": self.layout, "rest": self.rest}

    @staticmethod
    def from_state(state: dict[str, Any], step: int, saving: PriorityPolicy) -> _Copy:
        rows = RunningCheckpoint(state["rows"]["saved"], saving)
        rows.load_state_dict(state["rows"])
        return _Copy(rows, state["layout"], state["rest"], step, frozenset())


class DeltaStandbys:
    """Keeps this worker's delta standbys, and the saves of its own parts, in memory and on disk; warns of damage."""

    def __init__(
        self,
        resident: ResidentParts,
        row_of: Callable[[int], torch.Tensor],
        job: JobContext,
        warn: Callable[[str], None],
    ) -> None:
        settings = job.settings
        self._job = job
        self._resident = resident
        self._row_of = row_of
        self._optimizer = settings.mirror_optimizer
        self._saving = PriorityPolicy(
            every=settings.mirror_every,
            fraction=settings.mirror_fraction,
            choice=settings.mirror_choice,
            distance=settings.mirror_distance,
            predictor=settings.mirror_predictor,
            codec=settings.mirror_codec,
            seed=settings.seed,
        )
        self._written = StandbyFiles(job, warn)
        self._own: dict[int, tuple[FlatParams, RunningCheckpoint, int]] = {}
        self._copies: dict[int, _Copy] = {}
        self._saved_with: Any = None

    def exchange(self, comm: Communicator, mailbox: Mailbox, step: int) -> None:
        """Save the parts as due before ``step``; called by all, between :meth:`Mailbox.begin` and the step's messages."""
        self._written.publish(step)
        placement = self._resident.now
        is_first = self._saved_with is not placement
        if not (is_first or step % self._saving.period == 0 or self._optimizer == "kept"):
            return
        comm.check_failures()  # a failed worker sends no save, which virtual workers must imitate
        if is_first:
            self._forget(comm.local_ranks)
            self._written.expect(
                [part for part, ranks in enumerate(placement.backups) if ranks and ranks[0] in comm.local_ranks]
            )
        for part, backups in enumerate(placement.backups):  # send everything before waiting for anything
            giver = placement.holders(part)[0]
            if backups and giver in comm.local_ranks:
                header, *rest = self._save(part, step)
                mailbox.send(backups, header, me=giver)
                self._job.faults.reach("mirror", step, giver)
                for message in rest:
                    mailbox.send(backups, message, me=giver)
        comm.check_failures()  # a virtual worker may have failed just now, with everything that it sent
        for part, backups in enumerate(placement.backups):
            receivers = [rank for rank in backups if rank in comm.local_ranks]
            giver = placement.holders(part)[0]
            if receivers:
                self._receive(part, receivers, lambda giver=giver, me=receivers[0]: mailbox.receive(giver, me=me))  # type: ignore[misc]
        self._saved_with = placement
        for part, copy in self._copies.items():
            self._written.write(part, step, copy.state_dict)

    def _forget(self, here: Sequence[int]) -> None:
        """Discard copies of the previous placement; a remaining standby keeps its copy until a new one comes."""
        self._own = {}
        keeps = {part for part, ranks in enumerate(self._resident.now.backups) if not set(ranks).isdisjoint(here)}
        self._copies = {part: copy for part, copy in self._copies.items() if part in keeps}

    # -- on a holder of a part

    def _save(self, part: int, step: int) -> list[torch.Tensor]:
        """Save a part, or the blocks that are due (possibly none), and return the messages."""
        held = self._resident.held[part]
        rows = self._own[part][0] if part in self._own else FlatParams(held, self._row_of(part))
        now = (rows.of_parameters(), *(rows.of_optimizer() if self._optimizer == "saved" else ()))
        state = held.state_dict()
        if self._optimizer == "reset":
            state[OPTIMIZER] = state[OPTIMIZER] | {"state": {}}
        layout, rest = _apart(state, now)
        is_whole = part not in self._own or self._own[part][2] != len(now)  # an optimizer starts empty
        header: dict[str, Any] = {"step": step, "whole": is_whole, "layout": layout}
        sent: tuple[torch.Tensor, ...] = ()
        if is_whole:
            self._own[part] = rows, RunningCheckpoint(now, self._saving, step=step), len(now)
            sent = now
        elif self._own[part][1].is_due(step):
            saved = self._own[part][1].save(now, step)
            sent = saved.blocks, *saved.payload
            header["share"] = saved.share
        rest_header, packed = pack_state(rest)
        header |= {"count": len(sent), "rest": rest_header}
        return [as_message(header), *packed.share(0, 1), *sent]

    # -- on a standby

    def _receive(self, part: int, mine: Sequence[int], receive: Callable[[], torch.Tensor]) -> None:
        header = of_message(receive())
        tensors, packed = room_for(header["rest"])
        for piece in packed.pieces:
            piece.copy_(receive())
        packed.unpack()
        sent = [receive() for _ in range(header["count"])]
        if header["whole"]:
            rows = RunningCheckpoint(sent, self._saving, step=header["step"])
        else:
            rows = self._copies[part].rows
            if sent:
                rows.put(PartialSave(header["step"], sent[0].clone(), tuple(sent[1:]), header["share"]))
        rest = unflatten(tensors, header["rest"]["skeleton"])
        self._copies[part] = _Copy(rows, header["layout"], rest, header["step"], frozenset(mine))

    def restore(self, part: int, step: int, here: Sequence[int]) -> RestoredPart | None:
        """Return the state of a part before ``step`` from the memory of one of ``here``, None if there is none."""
        copy = self._copies.get(part)
        return None if copy is None or copy.kept_by.isdisjoint(here) else self._restored(copy, step)

    def restore_written(self, part: int, step: int) -> RestoredPart | None:
        """Return the state of a part before ``step`` from disk; None if this job has written no intact copy."""
        checkpoint = self._written.newest(part)
        if checkpoint is None:
            return None
        return self._restored(_Copy.from_state(checkpoint.state, checkpoint.step, self._saving), step)

    def _restored(self, copy: _Copy, step: int) -> RestoredPart:
        return copy.restore(step, keeps_optimizer=self._optimizer == "kept")

    def close(self) -> None:
        """Stop writing copies: training has ended."""
        self._written.close()

    def bytes_held(self) -> int:
        """Return the bytes of all copies on this worker: of parts that others hold, and of its own, as last saved."""
        kept = [copy.state_dict() for copy in self._copies.values()]
        kept += [own.state_dict() for _, own, _ in self._own.values()]
        leaves = (leaf for one in kept for leaf in flatten(one)[0].values())
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def _apart(state: dict[str, Any], rows: Sequence[torch.Tensor]) -> tuple[list[list[Any]], dict[str, Any]]:
    """Return the location in the rows of each tensor of a state, by path, and the rest of the state."""
    leaves, skeleton = flatten(state)
    layout, rest = [], {}
    for path, leaf in leaves.items():
        place = _place(leaf, rows) if isinstance(leaf, torch.Tensor) else None
        if place is None:
            rest[path] = leaf
        else:
            layout.append([path, *place, list(leaf.shape)])
    return layout, {"skeleton": json.dumps(skeleton), "leaves": rest}


def _place(leaf: torch.Tensor, rows: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the row of a tensor, and its offset there; None if it lies in no row."""
    for number, row in enumerate(rows):
        at, odd = divmod(leaf.data_ptr() - row.data_ptr(), row.element_size())
        if leaf.numel() and not odd and 0 <= at < row.numel():
            return number, at
    return None


def _together(layout: Sequence[Sequence[Any]], rows: Sequence[torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """Rebuild the state that :func:`_apart` took apart from these rows."""
    leaves = dict(rest["leaves"])
    for path, number, at, shape in layout:
        size = torch.Size(shape)
        leaves[path] = rows[number][at : at + size.numel()].view(size)
    state: dict[str, Any] = clone(unflatten(leaves, json.loads(rest["skeleton"])))
    return state
