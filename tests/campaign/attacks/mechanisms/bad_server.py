"""A server that is slow, hangs, breaks connections or refuses requests: what stands before one that works."""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
import threading
import time

UNAVAILABLE = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 105\r\nConnection: close\r\n\r\n"
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Slow down</Message></Error>'
)
UNAVAILABLE = UNAVAILABLE.replace(b"105", str(len(UNAVAILABLE.partition(b"\r\n\r\n")[2])).encode())
LOOKS_S = 0.02
CHUNK = 1 << 16


class Mode(enum.Enum):
    """What happens to connections."""

    WORKS = "works"
    SLOW = "slow"
    """Each chunk takes :attr:`BadServer.delay_s` longer."""
    RESETS = "resets"
    """Connections are reset, also those that exist."""
    UNAVAILABLE = "unavailable"
    """Each request is answered with 503."""
    HANGS = "hangs"
    """Nothing is answered; connections are reset when this is over."""


class BadServer:
    """Passes on what comes to its port, as its mode says.

    Args:
        port: Port of the server that works, on this machine.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.mode, self.delay_s = Mode.WORKS, 0.0
        self.struck = 0
        """Connections that were delayed, reset, refused or left waiting."""
        self.turn = threading.Lock()
        """Held while an attack has changed the mode."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close the port and all connections."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._port)) as far, contextlib.suppress(OSError):
            other = {near: far, far: near}
            is_struck = False
            while not self._is_over:
                if self.mode in (Mode.RESETS, Mode.HANGS):
                    self.struck += 1
                    while self.mode is Mode.HANGS and not self._is_over:
                        time.sleep(LOOKS_S)
                    _reset(near)
                    return
                for source in select.select([near, far], [], [], LOOKS_S)[0]:
                    data = source.recv(CHUNK)
                    if not data:
                        return
                    if self.mode is Mode.UNAVAILABLE and source is near:
                        self.struck += 1
                        near.sendall(UNAVAILABLE)
                        return
                    if self.mode is Mode.SLOW:
                        self.struck += not is_struck
                        is_struck = True
                        time.sleep(self.delay_s)
                    other[source].sendall(data)


def _reset(connection: socket.socket) -> None:
    """Have the other end see ECONNRESET instead of an orderly end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
