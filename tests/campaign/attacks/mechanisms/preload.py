"""Libraries of a few lines that stand between a process and the system's library, and what they are told meanwhile."""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from campaign.attacks.mechanisms.afterwards import afterwards

COMPILER = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
BILLION = 1_000_000_000
MOST_FOLDERS = 8
_COMPILING = threading.Lock()


def compiled(name: str) -> Path:
    """Compile ``name.c``, once; return the library, which exists as long as this process."""
    with _COMPILING:
        return _compiled(name)


@functools.cache
def _compiled(name: str) -> Path:
    assert COMPILER is not None
    source = Path(__file__).with_name(f"{name}.c")
    library = _folder() / f"{name}.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


@functools.cache
def _folder() -> Path:
    """A folder that is removed at the end of this process, also if it is killed."""
    folder = tempfile.mkdtemp(prefix="preload-")
    removed = afterwards('rm -r "$1"', folder)
    removed.__enter__()
    atexit.register(removed.__exit__, None, None, None)
    return Path(folder)


def preload(env: dict[str, str], name: str) -> None:
    """Have what is started with ``env`` load a library first."""
    env["LD_PRELOAD"] = " ".join(filter(None, (env.get("LD_PRELOAD", ""), str(compiled(name)))))


class Numbers:
    """Numbers of eight bytes in a file, which processes that run see at once."""

    def __init__(self, path: Path, count: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * count))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 8 * count)

    def set(self, *numbers: int) -> None:
        """Replace the first of them."""
        self._shared[: 8 * len(numbers)] = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)

    def get(self, at: int) -> int:
        """Return one of them, which a process may have changed."""
        return int.from_bytes(self._shared[8 * at : 8 * at + 8], "little", signed=True)


class WallClock:
    """The wall clock of the processes that are started with :attr:`env`; theirs alone.

    Args:
        path: A file for its offset.
    """

    def __init__(self, path: Path) -> None:
        self._offset = Numbers(path, 1)
        self.env = {"CLOCK_JUMP_FILE": str(path)}

    def jump(self, offset_s: float) -> None:
        """Set how many seconds it is ahead of the machine's clock."""
        self._offset.set(round(offset_s * BILLION))


class BadDisks:
    """Folders whose files are written slowly, or not at all, by the processes started with :attr:`env`.

    Args:
        path: A file for what happens to writes.
        folders: The folders, by name; at most eight.
    """

    def __init__(self, path: Path, folders: dict[str, Path]) -> None:
        self._shared = Numbers(path, 4 * MOST_FOLDERS)
        self._told = {name: {"write_s": 0.0, "sync_s": 0.0, "error": 0.0} for name in folders}
        where = ":".join(os.path.realpath(folder) for folder in folders.values())
        self.env = {"SLOW_DISK_FILE": str(path), "SLOW_DISK_FOLDERS": where}

    def set(self, name: str, **told: float) -> None:
        """Change for a folder the seconds of ``write_s`` and ``sync_s``, and the number of the ``error``."""
        self._told[name] |= told
        numbers = []
        for each in self._told.values():
            numbers += [round(each["write_s"] * BILLION), round(each["sync_s"] * BILLION), int(each["error"])]
        self._shared.set(*numbers)

    def struck(self, name: str) -> int:
        """How many calls below a folder were delayed or failed."""
        return self._shared.get(3 * MOST_FOLDERS + list(self._told).index(name))
