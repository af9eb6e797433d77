"""What is trained, by whom, and what is altered in it: the settings of the study of soft errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast.errors import ConfigError

DDP, PIPELINE, HYBRID, SESSION = "ddp", "pipeline", "hybrid", "session"
PLATFORMS = (DDP, PIPELINE, HYBRID, SESSION)

MODEL, OPTIMIZER = "model", "optimizer"
ALL, BELOW, CRITICAL = "all", "below", "critical"
"""Bits of a value: all; those below the critical one, so neither it nor the sign; the critical one alone."""
SAME, EACH = "same", "each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A training that goes on from an epoch in its middle.

    Raises:
        ConfigError: if its processes cannot be divided so.
    """

    platform: str
    """One of :data:`PLATFORMS`."""
    processes: int
    """How many, each with a model, or a stage, of its own."""
    stages: int = 1
    """Processes of one pipeline; 1: no pipeline."""
    network: str = "mlp"
    """A network of :mod:`holdfast_lab.workloads`."""
    dataset: str = "digits"
    """Images of :mod:`holdfast_lab.workloads`."""
    data: str = ""
    """The directory of its files, "" if it needs none."""
    size: int | None = None
    """Height and width that images are scaled to."""
    limit: int | None = None
    """Train on the first so many samples only."""
    test_limit: int | None = None
    """Test on the first so many only."""
    batch: int = 128
    """Samples of a step, over all processes."""
    microbatches: int = 2
    """Pieces of a replica's part of a batch, in a pipeline."""
    optimizer: str = "sgd"
    """See :func:`holdfast_lab.workloads.make_optimizer`."""
    dtype: str = "float32"
    """Of weights, activations and the optimizer's state."""
    restart: int = 4
    """Epochs before the restart, at least 1."""
    epochs: int = 2
    """Epochs after it, at least 1."""
    training_seed: int = 0
    """Of the weights, of the order of the samples, and of what is random in the network."""

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise ConfigError(f"the platform must be one of {', '.join(PLATFORMS)}, got {self.platform!r}")
        if self.processes < 1 or self.stages < 1 or self.processes % self.stages:
            raise ConfigError(f"processes must be a multiple of the stages, got {self.processes} and {self.stages}")
        if self.batch % (self.replicas * (self.microbatches if self.stages > 1 else 1)):
            raise ConfigError(f"{self.replicas} replicas cannot divide a batch of {self.batch} samples evenly")
        if self.restart < 1 or self.epochs < 1:
            raise ConfigError(
                f"there must be at least 1 epoch before the restart and 1 after it, got {self.restart} and {self.epochs}"
            )

    @property
    def replicas(self) -> int:
        """Return how many processes, or pipelines, have all of the model."""
        return self.processes // self.stages

    @property
    def real(self) -> int:
        """Return how many processes there really are: a session plays its workers in one."""
        return 1 if self.platform == SESSION else self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is altered in the state that a training goes on from, and in whose."""

    experiment: str
    """What it is part of."""
    target: str = MODEL
    """``model``: its weights and floating buffers; or the ``optimizer``'s tensors."""
    altered: int = 1
    """So many processes go on from an altered state; which is drawn."""
    flips: int = 1
    """Bits, or bursts, altered in the state of each of them."""
    bits: str = ALL
    """Which bits of a value: ``all``, ``below``, ``critical``, or a number, counted from the least significant."""
    burst: int = 1
    """So many neighbouring bits are flipped together."""
    layer: str = ""
    """Only in this one: ``first``, ``middle`` or ``last``; "" in all."""
    format: str = ""
    """Values are altered in this format and put back in that of the training; "": they are altered as they are."""
    draws: str = SAME
    """``same``: processes with the same state alter the same bits, as if they loaded one altered file; ``each``: its own."""

    def settings(self, setup: Setup) -> dict[str, Any]:
        """Return both as columns."""
        return dataclasses.asdict(self) | dataclasses.asdict(setup)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> tuple[Self, Setup]:
        """Return what :meth:`settings` was made of."""
        mine, theirs = (
            {field.name: settings[field.name] for field in dataclasses.fields(kind)} for kind in (cls, Setup)
        )
        return cls(**mine), Setup(**theirs)

    def name(self, setup: Setup) -> str:
        """Return the name of its cell."""
        where = f"{setup.platform} {setup.processes}" + (f" ({setup.stages} stages)" if setup.stages > 1 else "")
        what = f"{self.flips} x {self.bits}" + (f", bursts of {self.burst}" if self.burst > 1 else "")
        more = [f"{self.layer} layer"] if self.layer else []
        more += [setup.dtype] if setup.dtype != "float32" else []
        more += [f"altered as {self.format}"] if self.format else []
        more += [f"{setup.epochs} epochs", *([] if self.draws == SAME else ["each its own"])]
        whose = f"{self.target} of {self.altered}"
        trained = setup.network if setup.dataset == "digits" else f"{setup.network} on {setup.dataset}"
        return f"{self.experiment}: {where}, {trained}, {whose}, {what}, " + ", ".join(more)
