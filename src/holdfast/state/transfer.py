"""State transfer between the memories of workers: to newcomers from all workers that have the state, or of one part from its owner.

A header describes the state. The state is cut into pieces, which are sent from their original memory and received in their final
memory; only small tensors are packed together. Each sender sends other pieces to the newcomers. The digests of the pieces come last.
A received state counts once every worker knows that all newcomers have it, which the recovery protocol establishes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast.checkpoint.format import DTYPES, flatten, tensor_bytes, unflatten
from holdfast.comm import Communicator, Mailbox, broadcast_bytes
from holdfast.comm.device import DEVICES, DeviceStream, Wait, device_of
from holdfast.comm.memory import as_bytes
from holdfast.errors import CheckpointError, PeerFailed

PIECE_BYTES = 8 << 20
"""Maximum size of a piece in bytes; the senders take turns piece by piece."""
_SMALL_BYTES = 64 << 10
"""Tensors below this size are packed together, because a message costs more than copying them."""
_DIGEST_BYTES = 8


def send_state(comm: Communicator, newcomers: Sequence[int], state: Any, info: dict[str, Any]) -> None:
    """Take part in sending ``state``, equal at all members except ``newcomers``, which call :func:`receive_state`.

    The state must be one that can be saved in a checkpoint. ``info`` is plain JSON; that of the lowest sender is sent.
    """
    header, packed = pack_state(state)
    _broadcast_header(comm, newcomers, json.dumps(header | {"info": info}).encode())
    givers = _givers_of(comm, newcomers)
    pieces = packed.share(givers.index(comm.local_ranks[0]), len(givers))
    comm.sendrecv([(comm.processes.index((rank,)), piece) for piece in _sealed(pieces) for rank in newcomers], [])


def receive_state(comm: Communicator, newcomers: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Receive and return the state and the info that :func:`send_state` sends.

    Raises:
        CheckpointError: if the received bytes do not match their digests.
    """
    header = json.loads(_broadcast_header(comm, newcomers, b""))
    tensors, packed = room_for(header)
    givers = _givers_of(comm, newcomers)
    shares = {giver: packed.pieces[number :: len(givers)] for number, giver in enumerate(givers)}
    coming = {giver: _room_for_sealed(pieces) for giver, pieces in shares.items()}  # from all senders in parallel
    comm.sendrecv([], [(comm.processes.index((giver,)), data) for giver, sent in coming.items() for data in sent])
    for giver, sent in coming.items():
        _check_sealed(sent, f"the state received from worker {giver}")
    packed.unpack()
    return unflatten(tensors, header["skeleton"]), header["info"]


def send_part(comm: Communicator, taker: int, state: Mapping[str, Any]) -> None:
    """Send a state to ``taker`` alone, which calls :func:`receive_part`."""
    header, packed = pack_state(dict(state))
    message = as_message(header)
    to = comm.processes.index((taker,))
    comm.sendrecv([(to, torch.tensor([len(message)]))], [])
    comm.sendrecv([(to, data) for data in (message, *_sealed(packed.share(0, 1)))], [])


def receive_part(comm: Communicator, giver: int) -> dict[str, Any]:
    """Receive and return the state that ``giver`` sends.

    Raises:
        CheckpointError: if the received bytes do not match their digests.
    """
    source = comm.processes.index((giver,))
    length = torch.zeros(1, dtype=torch.int64)
    comm.sendrecv([], [(source, length)])
    message = torch.empty(int(length), dtype=torch.uint8)
    comm.sendrecv([], [(source, message)])
    header = of_message(message)
    tensors, packed = room_for(header)
    sent = _room_for_sealed(packed.pieces)
    comm.sendrecv([], [(source, data) for data in sent])
    _check_sealed(sent, f"the part of the model received from worker {giver}")
    packed.unpack()
    state: dict[str, Any] = unflatten(tensors, header["skeleton"])
    return state


