"""Inputs (:class:`Event`: what happened) and outputs (:class:`Action`: what to do) of the protocol and of a strategy.

They never leave the process. A worker's progress is one number, ``completed``: the collectives of training that it has
completed. A step with ``num_buckets`` buckets has ``num_buckets + 1`` collectives; the last one is the commit vote.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

LOADING = -1
"""``completed`` of a worker that has decided to load a checkpoint and has not finished doing so."""

JOINING = -2
"""``completed`` of a newcomer that has been admitted and has not received the training state yet."""


class Note(enum.IntFlag):
    """Flags that workers exchange besides gradients: in commit votes, or with their progress in a recovery.

    The values are sent between workers and stored in snapshots, so they never change.
    """

    STOP = 1
    """A script asked to stop after this step."""
    LEAVE = 2
    """A worker received SIGTERM in a way that stops all workers, or all stop."""
    SAVE = 4
    """The lead wanted a checkpoint after the last committed step."""
    CHANGE = 8
    """A worker waits to join, or received SIGTERM and leaves while the job continues."""
    ASK = 16
    """The lead knows of change requests for the running job."""
    PLANNED = 32
    """This worker regroups because the membership changes, and has detected no failure."""
    LOST = 64
    """A part of the model was held by failed workers only."""
    CORRUPT = 128
    """A state was found to be corrupt: all workers roll back to a verified one."""
    ALTERED = 256
    """A message of the step in progress was corrupted in transit: all workers retry the step."""

    def when(self, condition: object) -> Note:
        """Return this flag if the condition holds, else no flag."""
        return self if condition else NO_NOTE


NO_NOTE = Note(0)

VOTED = Note.STOP | Note.LEAVE | Note.CHANGE | Note.ASK
"""Flags of commit votes about the next step; a worker that missed the vote receives them when progress is shared."""

REPORTED = Note.SAVE | Note.PLANNED | Note.LOST | Note.CORRUPT | Note.ALTERED
"""Flags that a worker adds to its progress about its own state in this recovery; they apply to this recovery only."""


# ---------------------------------------------------------------------------------------------
# Events: what happened


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to this worker."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The worker is ready; it has not communicated with its peers yet."""


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """The worker is a newcomer and belongs to a generation from now on."""


@dataclass(frozen=True, slots=True)
class MembersChange(Event):
    """The last commit vote said that a worker waits to join or wants to leave: all regroup before the next step."""


@dataclass(frozen=True, slots=True)
class ChangesWait(Event):
    """The last commit vote said that the lead has change requests, to be applied before the next step."""


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """The gradients of this worker's slices of the step are ready."""


@dataclass(frozen=True, slots=True)
class BucketReduced(Event):
    """The all-reduce of the bucket in progress completed here."""


@dataclass(frozen=True, slots=True)
class StepVoted(Event):
    """The commit vote completed here: every survivor holds every bucket of the step."""


@dataclass(frozen=True, slots=True)
class CorruptionSeen(Event):
    """The commit vote reported a corrupt state or message: no worker commits the step, all regroup."""


@dataclass(frozen=True, slots=True)
class StepApplied(Event):
    """The optimizer has run."""


@dataclass(frozen=True, slots=True)
class DataExhausted(Event):
    """There is no next step."""


@dataclass(frozen=True, slots=True)
class LoopLeft(Event):
    """The commit vote reported that a worker's script has left the loop: no worker commits the step, and the loop ends."""


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    """A collective did not complete here because a peer failed."""


@dataclass(frozen=True, slots=True)
class Agreed(Event):
    """The members agreed; ``value`` is False too if the agreement reported a failed worker."""

    value: bool


@dataclass(frozen=True, slots=True)
class Revoked(Event):
    """The communicator is revoked: no worker blocks in a collective any more."""


@dataclass(frozen=True, slots=True)
class Shrunk(Event):
    """There is a new communicator of the survivors."""


@dataclass(frozen=True, slots=True)
class LeftGroup(Event):
    """This worker has left the group; the job continues without it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one worker.

    Args:
        completed: Collectives completed since the start of training, or :data:`LOADING` or :data:`JOINING`.
        computed: Whether its gradients of the step in progress are ready.
        flags: Flags of :data:`VOTED` that it received in commit votes, and of :data:`REPORTED` about its own state.
        heard: Digest of a split model's state from the last commit vote that it completed, from 0 to 2**62 - 1; a
            worker that missed that vote receives it here.
    """

    completed: int
    computed: bool
    flags: Note = NO_NOTE
    heard: int = 0


