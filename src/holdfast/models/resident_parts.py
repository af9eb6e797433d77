"""The parts of a model that are resident on this worker, and the placement of all parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.format import flatten
from holdfast.comm import Communicator
from holdfast.errors import InternalError
from holdfast.models.part import ModelPart
from holdfast.models.training_state import clone
from holdfast.recovery.placement import (
    Placement,
    PlacementShape,
    Restoration,
    initial_placement,
    next_placement,
    restorations,
    transfers,
)
from holdfast.state.transfer import receive_part, send_part

Build = Callable[[int], ModelPart]
Restore = Callable[[int], dict[str, Any]]
"""Returns the state of a part without a surviving holder, as it was some steps ago."""


class ResidentParts:
    """Keeps the resident parts in line with the placement: initially, and when workers fail or join.

    ``build`` returns a part in its initial state, and ``drop`` is called when a part is no longer resident.
    """

    def __init__(self, shape: PlacementShape, build: Build, drop: Callable[[int], None] = lambda part: None) -> None:
        self.shape = shape
        self._build = build
        self._drop = drop
        self.placement: Placement | None = None
        self.held: dict[int, ModelPart] = {}
        self._next: Placement | None = None
        self._staged: dict[int, dict[str, Any]] = {}

    @property
    def now(self) -> Placement:
        """The current placement."""
        assert self.placement is not None, "the parts have no placement yet"
        return self.placement

    def lost(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the parts without a holder among ``members``; none before there is a placement."""
        return () if self.placement is None else self.placement.lost(members)

    def begin(self, members: Sequence[int], here: Sequence[int], saved: Mapping[int, Mapping[str, Any]] | None) -> None:
        """Adopt the initial placement for these members, with initial states or those in ``saved``, by part."""
        self._staged, self._next = {}, None
        self.placement = initial_placement(self.shape, members)
        held = self.placement.held_by(here)
        for part in set(self.held) - set(held):
            self._forget(part)
        for part in held:
            if saved is None or part not in self.held:
                self.held[part] = self._build(part)
            if saved is not None:
                self.held[part].load_state_dict(clone(saved[part]))
        self.held = dict(sorted(self.held.items()))

    def make_equal(self, comm: Communicator) -> None:
        """Send the lowest holder's part to the other holders, so that nondeterminism in building it has no effect."""
        for part in range(self.now.parts):
            giver, *takers = self.now.holders(part)
            for taker in takers:
                state = self._transfer(comm, part, giver, taker)
                if state is not None:
                    self.held[part].load_state_dict(state, keeps=True)

    def move_parts(self, comm: Communicator, restore: Restore | None = None) -> int:
        """Give all parts holders among the survivors; received states are staged until :meth:`adopt_placement`.

        Parts without a holder are allowed only with ``restore``. Returns the number of parts transferred or restored.
        """
        self._staged = {}
        self._next = next_placement(self.shape, self.now, comm.members)
        moved = transfers(self.now, self._next, comm.members)
        for transfer in moved:
            state = self._transfer(comm, transfer.part, transfer.giver, transfer.taker)
            if state is not None:
                self._staged[transfer.part] = state
        lost = restorations(self.now, self._next, comm.members)
        for restoration in lost:
            self._restore(comm, restoration, restore)
        return len(moved) + len(lost)

    def _restore(self, comm: Communicator, this: Restoration, restore: Restore | None) -> None:
        """Take part in restoring a part: one worker restores it, and sends it to all its new holders."""
        if restore is None:
            raise InternalError(f"part {this.part} of the model has no surviving holder, and cannot be restored")
        if this.restorer in comm.local_ranks:
            state = restore(this.part)
            if {this.restorer, *this.takers} & set(comm.local_ranks) & set(self._next_placement.holders(this.part)):
                self._staged[this.part] = state
            for taker in this.takers:
                if taker not in comm.local_ranks:
                    send_part(comm, taker, state)
        elif set(this.takers) & set(comm.local_ranks):
            self._staged[this.part] = receive_part(comm, this.restorer)

    @property
    def _next_placement(self) -> Placement:
        assert self._next is not None, "there is no new placement"
        return self._next

    def adopt_placement(self, here: Sequence[int]) -> None:
        """Adopt the new placement, which every worker has."""
        self.placement, self._next = self._next_placement, None
        for part, state in self._staged.items():
            self.held[part] = self._build(part)
            self.held[part].load_state_dict(state, keeps=True)
        self._staged = {}
        for part in set(self.held) - set(self.placement.held_by(here)):
            self._forget(part)
        self.held = dict(sorted(self.held.items()))

    def lowest_holders(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the writer of each part: its lowest holder in ``members``, because a holder may just have failed."""
        placement = self.now
        return tuple(
            next(rank for rank in placement.holders(part) if rank in members) for part in range(placement.parts)
        )

    def states(self, parts: Sequence[int]) -> dict[str, Any]:
        """Return the states of some resident parts, by number as a string, not copied."""
        return {str(part): self.held[part].state_dict() for part in parts}

    def bytes_of(self, parts: Sequence[int]) -> int:
        """Return the bytes of the weights and optimizer states of some resident parts."""
        leaves = flatten(self.states(parts))[0].values()
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    def sha256s(self) -> dict[int, str]:
        """Return by resident part the sha256 over its weights and its optimizer state."""
        return {part: held.state_sha256() for part, held in self.held.items()}

    def _transfer(self, comm: Communicator, part: int, giver: int, taker: int) -> dict[str, Any] | None:
        """Take part in the transfer of a part; return its state on the receiver."""
        if giver in comm.local_ranks and taker in comm.local_ranks:
            return None  # one process runs both, and has the part
        if giver in comm.local_ranks:
            send_part(comm, taker, self.held[part].state_dict())
        elif taker in comm.local_ranks:
            return receive_part(comm, giver)
        return None

    def _forget(self, part: int) -> None:
        del self.held[part]
        self._drop(part)
