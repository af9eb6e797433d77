"""Whether ranks compare the collectives that they call."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from holdfast.base.options import parse
from holdfast.errors import ScriptError

if TYPE_CHECKING:
    from holdfast.distributed.tasks import Collective

_SIGNATURE_BYTES = 256


def debug_wanted() -> bool:
    """Return whether ``HOLDFAST_DEBUG`` asks that ranks compare the collectives that they call, before each.

    Raises:
        ConfigError: if it is neither 0 nor 1.
    """
    return bool(parse("HOLDFAST_DEBUG", os.environ.get("HOLDFAST_DEBUG", ""), default=False))


def compare_calls(job: Collective) -> None:
    """Make sure that all ranks call the same collective, or raise ``ScriptError`` with the call of each."""
    signature = job.call.signature.encode()[:_SIGNATURE_BYTES].ljust(_SIGNATURE_BYTES)
    gathered = torch.empty(len(job.group.comm.processes), _SIGNATURE_BYTES, dtype=torch.uint8)
    job.group.comm.allgather(torch.frombuffer(bytearray(signature), dtype=torch.uint8), gathered)
    signatures = [bytes(row.tolist()).decode(errors="replace").strip() for row in gathered]
    if len(set(signatures)) > 1:
        calls = "; ".join(f"rank {rank}: {call}" for rank, call in zip(job.group.alive, signatures, strict=True))
        number = job.group.completed
        raise ScriptError(f"the ranks call different collectives as number {number} of their group: {calls}")
