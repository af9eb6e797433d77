r"""What the hub and its clients send each other: one JSON object a line.

===========  ====================================================================
client       ``{"hello": 1, "token": ..., "job": ...}`` first, then requests
\            ``{"id": n, "op": "put" | "create" | "delete" | "ping", "key": ..., "value": ..., "leased": ...}``
hub          ``{"key": ..., "value": ... | null}`` for every change, all keys first;
\            ``{"id": n, "done": ...}`` in answer to a request, 0 to the hello
===========  ====================================================================
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.membership.store import MAX_VALUE_BYTES

HELLO = 1
"""Version of this protocol."""

MAX_LINE_BYTES = 8 * MAX_VALUE_BYTES
"""A longer line is nonsense; JSON may spell a character in six."""

LEASE_S = 10.0
"""A client that has not been heard of for so long loses what it leased."""


def dump(message: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Return the message in a line.

    Raises:
        ValueError: if it is none.
    """
    message = json.loads(line)
    if type(message) is not dict:
        msg = f"a message must be an object, got {message!r:.80}"
        raise ValueError(msg)
    return message
