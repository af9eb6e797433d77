"""Giving a part of a model from one worker's memory to another's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.checkpoint.format import unflatten
from holdfast.comm import Communicator
from holdfast.errors import CheckpointError
from holdfast.state.transfer import DIGEST_BYTES, digests, pack_state, room_for


def give(comm: Communicator, taker: int, state: Mapping[str, Any]) -> None:
    """Give a state to ``taker``, who calls :func:`take`.

    Args:
        comm: Of both.
        taker: Its rank.
        state: Anything that can be saved.

    Raises:
        PeerFailed: if it did not complete here.
    """
    said, packed = pack_state(dict(state))
    header = bytearray(json.dumps(said).encode())
    to = comm.processes.index((taker,))
    comm.swap([(to, torch.tensor([len(header)]))], [])
    sent = (torch.frombuffer(header, dtype=torch.uint8), *packed.pieces, digests(packed.pieces))
    comm.swap([(to, data) for data in sent], [])


def take(comm: Communicator, giver: int) -> dict[str, Any]:
    """Return the state that ``giver`` gives.

    Raises:
        CheckpointError: if what came is not what was given.
        PeerFailed: if it did not complete here.
    """
    source = comm.processes.index((giver,))
    length = torch.zeros(1, dtype=torch.int64)
    comm.swap([], [(source, length)])
    data = torch.empty(int(length), dtype=torch.uint8)
    comm.swap([], [(source, data)])
    header = json.loads(data.numpy().tobytes())
    tensors, packed = room_for(header)
    told = torch.empty(len(packed.pieces) * DIGEST_BYTES, dtype=torch.uint8)
    comm.swap([], [(source, piece) for piece in (*packed.pieces, told)])
    if not torch.equal(digests(packed.pieces), told):
        raise CheckpointError(f"the part of the model that worker {giver} gave came damaged")
    packed.unpack()
    state: dict[str, Any] = unflatten(tensors, header["skeleton"])
    return state
