"""In-memory snapshots of a state."""

from __future__ import annotations

import copy
from typing import Any

import torch


def copied(value: Any, room: Any = None) -> Any:
    """Return a deep copy of a state, given as nested containers of tensors and other values.

    The tensors of ``room``, a snapshot that is no longer needed, are reused: allocating fresh memory costs more than copying.
    """
    match value:
        case torch.Tensor():
            fits = (
                isinstance(room, torch.Tensor)
                and (room.shape, room.dtype, room.device) == (value.shape, value.dtype, value.device)
                and not value.is_sparse
            )
            return room.copy_(value.detach()) if fits else value.detach().clone()
        case dict():
            old = room if isinstance(room, dict) else {}
            return {name: copied(each, old.get(name)) for name, each in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            rooms = room if isinstance(room, list | tuple) and len(room) == len(value) else [None] * len(value)
            return type(value)(copied(each, old) for each, old in zip(value, rooms, strict=True))
        case _:
            return copy.deepcopy(value)
