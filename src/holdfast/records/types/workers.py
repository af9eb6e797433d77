"""Records of workers and of the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.records.types.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Record):
    """``rank`` leaves the job before ``step`` because it received SIGTERM; all of its work is in the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused(Record):
    """``rank``, a newcomer, has a different platform and the job promises bit-exactness: it ends and is not replaced.

    Args:
        why: How its platform differs, and what to do.
        platform: Its platform, see :mod:`holdfast.state.platform`.
    """

    why: str
    platform: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailed(Record):
    """The script raised an exception, or used the session wrongly.

    Args:
        exit_code: 2 for a wrong setting (:class:`~holdfast.errors.ConfigError`), otherwise 1.
        message: One line.
        traceback: The script's own frames, or "".
        is_bug: Whether the script would raise it again: neither lost workers nor the storage are the cause.
        is_loss: Whether a collective of ``torch.distributed`` needed failed ranks (:class:`~holdfast.errors.RanksLost`).
    """

    exit_code: int
    message: str
    traceback: str
    is_bug: bool = False
    is_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded(Record):
    """The process of ``rank`` has ended. Written by its watcher process.

    Args:
        exit_code: As in :mod:`subprocess`: -9 for SIGKILL.
        pid: Its process ID.
    """

    exit_code: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterDeclared(Record):
    """The script of ``rank`` has declared which worker writes its output. Written at the first call that differs.

    Args:
        how: ``"is_lead"``: it asked whether this worker is the lead; ``"save"``: it called ``session.save``, by which every
            worker writes.
        is_lead: Whether this worker is the lead, the lowest rank alive.
        in_loop: The call was made inside a loop of a session, so that it says nothing about what the script writes later.
    """

    how: str
    is_lead: bool
    in_loop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadLost(Record):
    """Rank 0 of ``torch.distributed`` is lost, no newcomer may take its seat, and the script has not asked whether this worker leads.

    Written by the lowest survivor: what the script does under ``rank == 0`` no longer happens.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveAwaited(Record):
    """``rank`` has waited for some seconds in a collective of ``torch.distributed``; or that wait has ended.

    Args:
        what: The collective, such as ``all_reduce(SUM)``; "" if the wait has ended.
        signature: What must be the same on all ranks: the collective, the type and shape of the tensor, the root.
        where: Line of the script, such as ``train.py, line 33``; "" if it is not known.
        group: Key of the process group.
        number: Number of collectives that have ended in that group.
        members: The workers of the group that are alive.
    """

    what: str
    signature: str = ""
    where: str = ""
    group: int = 0
    number: int = 0
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnded(Record):
    """The script of ``rank`` has ended, under ``torch.distributed``: it calls no further collective.

    Args:
        steps: Its steps of ``DistributedDataParallel``.
        groups: Keys of its process groups.
        completed: For each of them, the number of collectives that have ended.
    """

    steps: int
    groups: tuple[int, ...]
    completed: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSeen(Record):
    """``rank`` has been slower than the other workers for some time.

    Args:
        score: Its time to compute a slice, divided by the median of the other workers.
        policy: The response: ``"warn"``, ``"rebalance"`` or ``"replace"``.
    """

    score: float
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFenced(Record):
    """The launcher ends ``rank`` by SIGKILL because it makes no progress. Written just before.

    Args:
        silent_s: Seconds since its last sign of life.
        reason: Why it was considered stuck.
        stack: The stacks of its threads, the main thread first; "" if it could not write them.
    """

    silent_s: float
    reason: str
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost(Record):
    """``rank`` can no longer use its GPU, and ends by SIGKILL; written just before. The other workers continue.

    Args:
        what: ``"lost"``: an error after which a process must not use the device; ``"memory"``: too little memory for the
            slices that it took over from failed workers.
        message: The first line of the exception.
        gpu: The GPU, as ``CUDA_VISIBLE_DEVICES`` names it; "" if the launcher assigned none.
    """

    what: str
    message: str
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequested(Record):
    """The user requested an action on the running job through the dashboard. Written by the launcher.

    Args:
        action: ``"kill"``, ``"scale"``, ``"set"``, ``"save"`` or ``"stop"``.
        values: Its values as JSON, such as ``{"rank": 2}``.
    """

    action: str
    values: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRestarted(Record):
    """The launcher restarts the whole job.

    Args:
        restart: 1 for the first restart.
        workers: Ranks that it is restarted with.
        reason: The reason.
    """

    restart: int
    workers: tuple[int, ...]
    reason: str
