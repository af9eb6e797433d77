"""torch's own debug handlers of a worker, on a socket in the run's directory that only its user can open.

``torch.distributed.debug.start_debug_server`` is not used: its servers listen on all interfaces, its page is served by
a child of rank 0, which dies with rank 0, and it finds the ranks in a TCPStore, which does not follow lost and new
ranks. The handlers below it need none of that: a thread in C++ answers, also while the GIL is held.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from http.client import HTTPConnection

FLIGHT_RECORDER = "fr_trace_json"
"""The handler that returns the collectives that process groups of torch recorded."""
_TIMEOUT_S = 5.0
_serving: list[Any] = []


def handlers_path(run_dir: Path, rank: int) -> Path:
    """Return the socket at which the handlers of a worker answer."""
    return run_dir / f"debug-{rank}.sock"


def serve_handlers(path: Path) -> str:
    """Serve torch's handlers of this process at a socket until it ends; return why they cannot be served, else ""."""
    from holdfast.base.torch_private import debug_server

    try:
        path.unlink(missing_ok=True)  # of an earlier start of the job
        _serving.append(debug_server(str(path)))
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"torch serves no debug handlers: {str(error).partition(chr(10))[0]}"
    return ""


def flight_recorder(path: Path) -> str:
    """Return the flight recorder of a worker as JSON text, or in parentheses why there is none."""
    if not path.exists():
        return "(not served: start the job with --debug-handlers)"
    from http.client import HTTPException  # takes as long as the rest of this package

    try:
        text = _ask(path, FLIGHT_RECORDER)
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
