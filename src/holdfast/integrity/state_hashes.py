"""What is certified of the state where everybody has all of it. Of a model that is split see :mod:`holdfast.models.part_hashes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from holdfast.comm import Communicator
from holdfast.integrity.fingerprint import EVERY_KIND, RotatingDigest, raw
from holdfast.integrity.hash_chain import digest_of_tensors

if TYPE_CHECKING:
    from holdfast.models.replicated import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashed:
    """Digests of all tensors of a part, as one worker has it; as :class:`~holdfast.records.types.StateHashed` has them.

    Args:
        rank: Who.
        tensors: Digests by path.
        part: Which, -1 where the model is not split.
        parts: How many there are, 0 where it is not.
    """

    rank: int
    tensors: dict[str, str]
    part: int = -1
    parts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What hashing the state before a step says of it.

    Args:
        state: What stands in the link of the step, "" where it takes what others bring to the closing sum to know it.
        brings: What this process brings to that sum, a maximum; empty where nobody needs to hear it.
    """

    state: str = ""
    brings: tuple[int, ...] = ()


class WholeHashes:
    """Hashes the state where everybody has all of it, so that all know what the others do without being told.

    Args:
        replica: The model, with its optimizer.
        comm: The living.
    """

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        self._buffers = replica.buckets.buffers
        self._comm = comm
        self._digest = RotatingDigest(replica.model, replica.optimizer, buffers=replica.beside())

    def window(self, step: int) -> Said:
        """Return what the window of a step says."""
        return Said(state=f"{self._digest.of_step(step, EVERY_KIND):016x}")

    def everything(self) -> list[Hashed]:
        """Return digests of all tensors."""
        return [Hashed(rank=min(self._comm.here), tensors=hash_tensors(self._digest))]

    def said(self, everything: Sequence[Hashed]) -> Said:
        """Return what a step says before which everything is hashed."""
        (hashed,) = everything
        return Said(state=digest_of_tensors(hashed.tensors))

    def where(self, step: int) -> str:
        """Return which windows are those of a step, for people."""
        return self._digest.where(step)

    def remember_buffers(self) -> None:
        """Let the buffers, where no step is in progress, count as those with which one begins."""
        self._buffers.begin_step()


def hash_tensors(digest: RotatingDigest) -> dict[str, str]:
    """Return the digest of each tensor that there is, by path."""
    return {path: xxhash.xxh3_64_hexdigest(raw(tensor)) for path, tensor in digest.tensors()}
