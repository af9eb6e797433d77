"""Everything Holdfast raises on purpose.

::

    HoldfastError
    ├── ConfigError            you can mend it: a value, an option, a file        (also a ValueError)
    ├── ScriptError            the script uses the session in a way that cannot work
    ├── RanksLost              a torch.distributed collective needs a rank that is dead    (also a RuntimeError)
    ├── PeerFailed             a collective did not complete: somebody died; recovery answers it
    ├── JobError               the run cannot go on
    │   ├── TooFewWorkers      fewer survivors than ``min_workers``; the state was saved
    │   ├── StateLost          nobody has some part of the model any more, in memory or saved
    │   ├── StoreLost          the store that membership is kept in cannot be reached
    │   ├── VotedOut           the others went on without this worker
    │   ├── ReplicasDiffer     replicas that must be equal are not
    │   └── MessageAltered     what a worker gave to others did not arrive as it was
    ├── CheckpointError
    │   ├── CheckpointCorrupt  bytes on disk are not the bytes that were saved
    │   └── CheckpointMissing  there is no complete checkpoint where one was asked for
    └── InternalError          an invariant of Holdfast itself broke: please report it

:class:`Unwind` stands beside the tree, because it is no error and ``except Exception`` must let it through.

A script never sees :class:`PeerFailed`: the session answers it. It is public for those who use a
communicator directly.
"""

from __future__ import annotations


class HoldfastError(Exception):
    """Root of the tree: catches everything that Holdfast raises on purpose."""


class ConfigError(HoldfastError, ValueError):
    """A value that you gave is not allowed; the message says which, and what is."""


class ScriptError(HoldfastError):
    """The script breaks a rule of the session, such as skipping a slice of a step."""


class Unwind(BaseException):
    """Takes the stack of the script down, so that :func:`holdfast.reinit` can call ``main`` again. Let it through."""


class PeerFailed(HoldfastError):
    """A collective failed because a member died, or because a peer revoked it for that reason.

    You get it from a :class:`~holdfast.comm.base.Communicator`, at any member, at any moment after a
    death; others may have completed the same collective. You never get it inside a training loop.
    """


class RanksLost(HoldfastError, RuntimeError):
    """A collective of ``torch.distributed`` could not complete, because ranks of its group have died.

    The group can be used again, over the survivors.

    Args:
        message: What could not be done, and what to do.
        ranks: The dead ranks of the group, as global ranks, ascending.
        survivors: The living ones.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), survivors: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.survivors = survivors


class JobError(HoldfastError):
    """The run cannot go on; the message says what was saved and how to continue."""


class TooFewWorkers(JobError):
    """Fewer workers are alive than the run may go on with."""


class StateLost(JobError):
    """A part of the model is lost with all who held it, and was not saved: the job must begin again."""


class StoreLost(JobError):
    """The store that membership is kept in cannot be reached: nothing can be agreed on any more."""


class VotedOut(JobError):
    """The others have gone on without this worker, which they took for dead; it must stop."""


class ReplicasDiffer(JobError):
    """The digests of two replicas differ: somebody computed wrong bits."""


class MessageAltered(JobError):
    """What a worker was given is not what another one gave: its checksum says so."""


class CheckpointError(HoldfastError):
    """A checkpoint could not be written or read."""


class CheckpointCorrupt(CheckpointError):
    """What is on disk is not what was saved; the message names the tensor or file."""


class CheckpointMissing(CheckpointError):
    """No complete checkpoint exists where one was asked for."""


class InternalError(HoldfastError):
    """A rule that Holdfast keeps for itself was broken. Please report this, with the run's events."""
