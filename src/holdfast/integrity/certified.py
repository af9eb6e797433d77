"""What the certificate says of a step and of the state before it; :mod:`holdfast.integrity.certificate` makes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashed:
    """Digests of all tensors of a part, as one worker has it; as :class:`~holdfast.records.types.StateHashed` has them.

    Args:
        rank: Who.
        tensors: Digests by path.
        part: Which, -1 where the model is not split.
        parts: How many there are, 0 where it is not.
    """

    rank: int
    tensors: dict[str, str]
    part: int = -1
    parts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What was certified of a step; as :class:`~holdfast.records.types.StepCommitted` has it.

    Args:
        before: The link before.
        whole: The whole state was hashed.
        tensors: Then, digests of all tensors that this worker has.
    """

    before: str
    link: str
    ids: str
    figures: str
    state: str
    where: str
    whole: bool
    tensors: list[Hashed]
