"""What a checkpoint of the Trainer says about its job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.state.manager import CheckpointManager

_JOB = "holdfast.json"


def kept_state(settings: Settings) -> dict[str, Any]:
    """Return what the newest checkpoint of ``--checkpoint-dir`` says about the Trainer; nothing if there is none.

    Raises:
        ConfigError: if another training loop made it.
    """
    manager = CheckpointManager(settings, background=False)
    step = manager.newest(lambda *_: None, keep=False)
    if step is None:
        return {}
    state: dict[str, Any] = manager.info(step).get("framework", {})
    if not state:
        raise ConfigError(f"the checkpoint of step {step} in {manager.url} was not made by the Trainer")
    return state


def write_job(folder: Path, *, job: str, slices: int) -> None:
    """Write which job made a checkpoint, and what of it decides the bits of the steps that follow."""
    (folder / _JOB).write_text(json.dumps({"job": job, "slices": slices}) + "\n")


def read_job(folder: Path) -> dict[str, Any]:
    """Return that; nothing for a checkpoint that was made without Holdfast, or does not exist."""
    path = folder / _JOB
    job: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return job
