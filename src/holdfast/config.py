"""What a run was asked to do, and the environment variables that carry it to the workers.

One precedence everywhere: what the script passes to :class:`holdfast.Session`, then the environment
(which is how ``holdfast run`` passes its options on), then the default that stands here.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast.comm.fabrics.registry import BUILT_IN as FABRICS_BUILT_IN
from holdfast.comm.fabrics.registry import make_fabric
from holdfast.errors import ConfigError
from holdfast.options import check, choices, losses_of, option, parse, variable
from holdfast.recovery.registry import BUILT_IN, strategy_class

FABRICS = tuple(FABRICS_BUILT_IN)
CHECKPOINT_FORMATS = ("safetensors", "hdf5", "npz", "dcp")
STRATEGIES = tuple(BUILT_IN)
REINIT_FROM = ("own", "root", "checkpoint")
MIRROR_CHOICES = ("priority", "round-robin", "random")
MIRROR_DISTANCES = ("euclidean", "scaled")
MIRROR_PREDICTORS = ("last", "line", "calibrated")
MIRROR_CODECS = ("exact", "int8")
MIRROR_OPTIMIZERS = ("saved", "reset", "kept")
ORDERS = ("fold", "tree")
SPLITS = ("slices", "even")
BATCHES = ("global", "local")
RESCALES = ("survivors", "original")
UPDATES = ("lazy", "eager")
GUARDS = ("stop", "warn", "heal", "off")
KINDS = ("same", "any")

POLICIES = ("ignore", "warn", "rebalance", "replace")

FIRM = "HOLDFAST_FIRM"
"""Where this variable is 1, what the script passes to the session does not count: the run is somebody else's."""

MOST_WORKERS = 1 << 16
"""Most workers and spares of a job: far more than any job has had, and few enough to list one by one."""

