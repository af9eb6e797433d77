"""Compares the seeds of Python's hashes, which a launcher other than Holdfast's leaves random in each process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.state.context import JobContext

_AT_START = os.environ.get("PYTHONHASHSEED", "")
"""A script that sets it later does not change its hashes."""
_SAYS = "hash() of texts and orders of sets are not the same"


def hashes() -> dict[str, Any]:
    """Return what a checkpoint keeps: the seed, "" if it is random, and a digest of what it makes of a text."""
    return {"seed": _AT_START if _AT_START.isdigit() else "", "digest": hash_digest()}


def hash_digest() -> int:
    """Return a number that is equal at processes whose hashes are, from 0 to 2**61 - 1."""
    return hash("holdfast") >> 3 & (1 << 61) - 1


def warn_of_hashes(job: JobContext) -> None:
    """Say once that workers have different seeds."""
    if job.is_lead and not job.platform.hashes_differ:
        job.warn(f"{_SAYS} at all workers, nor after --resume: export PYTHONHASHSEED=0 before they start")
    job.platform.hashes_differ = True


def compare_hashes_with_checkpoint(job: JobContext, then: Mapping[str, Any], python: str) -> None:
    """Say once that this worker's hashes are not those of the checkpoint, if it has them; ``python`` has made that."""
    if not then or then.get("digest") == hash_digest() or job.platform.hashes_differ:
        return
    seed = then.get("seed", "")
    do = f"export PYTHONHASHSEED={seed}" if seed else "the seed was random; for later jobs, export PYTHONHASHSEED=0"
    if seed and seed == _AT_START:  # so their function is another one
        do = f"PYTHONHASHSEED is {seed} as then, but Python is {sys.version.partition(' ')[0]}; use Python {python} again"
    if job.is_lead:
        job.warn(f"{_SAYS} as when the checkpoint was made: {do}")
    job.platform.hashes_differ = True
