"""Folders that appear once they are complete, and what a checkpoint of the Trainer says about its job."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.state.manager import CheckpointManager

_UNFINISHED = "tmp-"
_JOB = "holdfast.json"


@contextlib.contextmanager
def complete_folder(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; what is in it is in ``folder`` once the block has ended.

    Args:
        folder: The folder.
        replaces: Replace an existing folder as a whole; otherwise files are moved into it one by one.
    """
    part = folder.parent / f"{_UNFINISHED}{folder.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    if not folder.exists():
        part.rename(folder)
    elif replaces:
        old = folder.parent / f"{_UNFINISHED}old-{folder.name}"
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old)
    else:
        for path in sorted(part.iterdir()):
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            os.replace(path, folder / path.name)
        part.rmdir()


def remove_unfinished(folder: Path, prefix: str) -> None:
    """Remove what workers that failed while saving have left in ``folder``."""
    for path in folder.glob(f"{_UNFINISHED}*{prefix}-*"):
        shutil.rmtree(path)


def kept_state(settings: Settings) -> dict[str, Any]:
    """Return what the newest checkpoint of ``--checkpoint-dir`` says about the Trainer; nothing if there is none.

    Raises:
        ConfigError: if another training loop made it.
    """
    manager = CheckpointManager(settings, background=False)
    step = manager.newest(lambda *_: None, keep=False)
    if step < 0:
        return {}
    found: dict[str, Any] = manager.info(step).get("framework", {})
    if not found:
        raise ConfigError(f"the checkpoint of step {step} in {manager.url} was not made by the Trainer")
    return found


def write_job(folder: Path, *, job: str, slices: int) -> None:
    """Write which job made a checkpoint, and what of it decides the bits of the steps that follow."""
    (folder / _JOB).write_text(json.dumps({"job": job, "slices": slices}) + "\n")


def read_job(folder: Path) -> dict[str, Any]:
    """Return that; nothing for a checkpoint that was made without Holdfast, or does not exist."""
    path = folder / _JOB
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
