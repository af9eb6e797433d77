"""Base class of model-parallel models: parts, their placement on workers, and their fingerprint.

The holder of a part hashes it, and the commit vote carries the digest.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from holdfast.checkpoint.parts import Wanted, all_but
from holdfast.comm import Communicator, Mailbox
from holdfast.config import Settings
from holdfast.errors import CheckpointError, ConfigError
from holdfast.integrity.fingerprint import RotatingDigest, StateDigests
from holdfast.integrity.hash_chain import number_of_tensors
from holdfast.integrity.state_hashes import Fingerprint, hash_tensors
from holdfast.models.part import ModelPart, Stateful
from holdfast.models.part_restore import PartRestorer
from holdfast.models.resident_parts import Build, ResidentParts
from holdfast.models.standby import DeltaStandbys
from holdfast.models.trainable import StepContext, Trainable
from holdfast.models.training_state import clone, model_sha256
from holdfast.records.certified import HashedState
from holdfast.records.types import PartsHeld
from holdfast.recovery.placement import Placement, PlacementShape, initial_placement
from holdfast.recovery.vote import MinMax
from holdfast.state.context import JobContext
from holdfast.state.run_log import RunLog
from holdfast.state.transfer import adopt_lowest

_Looked = TypeVar("_Looked")


class ModelParallel(Trainable):
    """A model in parts, with their placement and state; see :class:`ResidentParts`. One scaler serves all parts."""

    def __init__(self, shape: PlacementShape, build: Build, drop: Callable[[int], None], scaler: Any) -> None:
        super().__init__()
        self._scaler = scaler
        self.parts = shape.parts
        self.sends_copies = shape.lazy
        self.resident = ResidentParts(shape, build, drop)
        self._job: JobContext | None = None
        self._log: RunLog | None = None
        self._sha256s = ("", "")
        self._whole = torch.nn.Module()
        self.backups: DeltaStandbys | None = None

    # -- a loop

    def _connect(self, context: StepContext) -> None:
        job, log = context.job, context.log
        if job.settings.guard == "heal":
            raise ConfigError(
                "guard heal needs a replicated model, not a Pipeline or Sharded, held in parts: use stop or warn"
            )
        self._job, self._log = job, log
        self.backups = DeltaStandbys(self.resident, self._row_of, job, log.warn)

    @abstractmethod
    def _row_of(self, part: int) -> torch.Tensor:
        """Return the flattened parameters of a part that this worker holds."""

    @property
    def _comm(self) -> Communicator:
        assert self._job is not None, "the model is not connected"
        return self._job.comm

    def leave(self) -> None:
        if self.backups is not None:
            self.backups.close()

    def summary(self) -> PartsHeld:
        """Return what this worker holds of the model in its memory."""
        placement, local_ranks = self.resident.now, self._comm.local_ranks
        computes = sorted({part for _, part in placement.computed_by(local_ranks)})
        mirrors = sorted(set(self.resident.held) - set(computes))
        return PartsHeld(
            computes=tuple(computes),
            mirrors=tuple(mirrors),
            backups=tuple(
                part for part, ranks in enumerate(placement.backups) if not set(ranks).isdisjoint(local_ranks)
            ),
            computes_bytes=self.resident.bytes_of(computes),
            mirrors_bytes=self.resident.bytes_of(mirrors),
            copies_bytes=0 if self.backups is None else self.backups.bytes_held(),
        )

    # -- fingerprint and certificate

    def fingerprint(self, comm: Communicator, settings: Settings) -> PartFingerprint:
        return PartFingerprint(self, comm, settings)

    def prefix(self, part: int) -> str:
        """Return the prefix of a part's tensor names in the complete model."""
        return ""

    def common_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return by name the buffers of all workers, as of the beginning of the step; always the same memory."""
        return []

    def remember_buffers(self) -> None:
        """Between steps, take the current buffers as those of the next step's beginning."""
        for held in self.resident.held.values():
            held.buckets.buffers.begin_step()

    # -- planned alterations

    def enter(self, rank: int) -> None:
        """Prepare for computation by a local rank: with its own parts, and others from their lowest local holder."""
        for part, held in self.resident.held.items():
            if held.own.differ:
                holders = self._holders(part, self._comm.local_ranks)
                held.own.enter(rank if rank in holders else min(holders))

    def rest(self, here: Sequence[int]) -> None:
        for part, held in self.resident.held.items():
            if held.own.differ:
                held.own.rest(self._holders(part, here))

    def tensors_of(self, target: str, rank: int, here: Sequence[int]) -> dict[str, torch.Tensor]:
        if self.sends_copies and len(here) > 1:
            raise ConfigError(
                f"{target} cannot be altered with all workers in one process and mirror_every > 1: leave it out"
            )
        named_tensors: dict[str, torch.Tensor] = {}
        for part in self.resident.now.held_by((rank,)):
            tensors = self.resident.held[part].tensors_of(target, rank, self._holders(part, here))
            named_tensors |= {f"{self.prefix(part)}{name}": tensor for name, tensor in tensors.items()}
        return named_tensors

    def _holders(self, part: int, here: Sequence[int]) -> tuple[int, ...]:
        holders = self.resident.now.holders(part)
        return tuple(rank for rank in here if rank in holders)

    def set_learning_rate(self, value: float) -> None:
        for part in self.resident.held.values():
            part.set_learning_rate(value)

    # -- placement

    def lost(self, members: Sequence[int]) -> tuple[int, ...]:
        return self.resident.lost(members)

    def rehome(self, *, restores: bool) -> None:
        restore = None
        if restores:
            assert self._job is not None
            assert self._log is not None
            restorer = PartRestorer(self._job, self.resident, self.backups, self.initial_part, self._log)
            restore = restorer.restore
        self.resident.move_parts(self._comm, restore)

    def initial_part(self, part: int) -> dict[str, Any] | None:
        """Return the initial state of a part; None if it can no longer be built."""
        return None

    def exchange_backups(self, mailbox: Mailbox) -> None:
        """See :meth:`DeltaStandbys.exchange`; does nothing if parts have hot standbys."""
        if self.sends_copies and self.backups is not None:
            assert self._job is not None
            self.backups.exchange(self._comm, mailbox, self._job.step)

    def settle(self) -> None:
        self.resident.adopt_placement(self._comm.local_ranks)

    def make_equal(self, comm: Communicator) -> None:
        """Make the initial parts equal on all their holders, and the shared state equal to that of the lowest rank."""
        self.resident.begin(comm.members, comm.local_ranks, None)
        self.resident.make_equal(comm)
        state = adopt_lowest(comm, self.shared_state())
        if state is not None:
            self.load_shared_state(state)

    def placement(self) -> Any:
        return self.resident.now.to_json()

    def adopt_placement(self, placement: Any) -> None:
        self.resident.placement = Placement.from_json(placement)

    # -- the complete state

    def wanted(self, members: Sequence[int]) -> Wanted | None:
        """Return what this worker needs of a checkpoint: the parts that it holds initially, and the shared state."""
        held = initial_placement(self.resident.shape, members).held_by(self._comm.local_ranks)
        return all_but("replica/parts", *(f"replica/parts/{part}" for part in held))

    def writers(self, comm: Communicator) -> tuple[tuple[int, ...], ...]:
        """Return the processes that write a checkpoint: the lead, and the lowest holder of each part."""
        ranks = [comm.members[0], *self.resident.lowest_holders(comm.members)]
        processes = [next(process for process in comm.processes if rank in process) for rank in ranks]
        return tuple(dict.fromkeys(processes))

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker saves: the parts of which it is the lowest holder; the lead adds the shared state."""
        assert self._job is not None
        comm = self._comm
        own_parts = [
            part for part, rank in enumerate(self.resident.lowest_holders(comm.members)) if rank in comm.local_ranks
        ]
        parts = {"parts": self.resident.states(own_parts)}
        return parts | self.shared_state() if self._job.is_lead else parts

    def shared_state(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._shared().items()}

    def _shared(self) -> dict[str, Stateful]:
        shared = {f"registered.{name}": thing for name, thing in self.registered.items()}
        return shared if self._scaler is None else shared | {"scaler": self._scaler}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Restore the shared state, if this session has the same objects."""
        own_keys = self.shared_state().keys()
        if own_keys != state.keys() - {"parts"}:
            raise CheckpointError(
                f"the checkpoint holds {', '.join(sorted(state))}; this session has {', '.join(sorted(own_keys | {'parts'}))}"
            )
        for name, thing in self._shared().items():
            thing.load_state_dict(clone(state[name]))

    def load_state_dict(self, state: dict[str, Any], *, keeps: bool = False) -> None:
        """Restore the shared state; if the state has parts too, the placement becomes the initial one."""
        self.load_shared_state(state)
        if "parts" in state:
            saved = {int(part): of_part for part, of_part in state["parts"].items()}
            self.resident.begin(self._comm.members, self._comm.local_ranks, saved)

    def sha256s(self, here: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Return by worker the sha256 of the complete model, and that over those of all parts and optimizer states."""
        if not any(held.own.differ for held in self.resident.held.values()):
            return dict.fromkeys(here, self._sha256s)
        digests = {}
        for rank in here:
            self.enter(rank)
            digests[rank] = self._sha256s_now()
        self.rest(here)
        return digests

    def _sha256s_now(self) -> tuple[str, str]:
        """Return them for the worker that was entered last."""
        return model_sha256(self._whole), self._sha256s[1]

    def _note_sha256s(self, model: torch.nn.Module, of_parts: Sequence[str]) -> None:
        self._whole = model
        self._sha256s = (model_sha256(model), hashlib.sha256("".join(of_parts).encode()).hexdigest())


class PartFingerprint(Fingerprint):
    """Hashes this process's parts of a model.

    Each step hashes a window of one part, the next step one of another part, so a rotation is as long as that of a
    replicated model. Buffers that all workers have count as one more part.
    """

    def __init__(self, model: ModelParallel, comm: Communicator, settings: Settings) -> None:
        super().__init__(comm, settings)
        self._model = model
        self._split = model.resident.shape.parts
        self._parts = self._split + bool(model.common_buffers())
        self._digests: WeakKeyDictionary[ModelPart, RotatingDigest] = WeakKeyDictionary()

    def _windows(self, step: int) -> Mapping[int, StateDigests]:
        part, number = self._place(step)
        return self._look(part, lambda digest: digest.take(number))

    def _certify(self, digests: Mapping[int, int]) -> None:
        self.parts = (MinMax.of(digests.values()),)

    def _certify_whole(self, everything: Sequence[HashedState]) -> None:
        numbers: list[list[int]] = [[] for _ in range(self._parts)]
        for hashed in everything:
            numbers[hashed.part].append(number_of_tensors(hashed.tensors))
        self.parts = tuple(map(MinMax.of, numbers))

    def everything(self) -> list[HashedState]:
        """See :meth:`Fingerprint.everything`; equal states of local ranks are returned once."""
        states: list[HashedState] = []
        for part in range(self._parts):
            prefix = self._model.prefix(part) if part < self._split else ""
            unique_tensors: list[dict[str, str]] = []
            for rank, tensors in self._look(part, hash_tensors).items():
                if tensors not in unique_tensors:
                    unique_tensors.append(tensors)
                    named = {f"{prefix}{path}": digest for path, digest in tensors.items()}
                    states.append(HashedState(rank=rank, tensors=named, part=part, parts=self._parts))
        return states

    def where(self, step: int) -> str:
        part, number = self._place(step)
        name = f"part {part}: " if part < self._split else ""
        return next((name + where for where in self._look(part, lambda digest: digest.where(number)).values()), "")

    def remember_buffers(self) -> None:
        self._model.remember_buffers()

    def compare_all(self) -> None:
        """Do nothing: in the last step, too, one window of one part is compared."""

    def compared(self, step: int, half: str = "") -> tuple[str, ...]:
        return (f"part {self._place(step)[0]}",)

    def of_halves(self, step: int) -> dict[str, dict[int, int]]:
        return {}

    def _place(self, step: int) -> tuple[int, int]:
        """Return the part that a step hashes, and the number of the window."""
        return step % self._parts, step // self._parts

    def _look(self, part: int, look: Callable[[RotatingDigest], _Looked]) -> dict[int, _Looked]:
        """Return by local holder of a part the result of ``look`` for that worker's state."""
        local_ranks = self._comm.local_ranks
        if part == self._split:
            buffers = self._model.common_buffers() if self._is_certified else ()
            return dict.fromkeys(local_ranks, look(RotatingDigest(nn.Module(), buffers=buffers)))
        held = self._model.resident.held.get(part)
        if held is None:
            return {}
        digest = self._digests.get(held)
        if digest is None:
            buffers = held.beside() if self._is_certified else ()
            digest = self._digests[held] = RotatingDigest(held.model, held.optimizer, buffers=buffers)
        holders = self._model.resident.now.holders(part)
        return held.own.of_each([rank for rank in local_ranks if rank in holders], lambda: look(digest))


def shape_of(parts: int, chains: int, settings: Settings) -> PlacementShape:
    """Return the shape of the placement; by default, without pipeline replicas, each part has a hot standby."""
    copies = 1 + settings.mirror if settings.mirror >= 0 else 2
    return PlacementShape(parts=parts, chains=chains, copies=copies, lazy=settings.mirror_every > 1)
