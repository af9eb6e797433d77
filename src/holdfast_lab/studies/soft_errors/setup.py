"""Settings of the soft-error study: the training, its processes, and what is altered."""

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
"""Sets of bits of a value: all bits; those below the critical one (neither it nor the sign); only the critical one."""
SAME, EACH = "same", "each"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftErrorSetup:
    """A training that resumes from an epoch in its middle.

    Raises:
        ConfigError: if the processes, the stages and the batch do not divide evenly.
    """

    platform: str
    """One of :data:`PLATFORMS`."""
    processes: int
    """Number of processes; each has its own model or stage."""
    stages: int = 1
    """Processes per pipeline; 1: no pipeline."""
    network: str = "mlp"
    """A network of :mod:`holdfast_lab.workloads`."""
    dataset: str = "digits"
    """An image dataset of :mod:`holdfast_lab.workloads`."""
    data: str = ""
    """The directory of the data files; "" if the dataset needs none."""
    size: int | None = None
    """Height and width to which images are scaled."""
    limit: int | None = None
    """Train on only the first ``limit`` samples."""
    test_limit: int | None = None
    """Test on only the first ``test_limit`` samples."""
    batch: int = 128
    """Samples per step, over all processes."""
    microbatches: int = 2
    """Microbatches of a replica's share of the batch in a pipeline."""
    optimizer: str = "sgd"
    """A name of :func:`holdfast_lab.workloads.make_optimizer`."""
    dtype: str = "float32"
    """Data type of weights, activations and optimizer state."""
    restart: int = 4
    """Epochs before the restart, at least 1."""
    epochs: int = 2
    """Epochs after it, at least 1."""
    training_seed: int = 0
    """Seed of the weights, of the sample order, and of the network's own randomness."""

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise ConfigError(f"the platform must be one of {', '.join(PLATFORMS)}, got {self.platform!r}")
        if self.processes < 1 or self.stages < 1 or self.processes % self.stages:
            raise ConfigError(
                f"processes must be a multiple of stages, got {self.processes} processes and {self.stages} stages"
            )
        if self.batch % (self.replicas * (self.microbatches if self.stages > 1 else 1)):
            raise ConfigError(f"a batch of {self.batch} samples does not divide evenly over {self.replicas} replicas")
        if self.restart < 1 or self.epochs < 1:
            raise ConfigError(f"restart and epochs must be at least 1, got {self.restart} and {self.epochs}")

    @property
    def replicas(self) -> int:
        """Return the number of replicas: processes, or pipelines, that hold the whole model."""
        return self.processes // self.stages

    @property
    def real(self) -> int:
        """Return the number of operating-system processes: a session runs all its workers in one."""
        return 1 if self.platform == SESSION else self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftErrorCase:
    """What is altered in the state that a training resumes from, and in how many processes."""

    experiment: str
    """The experiment that the case belongs to."""
    target: str = MODEL
    """``model``: weights and floating-point buffers; or ``optimizer``: its tensors."""
    altered: int = 1
    """Number of processes that resume from an altered state; which ones is drawn."""
    flips: int = 1
    """Bits, or bursts, flipped in each altered process's state."""
    bits: str = ALL
    """Which bits of a value: ``all``, ``below``, ``critical``, or a bit number counted from the least significant."""
    burst: int = 1
    """Number of neighbouring bits that are flipped together."""
    layer: str = ""
    """Alter only the ``first``, ``middle`` or ``last`` layer; "": all layers."""
    format: str = ""
    """Convert values to this format, alter them, and convert them back; "": alter them as stored."""
    draws: str = SAME
    """``same``: processes with the same state flip the same bits, as if they loaded one altered file; ``each``: each
    draws its own."""

    def settings(self, setup: SoftErrorSetup) -> dict[str, Any]:
        """Return the case and the setup as columns."""
        return dataclasses.asdict(self) | dataclasses.asdict(setup)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> tuple[Self, SoftErrorSetup]:
        """Return the case and the setup that :meth:`settings` was made from."""
        mine, theirs = (
            {field.name: settings[field.name] for field in dataclasses.fields(kind)} for kind in (cls, SoftErrorSetup)
        )
        return cls(**mine), SoftErrorSetup(**theirs)

    def name(self, setup: SoftErrorSetup) -> str:
        """Return the name of the cell."""
        where = f"{setup.platform} {setup.processes}" + (f" ({setup.stages} stages)" if setup.stages > 1 else "")
        what = f"{self.flips} x {self.bits}" + (f", bursts of {self.burst}" if self.burst > 1 else "")
        more = [f"{self.layer} layer"] if self.layer else []
        more += [setup.dtype] if setup.dtype != "float32" else []
        more += [f"altered as {self.format}"] if self.format else []
        more += [f"{setup.epochs} epochs", *([] if self.draws == SAME else ["each its own"])]
        whose = f"{self.target} of {self.altered}"
        trained = setup.network if setup.dataset == "digits" else f"{setup.network} on {setup.dataset}"
        return f"{self.experiment}: {where}, {trained}, {whose}, {what}, " + ", ".join(more)
