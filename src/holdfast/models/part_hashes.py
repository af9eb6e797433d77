"""What is certified of the state of a split model: who holds a part hashes it, and the closing sum tells all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from holdfast.comm import Communicator
from holdfast.integrity.fingerprint import EVERY_KIND, RotatingDigest
from holdfast.integrity.hash_chain import number_of_tensors, said_of_part
from holdfast.integrity.state_hashes import Hashed, Said, hash_tensors
from holdfast.models.replicated import Replica

if TYPE_CHECKING:
    from holdfast.models.model_parallel import Split

_Looked = TypeVar("_Looked")


class PartHashes:
    """Hashes what this process has of a split model; see :class:`~holdfast.integrity.state_hashes.WholeHashes`.

    In each step it is a window of one part, in the next one of another part, so that a rotation is as long as that of a
    model that is not split. Buffers that all workers have count as one more part.

    Args:
        body: The model.
        comm: The living.
    """

    def __init__(self, body: Split, comm: Communicator) -> None:
        self._body = body
        self._comm = comm
        self._split = body.holdings.shape.parts
        self._parts = self._split + bool(body.common_buffers())
        self._digests: WeakKeyDictionary[Replica, RotatingDigest] = WeakKeyDictionary()

    def window(self, step: int) -> Said:
        """Return what the window of a step says, which is of one part."""
        part, number = self._place(step)
        return Said(brings=said_of_part(self._look(part, lambda digest: digest.of_step(number, EVERY_KIND)).values()))

    def everything(self) -> list[Hashed]:
        """Return digests of all tensors that are here; those of workers that this process plays once, where they are the same."""
        found: list[Hashed] = []
        for part in range(self._parts):
            prefix = self._body.prefix(part) if part < self._split else ""
            known: list[dict[str, str]] = []
            for rank, tensors in self._look(part, hash_tensors).items():
                if tensors not in known:
                    known.append(tensors)
                    named = {f"{prefix}{path}": digest for path, digest in tensors.items()}
                    found.append(Hashed(rank=rank, tensors=named, part=part, parts=self._parts))
        return found

    def said(self, everything: Sequence[Hashed]) -> Said:
        """Return what a step says before which everything is hashed."""
        numbers: list[list[int]] = [[] for _ in range(self._parts)]
        for hashed in everything:
            numbers[hashed.part].append(number_of_tensors(hashed.tensors))
        return Said(brings=tuple(number for of_part in numbers for number in said_of_part(of_part)))

    def where(self, step: int) -> str:
        """Return which windows are those of a step, for people; "" if nobody here has the part."""
        part, number = self._place(step)
        name = f"part {part}: " if part < self._split else ""
        return next((name + where for where in self._look(part, lambda digest: digest.where(number)).values()), "")

    def remember_buffers(self) -> None:
        """See :meth:`Split.remember_buffers`."""
        self._body.remember_buffers()

    def _place(self, step: int) -> tuple[int, int]:
        """Return the part of which a step hashes a window, and which one."""
        return step % self._parts, step // self._parts

    def _look(self, part: int, look: Callable[[RotatingDigest], _Looked]) -> dict[int, _Looked]:
        """Return, by worker, what ``look`` returns of a part as that worker has it; nothing of those who do not hold it."""
        here = self._comm.here
        if part == self._split:
            return dict.fromkeys(here, look(RotatingDigest(nn.Module(), buffers=self._body.common_buffers())))
        held = self._body.holdings.held.get(part)
        if held is None:
            return {}
        digest = self._digests.get(held)
        if digest is None:
            digest = self._digests[held] = RotatingDigest(held.model, held.optimizer, buffers=held.beside())
        holders = self._body.holdings.now.holders(part)
        return held.own.of_each([rank for rank in here if rank in holders], lambda: look(digest))
