"""How starters and the fork server of their node find and understand each other; imports little, as starters do."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

FORK_SERVER = "HOLDFAST_FORK_SERVER"
"""Path of the fork server's socket; not set if there is none."""
READY, GO, SUCCEEDED, FAILED = b"r", b"g", b"0", b"f"
"""Sent by the watcher once it runs, with a pidfd of it and one of the launcher if that is on the node; by the starter,
which then relies on it; by the watcher if the worker exited with 0; by the watcher if it ended in any other way."""
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def surroundings() -> dict[str, Any]:
    """Return what a process forked elsewhere must have in common with this one: its namespaces and control group."""
    with open("/proc/self/cgroup") as file:
        groups = file.read()
    return {"groups": groups, **{name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES}}


def connect_to(path: str) -> socket.socket:
    """Return a connection to the Unix socket ``path``, however long the path is; ``OSError`` if nothing listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        finally:
            os.close(folder)
    except OSError:
        connection.close()
        raise
    return connection


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the PID and the user of the process at the other end, as the kernel knows them."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
