"""Tensors that can be read one by one, wherever they are: what a comparison and a conversion work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.blocks import block_ranges, digest, run
from holdfast.checkpoint.format import DTYPES, tensor_bytes, tensor_path, unflatten
from holdfast.checkpoint.load import load, read_box, read_manifest
from holdfast.checkpoint.manifest import MANIFEST_NAME, Manifest
from holdfast.checkpoint.storage import Storage, step_folder
from holdfast.checkpoint.storage.local import LocalStorage


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint, or a file that another program wrote.

    Args:
        name: Where it is, for messages.
        kind: Its format.
        tensors: By path; tied ones stand here under each of their paths.
        read: Reads one of them. Raises :class:`~holdfast.errors.CheckpointCorrupt` if it is damaged.
        load: Reads everything and puts it together, as :func:`~holdfast.checkpoint.write_plan.take` wants it.
        scalars: What else is in it, by path; None if its format can hold nothing else.
        step: Steps that the state has behind it, None if nobody says.
        manifest: That of a checkpoint; None for another program's file.
        written_s: When a checkpoint was completed, seconds since 1970; None if nobody says.
    """

    name: str
    kind: str
    tensors: Mapping[str, Entry]
    read: Callable[[str], torch.Tensor]
    load: Callable[[], Any]
    scalars: Mapping[str, Any] | None = None
    step: int | None = None
    manifest: Manifest | None = None
    written_s: float | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    """Paths at which a tensor stands again, and where it stood first."""


def saved_source(storage: Storage, step: int) -> Source:
    """Return what there is to read in a checkpoint.

    Raises:
        CheckpointCorrupt: if its manifest is damaged.
        CheckpointMissing: if there is no complete checkpoint of this step.
    """
    manifest = read_manifest(storage, step)
    scalars, ties = scalars_of(manifest.skeleton, manifest.tensors)
    tensors = {path: Entry(DTYPES[entry.dtype], entry.shape) for path, entry in manifest.tensors.items()}
    tensors |= {path: tensors[first] for path, first in ties.items()}

    def read(path: str) -> torch.Tensor:
        shape = tensors[path].shape
        return read_box(storage, manifest, ties.get(path, path), (0,) * len(shape), shape)

    return Source(
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


def written_s(storage: Storage, step: int) -> float | None:
    """Return when a checkpoint was completed, in seconds since 1970; None if the storage does not say."""
    if not isinstance(storage, LocalStorage):
        return None
    try:
        return (Path(storage.url) / step_folder(step) / MANIFEST_NAME).stat().st_mtime
    except OSError:
        return None  # somebody removed it since it was listed


def scalars_of(skeleton: Any, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what is no tensor in a state, by path; and the paths at which a tensor stands again, with the first one.

    Args:
        skeleton: Of the state.
        tensors: By path; only the paths matter.
    """
    stand_ins = {path: torch.empty(0) for path in tensors}
    first = {id(stand_in): path for path, stand_in in stand_ins.items()}
    scalars: dict[str, Any] = {}
    ties: dict[str, str] = {}
    used: set[str] = set()
    for where, value in _leaves(unflatten(stand_ins, skeleton), ()):
        if not isinstance(value, torch.Tensor):
            scalars[tensor_path(where)] = value
        elif (path := first[id(value)]) in used:
            ties[tensor_path(where)] = path
        else:
            used.add(path)
    return scalars, ties


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest that a manifest has of a tensor in one piece; see :attr:`TensorEntry.xxh3`."""
    data = tensor_bytes(tensor)
    blocks = run(lambda ends: digest(data[ends[0] : ends[1]]), list(block_ranges(len(data))), len(data))
    return blocks[0] if len(blocks) == 1 else digest("".join(blocks).encode())


def _leaves(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    children: Iterable[tuple[Any, Any]]
    if isinstance(value, dict) and value:
        children = value.items()
    elif isinstance(value, list | tuple) and value:
        children = enumerate(value)
    else:
        yield where, value
        return
    for key, child in children:
        yield from _leaves(child, (*where, key))
