"""Giving states from the memory of one worker to that of another: to newcomers from all who have it, or a part from its holder.

A header says what comes. The state is cut into pieces, which are sent from where they lie, and received where they will stay; only
what is small is packed together. To newcomers each giver sends other pieces. The digests of the pieces come last. What a newcomer
got counts when it is known everywhere that all have it, which is for the protocol to find out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast.checkpoint.format import DTYPES, flatten, tensor_bytes, unflatten
from holdfast.comm import Communicator, Mail, share_bytes
from holdfast.errors import CheckpointError, PeerFailed

PIECE_BYTES = 8 << 20
"""Size of a piece, at most: givers take turns with them."""
_SMALL_BYTES = 64 << 10
"""Tensors below this are packed together, because a message costs more than to copy them."""
DIGEST_BYTES = 8


def give_state(comm: Communicator, newcomers: Sequence[int], state: Any, info: dict[str, Any]) -> None:
    """Take part in giving ``state``, the same at all members but ``newcomers``, who call :func:`take_state`.

    What is given can be saved; the info is plain JSON, and that of the lowest giver is given.
    """
    said, packed = pack_state(state)
    _share_header(comm, newcomers, json.dumps(said | {"info": info}).encode())
    givers = _givers(comm, newcomers)
    mine = packed.pieces[givers.index(comm.here[0]) :: len(givers)]
    comm.swap([(comm.processes.index((rank,)), piece) for piece in _sealed(mine) for rank in newcomers], [])


def take_state(comm: Communicator, newcomers: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Return the state and the info that :func:`give_state` gives.

    Raises:
        CheckpointError: if what came is not what was given.
    """
    header = json.loads(_share_header(comm, newcomers, b""))
    tensors, packed = room_for(header)
    givers = _givers(comm, newcomers)
    theirs = {giver: packed.pieces[number :: len(givers)] for number, giver in enumerate(givers)}
    coming = {giver: _room_for_sealed(pieces) for giver, pieces in theirs.items()}  # from all givers at the same time
    comm.swap([], [(comm.processes.index((giver,)), data) for giver, sent in coming.items() for data in sent])
    for giver, sent in coming.items():
        _check_sealed(sent, f"the state that worker {giver} gave")
    packed.unpack()
    return unflatten(tensors, header["skeleton"]), header["info"]


def give_part(comm: Communicator, taker: int, state: Mapping[str, Any]) -> None:
    """Give a state to ``taker`` alone, who calls :func:`take_part`."""
    said, packed = pack_state(dict(state))
    header = as_message(said)
    to = comm.processes.index((taker,))
    comm.swap([(to, torch.tensor([len(header)]))], [])
    comm.swap([(to, data) for data in (header, *_sealed(packed.pieces))], [])


def take_part(comm: Communicator, giver: int) -> dict[str, Any]:
    """Return the state that ``giver`` gives.

    Raises:
        CheckpointError: if what came is not what was given.
    """
    source = comm.processes.index((giver,))
    length = torch.zeros(1, dtype=torch.int64)
    comm.swap([], [(source, length)])
    message = torch.empty(int(length), dtype=torch.uint8)
    comm.swap([], [(source, message)])
    header = of_message(message)
    tensors, packed = room_for(header)
    sent = _room_for_sealed(packed.pieces)
    comm.swap([], [(source, data) for data in sent])
    _check_sealed(sent, f"the part of the model that worker {giver} gave")
    packed.unpack()
    state: dict[str, Any] = unflatten(tensors, header["skeleton"])
    return state


