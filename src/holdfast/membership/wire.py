r"""Protocol of the hub and its clients: one JSON object per line.

===========  ====================================================================
client       first the handshake of :mod:`holdfast.membership.authentication`; all that follows, in both directions,
\            has a MAC in front of each line, which is left out here
\            ``{"job": ...}``, then requests; with ``session``, a name of its own, it may repeat its last request at
\            another hub of a cluster, where ``again`` says that it comes back
\            ``{"id": n, "op": "put" | "create" | "delete", "key": ..., "value": ..., "leased": ...}``;
\            without ``id`` there is no answer
\            an empty line as a heartbeat
hub          ``{"key": ..., "value": ... | null}`` for every change, all keys first; null removes the key, or all keys
\            that begin with it if it ends in ``/``
\            ``{"id": n, "done": ...}`` in answer to a request, 0 to the first line, with ``lease_s``, and with
\            ``address`` where this is not the address of the client's end: its machine's towards the other nodes
\            ``{"refused": ...}``, then it closes the connection; with ``leader``, the address of the hub that may lead
\            an empty line in answer to a heartbeat
another hub  the handshake, then ``{"peer": NAME}``, answered by ``{"peer": NAME, "is_new": ...}``; then messages of
\            :mod:`holdfast.membership.consensus`, and an answer to each
===========  ====================================================================
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.membership.store import MAX_VALUE_BYTES

HELLO = 4
"""Version of this protocol."""

MAX_HELLO_BYTES = 4096
"""Maximum length of a line from a client that has not proved that it knows the token."""

MAX_LINE_BYTES = 8 * MAX_VALUE_BYTES
"""Maximum length of any other line; JSON may need six bytes for a character."""

NOT_LEADING = "another hub leads"
EXPIRED = "the session has expired"
"""Why a hub of a cluster refuses a client that knows the token."""

BEAT = b"\n"
"""A single byte is sent completely or not at all."""


class LineSplitter:
    """Splits received data into lines of at most ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines completed by ``data``; raise ``ValueError`` if one is too long."""
        lines = []
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._take(end)
            lines.append(b"".join(self._pieces))
            self._pieces, self._size = [], 0
        self._take(rest)
        return lines

    def _take(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > self.limit_bytes:
            raise ValueError(f"a line has more than {self.limit_bytes} bytes")


def dump(message: dict[str, Any]) -> bytes:
    """Encode a message as a line."""
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Decode the message in a line; raise ``ValueError`` if it is invalid."""
    try:
        message = json.loads(line.decode())
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if type(message) is not dict:
        raise ValueError(f"a message must be an object, got {message!r:.80}")
    return message
