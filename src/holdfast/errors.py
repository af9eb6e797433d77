"""The exceptions that Holdfast raises on purpose.

::

    HoldfastError
    ├── ConfigError            an invalid value, option or file, which the user can fix    (also a ValueError)
    ├── ScriptError            the script uses the session in a way that cannot work
    ├── RanksLost              a torch.distributed collective needs a failed rank          (also a RuntimeError)
    ├── PeerFailed             a collective did not complete because a worker failed; recovery handles it
    ├── JobError               the job cannot continue
    │   ├── TooFewWorkers      fewer survivors than ``min_workers``; the state was saved
    │   ├── StateLost          a part of the model is neither in any worker's memory nor in a checkpoint
    │   ├── StoreLost          the membership store cannot be reached
    │   ├── VotedOut           the survivors continued without this worker
    │   ├── ReplicasDiffer     replicas that must be equal differ
    │   ├── MessageAltered     the payload of a message does not match its checksum
    │   └── TrainingFailed     a job that a trainer started has failed or stopped
    ├── CheckpointError
    │   ├── CheckpointCorrupt  bytes on disk differ from the bytes that were saved
    │   └── CheckpointMissing  no complete checkpoint exists where one was requested
    └── InternalError          an invariant of Holdfast itself was violated: please report it

:class:`Unwind` is outside the tree: it is not an error, and ``except Exception`` must not catch it.

A script never sees :class:`PeerFailed`, because the session handles it. It is public for code that uses a
communicator directly.
"""

from __future__ import annotations

from typing import Any, NoReturn

STOPPED = 4
"""Exit code of a script, a job or a command that was stopped on request, with what could be saved."""


class HoldfastError(Exception):
    """Base class of every exception that Holdfast raises on purpose."""


class ConfigError(HoldfastError, ValueError):
    """A value is not allowed; the message names the value and the allowed ones."""


def refuse(message: str) -> NoReturn:
    """Raise a :class:`ConfigError`."""
    raise ConfigError(message)


class ScriptError(HoldfastError):
    """The script violates a rule of the session, such as skipping a slice of a step."""


class Unwind(BaseException):
    """Unwinds the script's stack, so that :func:`holdfast.reinit` can call ``main`` again. Do not catch it."""


class PeerFailed(HoldfastError):
    """A collective failed because a member failed, or because a peer revoked it for that reason.

    A :class:`~holdfast.comm.base.Communicator` may raise it at any member and at any time after a failure, even if
    other members have completed the same collective. It never reaches a training loop.
    """


class RanksLost(HoldfastError, RuntimeError):
    """A collective of ``torch.distributed`` could not complete because ranks of its group have failed.

    The group can be used again, over the survivors.

    Args:
        message: What failed, and how to continue.
        ranks: The failed ranks of the group, as global ranks, ascending.
        survivors: The surviving ranks, as global ranks, ascending.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), survivors: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.survivors = survivors


_MISTAKES = (AttributeError, ImportError, NameError, SyntaxError, TypeError)


def is_of_lost_ranks(error: BaseException | None) -> bool:
    """Return whether an error is, or was caused by, a :class:`RanksLost`, which torch's callbacks put into their own.

    An error in what a script does because of it counts, too, such as in a ``finally``; but not a mistake of its code.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, RanksLost) or (
            isinstance(error, RuntimeError) and f"{RanksLost.__name__}: " in str(error)
        ):
            return True
        seen.add(id(error))
        is_apart = error.__suppress_context__ or isinstance(error, _MISTAKES)
        error = error.__cause__ or (None if is_apart else error.__context__)
    return False


class JobError(HoldfastError):
    """The job cannot continue; the message says what was saved and how to resume."""


class TooFewWorkers(JobError):
    """Fewer workers are alive than ``min_workers`` allows."""


class StateLost(JobError):
    """Every worker that held a part of the model failed, and the part was not saved: the job must restart from scratch."""


class StoreLost(JobError):
    """The membership store cannot be reached, so workers can no longer agree on anything."""


class VotedOut(JobError):
    """The survivors took this worker for failed and continued without it; it must stop."""


class ReplicasDiffer(JobError):
    """The digests of two replicas differ: a worker computed wrong bits."""


class MessageAltered(JobError):
    """A message arrived altered: its payload does not match its checksum."""


class TrainingFailed(JobError):
    """A job that a trainer started has failed, or was stopped.

    Args:
        message: One line that says why.
        result: What it left, such as :class:`holdfast.integrations.ray.Result`; None if it never began.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class CheckpointError(HoldfastError):
    """A checkpoint could not be written or read."""


class CheckpointCorrupt(CheckpointError):
    """Data on disk differ from what was saved; the message names the tensor or file."""


class CheckpointMissing(CheckpointError):
    """No complete checkpoint exists where one was requested."""


class InternalError(HoldfastError):
    """An internal invariant was violated. Please report this, with the run's records."""
