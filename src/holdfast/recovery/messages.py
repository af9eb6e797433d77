"""What happened (:class:`Event`) and what to do (:class:`Action`): what the protocol and a strategy hear and say.

They never leave the process. A worker's progress is one number, ``completed``: the sums of the training sequence that it has
completed. With ``num_buckets`` buckets a step has ``num_buckets + 1`` sums, the last of which is the closing sum.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

LOADING = -1
"""``completed`` of a worker that has decided to load a checkpoint and has not finished doing so."""

JOINING = -2
"""``completed`` of a newcomer that has been admitted and has not got the others' state yet."""


class Note(enum.IntFlag):
    """What workers tell each other besides sums: in the closing sum of a step, or with their progress in a recovery.

    The values travel between workers and stand in snapshots, so they never change.
    """

    STOP = 1
    """A script asked to stop after this step."""
    LEAVE = 2
    """A worker was told to leave (SIGTERM), or all stop."""
    SAVE = 4
    """The lead wanted a checkpoint after the last step that was closed."""
    CHANGE = 8
    """A worker waits to join, or was told to leave the others (SIGTERM)."""
    ASK = 16
    """The lead knows of changes that the running job is to take."""
    CALM = 32
    """This worker came because members change, and has seen no failure."""
    LOST = 64
    """With the dead, a part of the model is lost that no living worker holds."""
    CORRUPT = 128
    """A state was found to be corrupt: all go back to one that is known to be right."""
    ALTERED = 256
    """A message of the step in progress was altered on its way: all do the step again."""

    def when(self, condition: object) -> Note:
        """Return this if the condition holds, else nothing."""
        return self if condition else NO_NOTE


NO_NOTE = Note(0)

VOTED = Note.STOP | Note.LEAVE | Note.CHANGE | Note.ASK
"""What closing sums say of the next step; a worker that missed the sum learns it with the progress of one that did not."""

REPORTED = Note.SAVE | Note.CALM | Note.LOST | Note.CORRUPT | Note.ALTERED
"""What a worker says with its progress of where it stands in this recovery; it counts for this recovery alone."""


# ---------------------------------------------------------------------------------------------
# Events: what happened


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to this worker."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The worker is ready; it knows nothing of the others yet."""


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """The worker is a newcomer, and belongs to a generation from now on."""


@dataclass(frozen=True, slots=True)
class MembersChange(Event):
    """Everybody heard in the last closing sum that somebody waits to join, or wants to leave: all meet before the next step."""


@dataclass(frozen=True, slots=True)
class ChangesWait(Event):
    """Everybody heard in the last closing sum that the job is to go on otherwise than before, from the next step on."""


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """The gradients of this worker's slices of the step are ready."""


@dataclass(frozen=True, slots=True)
class BucketSummed(Event):
    """The sum of the bucket in progress is known here."""


@dataclass(frozen=True, slots=True)
class StepClosed(Event):
    """The closing sum returned here: everybody alive holds every bucket of the step."""


@dataclass(frozen=True, slots=True)
class CorruptionSeen(Event):
    """The closing sum returned here and says that a state is corrupt, or a message was altered: nobody closes the step, all meet."""


@dataclass(frozen=True, slots=True)
class StepApplied(Event):
    """The optimizer has run."""


@dataclass(frozen=True, slots=True)
class RanOut(Event):
    """There is no next step."""


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    """A collective did not complete here."""


@dataclass(frozen=True, slots=True)
class Agreed(Event):
    """The members agreed; ``value`` is False too if the agreement reported a death."""

    value: bool


@dataclass(frozen=True, slots=True)
class Revoked(Event):
    """The communicator is revoked: nobody waits in a sum any more."""


@dataclass(frozen=True, slots=True)
class Shrunk(Event):
    """There is a new communicator of those alive."""


@dataclass(frozen=True, slots=True)
class Parted(Event):
    """This worker has left the others, who go on without it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one worker has come.

    Args:
        completed: Sums completed since the start of training, or :data:`LOADING`.
        computed: Whether the gradients of the step in progress are ready there.
        flags: What it has heard in closing sums, of :data:`VOTED`, and what it reports of itself, of :data:`REPORTED`.
        heard: What the last closing sum that it completed said of the state of a split model, from 0 to 2**62 - 1; who missed
            that one learns it here.
    """

    completed: int
    computed: bool
    flags: Note = NO_NOTE
    heard: int = 0