def adopt_lowest(comm: Communicator, state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the lowest member's state, if the members' states differ; None if all are equal, and at the lowest member.

    A collective of all workers that have a state. Entries that cannot be saved in a checkpoint stay the worker's own.

    Raises:
        CheckpointError: if the received bytes do not match their digests.
    """
    entries = {name: value for name, value in state.items() if _can_be_saved(value)}
    leaves, skeleton = flatten(entries)
    digest = xxhash.xxh3_64(json.dumps([skeleton, list(leaves)]).encode())
    for leaf in leaves.values():
        if isinstance(leaf, torch.Tensor):
            digest.update(tensor_bytes(leaf.detach().cpu().contiguous()))
    number = digest.intdigest() >> 2
    high, low = comm.maximum((number, ~number))
    if high == ~low:
        return None
    lowest, *receivers = comm.members
    if lowest in comm.local_ranks:
        send_state(comm, receivers, entries, {})
        return None
    taken, _ = receive_state(comm, receivers)
    return {**state, **taken}


def _can_be_saved(state: Any) -> bool:
    try:
        flatten(state)
    except CheckpointError:
        return False
    return True


def pack_state(state: Any) -> tuple[dict[str, Any], PackedTensors]:
    """Return the header of a state to be sent, as plain JSON, and its tensors, which are not copied yet."""
    leaves, skeleton = flatten(state)
    tensors = {path: leaf.detach() for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    named = [[path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for path, tensor in tensors.items()]
    return {"skeleton": skeleton, "tensors": named}, PackedTensors(tensors.values())


def room_for(said: dict[str, Any]) -> tuple[dict[str, torch.Tensor], PackedTensors]:
    """Return memory for the state that the header ``said`` describes: its tensors by path, and packed for receiving."""
    tensors = {path: torch.empty(shape, dtype=DTYPES[dtype]) for path, dtype, shape in said["tensors"]}
    return tensors, PackedTensors(tensors.values())


class PackedTensors:
    """The memory of tensors as pieces: slices of the large tensors in place, and one buffer that packs the small ones.

    Args:
        tensors: Tensors to send, or contiguous ones to receive into. Those to send may be on a device.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        large: list[torch.Tensor] = []
        self._small: list[torch.Tensor] = []
        for tensor in tensors:
            data = as_bytes(_contiguous(tensor))
            (large if len(data) >= _SMALL_BYTES else self._small).append(data)
        self._row = torch.empty(sum(map(len, self._small)), dtype=torch.uint8)
        packed = self._row.split(PIECE_BYTES) if len(self._row) else ()
        self._num_packed = len(packed)
        self.pieces = [*packed, *(piece for data in large for piece in data.split(PIECE_BYTES))]

    def share(self, number: int, count: int) -> list[torch.Tensor]:
        """Return the pieces that sender ``number`` of ``count`` sends, in host memory; nothing else is copied there."""
        packed = self.pieces[number : self._num_packed : count]
        if packed:
            self.pack()
        return [*packed, *_in_host(self.pieces[number + count * len(packed) :: count])]

    def pack(self) -> None:
        """Copy the small tensors into the buffer: from each device in one copy."""
        small = list(self._small)
        for device in {data.device for data in small if not device_of(data.device).is_host}:
            places = [place for place, data in enumerate(small) if data.device == device]
            together = _in_host([torch.cat([small[place] for place in places])])[0]
            parts = together.split([len(small[place]) for place in places])
            for place, part in zip(places, parts, strict=True):
                small[place] = part
        torch.cat(small or [self._row], out=self._row)

    def unpack(self) -> None:
        """Copy the small tensors out of the buffer."""
        for data, part in zip(self._small, self._row.split([len(data) for data in self._small]), strict=True):
            data.copy_(part)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bytes can be sent; one on a device stays there, unless that would take memory there."""
    is_known = tensor.device.type in DEVICES
    return tensor if is_known and tensor.is_contiguous() else tensor.cpu().contiguous()


def _in_host(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the pieces in host memory: those on a device are copied, all at once."""
    devices = {device for piece in pieces if not (device := device_of(piece.device)).is_host}
    for device in devices:
        device.hold(DeviceStream.TO_HOST, device.mark(DeviceStream.COMPUTE), Wait.COMPUTED)
    result = []
    for piece in pieces:
        device, into = device_of(piece.device), piece
        if not device.is_host:
            into = device.host_memory(len(piece))
            device.copy(into, piece, DeviceStream.TO_HOST)
        result.append(into)
    for device in devices:
        device.wait(device.mark(DeviceStream.TO_HOST), Wait.COPIED)
    return result


def as_message(said: Any) -> torch.Tensor:
    """Return JSON data as bytes to send; see :func:`of_message`."""
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def of_message(message: torch.Tensor) -> Any:
    """Return the data that :func:`as_message` encoded."""
    return json.loads(message.numpy().tobytes())


def broadcast(mailbox: Mailbox, comm: Communicator, teller: int, say: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Broadcast a message from ``teller`` and return it; only ``teller`` calls ``say`` to create it."""
    if teller not in comm.local_ranks:
        return mailbox.receive(teller)
    message = say()
    mailbox.send([rank for rank in comm.members if rank not in comm.local_ranks], message)
    return message


def _sealed(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the pieces, followed by their digests."""
    return [*pieces, _digests_of(pieces)]


def _room_for_sealed(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*pieces, torch.empty(len(pieces) * _DIGEST_BYTES, dtype=torch.uint8)]


def _check_sealed(sent: Sequence[torch.Tensor], what: str) -> None:
    *pieces, digests = sent
    if not torch.equal(_digests_of(pieces), digests):
        raise CheckpointError(f"{what} is damaged: its digests do not match")


def _digests_of(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digests of the pieces, one after the other."""
    row = b"".join(xxhash.xxh3_64_digest(tensor_bytes(piece)) for piece in pieces)
    return torch.frombuffer(bytearray(row), dtype=torch.uint8) if row else torch.empty(0, dtype=torch.uint8)


def _givers_of(comm: Communicator, newcomers: Sequence[int]) -> list[int]:
    """Return the members that have the state, ascending."""
    return [rank for rank in comm.members if rank not in newcomers]


def _broadcast_header(comm: Communicator, newcomers: Sequence[int], header: bytes) -> bytes:
    """Return the header of the lowest sender; raise ``PeerFailed`` if there is none."""
    shared = broadcast_bytes(comm, header, _givers_of(comm, newcomers)[0])
    if not shared:
        raise PeerFailed("no surviving worker has the state")
    return shared
