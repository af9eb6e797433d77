"""Messages of a stream of state over a TCP connection: a header as JSON with its MAC, and the bytes of tensors.

A connection begins with a proof that the newcomer knows the token. The MACs prove the same of the sender, and that no
header was changed, repeated or left out. The length of a header has a MAC of its own, so that no program without the token
determines how much is read. The bytes of tensors carry no digests: when a newcomer is admitted, everything
that it has is compared with the state of the members.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import struct
from collections.abc import Iterable
from typing import Any

import torch

from holdfast.membership.state_requests import StreamSecrets
from holdfast.state.live_bytes import LiveBytes

_MAC_BYTES = 32
_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20
"""Bytes that are copied and sent at a time: few enough to stay in the cache."""
_MOST_HEADER_BYTES = 1 << 28


def send_message(connection: socket.socket, header: dict[str, Any], body: LiveBytes, secrets: StreamSecrets) -> None:
    """Send a message; raise ``OSError`` if the connection has ended."""
    payload = json.dumps(header).encode()
    length = _LENGTH.pack(len(payload))
    connection.sendall(length + secrets.next_mac(length) + payload + secrets.next_mac(payload))
    room = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    view: Any = room.numpy()
    while count := body.take(room):
        connection.sendall(view[:count])


def receive_header(connection: socket.socket, secrets: StreamSecrets) -> dict[str, Any]:
    """Return the header of the next message; raise ``OSError`` if the connection has ended, or this is no stream of state."""
    (length,) = _LENGTH.unpack(_receive_proved(connection, _LENGTH.size, secrets))
    if length > _MOST_HEADER_BYTES:
        raise ConnectionError(f"a header of {length} bytes is not one of a stream of state")
    payload = _receive_proved(connection, length, secrets)
    try:
        header = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"a header of a stream of state is not JSON: {error}") from error
    if type(header) is not dict:
        raise ConnectionError(f"a header of a stream of state is not an object, but {header!r:.60}")
    return header


def _receive_proved(connection: socket.socket, size: int, secrets: StreamSecrets) -> bytearray:
    """Return the next bytes, whose MAC follows them."""
    payload = bytearray(size)
    _receive(connection, payload)
    mac = _receive(connection, bytearray(_MAC_BYTES))
    if not hmac.compare_digest(mac, secrets.next_mac(payload)):
        raise ConnectionError("a header of a stream of state was changed on its way, or sent by another program")
    return payload


def receive_body(connection: socket.socket, tensors: Iterable[torch.Tensor]) -> None:
    """Receive the bytes of a message into tensors of bytes; raise ``OSError`` if the connection has ended."""
    for tensor in tensors:
        _receive(connection, tensor.numpy())


def has_more(connection: socket.socket) -> bool:
    """Return whether something can be received at once, or the connection has ended."""
    look = select.poll()
    look.register(connection, select.POLLIN)
    return bool(look.poll(0))


def _receive(connection: socket.socket, room: Any) -> Any:
    view = memoryview(room)
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]
    return room


def hang_up(connection: socket.socket) -> None:
    """End a connection, or stop to listen, also if a forked child has the socket, or a thread waits for it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already
