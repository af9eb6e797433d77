"""The certificate while training goes on: each worker makes the same links, from what it has of the step anyway.

Nothing is copied: of the state it has the fingerprint of the step (:mod:`holdfast.integrity.state_hashes`). The last link belongs to the
state of training and goes where that goes (``World.link``): into checkpoints, to newcomers, and back.

Of a model that is split nobody has all of the state. Who holds a part hashes it, and the closing sum tells it to all, with a
few integers more. Who missed that sum, and goes on with the step because others did not, hears it with everybody's progress.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from holdfast.data.plan import MiniBatch
from holdfast.engine.context import World
from holdfast.engine.vote import Spread
from holdfast.errors import InternalError
from holdfast.integrity.certified import Hashed, Link
from holdfast.integrity.hash_chain import WHOLE_EVERY, digest_of_figures, digest_of_ids, digest_of_parts, link_of
from holdfast.integrity.state_hashes import Fingerprint
from holdfast.recovery.messages import Progress


class Certificate:
    """Makes the links of one training loop, of the fingerprints and ``figures`` of its steps."""

    def __init__(self, world: World, figures: Callable[[], list[float]], fingerprint: Fingerprint) -> None:
        self._world = world
        self._figures = figures
        self._fingerprint = fingerprint
        self._known = (-1, "")
        self._heard = 0

    def begin(self, step: int) -> None:
        """Hear that the fingerprint of an attempt at ``step`` is taken."""
        state = self._fingerprint.state
        self._known = (step, state) if state else (-1, "")  # the vote says it

    # -- of a split model: what others must hear

    def read(self, step: int, parts: Sequence[Spread]) -> None:
        """Hear what all say of the parts that are hashed, in a vote that closes ``step``; of a replicated model nothing."""
        if parts:
            self._hear(step, digest_of_parts([number for part in parts for number in part.pack()]))

    @property
    def heard(self) -> int:
        """What the last closing sum that this worker completed said; 0 where nothing is said."""
        return self._heard

    def learn(self, step: int, known: Mapping[int, Progress], num_buckets: int) -> None:
        """Hear with everybody's progress what the closing sum of ``step`` said, if another worker has completed it."""
        for other in known.values():
            if self._fingerprint.parts and other.completed // (num_buckets + 1) > step:
                self._hear(step, other.heard)

    def _hear(self, step: int, heard: int) -> None:
        self._heard, self._known = heard, (step, f"{heard:016x}")

    # -- a step

    def commit(self, batch: MiniBatch, lost: Collection[int]) -> Link:
        """Add the link of the step in progress, all sums of which are known; ``lost`` slices are not, or not whole, in them."""
        world = self._world
        known, state = self._known
        if known != batch.step:
            raise InternalError(f"step {batch.step} is committed, and what is known of the state is of step {known}")
        committed = [number for number in sorted(batch.owners) if number not in lost]
        ids = digest_of_ids((number, batch.slices[number].astype("<i8").tobytes()) for number in committed)
        figures = digest_of_figures(self._figures())
        before, world.committed.link = (
            world.committed.link,
            link_of(
                world.committed.link,
                step=batch.step,
                epoch=batch.epoch,
                samples=batch.samples_of(committed),
                ids=ids,
                figures=figures,
                state=state,
            ),
        )
        whole = batch.step % WHOLE_EVERY == 0
        return Link(
            before=before,
            link=world.committed.link,
            ids=ids,
            figures=figures,
            state=state,
            where="everything" if whole else self._where(batch.step),
            whole=whole,
            tensors=self._fingerprint.tensors,
        )

    def _where(self, step: int) -> str:
        if not self._world.is_lead:
            return ""
        return self._fingerprint.where(step)

    def hash_end(self) -> list[Hashed]:
        """Return digests of all tensors that this worker has, when no step is in progress."""
        self._fingerprint.remember_buffers()
        return self._fingerprint.everything()