@dataclass(frozen=True, slots=True)
class ProgressKnown(Event):
    """The progress of all survivors is known to all of them: the point at which the strategy decides.

    Args:
        progress: Progress of each survivor, by rank.
        num_buckets: Buckets of a step; a step has one collective more.
    """

    progress: Mapping[int, Progress]
    num_buckets: int


@dataclass(frozen=True, slots=True)
class HandedOver(Event):
    """The reduced ``bucket`` that another survivor held is available here too."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Done(Event):
    """An action of the strategy was carried out."""


@dataclass(frozen=True, slots=True)
class CheckpointLoaded(Event):
    """The state before ``step`` was loaded; training resumes at ``step``."""

    step: int


# ---------------------------------------------------------------------------------------------
# Actions: what to do


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do now."""


@dataclass(frozen=True, slots=True)
class ComputeStep(Action):
    """Compute the gradients of this worker's slices of ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class ReduceBucket(Action):
    """Take part in the all-reduce of ``bucket``."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class VoteStep(Action):
    """Take part in the commit vote of ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class ApplyStep(Action):
    """Run the optimizer with the reduced gradients of ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class Publish(Action):
    """``step`` is durable: its results may leave the process (checkpoint manifests, "done")."""

    step: int


@dataclass(frozen=True, slots=True)
class Revoke(Action):
    """Revoke the communicator, so that every worker blocked in a collective wakes up."""


@dataclass(frozen=True, slots=True)
class Agree(Action):
    """Agree with all survivors on ``flag``; the result is the AND.

    Args:
        flag: The flag.
        fences: Only keeps a revoke out of a shrink, which a fabric may do in another way.
    """

    flag: bool
    fences: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Shrink(Action):
    """Make a new communicator of the survivors."""


@dataclass(frozen=True, slots=True)
class ShareProgress(Action):
    """Exchange progress with all survivors."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class CatchUp(Action):
    """Survivors that did not commit ``step`` apply it now, from the reduced buckets they hold."""

    step: int


@dataclass(frozen=True, slots=True)
class DiscardStep(Action):
    """Discard the attempt at ``step``; the same mini-batch is computed again."""

    step: int


@dataclass(frozen=True, slots=True)
class HandOver(Action):
    """``source`` broadcasts its reduced ``bucket``."""

    step: int
    bucket: int
    source: int


@dataclass(frozen=True, slots=True)
class ContinueStep(Action):
    """Continue ``step`` over the survivors, from the collective at position ``next_sum`` of the step."""

    step: int
    next_sum: int


@dataclass(frozen=True, slots=True)
class LoadCheckpoint(Action):
    """Load the newest intact checkpoint, or the initial state if there is none; the same one at all workers.

    Training also starts with this action, which makes the replicas equal.
    """


@dataclass(frozen=True, slots=True)
class Reinitialise(Action):
    """Take a snapshot if the strategy needs one, tear the application down and rebuild it. Loading follows.

    No worker sends anything meanwhile. A worker that has rebuilt waits for its peers where all of them load.
    """


@dataclass(frozen=True, slots=True)
class SendState(Action):
    """Send the state before ``step`` to ``newcomers``, which buffer it.

    Every worker that is not a newcomer holds that state, and none has begun the step.
    """

    step: int
    newcomers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdoptState(Action):
    """All workers know that all newcomers hold the state before ``step``: the newcomers adopt it."""

    step: int


@dataclass(frozen=True, slots=True)
class MoveParts(Action):
    """Send parts of the model to the workers that will hold them, which buffer them.

    Args:
        restores: Parts without a surviving holder are restored first, from a standby some steps old.
    """

    restores: bool = False


@dataclass(frozen=True, slots=True)
class AdoptPlacement(Action):
    """All workers know that every worker has its parts: the new placement takes effect."""


@dataclass(frozen=True, slots=True)
class FetchConfig(Action):
    """Fetch the new settings, equal at all workers, and buffer them."""


@dataclass(frozen=True, slots=True)
class ApplyConfig(Action):
    """All workers know that every worker has the new settings: they take effect."""


@dataclass(frozen=True, slots=True)
class SaveAndStop(Action):
    """Save the state before the step in progress and stop: too few workers are alive."""


@dataclass(frozen=True, slots=True)
class Leave(Action):
    """All workers are done, and none needs this worker any more."""
