"""What the processes of a host agree on before training, by files in the directory of the run."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from holdfast.errors import JobError

_VALUES = "lightning-values.jsonl"
_TURNS = "lightning-turns"
_IN_TURN = "holdfast_in_turn"
_LONGEST_TURN_S = 3600.0
_LOOK_EVERY_S = 0.02


def agreed(key: str, choose: Callable[[], Any]) -> Any:
    """Return the value, plain JSON, that the first process of the job has chosen for ``key``."""
    with _locked(_VALUES) as file:
        if file is None:
            return choose()
        values = dict(json.loads(line) for line in file)
        if key not in values:
            values[key] = choose()
            file.write(json.dumps([key, values[key]]) + "\n")
        return values[key]


def in_turn(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``function`` as it must be called in every process, one after another: a download, which the next finds done."""
    if hasattr(function, _IN_TURN):
        return function

    @functools.wraps(function)
    def called() -> Any:
        with _locked(_TURNS):
            return function()

    setattr(called, _IN_TURN, True)
    return called


@contextlib.contextmanager
def _locked(name: str) -> Iterator[IO[str] | None]:
    """Hold a file of the run; None if there is no other process. The lock of a process that dies is released.

    Raises:
        JobError: if another process has held it for an hour.
    """
    run_dir = os.environ.get("HOLDFAST_RUN_DIR")
    if not run_dir:
        yield None
        return
    with (Path(run_dir) / name).open("a+") as file:
        deadline = time.monotonic() + _LONGEST_TURN_S
        while not _try_to_lock(file):
            if time.monotonic() > deadline:
                raise JobError(f"another worker has not ended prepare_data for {_LONGEST_TURN_S:g} s")
            time.sleep(_LOOK_EVERY_S)
        file.seek(0)
        yield file


def _try_to_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
