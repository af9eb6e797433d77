"""Holdfast checkpoints in any format: the manifest gives the place of every value."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from holdfast.checkpoint.block_writer import gaps
from holdfast.checkpoint.blocks import BLOCK_BYTES, block_ranges, digest_of
from holdfast.checkpoint.format import DTYPES
from holdfast.checkpoint.loading import steps
from holdfast.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, TensorEntry, TensorPiece, dump
from holdfast.checkpoint.storage import is_remote, step_folder, step_of
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.errors import CheckpointMissing, ConfigError
from holdfast_lab.inject.files.base import FileValues, InjectionTarget
from holdfast_lab.inject.locate.base import FileBox, FileBoxes, Index, row_major


class CheckpointValues(FileValues):
    """The values of a checkpoint; see :class:`~holdfast_lab.inject.files.base.FileValues`.

    Args:
        root: The directory of checkpoints.
        manifest: Its content. It need not exist there yet: :meth:`seal` writes it.
        write: Whether they may be altered.
        stack: Closes the files.
    """

    def __init__(self, root: Path, manifest: Manifest, stack: ExitStack, *, write: bool) -> None:
        self._storage = LocalStorage(root)
        self._manifest = manifest
        self._paths = {name: root / step_folder(manifest.step) / manifest.folder / name for name in manifest.files}
        if write:
            for path in self._paths.values():
                _unshare(path)
        located = {path: self._locate(entry) for path, entry in manifest.tensors.items()}
        archives = manifest.format == "npz"
        super().__init__(manifest.format, located, self._paths.values(), stack, write=write, archives=archives)

    def _locate(self, entry: TensorEntry) -> FileBoxes:
        boxes = [FileBox(self._paths[p.file], p.offset, p.start, p.shape, row_major(p.shape)) for p in entry.pieces]
        width = DTYPES[entry.dtype].itemsize
        return FileBoxes(dtype=entry.dtype, shape=entry.shape, width=width, boxes=tuple(boxes))

    def seal(self, *, keep_digests: bool) -> None:
        """See :meth:`FileValues.seal`; altered blocks and archives are read whole."""
        super().seal(keep_digests=keep_digests)
        manifest = self._manifest
        if not keep_digests:
            files = {name: self._files[path] for name, path in self._paths.items()}
            touched = {name: np.sort(np.concatenate(file.touched)) for name, file in files.items() if file.touched}
            tensors = {path: self._renewed(entry, touched) for path, entry in manifest.tensors.items()}
            entries = {name: self._rest(name) if name in touched else entry for name, entry in manifest.files.items()}
            manifest = dataclasses.replace(manifest, tensors=tensors, files=entries)
        for file in self._files.values():
            file.sync()
        self._storage.put(f"{step_folder(manifest.step)}/{MANIFEST_NAME}", dump(manifest))

    def _renewed(self, entry: TensorEntry, touched: Mapping[str, Index]) -> TensorEntry:
        return dataclasses.replace(
            entry,
            pieces=tuple(
                dataclasses.replace(piece, blocks=self._blocks(piece, touched[piece.file]))
                if piece.file in touched
                else piece
                for piece in entry.pieces
            ),
        )

    def _blocks(self, piece: TensorPiece, touched: Index) -> tuple[str, ...]:
        """Return the digests of a piece, with new ones for the altered blocks."""
        ends = np.searchsorted(touched, (piece.offset, piece.offset + piece.size_bytes))
        stale = set(np.unique((touched[ends[0] : ends[1]] - piece.offset) // BLOCK_BYTES).tolist())
        return tuple(
            self._digest(piece.file, [(piece.offset + start, piece.offset + end)]) if number in stale else old
            for number, (old, (start, end)) in enumerate(zip(piece.blocks, block_ranges(piece.size_bytes), strict=True))
        )

    def _rest(self, name: str) -> FileEntry:
        """Return the manifest's entry for an altered file; checksums inside it may have changed, too."""
        pieces = [piece for entry in self._manifest.tensors.values() for piece in entry.pieces if piece.file == name]
        size_bytes = self._files[self._paths[name]].size_bytes
        if self._manifest.files[name].rest_xxh3 is None:
            return FileEntry(size_bytes=size_bytes, rest_xxh3=None)
        return FileEntry(size_bytes=size_bytes, rest_xxh3=self._digest(name, gaps(size_bytes, pieces)))

    def _digest(self, name: str, ranges: Sequence[tuple[int, int]]) -> str:
        found = digest_of(ranges, self._files[self._paths[name]].read_into)
        assert found is not None, f"{name} became shorter while it was altered"
        return found


def find_checkpoint(text: str) -> InjectionTarget:
    """Return the target of a path; see :func:`holdfast_lab.inject.files.find`."""
    if is_remote(text):
        raise ConfigError(f"{text} must be on this machine to be altered; fetch it first")
    path = Path(text.removeprefix("file://"))
    if path.name == MANIFEST_NAME or (path.is_dir() and (path.parent / MANIFEST_NAME).is_file()):
        path = path.parent
    if not path.exists():
        raise ConfigError(f"there is no {str(path)!r}; name a checkpoint, a directory of checkpoints, or a file")
    if not path.is_dir():
        return InjectionTarget(path)
    if (path / MANIFEST_NAME).exists():
        step = step_of(path.resolve().name)
        if step is None:
            raise ConfigError(
                f"{path} has a checkpoint whose name does not match its step; call it step-00000020 for step 20"
            )
        return InjectionTarget(path.resolve().parent if path.name in ("", "..") else path.parent, step)
    if (path / ".metadata").exists():
        raise ConfigError(
            f"{path} is a directory of torch.distributed.checkpoint without a manifest.json of holdfast; its index is "
            "a pickle, which is not read: save it as .safetensors"
        )
    if not (complete := steps(path)):
        raise CheckpointMissing(f"there is no complete checkpoint in {path}; name a directory that has one, or a file")
    return InjectionTarget(path, complete[-1])


def _unshare(path: Path) -> None:
    """Replace a file that other checkpoints share by a copy of its own: altering one must not alter them."""
    if not path.exists() or path.stat().st_nlink < 2:
        return
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        shutil.copy2(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
