"""Copies of a state in memory."""

from __future__ import annotations

import copy
from typing import Any

import torch


def copied(value: Any, room: Any = None) -> Any:
    """Return a copy of a state that shares nothing with what goes on changing: of nested containers of tensors and anything else.

    The tensors of ``room``, a copy of an earlier state that is needed no more, are written anew: fresh memory costs more than to copy.
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
