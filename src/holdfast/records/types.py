"""Record types: the lines of ``events.jsonl``, sufficient to draw the run and to replay it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NOT_STAMPED: Any = None

STAMPS = ("t_s", "rank", "step")
"""Fields that :class:`holdfast.records.logger.Logger` adds to a record that does not set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of ``events.jsonl``. Created without stamps; a :class:`~holdfast.records.logger.Logger` adds them.

    Args:
        t_s: Seconds since the launcher started the job.
        rank: The rank that wrote it; for :class:`FaultFired` and :class:`WorkerEnded`, its subject; -1: the launcher.
        step: The step in progress, -1 if there is none.
    """

    t_s: float = _NOT_STAMPED
    rank: int = _NOT_STAMPED
    step: int = _NOT_STAMPED

    def missing_stamps(self) -> list[str]:
        """Return which of :data:`STAMPS` the record lacks; empty for a record that was written."""
        return [name for name in STAMPS if getattr(self, name) is _NOT_STAMPED]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Record):
    """Training starts, or resumes at ``step`` after a restart. Written by every worker, also on each restart.

    The ``torch.distributed`` backend writes it too, at the first step of ``DistributedDataParallel`` or at the end of a
    script without one. It knows neither the model nor a plan: the planned values, the buckets and the parameters are 0.

    ``link`` is the hash-chain link of the previous step (see :mod:`holdfast.integrity.hash_chain`):
    :data:`holdfast.integrity.hash_chain.GENESIS` at the start of the chain, "" without a chain. ``kind`` is the
    worker's platform, see :mod:`holdfast.state.platform`; it is not determined under ``torch.distributed``.
    ``given_up`` says how the platform of another worker, or of the loaded checkpoint's writer, differs, or "".
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
    """The optimizer ran for ``step``. Written by the lead (lowest rank alive); a new lead writes its last step again.

    Args:
        samples: Samples whose gradients are in the step; 0 under ``torch.distributed``, where this is unknown.
        workers: Workers that took part.
        metrics: Values that the script logged, averaged over the samples of the step, including ``loss``.
        link: The certificate's link, a hash of all fields below and of the previous link; see
            :mod:`holdfast.integrity.hash_chain`. "" without a certificate.
        ids: Digest of the samples, slice by slice.
        figures: Digest of the exact metrics.
        state: Digest of a part of the state before the step, of another part in each step.
        whole: The digest covers the whole state.
        where: Readable name of the hashed part.
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
class ImageLogged(Record):
    """The script logged an image in ``step``. Written before the step is committed, by the worker with its first slice.

    Only written if a launcher logs to something that shows images. It counts if the step is committed.

    Args:
        name: Its name.
        file: Its file, a PNG, in the folder ``media`` of the run folder; removed when it was logged. "" on another node
            than that of the launcher that logs.
        width: Pixels of a row.
        height: Number of rows.
        channels: 1: grey; 3: RGB; 4: RGBA.
    """

    name: str
    file: str
    width: int
    height: int
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramLogged(Record):
    """The script logged a histogram in ``step``; written as :class:`ImageLogged` is.

    Args:
        name: Its name.
        low: Lower end of the first bin.
        high: Upper end of the last bin; all bins have the same width.
        counts: Values in each bin.
        total: Sum of the values.
        squares: Sum of their squares.
    """

    name: str
    low: float
    high: float
    counts: tuple[int, ...]
    total: float
    squares: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHashed(Record):
    """State of ``rank`` before ``step``, every :data:`holdfast.integrity.hash_chain.WHOLE_EVERY` steps and at the end.

    Args:
        link: The link of the previous step, as this worker itself computed it.
        tensors: Digests by path: ``parameter``, ``parameter/key of the optimizer's state`` or ``buffer``. Written by
            the lead only, at the end by all. In a split model each worker writes those of the parts that it holds.
        part: The hashed part of a split model; -1 if the model is not split.
        parts: Number of parts, 0 if the model is not split.
    """

    link: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    part: int = -1
    parts: int = 0


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
            ``Revoke``, ``Agree``, ``Shrink``, ``Rehome``.
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
    """A survivor's value stood in for failed ranks in a collective of ``torch.distributed`` with one tensor a rank.

    Written at the first such collective of each kind, and again with their number so far, if there were more, at each
    later recovery and at the end.

    Args:
        collective: Its name, such as ``all_gather``.
        seats: The failed ranks.
        sources: For each of them, the rank whose value stood in.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedEagerly(Record):
    """The cost at ``rank`` of updating buckets before their step's commit vote, over all of its training.

    Args:
        steps: Steps that were updated this way and committed.
        buckets: Buckets that were updated, including those of steps that were rolled back.
        undone: Buckets whose update was rolled back.
        copy_bytes: Memory of the undo copies.
        copy_s: Seconds spent on making these copies.
        update_s: Seconds spent in the optimizer.
        waited_s: Seconds for which training waited for either; the rest overlapped with all-reduces.
        undo_s: Seconds spent on rolling updates back.
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
    """Whether ``rank`` can batch a step's slices in one pass is known; see :meth:`holdfast.session.step.Step.compute`.

    Args:
        samples: Samples of each slice.
        why_not: Why they are computed one by one; "" if they are batched from now on, as results stay bit-identical.
        at_once_s: Shortest time batched, over the steps that were computed in both ways; 0 if batching was impossible.
        one_by_one_s: Shortest time one by one.
    """

    samples: tuple[int, ...]
    why_not: str
    at_once_s: float
    one_by_one_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Record):
    """``rank`` leaves the job before ``step`` because it received SIGTERM; all of its work is in the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused(Record):
    """``rank``, a newcomer, has a different platform and the job promises bit-exactness: it ends and is not replaced.

    Args:
        why: How its platform differs, and what to do.
        kind: Its platform, see :mod:`holdfast.state.platform`.
    """

    why: str
    kind: Mapping[str, str]


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
class CheckpointSaved(Record):
    """The checkpoint before ``step`` is complete: its manifest is written.

    Args:
        path: Its path.
        size_bytes: Total size of its files.
        seconds: How long it blocked training.
        interval_s: Seconds until the next one is due, as chosen by ``--checkpoint-every auto``; 0 without that option.
    """

    path: str
    size_bytes: int
    seconds: float
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Record):
    """``rank`` passed the final gate: training is complete and no other worker needs it any more.

    Args:
        outcome: ``"done"``; ``"stopped"`` on request (SIGTERM) with its state saved; ``"gave-up"`` for too few workers.
        sha256: Hash over all parameters and buffers, in path order, little-endian bytes; "" under
            ``torch.distributed``, where it is unknown and all following fields are 0 or empty.
        state_sha256: Hash over these and the optimizer state.
        planned: Samples of the plan up to the last step.
        committed: Samples of the plan that contributed to the weights exactly once.
        lost: Samples that ``forward`` continued without.
        repeated: Samples that contributed to the weights more than once.
        checkpoint: Where the state was saved, or "".
        link: The link of the last step, as this worker itself computed it, or "".
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
    """The script raised an exception, or used the session wrongly.

    Args:
        exit_code: 2 for a wrong setting (:class:`~holdfast.errors.ConfigError`), otherwise 1.
        message: One line.
        traceback: The script's own frames, or "".
        is_bug: Whether the script would raise it again: neither lost workers nor the storage are the cause.
    """

    exit_code: int
    message: str
    traceback: str
    is_bug: bool = False


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
class StragglerSeen(Record):
    """``rank`` has been slower than the other workers for some time.

    Args:
        score: Its time to compute a slice, divided by the median of the other workers.
        policy: The response: ``"warn"``, ``"rebalance"`` or ``"replace"``.
    """

    score: float
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanged(Record):
    """A setting of the running job changes at ``step``. Written by every worker.

    Args:
        name: Name of the setting.
        value: The new value, as JSON.
    """

    name: str
    value: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequested(Record):
    """The user requested an action on the running job through the dashboard. Written by the launcher.

    Args:
        action: ``"kill"``, ``"scale"``, ``"set"``, ``"save"`` or ``"stop"``.
        values: Its values as JSON, such as ``{"rank": 2}``.
    """

    action: str
    values: str = "{}"
