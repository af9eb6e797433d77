"""Lets Accelerate see one process: it reads the environment, and Holdfast distributes the work itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from holdfast.comm.launchers import chosen
from holdfast.config import Settings

_ONE_PROCESS = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "PMI_SIZE": "1"}


def train_alone() -> None:
    """Let the environment describe one process from now on; do nothing outside of a Holdfast job."""
    if chosen(Settings.from_env().fabric) == "virtual":
        return
    os.environ.update(_ONE_PROCESS)
    os.environ.pop("LOCAL_RANK", None)


@contextlib.contextmanager
def seen_alone() -> Iterator[None]:
    """Let the environment describe one process in the context; afterwards a script may read its rank there again."""
    before = {name: os.environ.get(name) for name in (*_ONE_PROCESS, "LOCAL_RANK")}
    train_alone()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
