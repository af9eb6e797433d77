"""torch's own debug handlers of a worker, on a socket in the run's directory that only its user can open.

``torch.distributed.debug.start_debug_server`` is not used: its servers listen on all interfaces, its page is served by
a child of rank 0, which dies with rank 0, and it finds the ranks in a TCPStore, which does not follow lost and new
ranks. The handlers below it need none of that: a thread in C++ answers, also while the GIL is held.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
