"""Interpretation of a PATH: a checkpoint, a directory of checkpoints, or a file of another program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint.loading import OnDamaged, newest_intact, steps
from holdfast.checkpoint.storage import Storage, is_remote, open_storage, step_of
from holdfast.errors import CheckpointCorrupt, CheckpointMissing, ConfigError
from holdfast.tools.checkpoints.counted import CountedStorage
from holdfast.tools.checkpoints.source import saved_source
from holdfast.tools.formats.base import TensorSource
from holdfast.tools.formats.kinds import KINDS, open_imported


def find(text: str) -> tuple[Storage, int | None]:
    """Return the storage, and the step if a single checkpoint is named; raise a ConfigError if there is none."""
    if is_remote(text):
        parent, _, name = text.rstrip("/").rpartition("/")
        step = step_of(name)
        return open_storage(text if step is None else parent), step
    path = _folder(text)
    whole = path.resolve()  # "." has the name of its directory
    if (step := step_of(whole.name)) is not None:
        return open_storage(whole.parent if path.name in ("", "..") else path.parent), step
    if (path / "manifest.json").exists():
        raise ConfigError(
            f"{path} holds a checkpoint, but is not named after its step; rename it, for step 20 to step-00000020"
        )
    return open_storage(path), None


def find_root(text: str) -> Storage:
    """Return the storage of a directory of checkpoints; raise a ConfigError for anything else."""
    storage, step = find(text)
    if step is not None:
        raise ConfigError(f"{text} is a single checkpoint; name its directory: {storage.url}")
    return storage


@contextmanager
def opened(
    text: str,
    step: int | None = None,
    now: Callable[[str], None] = lambda text: None,
    count: Callable[[int], None] = lambda size: None,
    on_damaged: OnDamaged = lambda step, error: None,
) -> Iterator[TensorSource]:
    """Open a checkpoint or file; in a directory, ``step``, or the newest intact one.

    ``now`` receives progress messages, ``count`` the bytes that are read of a checkpoint's files, ``on_damaged`` each
    damaged checkpoint that is skipped.

    Raises:
        ConfigError: if it does not exist, or a step is given for a single checkpoint or file.
        CheckpointError: if it cannot be read.
    """
    if is_remote(text) and text.lower().endswith(KINDS):
        raise ConfigError(f"{text} is a file of another program, which must be on this machine; download it first")
    if _is_foreign(text):
        if step is not None:
            raise ConfigError(f"--step selects one of several checkpoints, and {text} is one file; leave it out")
        with open_imported(text) as source:
            yield source
        return
    storage, named = find(text)
    if named is not None and step is not None:
        raise ConfigError(
            f"--step selects one of several checkpoints, and {text} is one; leave it out, or name {storage.url}"
        )
    storage = CountedStorage(storage, count)
    chosen = named if named is not None else step
    yield saved_source(storage, _newest(storage, now, on_damaged) if chosen is None else chosen)


def _newest(storage: Storage, now: Callable[[str], None], on_damaged: OnDamaged) -> int:
    now(f"looking for the newest intact checkpoint in {storage.url}")
    step = newest_intact(storage, on_damaged)
    if step is not None:
        return step
    if steps(storage):
        raise CheckpointCorrupt(f"no checkpoint in {storage.url} is intact")
    what = f"there is no complete checkpoint in {storage.url}"
    raise CheckpointMissing(f"{what}; name a directory that contains one, or a file")


def _is_foreign(text: str) -> bool:
    path = Path(text.removeprefix("file://"))
    if is_remote(text) or path.name == "manifest.json" or _is_data_folder(path):
        return False
    return path.is_file() or ((path / ".metadata").exists() and not (path / "manifest.json").exists())


def _folder(text: str) -> Path:
    path = Path(text.removeprefix("file://"))
    if path.name == "manifest.json" or _is_data_folder(path):
        path = path.parent
    if not path.exists():
        raise ConfigError(
            f"there is no {str(path)!r}; name a directory of checkpoints, one checkpoint in it, a URL, or a file"
        )
    if not path.is_dir():
        raise ConfigError(f"{path} is a file; name a directory of checkpoints, or one checkpoint in it")
    return path


def _is_data_folder(path: Path) -> bool:
    """Return whether this directory has the data files of a Holdfast checkpoint, in any format."""
    return path.name.startswith("data-") and path.is_dir() and (path.parent / "manifest.json").is_file()
