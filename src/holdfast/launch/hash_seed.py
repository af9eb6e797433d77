"""The seed of Python's hashes, the same at all workers of a job and when it resumes.

It decides ``hash(text)`` and the orders of sets, by which scripts number labels or assign ids.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from holdfast.config import Settings

HASH_SEED = "PYTHONHASHSEED"
_STEP = re.compile(r"step-\d{8,}")
_MOST = 2**32


def hash_seed(settings: Settings) -> str:
    """Return the seed of hashes for the workers of a job.

    It is that of the checkpoint that the job resumes from; else that of the environment, or the job's seed.
    """
    return _of_checkpoint(settings) or _of_environment() or str(settings.seed % _MOST)


def hash_seed_line(settings: Settings) -> str:
    """Return a line that says that the checkpoint's seed is used and not another one of the environment; or ""."""
    kept, own = _of_checkpoint(settings), _of_environment()
    if not kept or own in ("", kept):
        return ""
    return f"{HASH_SEED} is {kept} as when the checkpoint was made, and not {own} as in the environment"


def _of_environment() -> str:
    """Return the seed in the environment; "" if there is none, or a random one, which would be another in each worker."""
    seed = os.environ.get(HASH_SEED, "")
    return "" if seed == "random" else seed


def _of_checkpoint(settings: Settings) -> str:
    """Return the seed of the newest checkpoint in a local directory that names one; "" if none is to be resumed, or known."""
    if not settings.resume or not settings.checkpoint_dir:
        return ""
    folder = Path(settings.checkpoint_dir.removeprefix("file://"))
    try:
        names = sorted((name for name in os.listdir(folder) if _STEP.fullmatch(name)), key=lambda name: int(name[5:]))
    except OSError:  # none, or in remote storage: the workers compare their hashes with the checkpoint's
        return ""
    for name in reversed(names):
        try:
            manifest = json.loads((folder / name / "manifest.json").read_bytes())
            return str(manifest["info"]["hashes"]["seed"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # incomplete or damaged
            continue
    return ""
