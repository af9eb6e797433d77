"""Giving the state of training to workers that come later, from the memory of all who have it.

The state is one long row of bytes. It goes in chunks, each from another giver, each with a digest of its own; a newcomer
keeps what it gets aside. It counts when everybody knows that everybody has it, which is for the protocol to find out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import xxhash

from holdfast.checkpoint.format import DTYPES, flatten, tensor_bytes, unflatten
from holdfast.comm import Communicator
from holdfast.errors import CheckpointError, PeerFailed

_CHUNK_BYTES = 8 << 20
_DIGEST_BYTES = 8


def give_state(comm: Communicator, newcomers: Sequence[int], state: Any, info: dict[str, Any]) -> None:
    """Take part in giving ``state``, the same at all members that are no newcomers.

    Args:
        comm: Of givers and newcomers.
        newcomers: Members that call :func:`take_state`.
        state: Anything that can be saved.
        info: Plain JSON; that of the lowest giver is given.

    Raises:
        PeerFailed: if somebody died.
    """
    leaves, skeleton = flatten(state)
    tensors = {path: leaf.detach().contiguous() for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    named = [[path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for path, tensor in tensors.items()]
    _share_header(comm, newcomers, json.dumps({"skeleton": skeleton, "info": info, "tensors": named}).encode())
    memory = [tensor_bytes(tensor) for tensor in tensors.values()]
    givers, me = _givers(comm, newcomers), comm.here[0]
    places = {rank: comm.processes.index((rank,)) for rank in newcomers}
    for start, end, giver in _chunks(sum(map(len, memory)), givers):
        if giver == me:
            chunk = torch.empty(end - start + _DIGEST_BYTES, dtype=torch.uint8)
            data = tensor_bytes(chunk)
            for part, at in _parts(memory, start, end):
                data[at : at + len(part)] = part
            data[end - start :] = xxhash.xxh3_64_digest(data[: end - start])
            comm.swap([(place, chunk) for place in places.values()], [])


def take_state(comm: Communicator, newcomers: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Return the state and the info that :func:`give_state` gives.

    Raises:
        CheckpointError: if what came is not what was given.
        PeerFailed: if somebody died.
    """
    header = json.loads(_share_header(comm, newcomers, b""))
    tensors = {path: torch.empty(shape, dtype=DTYPES[dtype]) for path, dtype, shape in header["tensors"]}
    memory = [tensor_bytes(tensor) for tensor in tensors.values()]
    chunks = list(_chunks(sum(map(len, memory)), givers := _givers(comm, newcomers)))
    for first in range(0, len(chunks), len(givers)):  # from all givers at the same time
        now = chunks[first : first + len(givers)]
        came = [torch.empty(end - start + _DIGEST_BYTES, dtype=torch.uint8) for start, end, _ in now]
        comm.swap([], [(comm.processes.index((chunk[2],)), data) for chunk, data in zip(now, came, strict=True)])
        for (start, end, giver), chunk in zip(now, came, strict=True):
            data = tensor_bytes(chunk)
            if xxhash.xxh3_64_digest(data[: end - start]) != bytes(data[end - start :]):
                msg = f"the state that worker {giver} gave came damaged, in its bytes {start} to {end}"
                raise CheckpointError(msg)
            for part, at in _parts(memory, start, end):
                part[:] = data[at : at + len(part)]
    return unflatten(tensors, header["skeleton"]), header["info"]


def _givers(comm: Communicator, newcomers: Sequence[int]) -> list[int]:
    return [rank for rank in comm.members if rank not in newcomers]


def _chunks(size_bytes: int, givers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first byte of each chunk, the one behind it, and who gives it."""
    for number, start in enumerate(range(0, size_bytes, _CHUNK_BYTES)):
        yield start, min(start + _CHUNK_BYTES, size_bytes), givers[number % len(givers)]


def _parts(memory: Sequence[memoryview], start: int, end: int) -> Iterator[tuple[memoryview, int]]:
    """Yield the pieces of memory that a chunk covers, and where in the chunk each begins."""
    for view, first in zip(memory, accumulate(map(len, memory), initial=0), strict=False):
        low, high = max(start, first), min(end, first + len(view))
        if low < high:
            yield view[low - first : high - first], low - start


def _share_header(comm: Communicator, newcomers: Sequence[int], header: bytes) -> bytes:
    """Return the header of the lowest giver."""
    root = _givers(comm, newcomers)[0]
    is_root = comm.here[0] == root
    (length,) = comm.maximum([len(header) if is_root else 0])
    if not length:
        msg = "nobody is left who has the state"
        raise PeerFailed(msg)
    data = torch.zeros(length, dtype=torch.uint8)
    if is_root:
        tensor_bytes(data)[:] = header
    comm.broadcast(data, root)
    return bytes(tensor_bytes(data))
