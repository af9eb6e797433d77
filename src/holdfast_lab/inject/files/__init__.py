"""Reads and writes values in checkpoint files, at the places that ``locate`` finds. HDF5 needs no torch.

If values are stored uncompressed and contiguously, the rest of the file is not read. Compressed HDF5 data
are decompressed chunk by chunk, and only the chunks that are needed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast.checkpoint.storage import step_folder
from holdfast.errors import ConfigError
from holdfast_lab.inject.files.base import FileValues, InjectionTarget, explained
from holdfast_lab.inject.locate import HDF5_KINDS, Locate, locators
from holdfast_lab.inject.locate.hdf5 import locate as locate_hdf5

__all__ = ["InjectionTarget", "copied", "find", "opened"]


_HDF5 = b"\x89HDF\r\n\x1a\n"


def find(text: str) -> InjectionTarget:
    """Return the target of a path: a file, a checkpoint, or the newest checkpoint of a directory.

    Raises:
        ConfigError: if the path does not exist or is something else.
        CheckpointMissing: if a directory has no complete checkpoint.
    """
    path = Path(text.removeprefix("file://"))
    if path.is_file() and path.suffix != ".json":  # a manifest stands for its checkpoint
        return InjectionTarget(path)
    from holdfast_lab.inject.files.checkpoint import find_checkpoint

    return find_checkpoint(text)


@contextmanager
def opened(target: InjectionTarget, *, write: bool) -> Iterator[FileValues]:
    """Open a target to alter it in place.

    Raises:
        ConfigError: if its kind is unknown.
        CheckpointCorrupt: if it is damaged.
        CheckpointError: if it cannot be read or altered.
    """
    with ExitStack() as stack:
        if target.step is None:
            yield _foreign(target.path, target.path, stack, write=write)
        else:
            from holdfast.checkpoint.loading import read_manifest
            from holdfast_lab.inject.files.checkpoint import CheckpointValues

            yield CheckpointValues(target.path, read_manifest(target.path, target.step), stack, write=write)


@contextmanager
def copied(target: InjectionTarget, out: Path) -> Iterator[FileValues]:
    """Open a copy of a target. The copy gets its final name only on success; otherwise it is removed.

    Args:
        target: The source of the copy.
        out: The new file; for a checkpoint, the directory of checkpoints in which the same step is created.

    Raises:
        ConfigError: if the name is already taken.
    """
    with ExitStack() as stack:
        if target.step is None:
            if out.exists():
                raise ConfigError(f"{out} already exists; name a new file, or remove it")
            draft = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
            stack.callback(draft.unlink, missing_ok=True)
            _copy(target.path, draft)
            with ExitStack() as inner:
                yield _foreign(draft, target.path, inner, write=True)
            with explained(out):
                draft.rename(out)
            return
        from holdfast.checkpoint.loading import read_manifest
        from holdfast_lab.inject.files.checkpoint import CheckpointValues

        root = out.parent if out.name == step_folder(target.step) else out
        manifest = read_manifest(target.path, target.step)
        folder = root / step_folder(target.step)
        if out.is_file() or folder.exists():
            raise ConfigError(
                f"{out if out.is_file() else folder} already exists; name another directory, or remove it"
            )
        done = stack.enter_context(ExitStack())
        done.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in manifest.files:
            _copy(target.path / step_folder(target.step) / manifest.folder / name, folder / manifest.folder / name)
        with ExitStack() as inner:
            yield CheckpointValues(root, manifest, inner, write=True)
        done.pop_all()


def _foreign(path: Path, named: Path, stack: ExitStack, *, write: bool) -> FileValues:
    """Open a file of another program, whose kind is determined by the name ``named``."""
    _check_plain(path)
    with explained(path), path.open("rb") as file:
        is_hdf5 = file.read(len(_HDF5)) == _HDF5
    kind = named.suffix.lower()
    locate: Locate
    if is_hdf5 or kind in HDF5_KINDS:
        locate, kind = locate_hdf5, ".hdf5"
    else:
        known = locators()
        if kind not in known:
            raise ConfigError(
                f"{named} is not a file that can be altered; it must be HDF5, or its name must end with one of "
                f"{', '.join(known)}"
            )
        locate = known[kind]
    archives = kind not in (".hdf5", ".safetensors")
    return FileValues(kind.removeprefix("."), locate(path, stack), [path], stack, write=write, archives=archives)


def _check_plain(path: Path) -> None:
    """Raise ``ConfigError`` for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file: name one")


def _copy(source: Path, target: Path) -> None:
    """Copy a file; where the file system supports it, the copy shares blocks until they are altered."""
    _check_plain(source)
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as old, target.open("xb") as new:
            left = os.fstat(old.fileno()).st_size
            try:
                while left and (done := os.copy_file_range(old.fileno(), new.fileno(), left)):
                    left -= done
            except OSError:  # not supported by every file system
                old.seek(new.seek(0, os.SEEK_END))
                shutil.copyfileobj(old, new, 1 << 20)
