"""What is trained, and which flips strike it: the settings of the study of the guard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, MESSAGE = "weights", "optimizer", "gradients", "activations", "message"
TARGETS = (WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, MESSAGE)
OF_ONE_REPLICA = (WEIGHTS, OPTIMIZER)
"""Targets that make replicas differ; the others give all of them the same wrong sum."""

CRITICAL = "30"
STRATA = {CRITICAL: 1 / 32, "23:29": 7 / 32, "31": 1 / 32, "0:22": 23 / 32}
"""Bits of a float32 that are drawn together: the critical one, the rest of the exponent, the sign, the mantissa; and the
share of all bits that they are. What is said of "any flip" is weighted by it, because the critical bit is drawn far more
often than it would come."""
WEIGHT_OF_BIT = 1 / 32

LEARNED = 64
"""Steps until the guard knows which values are usual: only what is not finite is out of range before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A training by virtual workers, that goes on from one that has begun."""

    network: str = "mlp"
    """A network of :mod:`holdfast_lab.workloads`, on its digits."""
    size: int | None = None
    """Height and width that images are scaled to: more of them is more weights, and a longer rotation of the guard."""
    optimizer: str = "adam"
    """See :func:`holdfast_lab.workloads.make_optimizer`."""
    workers: int = 2
    """Virtual ones; one that is altered has weights and an optimizer's state of its own."""
    batch: int = 64
    """Samples of a step."""
    warm: int = 4
    """Epochs before."""
    epochs: int = 4
    """Epochs that are disturbed."""
    sums: bool = False
    """Where there is a guard, checksums go with what is summed, too."""
    training_seed: int = 0
    """Of the weights, the order of the samples, and what is random in the network."""

    @property
    def name(self) -> str:
        """Return it in words."""
        wide = f" {self.size} x {self.size}" if self.size else ""
        sums = ", sums checked" if self.sums else ""
        return f"{self.network}{wide}, {self.optimizer}, {self.workers} workers{sums}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which flips strike it: one bit each, of any value, in any step, at any worker."""

    target: str
    """One of :data:`TARGETS`."""
    bits: str
    """One of :data:`STRATA`, in each of which every bit is as likely."""

    def settings(self, setup: Setup) -> dict[str, Any]:
        """Return both as columns."""
        return dataclasses.asdict(self) | dataclasses.asdict(setup)

    def name(self, setup: Setup) -> str:
        """Return the name of its cell."""
        return f"{self.target}, bits {self.bits}: {setup.name}"


def of_settings(kind: type[Any], settings: Mapping[str, Any]) -> Any:
    """Return the :class:`Setup` or the :class:`Case` in some columns."""
    return kind(**{field.name: settings[field.name] for field in dataclasses.fields(kind)})
