"""The certificate during training: each worker computes the same hash chain from data that it holds anyway.

Nothing is copied: the state enters as the fingerprint of the step (:mod:`holdfast.integrity.state_hashes`). The latest link is part of
the training state (``JobContext.link``): it is saved in checkpoints, sent to newcomers and rolled back with the state.

No worker has the whole state of a pipeline or sharded model. Each part is hashed by its owners, and the commit vote shares the digests
in a few more integers. A worker that missed a vote which others completed learns the digests from the progress messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from holdfast.data.plan import MiniBatch
from holdfast.errors import InternalError
from holdfast.integrity.hash_chain import (
    GENESIS,
    WHOLE_EVERY,
    digest_of_figures,
    digest_of_ids,
    digest_of_parts,
    link_of,
)
from holdfast.integrity.state_hashes import Fingerprint
from holdfast.records.certified import ChainLink, HashedState
from holdfast.recovery.messages import Progress
from holdfast.recovery.vote import MinMax
from holdfast.state.context import JobContext


class Certificate:
    """Computes the links of one training loop from the fingerprints and ``figures`` of its steps."""

    def __init__(self, job: JobContext, figures: Callable[[], list[float]], fingerprint: Fingerprint) -> None:
        self._job = job
        self._figures = figures
        self._fingerprint = fingerprint
        self._digest = (-1, "")
        self._received = 0

    def begin(self, step: int) -> None:
        """Record the fingerprint that was taken at the start of an attempt at ``step``."""
        state = self._fingerprint.state
        self._digest = (step, state) if state else (-1, "")  # the vote brings the state

    # -- digests of pipeline and sharded models, shared between workers

    def read(self, step: int, parts: Sequence[MinMax]) -> None:
        """Read the reduced digests of the hashed parts from the vote that commits ``step``; a replicated model has none."""
        if parts:
            self._receive(step, digest_of_parts([number for part in parts for number in part.pack()]))

    @property
    def received(self) -> int:
        """The digest from the last commit vote that this worker completed; 0 if the vote carries none."""
        return self._received

    def learn(self, step: int, progress: Mapping[int, Progress], num_buckets: int) -> None:
        """Adopt the digest of the vote on ``step`` from the progress of a worker that completed that vote."""
        for other in progress.values():
            if self._fingerprint.parts and other.completed // (num_buckets + 1) > step:
                self._receive(step, other.heard)

    def _receive(self, step: int, received: int) -> None:
        self._received, self._digest = received, (step, f"{received:016x}")

    # -- commit

    def commit(self, batch: MiniBatch, lost: Collection[int]) -> ChainLink:
        """Append the link of the step in progress after its all-reduces; slices in ``lost`` are missing from it, in whole or in part."""
        job = self._job
        step, state = self._digest
        if step != batch.step:
            raise InternalError(f"step {batch.step} is committed, but the known state digest is of step {step}")
        committed = [number for number in sorted(batch.owners) if number not in lost]
        ids = digest_of_ids((number, batch.slices[number].astype("<i8").tobytes()) for number in committed)
        figures = digest_of_figures(self._figures())
        before, job.committed.link = (
            job.committed.link,
            link_of(
                job.committed.link,
                step=batch.step,
                epoch=batch.epoch,
                samples=batch.samples_of(committed),
                ids=ids,
                figures=figures,
                state=state,
            ),
        )
        whole = batch.step % WHOLE_EVERY == 0
        return ChainLink(
            before=before,
            link=job.committed.link,
            ids=ids,
            figures=figures,
            state=state,
            where="everything" if whole else self._where(batch.step),
            whole=whole,
            tensors=self._fingerprint.tensors,
        )

    def _where(self, step: int) -> str:
        if not self._job.is_lead:
            return ""
        return self._fingerprint.where(step)

    def hash_end(self) -> list[HashedState]:
        """Return the digests of all resident tensors, when no step is in progress."""
        self._fingerprint.remember_buffers()
        return self._fingerprint.everything()


def begin_certificate(
    job: JobContext, figures: Callable[[], list[float]], fingerprint: Fingerprint
) -> Certificate | None:
    """Return the hash chain of a loop that begins; None if no certificate was requested."""
    if not job.settings.certificate:
        return None
    job.committed.link = job.committed.link or GENESIS
    return Certificate(job, figures, fingerprint)
