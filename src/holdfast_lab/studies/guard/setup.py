"""The settings of the guard study: training runs, and the bit flips injected into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, MESSAGE = "weights", "optimizer", "gradients", "activations", "message"
TARGETS = (WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, MESSAGE)
OF_ONE_REPLICA = (WEIGHTS, OPTIMIZER)
"""Targets that make replicas differ; flips of the other targets give all replicas the same wrong sum."""

CRITICAL = "30"
STRATA = {CRITICAL: 1 / 32, "23:29": 7 / 32, "31": 1 / 32, "0:22": 23 / 32}
"""Strata of the bits of a float32, and the share of all bits in each: the critical bit, the rest of the exponent, the
sign, the mantissa. Results for "any flip" are weighted by these shares, because the critical bit is over-sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSetup:
    """A training with virtual workers that continues from a warm state."""

    network: str = "mlp"
    """A network of :mod:`holdfast_lab.workloads`, trained on digits."""
    size: int | None = None
    """Height and width that images are scaled to; larger images mean more weights and a longer check rotation."""
    optimizer: str = "adam"
    """See :func:`holdfast_lab.workloads.make_optimizer`."""
    workers: int = 2
    """Number of virtual workers; a worker with a flip keeps its own weights and optimizer state."""
    batch: int = 64
    """Mini-batch size in samples."""
    warm: int = 4
    """Epochs before the warm state."""
    epochs: int = 4
    """Epochs that a bit flip may fall in."""
    sums: bool = False
    """Whether the guard, if enabled, also sends checksums with the all-reduces."""
    training_seed: int = 0
    """Seed of the weights, of the sample order, and of randomness in the network."""

    @property
    def name(self) -> str:
        """Return a description."""
        wide = f" {self.size} x {self.size}" if self.size else ""
        sums = ", sums checked" if self.sums else ""
        return f"{self.network}{wide}, {self.optimizer}, {self.workers} workers{sums}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardCase:
    """The injected bit flips: one bit each, of any value, in any step, at any worker."""

    target: str
    """One of :data:`TARGETS`."""
    bits: str
    """One of :data:`STRATA`; within it every bit is equally likely."""

    def settings(self, setup: GuardSetup) -> dict[str, Any]:
        """Return both as columns."""
        return dataclasses.asdict(self) | dataclasses.asdict(setup)

    def name(self, setup: GuardSetup) -> str:
        """Return the name of its cell."""
        return f"{self.target}, bits {self.bits}: {setup.name}"


def of_settings(kind: type[Any], settings: Mapping[str, Any]) -> Any:
    """Return the :class:`GuardSetup` or the :class:`GuardCase` in some columns."""
    return kind(**{field.name: settings[field.name] for field in dataclasses.fields(kind)})
