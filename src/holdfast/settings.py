"""What a run was asked to do, and the environment variables that carry it to the workers.

One precedence everywhere: what the script passes to :class:`holdfast.Session`, then the environment
(which is how ``holdfast run`` passes its options on), then the default that stands here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast.errors import ConfigError

FABRICS = ("ulfm", "virtual")
STRATEGIES = ("rollback", "forward", "restart")
ORDERS = ("fold", "tree")
SPLITS = ("slices", "even")
BATCHES = ("global", "local")
RESCALES = ("survivors", "original")

_CHOICES = {
    "fabric": ("", *FABRICS),
    "strategy": STRATEGIES,
    "order": ORDERS,
    "split": SPLITS,
    "batch": BATCHES,
    "rescale": RESCALES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set from outside the script. Each field ``x`` is read from ``HOLDFAST_X``."""

    fabric: str = ""
    """How workers talk; "" chooses ``ulfm`` under mpirun and one ``virtual`` worker otherwise."""
    workers: int = 1
    """Logical workers of the ``virtual`` fabric; the ``ulfm`` fabric asks MPI."""
    ranks: str = ""
    """Comma-separated numbers of the workers of a restarted job; "" is 0, 1, 2, ..."""
    strategy: str = "rollback"
    """What survivors do."""
    slices: int = 0
    """Pieces that a mini-batch is cut into; 0 is the number of workers the job is started with."""
    order: str = "fold"
    """Order in which slices are added."""
    split: str = "slices"
    """After a failure: whole slices change hands, or the mini-batch is cut anew, evenly."""
    batch: str = "global"
    """After a failure: the mini-batch keeps its size, or each worker does."""
    rescale: str = "survivors"
    """Divide a sum that lacks samples by what is in it, or by the size it would have had."""
    min_workers: int = 1
    """Below this many survivors: save and stop."""
    seed: int = 0
    """Of the order of samples, of the randomness inside the model, and of the fault plan."""
    bucket_bytes: int = 25 << 20
    """Gradients are summed in buckets of about this size."""
    shared_bytes: int = -1
    """Most memory that a worker may share with the others of its host, for sums; 0: none, -1: what is free."""
    checkpoint_dir: str = ""
    """Where checkpoints are; "" saves none."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves none but those that are asked for."""
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
        for name, least in (
            ("workers", 1),
            ("slices", 0),
            ("min_workers", 1),
            ("seed", 0),
            ("bucket_bytes", 1),
            ("checkpoint_every", 0),
            ("shared_bytes", -1),
        ):
            if getattr(self, name) < least:
                msg = f"{name} must be at least {least}, got {getattr(self, name)}"
                raise ConfigError(msg)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Read the settings from the environment; ``overrides`` that are not None win.

        Raises:
            ConfigError: if a variable or an override has a value that is not allowed, or is unknown.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            text = env.get(_variable(field.name))
            if text is not None:
                values[field.name] = _parse(_variable(field.name), text, field.default)
        known = {field.name for field in dataclasses.fields(cls)}
        for name in overrides.keys() - known:
            msg = f"unknown setting {name!r}; there are {', '.join(sorted(known))}"
            raise ConfigError(msg)
        return cls(**(values | {k: v for k, v in overrides.items() if v is not None}))

    def to_env(self) -> dict[str, str]:
        """Return the variables that make :meth:`from_env` give these settings again (defaults are left out)."""
        return {
            _variable(field.name): str(int(value)) if isinstance(value, bool) else str(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


def debug_wanted(env: Mapping[str, str] | None = None) -> bool:
    """Return whether ``HOLDFAST_DEBUG`` asks that ranks compare the collectives that they call, before each.

    Raises:
        ConfigError: if it is neither 0 nor 1.
    """
    text = (os.environ if env is None else env).get("HOLDFAST_DEBUG", "")
    return bool(_parse("HOLDFAST_DEBUG", text, default=False))


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
