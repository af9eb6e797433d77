"""A client of a hub or relay, made of its bytes, that may send anything after, or in, the handshake."""

import contextlib
import socket

from holdfast.membership.authentication import ClientHandshake
from holdfast.membership.wire import LineSplitter

WAIT_S = 60


class Stranger:
    """A connection after the handshake: ``keys`` sign what it sends."""

    def __init__(self, connection, keys, lines, read):
        self.socket, self.keys = connection, keys
        self._lines, self._read = lines, read

    def send(self, data):
        """Send lines with their MACs; what has no end is sent as it is."""
        *lines, rest = data.split(b"\n")
        signed = b"".join(self.keys.sign(line + b"\n") for line in lines)
        with contextlib.suppress(OSError):  # it was cut off while it still sent
            self.socket.sendall(signed + rest)

    def lines(self, count):
        """Return the next lines that the hub sends, verified."""
        while len(self._read) < count and (data := self.socket.recv(1 << 16)):
            self._read += self._lines.feed(data)
        taken, self._read = self._read[:count], self._read[count:]
        return [self.keys.verify(line) for line in taken]

    def read_to_end(self):
        """Say that no more comes, and return what the hub sends until it ends the connection."""
        answer = b"\n".join(self._read)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            while data := self.socket.recv(1 << 16):
                answer += data
        return answer


@contextlib.contextmanager
def connect(hub, token, hello):
    """Connect to a hub, with the handshake of a client that knows ``token``."""
    with socket.create_connection(("127.0.0.1", hub.port), timeout=WAIT_S) as connection:
        handshake = ClientHandshake(token, hello)
        connection.sendall(handshake.greeting)
        lines, read = LineSplitter(1 << 30), []
        while handshake.done is None:
            if not read:
                data = connection.recv(4096)
                assert data, "the hub ended the handshake"
                read += lines.feed(data)
                continue
            connection.sendall(handshake.take(read.pop(0)))
        yield Stranger(connection, handshake.done, lines, read)
