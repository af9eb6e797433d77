"""Modules of ``tests/support``: hosts made of namespaces, and a server with the protocol of S3."""

import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).parents[3] / "support")
if _SUPPORT not in sys.path:
    sys.path.append(_SUPPORT)

from netns import Hosts, ip  # noqa: E402
from s3 import Server, running_server  # noqa: E402

__all__ = ["Hosts", "Server", "ip", "running_server"]
