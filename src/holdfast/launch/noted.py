"""Notes of what this user has run here, one for each script with its arguments. They are kept outside of report folders, which may be untrusted.

The notes are empty files in ``$XDG_STATE_HOME/holdfast/runs`` (``~/.local/state/holdfast/runs``), each named by a digest of what was run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST = 1000
"""Notes that are kept: the newest."""


def note(facts: Mapping[str, Any]) -> None:
    """Note that a job with these :func:`job_facts` was run here; unwritten, ``holdfast verify`` needs ``--trust`` or ``--script``."""
    with suppress(OSError, RuntimeError):  # there is no home, or it is not writable
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(folder, _digest(facts)).touch(mode=0o600)
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST]:
            old.unlink(missing_ok=True)


def is_noted(facts: Mapping[str, Any]) -> bool:
    """Return whether this user has run here the same script, byte for byte, with the same arguments, as a report says."""
    try:
        found = Path(_folder(), _digest(facts)).lstat()
        return found.st_uid == Path(_folder()).lstat().st_uid == os.getuid()
    except (OSError, RuntimeError):
        return False


def _folder() -> Path:
    """Return where the notes are; raise a RuntimeError if this user has no home."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return Path(given if given.is_absolute() else Path.home() / ".local" / "state", "holdfast", "runs")


def _digest(facts: Mapping[str, Any]) -> str:
    ran = [facts["path"], facts["sha256"], list(facts["args"])]
    return hashlib.sha256(json.dumps(ran).encode()).hexdigest()
