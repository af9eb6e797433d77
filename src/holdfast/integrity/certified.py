"""What the certificate says of a step and of the state before it; :mod:`holdfast.integrity.certificate` makes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashed:
    """Digests of all tensors of a part, as one worker has it; as :class:`~holdfast.records.types.StateHashed` has them."""

    rank: int
    tensors: dict[str, str]  # digests by path
    part: int = -1  # which, -1 where the model is not split
    parts: int = 0  # how many there are, 0 where it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What was certified of a step; as :class:`~holdfast.records.types.StepCommitted` has it."""

    before: str  # the link before
    link: str
    ids: str
    figures: str
    state: str
    where: str
    whole: bool  # the whole state was hashed
    tensors: list[Hashed]  # then, digests of all tensors that this worker has
