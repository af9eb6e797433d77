"""What a run was asked to do, and the environment variables that carry it to the workers.

One precedence everywhere: what the script passes to :class:`holdfast.Session`, then the environment
(which is how ``holdfast run`` passes its options on), then the default that stands here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast.comm.fabrics.registry import BUILT_IN as FABRICS_BUILT_IN
from holdfast.comm.fabrics.registry import make_fabric
from holdfast.errors import ConfigError
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

_CHOICES = {
    "reinit_from": REINIT_FROM,
    "mirror_choice": MIRROR_CHOICES,
    "mirror_distance": MIRROR_DISTANCES,
    "mirror_predictor": MIRROR_PREDICTORS,
    "mirror_codec": MIRROR_CODECS,
    "mirror_optimizer": MIRROR_OPTIMIZERS,
    "order": ORDERS,
    "split": SPLITS,
    "batch": BATCHES,
    "rescale": RESCALES,
    "update": UPDATES,
    "guard": GUARDS,
    "kinds": KINDS,
    "checkpoint_format": CHECKPOINT_FORMATS,
}

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

    fabric: str = ""
    """How workers talk; "" chooses ``ulfm`` under mpirun and one ``virtual`` worker otherwise."""
    workers: int = 1
    """How many workers share the work, as long as so many are alive."""
    spares: int = 0
    """Workers beside them that take part in every step without a slice, and take the place of who dies."""
    ranks: str = ""
    """Comma-separated numbers of the workers that the job is started with; "" is 0, 1, 2, ..."""
    rank: int = -1
    """This worker's number under the ``gloo`` fabric; MPI numbers those of the ``ulfm`` fabric."""
    store: str = ""
    """Where membership is kept under the ``gloo`` fabric, as ``holdfast://HOST:PORT/JOB``."""
    token: str = ""
    """What the store asks for before it answers."""
    strategy: str = "rollback"
    """What survivors do."""
    reinit_from: str = "own"
    """What ``reinit`` goes on from: each survivor's own snapshot, the lowest one's, or the newest checkpoint."""
    slices: int = 0
    """Pieces that a mini-batch is cut into; 0 is the number of workers the job is started with, or what ``auto_slices`` says."""
    auto_slices: int = -1
    """Choose ``slices`` so that the loss of so many workers leaves the work nearly even; 0: of a quarter of them; -1: do not."""
    order: str = "fold"
    """Order in which slices are added."""
    split: str = "slices"
    """After a failure: whole slices change hands, or the mini-batch is cut anew, evenly."""
    batch: str = "global"
    """After a failure: the mini-batch keeps its size, or each worker does."""
    rescale: str = "survivors"
    """Divide a sum that lacks samples by what is in it, or by the size it would have had."""
    update: str = "lazy"
    """When the optimizer runs: once the closing sum has returned; or, bucket by bucket, as soon as the bucket's sum is in, with a
    copy to take it back from until the closing sum has."""
    guard: str = "stop"
    """When replicas are found to differ: stop, warn and go on, or heal, which is to go back to a state in memory that is known
    to be right; off: they are not compared. With warn and heal, values far out of range are looked for, too."""
    guard_sums: bool = False
    """Checksums go with what is summed, and whoever adds it looks; what comes of a finding is as ``guard`` says."""
    kinds: str = "same"
    """Where bits are promised: refuse workers of another kind, whose bits would differ (see :mod:`holdfast.state.platform`); or take any, and
    say what is given up."""
    certificate: bool = True
    """Each committed step gets a link, a digest of what it was and of the link before, see :mod:`holdfast.integrity.hash_chain`."""
    mirror: int = -1
    """Workers beside its own that hold each part of a model that is split; -1: one, where there is no replica of it."""
    mirror_every: int = 1
    """1: mirrors apply every step themselves. Above: they are backups, to which as much is sent in so many steps as a whole
    copy is."""
    mirror_fraction: float = 1.0
    """How much of a copy is sent to a backup at a time: the smaller, the more often."""
    mirror_choice: str = "priority"
    """What is sent first: what is farthest from the copy, all in turn, or any."""
    mirror_distance: str = "euclidean"
    """How far something is from the copy: its parameters alone, or with its optimizer's state, each scaled to its size."""
    mirror_predictor: str = "last"
    """What a lost part is restored to: what was saved last, the line through what was saved last and before, or as far along
    it as the part was found to go."""
    mirror_codec: str = "exact"
    """How it is sent: as it is, or as differences of a byte each."""
    mirror_optimizer: str = "saved"
    """The optimizer's state of a lost part: saved with it, begun anew, or sent whole in every step."""
    min_workers: int = 1
    """Below this many survivors: save and stop."""
    seed: int = 0
    """Of the order of samples, of the randomness inside the model, and of the fault plan."""
    bucket_bytes: int = 25 << 20
    """Gradients are summed in buckets of about this size."""
    shared_bytes: int = -1
    """Most memory that a worker may share with the others of its host, for sums; 0: none, -1: what is free."""
    checkpoint_dir: str = ""
    """Where checkpoints are, a directory or an URL such as ``s3://bucket/run``; "" saves none."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves none but those that are asked for."""
    checkpoint_auto: bool = False
    """Take checkpoints as often as pays, from what they are found to cost and how often failures come (Daly 2006)."""
    checkpoint_format: str = "safetensors"
    """Of the files: safetensors, hdf5, npz or dcp."""
    keep_last: int = 0
    """How many of the newest checkpoints are kept, at least 2; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that it divides are kept, too."""
    mtbf_s: float = 86400.0
    """Mean time between failures of the whole job that is believed in until failures are seen; for ``checkpoint_auto``."""
    hang_timeout_s: float = 30.0
    """A worker that has given no sign for so long, or for three times as long as ever before, is ended; 0 ends none."""
    start_timeout_s: float = 120.0
    """A worker that is not ready to connect after so long, or after three times what the slowest other one took, is ended if the
    others wait for it or it shows no sign of life; 0 ends none."""
    stop_after: int = -1
    """Stop, with the state saved, when this step is committed; -1: when the script ends."""
    resume: bool = False
    """Go on from the newest intact checkpoint in ``checkpoint_dir``, if there is one."""
    faults: str = ""
    """The fault plan, as JSON (see :mod:`holdfast.faults.plan`)."""
    run_dir: str = ""
    """Where workers write their records and beacons; "" writes none."""
    origin_s: float = 0.0
    """``time.monotonic()`` when the launcher started: zero of every ``t_s``."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                msg = f"{name} must be one of {', '.join(a for a in allowed if a)}, got {value!r}"
                raise ConfigError(msg)
        strategy_class(self.strategy)  # refuses a name that there is not
        if self.fabric:
            make_fabric(self.fabric)
        for name, least in (
            ("workers", 1),
            ("spares", 0),
            ("slices", 0),
            ("auto_slices", -1),
            ("min_workers", 1),
            ("seed", 0),
            ("bucket_bytes", 1),
            ("checkpoint_every", 0),
            ("keep_every", 0),
            ("shared_bytes", -1),
            ("mirror", -1),
            ("mirror_every", 1),
            ("stop_after", -1),
        ):
            if getattr(self, name) < least:
                msg = f"{name} must be at least {least}, got {getattr(self, name)}"
                raise ConfigError(msg)
        for name in ("workers", "spares"):
            if getattr(self, name) > MOST_WORKERS:
                msg = f"{name} must be at most {MOST_WORKERS}, got {getattr(self, name)}"
                raise ConfigError(msg)
        if self.keep_last < 0 or self.keep_last == 1:
            msg = f"keep_last must be at least 2, or 0 to keep all, got {self.keep_last}: the newest may be damaged"
            raise ConfigError(msg)
        if self.hang_timeout_s != 0 and not _SHORTEST_HANG_S <= self.hang_timeout_s < math.inf:
            msg = f"hang_timeout_s must be at least {_SHORTEST_HANG_S:g} seconds and finite, or 0 for never, got {self.hang_timeout_s:g}"
            raise ConfigError(msg)
        if self.hang_timeout_s > _LONGEST_HANG_S:
            msg = f"hang_timeout_s must be at most {_LONGEST_HANG_S:g} seconds, or 0 for never, got {self.hang_timeout_s:g}"
            raise ConfigError(msg)
        if self.start_timeout_s != 0 and not _SHORTEST_START_S <= self.start_timeout_s <= _LONGEST_HANG_S:
            msg = f"start_timeout_s must be from {_SHORTEST_START_S:g} to {_LONGEST_HANG_S:g} seconds, or 0 for never, got {self.start_timeout_s:g}"
            raise ConfigError(msg)
        self._check_mirrors()
        if self.guard_sums and self.guard == "off":
            msg = "guard_sums needs guard stop, warn or heal, which say what comes of a finding, got off"
            raise ConfigError(msg)
        if not self.mtbf_s > 0:
            msg = f"mtbf_s must be positive, got {self.mtbf_s}"
            raise ConfigError(msg)
        if self.checkpoint_every and self.checkpoint_auto:
            msg = "checkpoints are taken every so many steps (checkpoint_every) or as often as pays (checkpoint_auto), not both"
            raise ConfigError(msg)

    def _check_mirrors(self) -> None:
        if not 0 < self.mirror_fraction <= 1 or round(self.mirror_fraction * self.mirror_every) < 1:
            msg = (
                f"mirror_fraction must be above 0, at most 1, and at least one step of mirror_every ({self.mirror_every}), "
                f"got {self.mirror_fraction:g}"
            )
            raise ConfigError(msg)
        if self.mirror_every > 1 and not strategy_class(self.strategy).restores_parts:
            msg = f"mirror_every above 1 needs strategy partial, got {self.strategy}: a copy that is some steps old has not the bits that it promises"
            raise ConfigError(msg)

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
            text = env.get(_variable(field.name))
            if field.name == "slices" and text is not None and text.startswith("auto"):
                values["auto_slices"] = losses_of(text, _variable("slices"))
            elif text is not None:
                values[field.name] = _parse(_variable(field.name), text, field.default)
        known = {field.name for field in dataclasses.fields(cls)}
        for name in overrides.keys() - known:
            msg = f"unknown setting {name!r}; there are {', '.join(sorted(known))}"
            raise ConfigError(msg)
        is_firm = _parse(FIRM, env.get(FIRM, ""), default=False)
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
            _variable(field.name): str(int(value)) if isinstance(value, bool) else str(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @property
    def pulse_every_s(self) -> float:
        """How often a worker shows that its interpreter runs, seconds: ten times in the shorter timeout; 0: never."""
        return min((limit for limit in (self.hang_timeout_s, self.start_timeout_s) if limit), default=0.0) / 10


def losses_of(text: str, name: str) -> int:
    """Return the loss of how many workers the number of slices is to bear, 0 for as many as usual.

    Args:
        text: ``auto`` or ``auto:F``.
        name: Of what was given, for the message.

    Raises:
        ConfigError: if it is something else.
    """
    word, colon, losses = text.partition(":")
    if word == "auto" and (not colon or (losses.isdecimal() and int(losses) > 0)):
        return int(losses or 0)
    msg = f"{name} must be a number, auto, or auto:F to bear the loss of F workers, 1 at least, got {text!r}"
    raise ConfigError(msg)


def debug_wanted(env: Mapping[str, str] | None = None) -> bool:
    """Return whether ``HOLDFAST_DEBUG`` asks that ranks compare the collectives that they call, before each.

    Raises:
        ConfigError: if it is neither 0 nor 1.
    """
    text = (os.environ if env is None else env).get("HOLDFAST_DEBUG", "")
    return bool(_parse("HOLDFAST_DEBUG", text, default=False))


MAX_REQUEST = 1 << 16
"""Most characters of a line that asks a running job for changes."""


def request_in(line: str) -> dict[str, Any]:
    """Return what a line of a file asks a running job for; the caller checks whether a value is allowed.

    Raises:
        ConfigError: if it is no JSON object with names of settings as keys.
    """
    if len(line) > MAX_REQUEST:
        msg = f"it has more than {MAX_REQUEST} characters"
        raise ConfigError(msg)
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        msg = f"it is not JSON: {error}"
        raise ConfigError(msg) from None
    if not isinstance(request, dict):
        msg = f"it must be a JSON object, and is a {type(request).__name__}"
        raise ConfigError(msg)
    for name in request:
        if not name.isidentifier():
            msg = f"{name!a:.60} is no name of a setting"
            raise ConfigError(msg)
    return request


def _variable(name: str) -> str:
    return f"HOLDFAST_{name.upper()}"


def _parse(variable: str, text: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "0": False, "false": False, "": False}[text.lower()]
        return type(default)(text)
    except (KeyError, ValueError):
        msg = f"{variable} must be {'0 or 1' if isinstance(default, bool) else f'of type {type(default).__name__}'}, got {text!r}"
        raise ConfigError(msg) from None
