"""Torch's flight recorder of a worker, from the debug handlers that the worker serves with ``--debug-handlers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from http.client import HTTPConnection

_HANDLER = "fr_trace_json"
"""The handler that returns the collectives that process groups of torch recorded."""
_TIMEOUT_S = 5.0


def flight_recorder(path: Path) -> str:
    """Return the flight recorder of a worker as JSON text, or in parentheses why there is none."""
    if not path.exists():
        return "(not served: start the job with --debug-handlers)"
    from http.client import HTTPException  # takes as long as the rest of this package

    try:
        text = _ask(path, _HANDLER)
        entries = json.loads(text).get("entries", [])
    except (OSError, ValueError, AttributeError, HTTPException) as error:
        return f"(no answer: {error})"
    if not entries:
        return "(empty: no process group of torch has recorded a collective; its size is TORCH_FR_BUFFER_SIZE)"
    return text


def _ask(path: Path, handler: str) -> str:
    connection = _connection(path)
    try:
        connection.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"status {answer.status} of the handler {handler}")
    return text


def _connection(path: Path) -> HTTPConnection:
    import socket
    from http.client import HTTPConnection

    connection = HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(_TIMEOUT_S)
    try:
        connection.sock.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
