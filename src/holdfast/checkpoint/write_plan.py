"""The part of a state that one writer writes: all of it, an even part, or a distinct part that it alone holds."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.format import Leaf, Shard, flatten
from holdfast.comm.device import DEVICES
from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBox:
    """A part of a tensor that this worker writes."""

    path: str  # Path of the tensor
    key: str  # Name in the file
    tensor: torch.Tensor  # The values: contiguous on the CPU, or as they are on the device of the model
    start: tuple[int, ...]  # First index in each dimension of the whole tensor
    whole: tuple[int, ...]  # Shape of the whole tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """The part of a state that one writer writes."""

    boxes: tuple[WriteBox, ...]  # The tensors, or parts of them
    skeleton: Any
    """Structure of the whole state, or of a distinct part; None for the other writers of a replicated state."""
    part: int = 0  # Index of this part
    parts: int = 1  # Number of parts

    @property
    def size_bytes(self) -> int:
        """Total size of the values."""
        return sum(box.tensor.nbytes for box in self.boxes)


def take(state: Any, part: int = 0, parts: int = 1, *, distinct: bool = False) -> WritePlan:
    """Return what one of ``parts`` writers writes of a state; the tensors are not copied.

    Args:
        state: See :func:`~holdfast.checkpoint.format.flatten`. The same at all writers, except for shards.
        part: Index of the part: an even share of the bytes, and all shards that this worker holds.
        parts: Number of writers.
        distinct: The state, a dict, is a part of its own, and all of it is taken. Dicts that several writers have are merged;
            any other value must come from one writer only, except for the shards of a tensor.
            An empty dict reserves a place for entries of other writers.

    Raises:
        CheckpointError: if the state contains something that is not data.
        ConfigError: if ``part`` is out of range, or a distinct part is not a dict.
    """
    if not 0 <= part < parts:
        raise ConfigError(f"part must be at least 0 and below parts, got part {part} of {parts}")
    if distinct and not isinstance(state, dict):
        raise ConfigError(
            f"a distinct part of a state must be a dict, got {type(state).__name__}; name its values by their keys"
        )
    leaves, skeleton = flatten(state)
    boxes = tuple(_assign_leaves(leaves, 0, 1) if distinct else _assign_leaves(leaves, part, parts))
    return WritePlan(boxes=boxes, skeleton=skeleton if distinct or part == 0 else None, part=part, parts=parts)


def _assign_leaves(leaves: Mapping[str, Leaf], part: int, parts: int) -> list[WriteBox]:
    """Return what one of ``parts`` writers writes; every writer computes the same cuts.

    The replicated tensors are treated as one long sequence of bytes, which is cut between rows. Shards are written
    by the workers that hold them.
    """
    total = sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, torch.Tensor))
    first, end = total * part // parts, total * (part + 1) // parts
    boxes: list[WriteBox] = []
    position = 0
    for path, leaf in leaves.items():
        if isinstance(leaf, Shard):
            boxes.append(make_box(path, _plain(leaf.tensor), leaf.start, leaf.shape, leaves))
            continue
        rows = leaf.shape[0] if leaf.dim() and leaf.numel() else 1
        row_bytes = leaf.nbytes // rows
        if row_bytes:
            low, high = (min(max(-((position - cut) // row_bytes), 0), rows) for cut in (first, end))
        else:
            low, high = 0, int(first <= position < end or (part == parts - 1 and position >= end))
        position += leaf.nbytes
        if low < high:
            whole = tuple(leaf.shape)
            cut = leaf[low:high] if high - low < rows else leaf
            boxes.append(make_box(path, _plain(cut), (low, *[0] * (len(whole) - 1)) if whole else (), whole, leaves))
    return boxes


def make_box(
    path: str, tensor: torch.Tensor, start: tuple[int, ...], whole: tuple[int, ...], paths: Container[str]
) -> WriteBox:
    """Return a box of a tensor with its name in the file; ``paths`` are the paths of all tensors."""
    key = path
    if tuple(tensor.shape) != whole:
        place = ",".join(map(str, start))
        # A path may contain any characters, but a "~" in it is never followed by "@".
        key = next(key for key in (f"{path}@{place}", f"{path}~@{place}") if key not in paths)
    return WriteBox(path=path, key=key, tensor=tensor, start=start, whole=whole)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor, copied only if necessary; on a device, the tensor: its copy is contiguous."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" and tensor.device.type in DEVICES:
        return tensor
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()
