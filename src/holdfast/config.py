"""Settings of a run, and the environment variables that pass them to the workers.

Precedence: arguments of :class:`holdfast.Session` in the script, then the environment (through which ``holdfast run``
passes its options), then the defaults below.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast import setting_choices
from holdfast.base.options import check, choices, losses_of, option, parse, variable
from holdfast.base.orders import LISTED_ORDERS, is_rounded
from holdfast.base.rules import check_rules
from holdfast.checkpoint.files.registry import check_format
from holdfast.comm.fabrics.registry import make_fabric
from holdfast.errors import ConfigError
from holdfast.recovery.registry import strategy_class
from holdfast.setting_checks import RULES

FIRM = "HOLDFAST_FIRM"
"""If this variable is 1, arguments of the session in the script are ignored: the run is a replay."""

RESPAWNS = "HOLDFAST_RESPAWNS"
"""The launcher sets this variable to the number of new workers that may join the running job, if any may."""

MOST_WORKERS = 1 << 16
"""Maximum number of workers and spares of a job; few enough to list one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings that can be set from outside the script. Each field ``x`` is read from ``HOLDFAST_X``."""

    workers: int = option(
        1,
        help="Worker processes on each node; with --hosts, in total.",
        manual="worker processes on each node; with `--hosts`, in total",
        usual="1; with `--hosts`, all slots",
        group="Workers",
        is_basic=True,
        flags=("--workers", "-n"),
        metavar="N",
        least=1,
        most=MOST_WORKERS,
    )
    fabric: str = option(
        "",
        help="Communication backend: Open MPI, Gloo, or a single process.",
        manual="communication backend: Open MPI with ULFM; Gloo, which also admits new workers and spans nodes; or one process for all workers. Models may be on an NVIDIA GPU: [not run on one yet](../how-to/gpus.md)",
        usual="`ulfm`",
        group="Workers",
        is_basic=True,
        choices=("", *setting_choices.FABRICS),
        is_open=True,
    )
    spares: int = option(
        0,
        help="Warm spare workers, which replace failed ones.",
        manual="warm spare workers, in addition to `-n`: they take part in every step without a slice, and replace a failed worker from the interrupted step on. In a `torch.distributed` script they wait in `init_process_group`, and take the rank of a failed process if the script calls [`holdfast.distributed.register`](../how-to/own-script-with-torch-distributed.md#replace-dead-ranks)",
        usual="0",
        group="Spare and replacement workers",
        is_basic=True,
        metavar="K",
        least=0,
        most=MOST_WORKERS,
    )
    ranks: str = ""
    """Comma-separated ranks that the job is started with; "" is 0, 1, 2, ..."""
    rank: int = -1
    """Rank of this worker with the ``gloo`` fabric; with ``ulfm``, MPI assigns it."""
    store: str = ""
    """URL of the membership store of the ``gloo`` fabric, as ``holdfast://HOST:PORT/JOB``."""
    token: str = option(
        "",
        help="Secret that all nodes share.",
        manual="secret that all nodes share, also read from `HOLDFAST_TOKEN`; required if the store is not on this machine",
        group="Multiple nodes with Gloo",
        flags=("--rdzv-token",),
        metavar="SECRET",
        env="HOLDFAST_TOKEN",
    )
    strategy: str = option(
        "rollback",
        help="How survivors recover from a failure.",
        manual="how survivors recover from a failure; `restart` needs `--checkpoint-dir`, `reinit` a script that ends with `holdfast.reinit(main)`, `partial` a pipeline or sharded model",
        group="Recovery",
        is_basic=True,
        choices=setting_choices.STRATEGIES,
        is_open=True,
    )
    empty_seats: str = option(
        "fill",
        help="torch.distributed: sums are scaled for failed ranks and gathers filled; or only filled; or RanksLost.",
        manual="`torch.distributed` scripts: while the seat of a failed rank is empty, `fill` scales the script's sums so that `sum / world_size` stays a mean, and fills gathers of metrics with the value of the lowest surviving rank; `survivors` leaves sums as they are; `raise` raises `RanksLost`. What ranks hold of a split state always raises: [own-script-with-torch-distributed.md](../how-to/own-script-with-torch-distributed.md#empty-seats)",
        group="Recovery",
        choices=setting_choices.EMPTY_SEATS,
    )
    reinit_from: str = option(
        "own",
        help="State from which --strategy reinit resumes.",
        manual="state from which `reinit` resumes: a snapshot that each survivor takes at the failure; a snapshot of the lowest surviving rank, sent to the others; or the newest checkpoint, the only choice for pipeline and sharded models",
        group="Recovery",
        choices=setting_choices.REINIT_FROM,
    )
    order: str = option(
        setting_choices.AUTO,
        help="Order in which the gradients of slices are added; auto: tree if the run begins on several hosts, else fold.",
        manual="order in which the gradients of slices are added: `fold` ((0+1)+2)+3, or `tree` (0+1)+(2+3); `-wide`: 16-bit gradients are added in float32, and rounded once; `auto`: [`tree` if the run begins with workers on several hosts, else `fold`](../explanation/all-reduce.md#which-order); the others are those of `--wire bf16`",
        group="Mini-batches and gradient reduction",
        choices=(setting_choices.AUTO, *LISTED_ORDERS),
        is_open=True,  # N is any of the units
    )
    wire: str = option(
        "fp32",
        help="Type in which float32 gradients travel between workers; bf16 halves the bytes, and has bits of its own.",
        manual="type in which float32 gradients travel between workers. `bf16` halves the bytes: gradients and their mean are rounded to bfloat16 at fixed places, and added in float32. The bits are others than those of `fp32`, but as independent of failures: [all-reduce.md](../explanation/all-reduce.md#gradients-in-16-bits-on-the-wire)",
        group="Mini-batches and gradient reduction",
        choices=setting_choices.WIRES,
    )
    split: str = option(
        "slices",
        help="After a failure, reassign whole slices, or split the mini-batch evenly again.",
        manual="after a failure: survivors take over whole slices, and results stay bit-identical; or the mini-batch is split evenly again, and they do not",
        group="Mini-batches and gradient reduction",
        choices=setting_choices.SPLITS,
    )
    batch: str = option(
        "global",
        help="After a failure, keep the mini-batch size of the job, or that of each worker.",
        manual="after a failure: the mini-batch keeps its size; or each worker's share does, and the mini-batch shrinks",
        group="Mini-batches and gradient reduction",
        choices=setting_choices.BATCHES,
    )
    rescale: str = option(
        "survivors",
        help="Divide an incomplete all-reduce by its samples, or by those of the full mini-batch.",
        manual="divisor of an all-reduce that lacks samples: the samples that it contains, or those of the full mini-batch",
        group="Mini-batches and gradient reduction",
        choices=setting_choices.RESCALES,
    )
    overlap_optimizer: bool = option(
        False,
        help="Overlap the optimizer with the all-reduce, instead of running it after the commit vote.",
        manual="run the optimizer bucket by bucket, each as soon as it is reduced, overlapped with the remaining all-reduces, with an undo copy until the commit vote. The bits are the same: [architecture.md](../explanation/architecture.md#the-rules-and-why)",
        usual="off",
        group="Mini-batches and gradient reduction",
    )
    guard: str = option(
        "stop",
        help="Response to silent data corruption.",
        manual="`stop`: abort when replicas differ. `warn`: log and continue. `heal`: roll back to the last verified in-memory snapshot and replay. `off`: do not compare. `warn` and `heal` also check for values far out of range: [guard-against-corruption.md](../how-to/guard-against-corruption.md)",
        group="Verification and silent data corruption",
        is_basic=True,
        choices=setting_choices.GUARDS,
    )
    guard_sums: bool = option(
        False,
        help="Send checksums with gradients, and verify them on receipt.",
        manual="send checksums with the gradients of an all-reduce and with the messages of pipeline stages; the receiver verifies them. `--guard` selects the response; `heal` repeats only that step: [checksum-all-reduces.md](../how-to/checksum-all-reduces.md)",
        usual="off",
        group="Verification and silent data corruption",
    )
    require_same_platform: bool = option(
        True,
        help="Accept workers on any platform; by default one that computes different bits is refused.",
        manual="accept workers on any platform, and report what is no longer guaranteed. By default, where results are bit-identical, a worker whose CPU, thread count or torch computes different bits is refused: [mixed-platforms.md](../how-to/mixed-platforms.md)",
        usual="off",
        group="Verification and silent data corruption",
        flags=("--no-require-same-platform",),
    )
    certificate: bool = option(
        True,
        help="Do not write digests of each step, which diff-runs and verify read.",
        manual="do not write digests of each step, which `diff-runs` and `verify` read: [certificate.md](../explanation/exactness.md)",
        group="Verification and silent data corruption",
        flags=("--no-certificate",),
    )
    mirror: int = option(
        -1,
        help="Standbys of each part of the model.",
        manual="standbys of each part of the model, in addition to the worker that computes it; replicas of a pipeline count. With 0, a failure costs the steps since the last checkpoint: [failures-model-parallel.md](../explanation/failures-model-parallel.md)",
        usual="1",
        group="Pipeline and sharded models",
        metavar="K",
        least=-1,
        least_given=0,
    )
    """Standbys of each part of a split model, in addition to its own worker; -1: one, unless the part has a replica."""
    mirror_every: int = option(
        1,
        help="1: standbys apply every step. Above 1: they receive a full copy in this many steps.",
        manual="1: hot standbys, which apply every step and stay bit-identical. Above 1, with `--strategy partial`: delta standbys, which receive as many bytes as a full copy every STEPS steps; with `--checkpoint-dir`, one of them writes its copy there at that interval",
        group="Pipeline and sharded models",
        metavar="STEPS",
        least=1,
    )
    mirror_fraction: float = option(
        1.0,
        help="Fraction of a copy to send at a time; smaller fractions are sent more often.",
        manual="fraction of a copy to send at a time, every R x STEPS steps: with 0.125 and 16, an eighth every other step",
        group="Pipeline and sharded models",
        metavar="R",
    )
    mirror_choice: str = option(
        "priority",
        help="Which blocks to send: those that changed most, all in turn, or random ones.",
        manual="which blocks to send: those farthest from the values they would be restored to, all in turn, or random ones",
        group="Pipeline and sharded models",
        choices=setting_choices.MIRROR_CHOICES,
    )
    mirror_distance: str = option(
        "euclidean",
        help="What change is measured on: parameters, or optimizer state as well.",
        manual="distance of a block: over its parameters; or also over the optimizer state that is saved, each scaled by the root mean square of the values sent",
        group="Pipeline and sharded models",
        choices=setting_choices.MIRROR_DISTANCES,
    )
    mirror_predictor: str = option(
        "last",
        help="Predict a lost block: last value, linear extrapolation, or a calibrated one.",
        manual="value to restore a lost block to: the last value sent; linear extrapolation of the last two; or extrapolation by the fraction that has fitted this part: [partial-recovery.md](../explanation/partial-recovery.md#which-options-to-choose)",
        group="Pipeline and sharded models",
        choices=setting_choices.MIRROR_PREDICTORS,
    )
    mirror_codec: str = option(
        "exact",
        help="Send values exactly, or as one-byte differences.",
        manual="encoding of blocks: exact, or one-byte differences, so that four times as many blocks fit into the same bytes",
        group="Pipeline and sharded models",
        choices=setting_choices.MIRROR_CODECS,
    )
    mirror_optimizer: str = option(
        "saved",
        help="Optimizer state of a lost part: restored with its blocks, reset, or kept current.",
        manual="optimizer state of a lost part: sent and restored with its blocks; reset; or sent in full at every step, and thus restored as it was at the failure",
        group="Pipeline and sharded models",
        choices=setting_choices.MIRROR_OPTIMIZERS,
    )
    min_workers: int = option(
        1,
        help="With fewer workers, save the state and stop.",
        manual="with fewer workers: save the state, exit with code 1 and print the command that resumes",
        group="Recovery",
        metavar="M",
        least=1,
    )
    seed: int = option(
        0,
        help="Seed of the sample order, of randomness in the model, and of --mtbf.",
        manual="seed of the sample order, of randomness in the model, and of `--mtbf`",
        usual="0",
        group="Workers",
        metavar="S",
        least=0,
    )
    slices: int = option(
        0,
        help="Slices per mini-batch, fixed for the job.",
        manual="slices per mini-batch, fixed for the job; give it to compare the bits of jobs of different sizes. `auto:F` chooses, and logs, a number that keeps the load nearly even after the loss of up to F workers; `auto` takes a quarter of the workers for F: [choose-slices.md](../how-to/choose-slices.md). At most 65,536, or the samples of a mini-batch if there are more",
        usual="one per worker",
        group="Mini-batches and gradient reduction",
        is_basic=True,
        metavar="V|auto[:F]",
        kind=str,
        least=0,
    )
    """Slices per mini-batch; 0: the number of workers at the start of the job, or chosen by ``auto_slices``."""
    auto_slices: int = option(-1, least=-1)
    """Choose ``slices`` to keep the load nearly even after the loss of this many workers; 0: of a quarter of them; -1:
    off."""
    bucket_bytes: int = option(25 << 20, least=1)
    """Approximate size of the buckets in which gradients are reduced."""
    shared_bytes: int = option(-1, least=-1)
    """Maximum shared memory of a worker with the others of its host, for all-reduces; 0: none, -1: all that is free."""
    between_hosts: str = option(
        "fabric",
        help="What carries gradients between hosts; nccl has never run.",
        manual="what carries gradients between hosts: messages of the fabric; or NCCL, for models on GPUs and with `--order tree`, which [has never run](../how-to/gpus.md#nccl-between-hosts)",
        group="Mini-batches and gradient reduction",
        choices=setting_choices.BETWEEN_HOSTS,
    )
    overlap: str = option(
        "auto",
        help="Begin all-reduces during the backward pass: where they send messages, everywhere, or never.",
        manual="begin the all-reduce of a bucket during the backward pass, as soon as its gradients are complete: where all-reduces send messages; also through shared memory; or never. The bits are the same: [all-reduce.md](../explanation/all-reduce.md#overlap-with-the-backward-pass)",
        group="Mini-batches and gradient reduction",
        choices=setting_choices.OVERLAPS,
    )
    checkpoint_dir: str = option(
        "",
        help="Directory or URL of checkpoints, such as s3://bucket/run.",
        manual="directory of checkpoints, or `s3://bucket/run`, `gs://bucket/run` or `az://container/run` (with `holdfast[cluster]`); it must not hold checkpoints of another run",
        group="Checkpoints",
        is_basic=True,
        metavar="URL",
    )
    checkpoint_every: int = option(
        0,
        help="Steps between checkpoints; auto: the optimal interval.",
        manual="steps between checkpoints; `auto`: the optimal interval (Daly 2006), see below",
        usual="no checkpoints",
        group="Checkpoints",
        is_basic=True,
        metavar="STEPS|auto",
        kind=str,
        least=0,
    )
    """Steps between checkpoints; 0 saves only those that are requested."""
    checkpoint_auto: bool = False
    """Choose the checkpoint interval from the measured cost of a checkpoint and the failure rate (Daly 2006)."""
    checkpoint_format: str = option(
        "safetensors",
        help="File format of new checkpoints.",
        manual="file format of new checkpoints; every format can be read",
        group="Checkpoints",
        choices=setting_choices.CHECKPOINT_FORMATS,
        is_open=True,
    )
    incremental_checkpoints: bool = option(
        True,
        help="Write every checkpoint in full, without sharing files with an earlier one.",
        manual="write every checkpoint in full; otherwise blocks that did not change are shared with the last checkpoint but one: [store-checkpoints.md](../how-to/store-checkpoints.md#what-did-not-change)",
        group="Checkpoints",
        flags=("--full-checkpoints",),
    )
    keep_last: int = option(
        0,
        help="Keep only the K newest checkpoints.",
        manual="keep only the K newest checkpoints, at least 2: the newest may turn out to be damaged",
        usual="all",
        group="Checkpoints",
        metavar="K",
        least_given=2,
        because="the newest may turn out to be damaged",
    )
    """Number of newest checkpoints to keep, at least 2; 0 keeps all."""
    keep_every: int = option(
        0,
        help="Also keep checkpoints of steps that N divides.",
        group="Checkpoints",
        metavar="N",
        least=0,
        least_given=1,
    )
    """Checkpoints of steps that it divides are kept, too."""
    mtbf_s: float = option(
        86400.0,
        help="Mean time between failures that --checkpoint-every auto assumes at first.",
        manual="mean time between failures of the whole job that `--checkpoint-every auto` assumes until failures are observed",
        usual="86400",
        group="Checkpoints",
        flags=("--expected-mtbf",),
    )
    hang_timeout_s: float = option(
        30.0,
        help="Kill a worker that has sent no heartbeat for this long; 0: never.",
        manual="kill a worker that has sent no heartbeat, or has made no progress while others wait for it, for this long; it counts as failed. At least 0.1, or 0: never. [detect-failures.md](../how-to/detect-failures.md) says what raises the limit",
        group="Failure detection",
    )
    """Limit without a heartbeat; rises to three times the longest silence so far. 0: no limit."""
    start_timeout_s: float = option(
        120.0,
        help="Kill a worker that is not ready to connect after this long; 0: never.",
        manual="limit for a worker to become ready to connect; it rises to three times what the slowest other worker took. A later worker is killed if it sends no heartbeat, or once another worker has waited for it this long. The job then begins without it, or with a spare. At least 1, or 0: never: [start-and-stop.md](../how-to/start-and-stop.md#when-a-worker-does-not-start)",
        group="Failure detection",
    )
    """Limit to become ready to connect, or three times the slowest other worker. A later one is killed if others wait for
    it, or it sends no heartbeat. 0: no limit."""
    debug_handlers: bool = option(
        False,
        help="Serve torch's debug handlers of each worker on a socket in the run's directory, for holdfast debug-bundle.",
        manual="serve torch's debug handlers of each worker, such as its flight recorder, on a socket in the run's directory, which only you can open; `holdfast debug-bundle` asks them: [debug.md](../how-to/debug.md#flight-recorder)",
        group="Output",
    )
    """Serve torch's debug handlers of this worker on a socket in ``run_dir``."""
    stop_after: int = option(
        -1,
        help="Once this step is committed, save the state and exit with code 4.",
        manual="once this step is committed, save the state as on SIGTERM and exit with code 4",
        group="Resume and stop",
        metavar="STEP",
        least=-1,
        least_given=0,
    )
    """Stop, with the state saved, once this step is committed; -1: run to the end of the script."""
    resume: bool = option(
        False,
        help="Resume from the newest intact checkpoint.",
        manual="resume from the newest intact checkpoint in `--checkpoint-dir`, on any number of workers; damaged checkpoints are reported and skipped",
        group="Resume and stop",
        is_basic=True,
    )
    faults: str = ""
    """The fault plan, as JSON (see :mod:`holdfast.faults.plan`)."""
    run_dir: str = ""
    """Directory of the workers' records and beacons; "" writes none."""
    origin_s: float = 0.0
    """``time.monotonic()`` at the start of the launcher, the zero of every ``t_s``."""
    launch_dir: str = ""
    """Where the launcher was started: a script may change to another directory before it trains, and the launcher means this one."""

    def __post_init__(self) -> None:
        check(self)
        strategy_class(self.strategy)  # raises if the name is unknown
        if self.fabric:
            make_fabric(self.fabric)
        check_format(self.checkpoint_format, "checkpoint_format")
        check_rules(RULES, self)

    @property
    def rounds(self) -> bool:
        """Whether float32 gradients are rounded to bfloat16 on the wire."""
        return self.wire == "bf16" or is_rounded(self.order)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Read the settings from the environment; ``overrides`` that are not None win.

        ``slices`` may be ``auto`` or ``auto:F`` in both, see :func:`losses_of`; a number from either takes precedence.

        Raises:
            ConfigError: if a variable or an override has a value that is not allowed, or is unknown.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            text = env.get(variable(field.name))
            if field.name == "slices" and text is not None and text.startswith("auto"):
                values["auto_slices"] = losses_of(text, variable("slices"))
            elif text is not None:
                values[field.name] = parse(variable(field.name), text, field.default)
        names = {field.name for field in dataclasses.fields(cls)}
        for name in overrides.keys() - names:
            raise ConfigError(f"unknown setting {name!r}; known settings are {', '.join(sorted(names))}")
        is_firm = parse(FIRM, env.get(FIRM, ""), default=False)
        settings = {} if is_firm else {k: v for k, v in overrides.items() if v is not None}
        if "checkpoint_dir" in settings:  # by the script, which means its own working directory
            settings["launch_dir"] = ""
        if isinstance(settings.get("slices"), str):
            settings["auto_slices"] = losses_of(settings.pop("slices"), "slices")
        return cls(**(values | settings))

    @property
    def auto_text(self) -> str:
        """Input of :func:`losses_of`; "" if the number of slices is not chosen automatically."""
        if self.slices or self.auto_slices < 0:
            return ""
        return f"auto:{self.auto_slices}" if self.auto_slices else "auto"

    def to_env(self) -> dict[str, str]:
        """Return the variables from which :meth:`from_env` reproduces these settings; defaults are omitted."""
        return {
            variable(field.name): str(int(value)) if isinstance(value, bool) else str(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @property
    def pulse_every_s(self) -> float:
        """Interval of a worker's heartbeat, seconds: a tenth of the shorter timeout; 0: no heartbeat."""
        return min((limit for limit in (self.hang_timeout_s, self.start_timeout_s) if limit), default=0.0) / 10


_CHOICES = choices(Settings)
