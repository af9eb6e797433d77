"""The fingerprint of a replicated model: every worker hashes the same state, so no digest needs to be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.comm import Communicator
from holdfast.config import Settings
from holdfast.integrity.fingerprint import EVERYTHING, HALVES, LONGEST_ROTATION, RotatingDigest, StateDigests
from holdfast.integrity.hash_chain import digest_of_tensors
from holdfast.integrity.state_hashes import Fingerprint, hash_tensors
from holdfast.models.part import ModelPart
from holdfast.records.certified import HashedState
from holdfast.recovery.vote import MinMax


class WholeFingerprint(Fingerprint):
    """The fingerprint of a replicated model: every worker has the complete state, and knows which part others hash."""

    def __init__(self, whole: ModelPart, comm: Communicator, settings: Settings) -> None:
        super().__init__(comm, settings)
        self._whole = whole
        self.digest: RotatingDigest = RotatingDigest(
            whole.model,
            whole.optimizer,
            LONGEST_ROTATION if settings.guard in ("warn", "heal") else 0,
            buffers=whole.beside() if self._is_certified else (),
        )

    def _windows(self, step: int) -> Mapping[int, StateDigests]:
        return self._whole.own.of_each(self._comm.local_ranks, lambda: self.digest.take(step))

    def _certify(self, digests: Mapping[int, int]) -> None:
        self.state = f"{digests[min(digests)]:016x}"

    def _certify_whole(self, everything: Sequence[HashedState]) -> None:
        (hashed,) = everything
        self.state = digest_of_tensors(hashed.tensors)

    def everything(self) -> list[HashedState]:
        return [HashedState(rank=min(self._comm.local_ranks), tensors=hash_tensors(self.digest))]

    def where(self, step: int) -> str:
        return self.digest.where(step)

    def remember_buffers(self) -> None:
        self._whole.buckets.buffers.begin_step()

    def compare_all(self) -> None:
        self.is_of_all = True
        self._whole.wait_updated()
        numbers = self._whole.own.of_each(self._comm.local_ranks, lambda: self.digest.of_step(EVERYTHING))
        self.replicas = MinMax.of(numbers.values())

    def compared(self, step: int, half: str = "") -> tuple[str, ...]:
        if self.is_of_all:
            return (half or "everything",)
        return tuple(dict.fromkeys(piece.path for piece in self.digest.pieces(step, (half,) if half else HALVES)))

    def of_halves(self, step: int) -> dict[str, dict[int, int]]:
        self._whole.wait_updated()
        window = EVERYTHING if self.is_of_all else step
        return {half: self._of_half(window, half) for half in HALVES}

    def _of_half(self, window: int, half: str) -> dict[int, int]:
        return self._whole.own.of_each(self._comm.local_ranks, lambda: self.digest.of_step(window, (half,)))