@dataclass(frozen=True, slots=True)
class ProgressKnown(Event):
    """Everybody's progress is known to everybody: the moment to decide.

    Args:
        progress: By rank, of those alive.
        num_buckets: Buckets of a step; it has one sum more.
    """

    progress: Mapping[int, Progress]
    num_buckets: int


@dataclass(frozen=True, slots=True)
class HandedOver(Event):
    """The sum of ``bucket`` that somebody held is known here too."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class ActDone(Event):
    """One order of the strategy was carried out."""


@dataclass(frozen=True, slots=True)
class CheckpointLoaded(Event):
    """The state before ``step`` was loaded; training goes on there."""

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
class SumBucket(Action):
    """Take part in the sum of ``bucket``."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class CloseStep(Action):
    """Take part in the closing sum of ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class ApplyStep(Action):
    """Run the optimizer with the summed gradients of ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class Publish(Action):
    """``step`` is stable: what it made may leave the process (checkpoint manifests, "done")."""

    step: int


@dataclass(frozen=True, slots=True)
class Revoke(Action):
    """Revoke the communicator, so that everybody who waits in a sum wakes up."""


@dataclass(frozen=True, slots=True)
class Agree(Action):
    """Agree with everybody alive on ``flag``; the result is the AND."""

    flag: bool


@dataclass(frozen=True, slots=True)
class Shrink(Action):
    """Make a new communicator of those alive."""


@dataclass(frozen=True, slots=True)
class ShareProgress(Action):
    """Tell everybody how far this worker is, and hear how far they are."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class CatchUp(Action):
    """Those that did not close ``step`` apply it now, from what they hold."""

    step: int


@dataclass(frozen=True, slots=True)
class DiscardStep(Action):
    """Drop everything of the attempt at ``step``; the same mini-batch is computed again."""

    step: int


@dataclass(frozen=True, slots=True)
class HandOver(Action):
    """``source`` gives its sum of ``bucket`` to everybody."""

    step: int
    bucket: int
    source: int


@dataclass(frozen=True, slots=True)
class ContinueStep(Action):
    """Go on with ``step`` at the sum number ``next_sum`` of the step, over the survivors."""

    step: int
    next_sum: int


@dataclass(frozen=True, slots=True)
class LoadCheckpoint(Action):
    """Load the newest intact checkpoint, or the initial state if there is none, the same everywhere.

    Training starts with it too: that is how replicas become equal.
    """


@dataclass(frozen=True, slots=True)
class Reinitialise(Action):
    """Take a snapshot, if there is to be one; take the application down and build it again. Loading comes next.

    Nobody sends anything meanwhile. Whoever has done so is at a beginning, and waits for the others where all load.
    """


@dataclass(frozen=True, slots=True)
class Welcome(Action):
    """Give the state before ``step`` to ``newcomers``, who keep it aside.

    Everybody who is no newcomer holds it, and nobody has begun the step.
    """

    step: int
    newcomers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Install(Action):
    """Everybody knows that all newcomers hold the state before ``step``: they go on from it."""

    step: int


@dataclass(frozen=True, slots=True)
class Rehome(Action):
    """Give parts of the model to those who are to hold them from now on, and who keep them aside.

    Args:
        restores: Parts that nobody holds any more are restored first, as they were some steps ago.
    """

    restores: bool = False


@dataclass(frozen=True, slots=True)
class Settle(Action):
    """Everybody knows that everybody has the parts that it is to hold: the new homes count."""


@dataclass(frozen=True, slots=True)
class TakeChanges(Action):
    """Get the new settings, the same at all workers, and keep them aside."""


@dataclass(frozen=True, slots=True)
class MakeChanges(Action):
    """Everybody knows that everybody has the new settings: they count from now on."""


@dataclass(frozen=True, slots=True)
class SaveAndStop(Action):
    """Save the state before the step in progress and stop: too few workers are left."""


@dataclass(frozen=True, slots=True)
class Leave(Action):
    """Everybody is done: nobody needs this worker any more."""
