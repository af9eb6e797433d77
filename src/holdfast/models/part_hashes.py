"""The fingerprint of a model in parts: the holder of a part hashes it, and the commit vote carries the digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from holdfast.comm import Communicator
from holdfast.config import Settings
from holdfast.integrity.fingerprint import RotatingDigest, StateDigests
from holdfast.integrity.hash_chain import number_of_tensors
from holdfast.integrity.state_hashes import Fingerprint, hash_tensors
from holdfast.models.part import ModelPart
from holdfast.models.resident_parts import ResidentParts
from holdfast.records.certified import HashedState
from holdfast.recovery.vote import MinMax

_Looked = TypeVar("_Looked")


class HashedParts:
    """A model in parts, as the fingerprint sees it."""

    resident: ResidentParts

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


class PartFingerprint(Fingerprint):
    """Hashes this process's parts of a model.

    Each step hashes a window of one part, the next step one of another part, so a rotation is as long as that of a
    replicated model. Buffers that all workers have count as one more part.
    """

    def __init__(self, model: HashedParts, comm: Communicator, settings: Settings) -> None:
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
