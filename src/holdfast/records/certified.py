"""What the certificate records of a step and of the state before it; :mod:`holdfast.integrity.certificate` computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedState:
    """Digests of all tensors of a part, from one worker; recorded as :class:`~holdfast.records.types.StateHashed`."""

    rank: int
    tensors: dict[str, str]  # digests by path
    part: int = -1  # index of the part, -1 for a replicated model
    parts: int = 0  # number of parts, 0 for a replicated model


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """The certificate of one step; recorded as :class:`~holdfast.records.types.StepCommitted`."""

    before: str  # the previous link
    link: str
    ids: str
    figures: str
    state: str
    where: str
    whole: bool  # the whole state was hashed
    tensors: list[HashedState]  # if so, the digests of all resident tensors
