"""The certificate while training goes on: each worker makes the same links, from what it has of the step anyway.

Nothing is sent, nothing is copied. The state is hashed when an attempt at a step begins, because then it is the same however the
step before came about: with updates made late or early, after a death, or of a newcomer. The last link belongs to the state
of training and goes where that goes (``World.link``): into checkpoints, to newcomers, and back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from holdfast.errors import InternalError
from holdfast.guard import RotatingDigest
from holdfast.guard.fingerprint import EVERY_KIND, raw
from holdfast.links import WHOLE_EVERY, digest_of_figures, digest_of_ids, digest_of_tensors, link_of
from holdfast.train.batches import MiniBatch
from holdfast.train.replica import Replica
from holdfast.train.world import World

if TYPE_CHECKING:
    from holdfast.train.split.body import Pipelined
    from holdfast.train.split.sharded import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What was certified of a step; as :class:`~holdfast.events.StepCommitted` has it.

    Args:
        before: The link before.
        tensors: Digests by path, where the whole state was hashed, else nothing.
    """

    before: str
    link: str
    ids: str
    figures: str
    state: str
    where: str
    tensors: dict[str, str]


class Certificate:
    """Makes the links of one training loop.

    Of a model that is split nobody has all of the state, and who goes on without having heard the closing sum would not know what
    others have of it: its links are of samples and metrics.

    Args:
        world: Keeps the last one.
        replica: What is trained.
    """

    def __init__(self, world: World, replica: Replica | Pipelined | Shards) -> None:
        self._world = world
        self._replica = replica
        self._digest: RotatingDigest | None = None
        if isinstance(replica, Replica):
            buffers = replica.buckets.buffers.beginning()
            self._digest = RotatingDigest(replica.model, replica.optimizer, buffers=buffers)
        self._begun = (-1, "")
        self._tensors: dict[str, str] = {}

    def begin(self, step: int) -> None:
        """Hash a part of the state, before anything of an attempt at ``step`` changes it."""
        self._tensors, state = {}, ""
        if self._digest is not None and step % WHOLE_EVERY == 0:
            self._tensors = _hash_whole(self._digest)
            state = digest_of_tensors(self._tensors)
        elif self._digest is not None:
            state = f"{self._digest.of_step(step, EVERY_KIND):016x}"
        self._begun = (step, state)

    def commit(self, batch: MiniBatch, lost: Collection[int]) -> Link:
        """Add the link of the step in progress, all sums of which are known.

        Args:
            batch: Its mini-batch.
            lost: Slices that are not, or not whole, in the sums.
        """
        world = self._world
        begun, state = self._begun
        if begun != batch.step:
            msg = f"step {batch.step} is committed, and the state was hashed before step {begun}"
            raise InternalError(msg)
        committed = [number for number in sorted(batch.owners) if number not in lost]
        ids = digest_of_ids((number, batch.slices[number].astype("<i8").tobytes()) for number in committed)
        figures = digest_of_figures(self._replica.figures())
        before, world.link = (
            world.link,
            link_of(
                world.link,
                step=batch.step,
                epoch=batch.epoch,
                samples=batch.samples_of(committed),
                ids=ids,
                figures=figures,
                state=state,
            ),
        )
        return Link(
            before=before,
            link=world.link,
            ids=ids,
            figures=figures,
            state=state,
            where="everything" if self._tensors else self._where(batch.step),
            tensors=self._tensors,
        )

    def _where(self, step: int) -> str:
        return self._digest.where(step) if self._digest is not None and self._world.is_lead else ""

    def hash_end(self) -> dict[str, str]:
        """Return the digest of each tensor when no step is in progress, by path."""
        if self._digest is None or not isinstance(self._replica, Replica):
            return {}
        self._replica.buckets.buffers.begin_step()
        return _hash_whole(self._digest)


def _hash_whole(digest: RotatingDigest) -> dict[str, str]:
    return {path: xxhash.xxh3_64_hexdigest(raw(tensor)) for path, tensor in digest.tensors()}
