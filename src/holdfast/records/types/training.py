"""Records of training: how it starts, its steps, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.records.types.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Record):
    """Training starts, or resumes at ``step`` after a restart. Written by every worker, also on each restart.

    The ``torch.distributed`` backend writes it too, at the first step of ``DistributedDataParallel`` or at the end of a
    script without one. It knows neither the model nor a plan: the planned values, the buckets and the parameters are 0.

    ``link`` is the hash-chain link of the previous step (see :mod:`holdfast.integrity.hash_chain`):
    :data:`holdfast.integrity.hash_chain.GENESIS` at the start of the chain, "" without a chain. ``platform`` is the
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
    overlap_optimizer: bool = False
    link: str = ""
    platform: Mapping[str, str] = field(default_factory=dict)
    given_up: str = ""

    @property
    def is_distributed(self) -> bool:
        """Whether the ``torch.distributed`` backend wrote it."""
        return self.parameters == 0 and self.steps_planned == 0


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
class OptimizerOverlapped(Record):
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
class SettingChanged(Record):
    """A setting of the running job changes at ``step``. Written by every worker.

    Args:
        name: Name of the setting.
        value: The new value, as JSON.
    """

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Record):
    """The checkpoint before ``step`` is complete: its manifest is written.

    Args:
        path: Its path.
        size_bytes: Its size.
        seconds: How long it blocked training.
        interval_s: Seconds until the next one is due, as chosen by ``--checkpoint-every auto``; 0 without that option.
        new_bytes: How much of it was written; the rest it shares with an earlier checkpoint.
    """

    path: str
    size_bytes: int
    seconds: float
    interval_s: float = 0.0
    new_bytes: int = 0


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
