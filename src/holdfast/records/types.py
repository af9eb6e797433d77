"""What is written down: the lines of ``events.jsonl``, enough to draw the run, and to replay it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NOT_STAMPED: Any = None

STAMPS = ("t_s", "rank", "step")
"""What :class:`holdfast.records.logger.Logger` adds to a record where the record does not give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of ``events.jsonl``. Made without stamps, it gets them from a :class:`~holdfast.records.logger.Logger`.

    Args:
        t_s: Seconds since the launcher started the job.
        rank: Who wrote it; for :class:`FaultFired` and :class:`WorkerEnded`, whom it is about; -1 is the launcher.
        step: The step in progress, -1 where there is none.
    """

    t_s: float = _NOT_STAMPED
    rank: int = _NOT_STAMPED
    step: int = _NOT_STAMPED

    def missing_stamps(self) -> list[str]:
        """Return which of :data:`STAMPS` the record lacks; none once it was written down."""
        return [name for name in STAMPS if getattr(self, name) is _NOT_STAMPED]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Record):
    """Training starts, or goes on at ``step`` after a restart. Written by every worker, also on each restart.

    The ``torch.distributed`` backend writes it too, at the first step of ``DistributedDataParallel`` or at the end of a
    script that has none. It knows neither the model nor a plan: what is planned, the buckets and the parameters are 0.

    ``link`` is that of the step before (see :mod:`holdfast.integrity.hash_chain`): :data:`holdfast.integrity.hash_chain.GENESIS` where the links begin, "" where
    there is none. ``kind`` is that of the worker, see :mod:`holdfast.state.platform`; under ``torch.distributed`` nobody looks. ``given_up``
    says how another worker, or who made the checkpoint that is gone on from, differs in it, "" if nobody does.
    """

    fabric: str
    strategy: str
    seed: int
    workers: int
    slices: int
    order: str
    split: str
    batch: str
    rescale: str
    steps_planned: int
    samples_planned: int
    num_buckets: int
    parameters: int
    update: str = "lazy"
    link: str = ""
    kind: Mapping[str, str] = field(default_factory=dict)
    given_up: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(Record):
    """The optimizer ran for ``step``. Written by the lowest worker alive; a new lowest one writes its last again.

    Args:
        samples: Samples whose gradients are in the step; 0 under ``torch.distributed``, where nobody knows.
        workers: Workers that took part.
        metrics: What the script logged, mean over the samples of the step, ``loss`` among it.
        link: Of the certificate, made of all that follows and of the link before; see :mod:`holdfast.integrity.hash_chain`. "" where there is none.
        ids: Digest of the samples, slice by slice.
        figures: Digest of the exact metrics.
        state: Digest of a part of the state before the step, of another part in each step.
        whole: It is of all of the state.
        where: Which part, for people.
    """

    epoch: int
    samples: int
    workers: int
    metrics: Mapping[str, float]
    link: str = ""
    ids: str = ""
    figures: str = ""
    state: str = ""
    whole: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHashed(Record):
    """All of the state before ``step``, as ``rank`` has it: every :data:`holdfast.integrity.hash_chain.WHOLE_EVERY` steps, and at the end.

    Args:
        link: Of the step before, by what this worker itself has seen.
        tensors: Digests by path, ``parameter``, ``parameter/key of the optimizer's state`` or ``buffer``; only the lowest worker gives
            them, but at the end all do. Of a split model each worker gives those of the parts that it holds.
        part: Of a split model, which part they are of; -1 where it is not split.
        parts: How many there are, 0 where it is not split.
    """

    link: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    part: int = -1
    parts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFired(Record):
    """An injected fault is about to strike ``rank``, or its whole node; the line is written just before.

    Args:
        fault: Its number in the plan.
        kind: One of :data:`holdfast.faults.plan.KINDS`.
        phase: Where in the step.
        node: Which node it strikes, -1 if only a worker.
        workers: The workers on that node.
    """

    fault: int
    kind: str
    phase: str
    node: int = -1
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesAltered(Record):
    """What an injected flip did to ``rank``; the line follows its :class:`FaultFired`.

    Args:
        fault: Its number in the plan.
        target: What was altered, one of :data:`holdfast.faults.flip.TARGETS`.
        count: How many values were.
        values: What became of the first of them, 64 at most, as :mod:`holdfast.faults.tensors` says it: for each bit that
            was flipped ``path``, ``index`` in row-major order, ``bit`` (the least significant is 0), ``before`` and ``after``.
    """

    fault: int
    target: str
    count: int
    values: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSeen(Record):
    """A collective failed at ``rank``: it knows that somebody is gone, not yet who."""

    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Record):
    """The survivors decided. Written by every survivor.

    Args:
        step: The step that training goes on with.
        lost: Ranks that were alive before and are not now.
        survivors: Ranks alive.
        decision: ``"redo"`` the step, ``"continue"`` it over the survivors, ``"load"`` a checkpoint, ``"reinit"`` the
            application, ``"heal"`` the state, ``"stop"``; ``"grow"`` where nothing failed and newcomers were welcomed.
        redone_steps: Steps (the one in progress included) whose work is done again.
        generation: How many communicators there have been.
        joined: Ranks alive that were not there before.
        held_s: How long the giver of this record was kept from computing for newcomers; 0 where none came.
        orders: How often it carried out each order of the protocol in this recovery, by the order's name, such as
            ``Revoke``, ``Agree``, ``Shrink``, ``Rehome``.
        times_s: How long it took for them, waiting for others included.
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
class Reinitialised(Record):
    """``rank`` has built its application again, in the same process, and goes on. Written with :class:`Recovered`.

    Args:
        source: What it goes on from: ``"own"`` or ``"root"``, a snapshot taken at the fault, or ``"checkpoint"``, which is
            also the beginning of training where there is none.
        form: ``"survivors"`` if fewer workers go on than the job wants, ``"replaced"`` if spares have filled the places.
        snapshot_s: To take the step in progress back, and the snapshot if one was taken here.
        rebuild_s: From there until the new session met the others: the old application goes, ``main`` builds a new one.
        load_s: From there until the state was loaded, the wait for the slowest included.
        generation: As in :class:`Recovered`.
    """

    generation: int
    source: str
    form: str
    snapshot_s: float
    rebuild_s: float
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionFound(Record):
    """The guard found something wrong while ``step`` was closed. Written by the lowest worker, or by who found it.

    Args:
        what: ``"replicas"`` differ; ``"range"``: a number is not finite, or far from all that were there before;
            ``"message"``: what was given to a sum, or came from it, was altered on its way.
        where: What was compared in that step: names of parameters and of the optimizer's state; or ``"loss"``; or messages.
        ranks: Whose bits are wrong, if that is known: those of the minority, or who had given what was altered.
        policy: What is done about it: ``"warn"``, ``"heal"`` or ``"stop"``.
    """

    what: str
    where: tuple[str, ...]
    ranks: tuple[int, ...]
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionHealed(Record):
    """All are past the step in which corruption was found. Written by the lowest worker.

    Args:
        ranks: Whose history did not reproduce first: they were at fault. Empty if all had computed the same until then.
        found_at: The step in which it was found.
        went_back_to: The step that all went back to.
        source: ``"snapshot"``, from memory, ``"checkpoint"`` or ``"beginning"``; ``"step"``: nobody's state was wrong, and the step
            was done again.
        is_training: It came again, with the same bits: it belongs to the training, such as a learning rate that is too high.
    """

    ranks: tuple[int, ...]
    found_at: int
    went_back_to: int
    source: str
    is_training: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRestored(Record):
    """``rank`` restored a part of the model that nobody held any more; all else stays as it is before ``step``.

    Args:
        part: Its number.
        source: ``"backup"``: a copy in the memory of ``rank``; ``"copy"``: one that a backup wrote to the disk;
            ``"checkpoint"``; ``"beginning"``: as training began.
        ages: How many steps old its blocks are: all ages that there are, ascending.
        blocks: Of each age, how many blocks; a block is a piece of the part that is saved as a whole.
        optimizer: What became of its optimizer's state: ``"saved"``, as old as the part, ``"reset"``, or ``"kept"``.
        optimizer_age: How many steps old it is where it was kept: 1 if the holder died before it could send the newest.
    """

    part: int
    source: str
    ages: tuple[int, ...]
    blocks: tuple[int, ...]
    optimizer: str
    optimizer_age: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsHeld(Record):
    """What ``rank`` had of a split model in its memory at the end of training: weights and optimizer's state.

    Args:
        computes: Parts that it computed.
        mirrors: Parts that it held besides.
        backups: Parts of which it had a copy of some steps before.
        computes_bytes: Of the parts that it computed.
        mirrors_bytes: Of its mirrors.
        copies_bytes: Of its backups, and of what it compared its own parts with to keep those of others up to date.
    """

    computes: tuple[int, ...]
    mirrors: tuple[int, ...]
    backups: tuple[int, ...]
    computes_bytes: int
    mirrors_bytes: int
    copies_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedEagerly(Record):
    """What it took ``rank`` to update buckets before their step was closed, over all of its training.

    Args:
        steps: Steps that were updated so, and closed.
        buckets: Buckets that were updated, also those of steps that were taken back.
        undone: Buckets whose update was taken back.
        copy_bytes: Memory of the copies that updates are taken back from.
        copy_s: To make these copies.
        update_s: For the optimizer.
        waited_s: For how long training waited for either: the rest went on beside the sums.
        undo_s: To take updates back.
    """

    steps: int
    buckets: int
    undone: int
    copy_bytes: int
    copy_s: float
    update_s: float
    waited_s: float
    undo_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesTried(Record):
    """``rank`` knows whether the slices of a step, where it holds so many, go through the model at once; see :meth:`holdfast.session.step.Step.compute`.

    Args:
        samples: Of each slice.
        why_not: Why they go one by one; "" where they go at once from now on: each has the bits that it has by itself.
        at_once_s: The least time that they took at once, of the steps that were computed in both ways; 0 if that was impossible.
        one_by_one_s: And one by one.
    """

    samples: tuple[int, ...]
    why_not: str
    at_once_s: float
    one_by_one_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Record):
    """``rank`` leaves the others before ``step``, as it was told to (SIGTERM): all that it did is in the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused(Record):
    """``rank``, a newcomer, is of another kind than the others, whose job promises bits: it ends, and is not replaced.

    Args:
        why: How it differs, and what to do.
        kind: Its own, see :mod:`holdfast.state.platform`.
    """

    why: str
    kind: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLost(Record):
    """``forward`` went on without these samples. Written together with :class:`StepCommitted`.

    Args:
        ids: The samples, by index in the dataset.
        buckets: Buckets of the step that their gradients are missing from.
    """

    epoch: int
    ids: tuple[int, ...]
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Record):
    """The checkpoint before ``step`` is complete: its manifest is written.

    Args:
        path: Where it is.
        size_bytes: Of its files.
        seconds: How long training was held for it.
        interval_s: How long after it the next is due, as chosen by ``--checkpoint-every auto``; 0 if that is not asked for.
    """

    path: str
    size_bytes: int
    seconds: float
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Record):
    """``rank`` passed the gate: training is over and nobody needs it any more.

    Args:
        outcome: ``"done"``; ``"stopped"`` on request (SIGTERM) with its state saved; ``"gave-up"`` for too few workers.
        sha256: Over all parameters and buffers, in path order, little-endian bytes; "" under ``torch.distributed``, where
            nobody knows, and all that follows is 0 or empty.
        state_sha256: Over these and the optimizer's state.
        planned: Samples of the plan up to the last step.
        committed: Samples of the plan that are in the weights once.
        lost: Samples that ``forward`` went on without.
        repeated: Samples that are in the weights more than once.
        checkpoint: Where the state was saved, or "".
        link: Of the last step, by what this worker itself has seen, or "".
    """

    outcome: str
    sha256: str
    state_sha256: str
    planned: int
    committed: int
    lost: int
    repeated: int
    metrics: Mapping[str, float]
    checkpoint: str
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailed(Record):
    """The script raised, or used the session wrongly.

    Args:
        exit_code: 2 for a wrong setting (:class:`~holdfast.errors.ConfigError`), otherwise 1.
        message: One line.
        traceback: The script's own frames, or "".
    """

    exit_code: int
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded(Record):
    """The process of ``rank`` is gone. Written by the watcher beside it.

    Args:
        exit_code: As in :mod:`subprocess`: -9 for SIGKILL.
        pid: Its process.
    """

    exit_code: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSeen(Record):
    """``rank`` has been slower than the others for some time.

    Args:
        score: What it takes to compute a slice, over the median of the others.
        policy: What is done about it: ``"warn"``, ``"rebalance"`` or ``"replace"``.
    """

    score: float
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanged(Record):
    """The running job goes on otherwise from ``step`` on. Written by every worker.

    Args:
        name: Of what was changed.
        value: The new value, as JSON.
    """

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFenced(Record):
    """The launcher ends ``rank`` by SIGKILL: it is there and gets no further. Written just before.

    Args:
        silent_s: For how long it had given no sign.
        reason: Why it was taken to be stuck.
    """

    silent_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRestarted(Record):
    """The launcher starts the whole job again.

    Args:
        restart: 1 for the first restart.
        workers: Ranks that it is started with.
        reason: Why.
    """

    restart: int
    workers: tuple[int, ...]
    reason: str