_LONGEST_HANG_S = 1e9
"""Threads cannot sleep for much longer."""
_SHORTEST_HANG_S = 0.1
"""A beacon pulses ten times in a second: whoever is looked at more closely seems to have stopped between two pulses."""
_SHORTEST_START_S = 1.0
"""Python alone takes a tenth of a second to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set from outside the script. Each field ``x`` is read from ``HOLDFAST_X``."""

    fabric: str = option(
        "",
        help="How they talk [ulfm].",
        manual="how they talk: Open MPI; Gloo, rebuilt among survivors, which also takes in new workers and spans nodes; or all of them in one process. Models must be in CPU memory; only with `virtual` a replicated model may be on a GPU",
        usual="`ulfm`",
        group="recovery",
        choices=("", *FABRICS),
        is_open=True,
    )
    workers: int = option(
        1,
        help="Workers on this machine, or on all --hosts [1].",
        manual="worker processes",
        usual="1; with `--hosts` all that they have room for",
        group="workers",
        flags=("--workers", "-n"),
        metavar="N",
        least=1,
        most=MOST_WORKERS,
    )
    spares: int = option(
        0,
        help="Workers that wait, warm, to take the place of who dies [0].",
        manual="workers beside the N that take part in every step without a slice, warm, and take the place of who dies: from the step that was interrupted on",
        group="copies",
        metavar="K",
        least=0,
        most=MOST_WORKERS,
    )
    ranks: str = ""
    """Comma-separated numbers of the workers that the job is started with; "" is 0, 1, 2, ..."""
    rank: int = -1
    """This worker's number under the ``gloo`` fabric; MPI numbers those of the ``ulfm`` fabric."""
    store: str = ""
    """Where membership is kept under the ``gloo`` fabric, as ``holdfast://HOST:PORT/JOB``."""
    token: str = option(
        "",
        help="What all nodes must know.",
        manual="what all nodes must know, also as `HOLDFAST_TOKEN`; needed when the store is beyond this machine",
        group="meeting",
        flags=("--rdzv-token",),
        metavar="SECRET",
        env="HOLDFAST_TOKEN",
    )
    strategy: str = option(
        "rollback",
        help="What survivors do [rollback].",
        manual="what survivors do; `restart` needs `--checkpoint-dir`, `reinit` a script that ends with `holdfast.reinit(main)`, `partial` a model that is split",
        group="recovery",
        choices=STRATEGIES,
        is_open=True,
    )
    reinit_from: str = option(
        "own",
        help="What --strategy reinit goes on from [own].",
        manual="what `reinit` goes on from: a snapshot that each survivor takes at the fault; one that the lowest takes and gives to the others; or the newest checkpoint, the only one for models that are split",
        group="recovery",
        choices=REINIT_FROM,
    )
    order: str = option(
        "fold",
        help="Order in which they are added [fold].",
        manual="order in which slices are added: ((0+1)+2)+3, or (0+1)+(2+3)",
        group="sums",
        choices=ORDERS,
    )
    split: str = option(
        "slices",
        help="After a failure: hand slices over, or cut anew [slices].",
        manual="after a failure: survivors take over whole slices and the bits stay; or the mini-batch is cut anew, evenly, and they do not",
        group="sums",
        choices=SPLITS,
    )
    batch: str = option(
        "global",
        help="After a failure: which size stays [global].",
        manual="after a failure: the mini-batch keeps its size, or each worker's share does and the mini-batch shrinks",
        group="sums",
        choices=BATCHES,
    )
    rescale: str = option(
        "survivors",
        help="Divide an incomplete sum by [survivors].",
        manual="divide a sum that lacks samples by what is in it, or by what it would have had",
        group="sums",
        choices=RESCALES,
    )
    update: str = option(
        "lazy",
        help="The optimizer runs after all sums, or bucket by bucket [lazy].",
        manual="when the optimizer runs: once the closing sum has returned; or bucket by bucket, each as soon as its sum is in, beside the sums that follow, with an undo copy until then. The bits are the same: [architecture.md](../explanation/architecture.md#the-rules-and-why)",
        group="sums",
        choices=UPDATES,
    )
    guard: str = option(
        "stop",
        help="When replicas differ, or with warn and heal values are absurd [stop].",
        manual="when replicas are found to differ: stop, warn and go on, or go back to a state in memory that is known to be right and do the steps since again; `off` does not compare. `warn` and `heal` also look for values far out of range: [guard-against-corruption.md](../how-to/guard-against-corruption.md)",
        group="sums",
        choices=GUARDS,
    )
    guard_sums: bool = option(
        False,
        help="Checksums go with what is summed; whoever adds it looks.",
        manual="checksums go with the gradients that workers give to sums, and with what stages of a pipeline hand over; whoever adds or takes it looks. A finding is answered as `--guard` says; `heal` does that one step again: [checksum-all-reduces.md](../how-to/checksum-all-reduces.md)",
        usual="off",
        group="sums",
    )
    kinds: str = option(
        "same",
        help="Workers whose bits would differ: refused, or taken [same].",
        manual="where bits are promised: refuse a worker whose bits would differ, because its CPU, threads or torch do; or take any, and say what is given up: [mixed-platforms.md](../how-to/mixed-platforms.md)",
        group="sums",
        choices=KINDS,
    )
    certificate: bool = option(
        True,
        help="Write no digests of each step, which diff-runs and verify read.",
        manual="write no digests of each step, which `diff-runs` and `verify` read: [certificate.md](../explanation/exactness.md)",
        group="sums",
        flags=("--no-certificate",),
    )
    mirror: int = option(
        -1,
        help="Workers that hold each part of a split model beside those that compute it [1].",
        manual="of a model that is split: hold each part at K workers beside the one that computes it; where chains are replicas of each other they count. 0 keeps parts once, and a death costs the steps since the checkpoint: [failures-model-parallel.md](../explanation/failures-model-parallel.md)",
        group="copies",
        metavar="K",
        least=-1,
        least_given=0,
    )
    """Workers beside its own that hold each part of a model that is split; -1: one, where there is no replica of it."""
    mirror_every: int = option(
        1,
        help="1: they apply every step. Above, with --strategy partial: a whole copy is sent to them in so many [1].",
        manual="1: those K apply every step themselves, and the bits of what they hold are right. Above, with `--strategy partial`: they keep a copy, and in so many steps as much is sent to them as a whole copy is; with `--checkpoint-dir` one of them writes its copy there as often",
        group="copies",
        metavar="STEPS",
        least=1,
    )
    mirror_fraction: float = option(
        1.0,
        help="How much of a copy at a time: the smaller, the more often [1].",
        manual="how much of a copy is sent at a time, every R x STEPS steps: with 0.125 and 16 an eighth every other step",
        group="copies",
        metavar="R",
    )
    mirror_choice: str = option(
        "priority",
        help="What is sent first [priority: what moved most].",
        manual="what is sent: the blocks that are farthest from what they would be restored to, all in turn, or any",
        group="copies",
        choices=MIRROR_CHOICES,
    )
    mirror_distance: str = option(
        "euclidean",
        help="What moved most by: parameters, or all that is sent [euclidean].",
        manual="how far a block is: its parameters alone, or with the optimizer's state that is saved, each in its own unit, the root of the mean square of what was sent",
        group="copies",
        choices=MIRROR_DISTANCES,
    )
    mirror_predictor: str = option(
        "last",
        help="Restore the last value, the line through two, or part of the way along it [last].",
        manual="what a lost block is restored to: what was sent last; where the line through what was sent last and before that leads; or as far along it as the part was found to go: [partial-recovery.md](../explanation/partial-recovery.md#which-options-to-choose)",
        group="copies",
        choices=MIRROR_PREDICTORS,
    )
    mirror_codec: str = option(
        "exact",
        help="Send numbers, or differences of a byte [exact].",
        manual="how it is sent: as it is, or as differences of one byte, so that 3.2 times as many blocks of float32 go into the same bytes",
        group="copies",
        choices=MIRROR_CODECS,
    )
    mirror_optimizer: str = option(
        "saved",
        help="The optimizer's state of a part that is lost [saved].",
        manual="the optimizer's state of a lost part: sent and restored with its blocks; begun anew; or sent whole in every step, so that it is restored as it was when the part was lost",
        group="copies",
        choices=MIRROR_OPTIMIZERS,
    )
    min_workers: int = option(
        1,
        help="Below this: save and stop [1].",
        manual="with fewer: save the state, stop with exit code 1, say how to resume",
        group="limits",
        metavar="M",
        least=1,
    )
    seed: int = option(
        0,
        help="Of the samples' order, the model and the kills [0].",
        manual="of the order of samples, the randomness in the model, and `--mtbf`",
        group="seed",
        metavar="S",
        least=0,
    )
    slices: int = option(
        0,
        help="Pieces of a mini-batch, for the whole job [N].",
        manual="pieces a mini-batch is cut into, fixed for the job. Give it to compare the bits of jobs of different sizes. `auto:F` chooses a number with which the loss of up to F workers leaves the work nearly even, and says so; `auto` takes a quarter of the workers for F: [choose-slices.md](../how-to/choose-slices.md). At most 65,536, or the samples of a mini-batch if there are more",
        usual="the number of workers",
        group="slices",
        metavar="V|auto[:F]",
        kind=str,
        least=0,
    )
    """Pieces that a mini-batch is cut into; 0 is the number of workers the job is started with, or what ``auto_slices`` says."""
    auto_slices: int = option(-1, least=-1)
    """Choose ``slices`` so that the loss of so many workers leaves the work nearly even; 0: of a quarter of them; -1: do not."""
    bucket_bytes: int = option(25 << 20, least=1)
    """Gradients are summed in buckets of about this size."""
    shared_bytes: int = option(-1, least=-1)
    """Most memory that a worker may share with the others of its host, for sums; 0: none, -1: what is free."""
    checkpoint_dir: str = option(
        "",
        help="Where checkpoints are: a folder, or s3://bucket/run.",
        manual="where checkpoints are: a folder, `s3://bucket/run`, `gs://bucket/run` or `az://container/run` (with `holdfast[cluster]`); must hold none of another run",
        group="checkpoints",
        metavar="URL",
    )
    checkpoint_every: int = option(
        0,
        help="Steps between checkpoints, or as often as pays.",
        manual="steps between two; `auto`: as often as pays, see below",
        usual="saves none",
        group="checkpoints",
        metavar="STEPS|auto",
        kind=str,
        least=0,
    )
    """Steps between checkpoints; 0 saves none but those that are asked for."""
    checkpoint_auto: bool = False
    """Take checkpoints as often as pays, from what they are found to cost and how often failures come (Daly 2006)."""
    checkpoint_format: str = option(
        "safetensors",
        help="Of their files [safetensors].",
        manual="of their files; what is read may have any",
        group="checkpoints",
        choices=CHECKPOINT_FORMATS,
    )
    keep_last: int = option(
        0,
        help="Keep only so many of the newest [all].",
        manual="keep only so many of the newest, 2 at least: the newest may turn out to be damaged",
        group="checkpoints",
        metavar="K",
        least_given=2,
        because="the newest may turn out to be damaged",
    )
    """How many of the newest checkpoints are kept, at least 2; 0 keeps all."""
    keep_every: int = option(
        0,
        help="Besides these, keep those of every N-th step.",
        group="checkpoints",
        metavar="N",
        least=0,
        least_given=1,
    )
    """Checkpoints of steps that it divides are kept, too."""
    mtbf_s: float = option(
        86400.0,
        help="Between failures, until some are seen; for auto [a day].",
        manual="mean time between failures of the whole job to believe in until some are seen; for `auto`",
        usual="86400",
        group="checkpoints",
        flags=("--expected-mtbf",),
    )
    hang_timeout_s: float = option(
        30.0,
        help="End a worker that gives no sign for so long [30]; 0: never.",
        manual="a worker that has given no sign for so long, or stands still for so long while others wait for it, is ended and counts as dead; at least 0.1, or 0: never. [detect-failures.md](../how-to/detect-failures.md) says what raises it",
        usual="30",
        group="watching",
    )
    """A worker that has given no sign for so long, or for three times as long as ever before, is ended; 0 ends none."""
    start_timeout_s: float = option(
        120.0,
        help="End a worker that keeps the others waiting for so long at the start [120]; 0: never.",
        manual="limit for a worker to become ready to connect; it rises to three times what the slowest other worker took. A later worker is ended if it gives no sign of life, or if another worker has waited for it as long. The job then begins without it, or with a spare. At least 1, or 0: never. [start-and-stop.md](../how-to/start-and-stop.md#when-a-worker-does-not-start) says more",
        usual="120",
        group="watching",
    )
    """A worker that is not ready to connect after so long, or after three times what the slowest other one took, is ended if the
    others wait for it or it shows no sign of life; 0 ends none."""
    stop_after: int = option(
        -1,
        help="Save and stop when this step is committed; exit code 4.",
        manual="when this step is committed, save the state as on SIGTERM, and end with 4",
        group="length",
        metavar="STEP",
        least=-1,
        least_given=0,
    )
    """Stop, with the state saved, when this step is committed; -1: when the script ends."""
    resume: bool = option(
        False,
        help="Go on from the newest intact checkpoint.",
        manual="go on from the newest intact checkpoint in `--checkpoint-dir`, on any number of workers; damaged ones are named and passed over",
        group="length",
    )
    faults: str = ""
    """The fault plan, as JSON (see :mod:`holdfast.faults.plan`)."""
    run_dir: str = ""
    """Where workers write their records and beacons; "" writes none."""
    origin_s: float = 0.0
    """``time.monotonic()`` when the launcher started: zero of every ``t_s``."""

    def __post_init__(self) -> None:
        check(self)
        strategy_class(self.strategy)  # refuses a name that there is not
        if self.fabric:
            make_fabric(self.fabric)
        if self.keep_last < 0 or self.keep_last == 1:
            raise ConfigError(
                f"keep_last must be at least 2, or 0 to keep all, got {self.keep_last}: the newest may be damaged"
            )
        if self.hang_timeout_s != 0 and not _SHORTEST_HANG_S <= self.hang_timeout_s < math.inf:
            raise ConfigError(
                f"hang_timeout_s must be at least {_SHORTEST_HANG_S:g} seconds and finite, or 0 for never, got {self.hang_timeout_s:g}"
            )
        if self.hang_timeout_s > _LONGEST_HANG_S:
            raise ConfigError(
                f"hang_timeout_s must be at most {_LONGEST_HANG_S:g} seconds, or 0 for never, got {self.hang_timeout_s:g}"
            )
        if self.start_timeout_s != 0 and not _SHORTEST_START_S <= self.start_timeout_s <= _LONGEST_HANG_S:
            raise ConfigError(
                f"start_timeout_s must be from {_SHORTEST_START_S:g} to {_LONGEST_HANG_S:g} seconds, or 0 for never, got {self.start_timeout_s:g}"
            )
        self._check_mirrors()
        if self.guard_sums and self.guard == "off":
            raise ConfigError("guard_sums needs guard stop, warn or heal, which say what comes of a finding, got off")
        if not self.mtbf_s > 0:
            raise ConfigError(f"mtbf_s must be positive, got {self.mtbf_s}")
        if self.checkpoint_every and self.checkpoint_auto:
            raise ConfigError(
                "checkpoints are taken every so many steps (checkpoint_every) or as often as pays (checkpoint_auto), not both"
            )

    def _check_mirrors(self) -> None:
        if not 0 < self.mirror_fraction <= 1 or round(self.mirror_fraction * self.mirror_every) < 1:
            raise ConfigError(
                f"mirror_fraction must be above 0, at most 1, and at least one step of mirror_every ({self.mirror_every}), "
                f"got {self.mirror_fraction:g}"
            )
        if self.mirror_every > 1 and not strategy_class(self.strategy).restores_parts:
            raise ConfigError(
                f"mirror_every above 1 needs strategy partial, got {self.strategy}: a copy that is some steps old has not the bits that it promises"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Read the settings from the environment; ``overrides`` that are not None win.

        ``slices`` may be ``auto`` or ``auto:F`` in both, see :func:`losses_of`; a number goes before, wherever it is from.

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
        known = {field.name for field in dataclasses.fields(cls)}
        for name in overrides.keys() - known:
            raise ConfigError(f"unknown setting {name!r}; there are {', '.join(sorted(known))}")
        is_firm = parse(FIRM, env.get(FIRM, ""), default=False)
        given = {} if is_firm else {k: v for k, v in overrides.items() if v is not None}
        if isinstance(given.get("slices"), str):
            given["auto_slices"] = losses_of(given.pop("slices"), "slices")
        return cls(**(values | given))

    @property
    def auto_text(self) -> str:
        """What :func:`losses_of` reads, "" where the number of slices is not to be chosen."""
        if self.slices or self.auto_slices < 0:
            return ""
        return f"auto:{self.auto_slices}" if self.auto_slices else "auto"

    def to_env(self) -> dict[str, str]:
        """Return the variables that make :meth:`from_env` give these settings again (defaults are left out)."""
        return {
            variable(field.name): str(int(value)) if isinstance(value, bool) else str(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @property
    def pulse_every_s(self) -> float:
        """How often a worker shows that its interpreter runs, seconds: ten times in the shorter timeout; 0: never."""
        return min((limit for limit in (self.hang_timeout_s, self.start_timeout_s) if limit), default=0.0) / 10


def debug_wanted(env: Mapping[str, str] | None = None) -> bool:
    """Return whether ``HOLDFAST_DEBUG`` asks that ranks compare the collectives that they call, before each.

    Raises:
        ConfigError: if it is neither 0 nor 1.
    """
    text = (os.environ if env is None else env).get("HOLDFAST_DEBUG", "")
    return bool(parse("HOLDFAST_DEBUG", text, default=False))


_CHOICES = choices(Settings)
