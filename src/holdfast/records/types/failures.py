"""Records of failures: what was injected, what was detected, and how the survivors recovered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.records.types.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFired(Record):
    """An injected fault is about to strike ``rank``, or its whole node; written just before.

    Args:
        fault: Its number in the plan.
        kind: One of :data:`holdfast.faults.plan.KINDS`.
        phase: The phase of the step.
        node: The node that it strikes, -1 if it strikes a single worker.
        workers: The workers on that node.
    """

    fault: int
    kind: str
    phase: str
    node: int = -1
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesAltered(Record):
    """The result of an injected flip at ``rank``; follows its :class:`FaultFired`.

    Args:
        fault: Its number in the plan.
        target: The altered target, one of :data:`holdfast.faults.flip.TARGETS`.
        count: Number of altered values.
        values: The first altered values, at most 64, in the form of :mod:`holdfast.faults.tensors`: for each flipped
            bit ``path``, ``index`` in row-major order, ``bit`` (the least significant is 0), ``before`` and ``after``.
    """

    fault: int
    target: str
    count: int
    values: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSeen(Record):
    """A collective failed at ``rank``: some worker has failed, but it is not yet known which."""

    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Record):
    """The survivors decided. Written by every survivor.

    Args:
        step: The step at which training resumes.
        lost: Ranks that were alive before the recovery and are not alive after it.
        survivors: Ranks alive.
        decision: ``"redo"`` the step, ``"continue"`` it over the survivors, ``"load"`` a checkpoint, ``"reinit"`` the
            application, ``"heal"`` the state, ``"stop"``; ``"grow"`` if nothing failed and newcomers joined.
        redone_steps: Steps that are recomputed, including the one in progress.
        generation: Number of communicators so far.
        joined: Ranks alive that were not members before.
        held_s: Seconds for which newcomers kept the writer of this record from computing; 0 if none joined.
        orders: How often the writer carried out each action of the protocol in this recovery, by its name, such as
            ``Revoke``, ``Agree``, ``Shrink``, ``MoveParts``.
        times_s: Total time of each action in seconds, including waiting for other workers.
    """

    lost: tuple[int, ...]
    survivors: tuple[int, ...]
    decision: str
    redone_steps: int
    generation: int
    joined: tuple[int, ...] = ()
    held_s: float = 0.0
    orders: Mapping[str, int] = field(default_factory=dict)
    times_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatsFilled(Record):
    """A survivor's value stood in for failed ranks in a gather of ``torch.distributed``, or a sum was scaled for them.

    Written at the first such collective of each kind, and again with their number so far, if there were more, at each
    later recovery and at the end.

    Args:
        collective: Its name, such as ``all_gather``.
        seats: The failed ranks.
        sources: For each of them, the rank whose value stood in; -1 if the collective was a sum, and scaled.
        count: Number of such collectives so far.
    """

    collective: str
    seats: tuple[int, ...]
    sources: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatTaken(Record):
    """A newcomer has taken the seat of a failed rank of ``torch.distributed``, with the state of a survivor.

    Written by every rank that was there before.

    Args:
        step: The first step in which it takes part.
        seat: The rank that ``torch.distributed`` gives it.
        worker: The newcomer, as the launcher numbers it.
    """

    seat: int
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinitialised(Record):
    """``rank`` has rebuilt its application in the same process and resumes. Written with :class:`Recovered`.

    Args:
        source: The state it resumes from: ``"own"`` or ``"root"``, a snapshot taken at the failure, or
            ``"checkpoint"``, which also stands for the initial state if there is no checkpoint.
        form: ``"survivors"`` if fewer workers resume than the job wants, ``"replaced"`` if spares have filled the gaps.
        snapshot_s: Time to discard the step in progress, and to take the snapshot if one was taken here, in seconds.
        rebuild_s: From then until the new session was connected: ``main`` builds the application again.
        load_s: From then until the state was loaded, including the wait for the slowest worker.
        generation: As in :class:`Recovered`.
    """

    generation: int
    source: str
    form: str
    snapshot_s: float
    rebuild_s: float
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLost(Record):
    """``forward`` continued without these samples. Written together with :class:`StepCommitted`.

    Args:
        ids: The samples, by index in the dataset.
        buckets: Buckets of the step that lack their gradients.
    """

    epoch: int
    ids: tuple[int, ...]
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionFound(Record):
    """The guard found corruption in the commit vote of ``step``. Written by the lead, or by the worker that found it.

    Args:
        what: ``"replicas"`` differ; ``"range"``: a value is not finite, or far from all earlier ones;
            ``"message"``: the input or the result of an all-reduce was altered in transit.
        where: What was compared in that step: names of parameters and of optimizer state; or ``"loss"``; or messages.
        ranks: Ranks with wrong bits, if known: those in the minority, or the senders of altered messages.
        policy: The response: ``"warn"``, ``"heal"`` or ``"stop"``.
    """

    what: str
    where: tuple[str, ...]
    ranks: tuple[int, ...]
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionHealed(Record):
    """All workers are past the step in which corruption was found. Written by the lead.

    Args:
        ranks: Ranks whose history was first not reproduced: they were at fault. Empty if all had computed the same.
        found_at: The step in which corruption was found.
        went_back_to: The step to which all workers rolled back.
        source: ``"snapshot"``, from memory, ``"checkpoint"`` or ``"beginning"``; ``"step"``: no worker's state was
            wrong, and the step was retried.
        is_training: The same bits were recomputed, so training itself causes them, such as by too high a learning rate.
    """

    ranks: tuple[int, ...]
    found_at: int
    went_back_to: int
    source: str
    is_training: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRestored(Record):
    """``rank`` restored a part of the model without a surviving holder; everything else stays as it is before ``step``.

    Args:
        part: Its number.
        source: ``"backup"``: a delta standby in the memory of ``rank``; ``"copy"``: a file that a delta standby wrote;
            ``"checkpoint"``; ``"beginning"``: the initial values.
        ages: Ages of its blocks in steps: every age that occurs, ascending.
        blocks: Number of blocks of each age; a block is a piece of the part that is saved as a unit.
        optimizer: The state of its optimizer: ``"saved"``, as old as the part, ``"reset"``, or ``"kept"``.
        optimizer_age: Age of a kept optimizer state in steps: 1 if the holder died before it could send the newest.
    """

    part: int
    source: str
    ages: tuple[int, ...]
    blocks: tuple[int, ...]
    optimizer: str
    optimizer_age: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsHeld(Record):
    """The parts of a split model in the memory of ``rank`` at the end of training: weights and optimizer state.

    Args:
        computes: Parts that it computed.
        mirrors: Parts that it held as a hot standby.
        backups: Parts that it held as a delta standby, in a state some steps old.
        computes_bytes: Size of the parts that it computed.
        mirrors_bytes: Size of its hot standbys.
        copies_bytes: Size of its delta standbys, and of the references from which it updates those of other workers.
    """

    computes: tuple[int, ...]
    mirrors: tuple[int, ...]
    backups: tuple[int, ...]
    computes_bytes: int
    mirrors_bytes: int
    copies_bytes: int
