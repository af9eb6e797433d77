"""What fuzzers are made of."""

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Parser:
    """A parser, what is right for it, and words that it knows."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


@functools.cache
def folder() -> Path:
    """A folder of this process, in memory where there is one; removed at the end."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = tempfile.TemporaryDirectory(dir=parent, prefix="fuzz-")
    _folders.append(made)
    return Path(made.name)


_folders: list[tempfile.TemporaryDirectory[str]] = []
