"""Sources whose tensors can be read one by one, for comparison and conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.blocks import block_ranges, digest, run
from holdfast.checkpoint.format import DTYPES, scalars_of, tensor_bytes
from holdfast.checkpoint.loading import load, read_box, read_manifest
from holdfast.checkpoint.manifest import MANIFEST_NAME
from holdfast.checkpoint.storage import Storage, step_folder
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.tools.checkpoints.counted import CountedStorage
from holdfast.tools.formats.base import TensorInfo, TensorSource


def saved_source(storage: Storage, step: int) -> TensorSource:
    """Return a checkpoint as a source.

    Raises:
        CheckpointCorrupt: if its manifest is damaged.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    manifest = read_manifest(storage, step)
    scalars, ties = scalars_of(manifest.skeleton, manifest.tensors)
    tensors = {path: TensorInfo(DTYPES[entry.dtype], entry.shape) for path, entry in manifest.tensors.items()}
    tensors |= {path: tensors[first] for path, first in ties.items()}

    def read(path: str) -> torch.Tensor:
        shape = tensors[path].shape
        return read_box(storage, manifest, ties.get(path, path), (0,) * len(shape), shape)

    return TensorSource(
        name=f"{storage.url}/{step_folder(step)}",
        kind=manifest.format,
        tensors=tensors,
        read=read,
        load=lambda: load(storage, step).state,
        scalars=scalars,
        step=step,
        manifest=manifest,
        written_s=written_s(storage, step),
        ties=ties,
    )


def facts_of(source: TensorSource, now: Callable[[str], None]) -> dict[str, Any]:
    """Return what a source contains, as JSON; ``now`` is called with a text before each tensor is read."""
    manifest = source.manifest
    tensors = []
    for path, entry in source.tensors.items():
        if path in source.ties:
            continue
        now(f"reading {path}")
        xxh3 = tensor_digest(source.read(path)) if manifest is None else manifest.tensors[path].xxh3
        dtype = str(entry.dtype).removeprefix("torch.")
        shape = list(entry.shape)
        tensors.append({"path": path, "dtype": dtype, "shape": shape, "bytes": entry.size_bytes, "xxh3": xxh3})
    return {
        "path": source.name,
        "format": source.kind,
        "step": source.step,
        "generation": None if manifest is None else manifest.generation,
        "files": None if manifest is None else {name: file.size_bytes for name, file in manifest.files.items()},
        "written": source.written_s,
        "versions": None if manifest is None else manifest.versions,
        "info": {} if manifest is None else manifest.info,
        "tensors": tensors,
        "ties": dict(source.ties),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
    }


def written_s(storage: Storage, step: int) -> float | None:
    """Return the completion time of a checkpoint, in seconds since 1970; None if the storage does not record it."""
    if isinstance(storage, CountedStorage):
        storage = storage.inner
    if not isinstance(storage, LocalStorage):
        return None
    try:
        return (Path(storage.url) / step_folder(step) / MANIFEST_NAME).stat().st_mtime
    except OSError:
        return None  # it was removed since it was listed


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest that a manifest would have for a tensor in one piece; see :attr:`TensorEntry.xxh3`."""
    data = tensor_bytes(tensor)
    blocks = run(lambda ends: digest(data[ends[0] : ends[1]]), list(block_ranges(len(data))), len(data))
    return blocks[0] if len(blocks) == 1 else digest("".join(blocks).encode())