def take_lowest(comm: Communicator, state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state of the lowest member, where members have different ones; None where all are equal, and there.

    All who have a state call this together. What cannot be saved under one of its names is a worker's own.

    Raises:
        CheckpointError: if what came is not what was given.
    """
    given = {name: value for name, value in state.items() if _can_be_saved(value)}
    leaves, skeleton = flatten(given)
    digest = xxhash.xxh3_64(json.dumps([skeleton, list(leaves)]).encode())
    for leaf in leaves.values():
        if isinstance(leaf, torch.Tensor):
            digest.update(tensor_bytes(leaf.detach().cpu().contiguous()))
    number = digest.intdigest() >> 2
    high, low = comm.maximum((number, ~number))
    if high == ~low:
        return None
    lowest, *others = comm.members
    if lowest in comm.here:
        give_state(comm, others, given, {})
        return None
    taken, _ = take_state(comm, others)
    return {**state, **taken}


def _can_be_saved(state: Any) -> bool:
    try:
        flatten(state)
    except CheckpointError:
        return False
    return True


def pack_state(state: Any) -> tuple[dict[str, Any], Packed]:
    """Return what is to be said of a state before it is given, plain JSON, and what is given."""
    leaves, skeleton = flatten(state)
    tensors = {
        path: leaf.detach().cpu().contiguous() for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)
    }
    named = [[path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for path, tensor in tensors.items()]
    packed = Packed(tensors.values())
    packed.pack()
    return {"skeleton": skeleton, "tensors": named}, packed


def room_for(said: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Packed]:
    """Return memory for the tensors of a state of which ``said`` was said, by path and as it is taken."""
    tensors = {path: torch.empty(shape, dtype=DTYPES[dtype]) for path, dtype, shape in said["tensors"]}
    return tensors, Packed(tensors.values())


class Packed:
    """The memory of contiguous tensors as pieces: parts of the large ones, where they lie, and the small ones in a row of their own."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        large: list[torch.Tensor] = []
        self._small: list[torch.Tensor] = []
        for tensor in tensors:
            data = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
            (large if len(data) >= _SMALL_BYTES else self._small).append(data)
        self._row = torch.empty(sum(map(len, self._small)), dtype=torch.uint8)
        self.pieces = [piece for data in (self._row, *large) for piece in data.split(PIECE_BYTES) if len(piece)]

    def pack(self) -> None:
        """Copy the small tensors into their row."""
        torch.cat(self._small or [self._row], out=self._row)

    def unpack(self) -> None:
        """Copy the small tensors out of their row."""
        for data, part in zip(self._small, self._row.split([len(data) for data in self._small]), strict=True):
            data.copy_(part)


def as_message(said: Any) -> torch.Tensor:
    """Return plain JSON as bytes that can be sent; see :func:`of_message`."""
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def of_message(message: torch.Tensor) -> Any:
    """Return what :func:`as_message` made bytes of."""
    return json.loads(message.numpy().tobytes())


def tell(mail: Mail, comm: Communicator, teller: int, say: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the message that ``teller`` sends to all others; it alone calls ``say`` to make it."""
    if teller not in comm.here:
        return mail.receive(teller)
    told = say()
    mail.send([rank for rank in comm.members if rank not in comm.here], told)
    return told


def _sealed(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the pieces, and behind them their digests."""
    return [*pieces, _digests(pieces)]


def _room_for_sealed(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*pieces, torch.empty(len(pieces) * DIGEST_BYTES, dtype=torch.uint8)]


def _check_sealed(sent: Sequence[torch.Tensor], what: str) -> None:
    *pieces, told = sent
    if not torch.equal(_digests(pieces), told):
        raise CheckpointError(f"{what} came damaged")


def _digests(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digests of the pieces, one after the other."""
    row = b"".join(xxhash.xxh3_64_digest(tensor_bytes(piece)) for piece in pieces)
    return torch.frombuffer(bytearray(row), dtype=torch.uint8) if row else torch.empty(0, dtype=torch.uint8)


def _givers(comm: Communicator, newcomers: Sequence[int]) -> list[int]:
    return [rank for rank in comm.members if rank not in newcomers]


def _share_header(comm: Communicator, newcomers: Sequence[int], header: bytes) -> bytes:
    """Return the header of the lowest giver."""
    shared = share_bytes(comm, header, _givers(comm, newcomers)[0])
    if not shared:
        raise PeerFailed("nobody is left who has the state")
    return shared
