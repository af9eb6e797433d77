"""The fingerprint of a step: the state before it, hashed once. Replicas are compared by it, and the certificate includes it.

It is taken at the start of an attempt at the step. The state is then the same whether updates were overlapped or late, after a failure,
and on a newcomer. :mod:`holdfast.models.replicated` hashes replicated models, :mod:`holdfast.models.model_parallel` split ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from holdfast.comm import Communicator
from holdfast.config import Settings
from holdfast.integrity.fingerprint import RotatingDigest, StateDigests, digests_of
from holdfast.integrity.hash_chain import WHOLE_EVERY
from holdfast.records.certified import HashedState
from holdfast.recovery.vote import MinMax


class Fingerprint(ABC):
    """The digests of this process's state before the step in progress; empty if neither guard nor certificate needs them."""

    def __init__(self, comm: Communicator, settings: Settings) -> None:
        self._comm = comm
        self.digest: RotatingDigest | None = None
        """Digest of the replicated state; None for pipeline and sharded models."""
        self._is_compared = settings.guard != "off"
        self._is_certified = settings.certificate
        self.replicas: MinMax | None = None
        """For the guard: the spread of the replicas' digests. None if replicas are not compared."""
        self.is_of_all = False
        """Whether the digests cover the whole state."""
        self.state = ""
        """For the certificate: the state digest in the link of the step; "" if it needs the parts of other workers."""
        self.parts: tuple[MinMax, ...] = ()
        """For the certificate of a pipeline or sharded model: the spread of each part that is hashed in this step."""
        self.tensors: list[HashedState] = []
        """In a step that hashes the whole state for the certificate: digests of all resident tensors."""

    def take(self, step: int) -> None:
        """Take the fingerprint of the state before ``step``, before an attempt at it changes the state."""
        is_whole = self._is_certified and step % WHOLE_EVERY == 0
        self.tensors = self.everything() if is_whole else []
        self.is_of_all = False
        is_window_read = self._is_compared or (self._is_certified and not is_whole)
        windows = self._windows(step) if is_window_read else {}
        if self._is_compared:
            self.replicas = MinMax.of([digests.replicas for digests in windows.values()])
        if is_whole:
            self._certify_whole(self.tensors)
        elif self._is_certified:
            self._certify({rank: digests.certified for rank, digests in windows.items()})

    @abstractmethod
    def _windows(self, step: int) -> Mapping[int, StateDigests]:
        """Return the window digests of a step, by local rank that holds the windows."""

    @abstractmethod
    def _certify(self, digests: Mapping[int, int]) -> None:
        """Set the certified digest of a step from its window digests."""

    @abstractmethod
    def _certify_whole(self, everything: Sequence[HashedState]) -> None:
        """Set the certified digest of a step in which the whole state is hashed."""

    @abstractmethod
    def everything(self) -> list[HashedState]:
        """Return the digests of all resident tensors."""

    @abstractmethod
    def where(self, step: int) -> str:
        """Return the windows certified in a step, for display; "" if this process does not hold them."""

    @abstractmethod
    def remember_buffers(self) -> None:
        """Store the current buffers as those of the next step's start; call it only between steps."""

    # -- details for the guard

    @abstractmethod
    def compare_all(self) -> None:
        """Take the replicas' digest of the whole current state: no later step would detect a flip."""

    @abstractmethod
    def compared(self, step: int, half: str = "") -> tuple[str, ...]:
        """Return the names of the pieces compared in a step, or in one half of it."""

    @abstractmethod
    def of_halves(self, step: int) -> dict[str, dict[int, int]]:
        """Return the current digests of what is compared in a step, by half and by worker; empty for pipeline and sharded models."""


def hash_tensors(digest: RotatingDigest) -> dict[str, str]:
    """Return the digest of each tensor, by path."""
    return digests_of(digest.tensors())
