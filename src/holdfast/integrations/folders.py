"""Folders that appear once they are complete, whichever worker fails while it writes one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_UNFINISHED = "tmp-"


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
