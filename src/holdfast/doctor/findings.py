"""What was found, as plain data. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Found:
    """What was found of a subject. What differs is named as :func:`holdfast.doctor.target.results_of` names it.

    Args:
        name: Of the subject.
        digests: Of what it was given and what it made of it.
        again: What differs when the same is computed again.
        threads: What differs with so many threads.
        memory: What differs where inputs lie at an odd place in memory.
        together: What differs for a sample that is computed together with others; None if that cannot be found out.
        complaint: What ``torch.use_deterministic_algorithms(True)`` says about it.
        error: Why it could not be examined.
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
        """Return it as plain data."""
        return asdict(self) | {"threads": {str(count): what for count, what in self.threads.items()}}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Found:
        """Return what :meth:`as_json` gave."""
        return cls(**{**said, "threads": {int(count): what for count, what in said["threads"].items()}})


@dataclass(slots=True)
class Seen:
    """What was seen of a script's first step.

    Args:
        parameters: Numbers in its model.
        samples: Of the slice.
        layers: What was found of each layer, by its path in the model, in the order in which they computed first.
        step: What was found of the loss and all gradients together.
        odd_places: What does not lie in memory where torch would put it: samples, weights.
        dataset_again: Samples differ when they are fetched again.
        draws: Global generators that are drawn from, by ``dataset`` and ``model``.
        weights: Digest of the weights that the script began with.
        samples_digest: Digest of the samples.
    """

    parameters: int = 0
    samples: int = 0
    layers: list[Found] = field(default_factory=list)
    step: Found = field(default_factory=lambda: Found("the whole step"))
    odd_places: list[str] = field(default_factory=list)
    dataset_again: bool = False
    draws: dict[str, list[str]] = field(default_factory=dict)
    weights: str = ""
    samples_digest: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self) | {"layers": [layer.as_json() for layer in self.layers], "step": self.step.as_json()}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Seen:
        """Return what :meth:`as_json` gave."""
        layers = [Found.from_json(layer) for layer in said["layers"]]
        return cls(**{**said, "layers": layers, "step": Found.from_json(said["step"])})


def blame(one: Sequence[Found], other: Sequence[Found]) -> str:
    """Return the first layer that was given the same in two processes and made other bits of it, "" if there is none."""
    theirs = {layer.name: layer.digests for layer in other}
    for layer in one:
        given = [name for name in layer.digests if name.startswith("input ")]
        two = theirs.get(layer.name, {})
        if all(layer.digests[name] == two.get(name) for name in given) and layer.digests != two:
            return layer.name
    return ""
