"""Findings, as plain data. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Findings:
    """Findings about a target. Differences are named as in :func:`holdfast.tools.doctor.target.results_of`.

    Args:
        name: Name of the target.
        digests: Digests of its inputs and results.
        again: Differences when it is computed again.
        threads: Differences by thread count.
        memory: Differences with misaligned inputs.
        together: Differences for a sample that is computed together with others; None if that cannot be determined.
        complaint: Error of ``torch.use_deterministic_algorithms(True)``.
        error: Why the target could not be checked.
    """

    name: str
    digests: dict[str, str] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)
    threads: dict[int, list[str]] = field(default_factory=dict)
    memory: list[str] = field(default_factory=list)
    together: list[str] | None = None
    complaint: str = ""
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the findings as plain data."""
        return asdict(self) | {"threads": {str(count): what for count, what in self.threads.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Findings:
        """Restore findings from :meth:`as_json`."""
        return cls(**{**data, "threads": {int(count): what for count, what in data["threads"].items()}})


@dataclass(slots=True)
class ScriptFindings:
    """Findings about a script's first step.

    Args:
        parameters: Number of parameters of its model.
        samples: Samples of the slice.
        layers: Findings about each layer, by its path in the model, in the order of their first computation.
        step: Findings about the loss and all gradients together.
        misaligned: Misaligned tensors: samples, weights.
        dataset_again: Whether samples differ when they are fetched again.
        draws: Global random generators that are used, by ``dataset`` and ``model``.
        weights: Digest of the initial weights.
        samples_digest: Digest of the samples.
    """

    parameters: int = 0
    samples: int = 0
    layers: list[Findings] = field(default_factory=list)
    step: Findings = field(default_factory=lambda: Findings("the whole step"))
    misaligned: list[str] = field(default_factory=list)
    dataset_again: bool = False
    draws: dict[str, list[str]] = field(default_factory=dict)
    weights: str = ""
    samples_digest: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the findings as plain data."""
        return asdict(self) | {"layers": [layer.as_json() for layer in self.layers], "step": self.step.as_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScriptFindings:
        """Restore findings from :meth:`as_json`."""
        layers = [Findings.from_json(layer) for layer in data["layers"]]
        return cls(**{**data, "layers": layers, "step": Findings.from_json(data["step"])})


def blame(one: Sequence[Findings], other: Sequence[Findings]) -> str:
    """Return the first layer that computed different bits from equal inputs in two processes, or ""."""
    digests = {layer.name: layer.digests for layer in other}
    for layer in one:
        inputs = [name for name in layer.digests if name.startswith("input ")]
        two = digests.get(layer.name, {})
        if all(layer.digests[name] == two.get(name) for name in inputs) and layer.digests != two:
            return layer.name
    return ""
