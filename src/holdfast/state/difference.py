"""State transfer to newcomers that have most of it already: only the pieces that differ are sent.

Every sender sends the digests of its pieces, and each newcomer answers which of them it lacks. A newcomer that has
nothing lacks all. What it has then equals the state of the senders, wherever it came from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.format import DTYPES, unflatten
from holdfast.comm import Communicator
from holdfast.errors import CheckpointError
from holdfast.state.transfer import (
    DIGEST_BYTES,
    PackedTensors,
    broadcast_header,
    digests_of,
    givers_of,
    pack_state,
)


def send_difference(comm: Communicator, newcomers: Sequence[int], state: Any, info: dict[str, Any]) -> None:
    """Take part in sending ``state`` as :func:`~holdfast.state.transfer.send_state` does, to :func:`receive_difference`."""
    header, packed = pack_state(state)
    broadcast_header(comm, newcomers, json.dumps(header | {"info": info}).encode())
    givers = givers_of(comm, newcomers)
    pieces = packed.share(givers.index(comm.local_ranks[0]), len(givers))
    digests = digests_of(pieces)
    places = [comm.processes.index((rank,)) for rank in newcomers]
    lacks = [torch.empty(len(pieces), dtype=torch.uint8) for _ in places]
    comm.sendrecv([(place, digests) for place in places], list(zip(places, lacks, strict=True)))
    comm.sendrecv(
        [
            (place, piece)
            for place, lack in zip(places, lacks, strict=True)
            for piece, is_lacking in zip(pieces, lack.tolist(), strict=True)
            if is_lacking
        ],
        [],
    )


def receive_difference(
    comm: Communicator, newcomers: Sequence[int], known: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, Any], int]:
    """Receive a state, and return it with its info, and the number of bytes that differed from the tensors ``known``.

    Args:
        comm: The communicator.
        newcomers: Members without the state, of which this is one.
        known: Tensors by path; those that occur in the state become part of it.

    Raises:
        CheckpointError: if the received bytes do not match their digests.
    """
    header = json.loads(broadcast_header(comm, newcomers, b""))
    tensors = {path: _room(known.get(path), DTYPES[dtype], shape) for path, dtype, shape in header["tensors"]}
    packed = PackedTensors(tensors.values())
    packed.pack()
    givers = givers_of(comm, newcomers)
    places = [comm.processes.index((giver,)) for giver in givers]
    shares = [packed.pieces[number :: len(givers)] for number in range(len(givers))]
    all_digests = [torch.empty(len(pieces) * DIGEST_BYTES, dtype=torch.uint8) for pieces in shares]
    comm.sendrecv([], list(zip(places, all_digests, strict=True)))
    lacks = [_differ(pieces, digests) for pieces, digests in zip(shares, all_digests, strict=True)]
    comm.sendrecv(list(zip(places, lacks, strict=True)), [])
    coming = [
        [piece for piece, lack in zip(pieces, lacking.tolist(), strict=True) if lack]
        for pieces, lacking in zip(shares, lacks, strict=True)
    ]
    comm.sendrecv([], [(place, piece) for place, pieces in zip(places, coming, strict=True) for piece in pieces])
    for giver, pieces, lacking, digests in zip(givers, coming, lacks, all_digests, strict=True):
        if not torch.equal(digests_of(pieces), digests.view(-1, DIGEST_BYTES)[lacking.bool()].reshape(-1)):
            raise CheckpointError(f"the state received from worker {giver} is damaged: its digests do not match")
    packed.unpack()
    return (
        unflatten(tensors, header["skeleton"]),
        header["info"],
        sum(len(piece) for pieces in coming for piece in pieces),
    )


def _room(known: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return memory for a tensor of the state: the known tensor itself, if it is of this kind and contiguous."""
    if known is None or known.dtype != dtype or list(known.shape) != list(shape) or known.device.type != "cpu":
        return torch.empty(shape, dtype=dtype)
    return known.detach().contiguous()


def _differ(pieces: Sequence[torch.Tensor], told: torch.Tensor) -> torch.Tensor:
    """Return for each piece 1 if its digest is not the one that was told, otherwise 0."""
    return (digests_of(pieces) != told).view(-1, DIGEST_BYTES).any(dim=1).to(torch.uint8)
