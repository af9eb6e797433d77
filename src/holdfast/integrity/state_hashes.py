"""The fingerprint of a step: the state before it, hashed once. Replicas are compared by it, and the certificate is made of it.

It is taken when an attempt at the step begins. Then the state is the same however the step before came about: with updates made
late or early, after a death, or of a newcomer. Of what, see :mod:`holdfast.models.whole_hashes` and, for a model that is split, :mod:`holdfast.models.part_hashes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import xxhash

from holdfast.comm import Communicator
from holdfast.config import Settings
from holdfast.engine.vote import Spread
from holdfast.integrity.certified import Hashed
from holdfast.integrity.fingerprint import Digests, RotatingDigest, raw
from holdfast.integrity.hash_chain import WHOLE_EVERY


class Fingerprint(ABC):
    """What the state before the step in progress is, as this process has it; nothing where neither guard nor certificate reads it."""

    def __init__(self, comm: Communicator, settings: Settings) -> None:
        self._comm = comm
        self.digest: RotatingDigest | None = None
        """Of the state that all have; None where workers hold parts."""
        self._is_compared = settings.guard != "off"
        self._is_certified = settings.certificate
        self.replicas: Spread | None = None
        """For the guard: of what replicas compare. None if they do not."""
        self.is_of_all = False
        """Whether that is all there is."""
        self.state = ""
        """For the certificate: what stands in the link of the step; "" where that takes the parts of others."""
        self.parts: tuple[Spread, ...] = ()
        """For the certificate of a split model: of each part that is hashed in this step."""
        self.tensors: list[Hashed] = []
        """In a step that hashes everything for the certificate: digests of all tensors that are here."""

    def take(self, step: int) -> None:
        """Hash what is hashed before ``step``, before anything of an attempt at it changes that."""
        is_whole = self._is_certified and step % WHOLE_EVERY == 0
        self.tensors = self.everything() if is_whole else []
        self.is_of_all = False
        is_window_read = self._is_compared or (self._is_certified and not is_whole)
        windows = self._windows(step) if is_window_read else {}
        if self._is_compared:
            self.replicas = Spread.of([digests.replicas for digests in windows.values()])
        if is_whole:
            self._certify_whole(self.tensors)
        elif self._is_certified:
            self._certify({rank: digests.certified for rank, digests in windows.items()})

    @abstractmethod
    def _windows(self, step: int) -> Mapping[int, Digests]:
        """Return the digests of the windows of a step, by worker that this process plays and that has them."""

    @abstractmethod
    def _certify(self, digests: Mapping[int, int]) -> None:
        """Say what is certified of the windows of a step, which have these digests."""

    @abstractmethod
    def _certify_whole(self, everything: Sequence[Hashed]) -> None:
        """Say what is certified of a step before which everything is hashed."""

    @abstractmethod
    def everything(self) -> list[Hashed]:
        """Return digests of all tensors that are here."""

    @abstractmethod
    def where(self, step: int) -> str:
        """Return which windows are certified in a step, for people; "" if this process does not have them."""

    @abstractmethod
    def remember_buffers(self) -> None:
        """Let the buffers, where no step is in progress, count as those with which one begins."""

    # -- for the guard, beside the spread of the replicas

    @abstractmethod
    def compare_all(self) -> None:
        """Take the replicas' digest of all that there is, as it is now: no later step would find what flips meanwhile."""

    @abstractmethod
    def compared(self, step: int, half: str = "") -> tuple[str, ...]:
        """Return the names of what is compared in a step, or of one half of it."""

    @abstractmethod
    def of_halves(self, step: int) -> dict[str, dict[int, int]]:
        """Return by half of what is compared in a step, and by worker, the digest of what is there now; nothing of parts."""


def hash_tensors(digest: RotatingDigest) -> dict[str, str]:
    """Return the digest of each tensor that there is, by path."""
    return {path: xxhash.xxh3_64_hexdigest(raw(tensor)) for path, tensor in digest.tensors()}
