"""What mpirun or the launcher starts for each worker: ``python -m holdfast.launch.starter SCRIPT [ARGS]...``.

It asks the fork server of its node, see :mod:`holdfast.launch.fork_server`, for a watcher with a worker, and ends as the
watcher does. Without a server that answers, it becomes the watcher itself: the worker then imports torch on its own.

This module imports little, because it runs once a worker.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

FORK_SERVER = "HOLDFAST_FORK_SERVER"
"""Path of the fork server's socket; not set if there is none."""
READY, GO, SUCCEEDED = b"r", b"g", b"0"
"""Sent by the watcher once it runs; by the starter, which then relies on it; by the watcher if the worker exited with 0."""
_ANSWER_S = 60.0
"""Time that the server may take to answer: it imports torch first."""
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def main() -> NoReturn:
    """Have the worker forked, and end as its watcher does."""
    connection = _ask(os.environ.get(FORK_SERVER, ""))
    if connection is None:
        from holdfast.launch import worker

        worker.main()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, which saves
    if _receive_byte(connection) == SUCCEEDED:
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


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


def _ask(path: str) -> socket.socket | None:
    """Return the connection to our watcher, None if there is no server, or it does not answer or refuses."""
    if not path:
        return None
    try:
        connection = connect_to(path)
    except OSError:
        return None
    try:
        _send_request(connection)
        connection.settimeout(_ANSWER_S)
        if _receive_byte(connection) == READY:
            connection.sendall(GO)
            connection.settimeout(None)
            return connection
    except OSError:  # it was killed, or is stopped
        pass
    connection.close()  # a watcher that answers too late ends for want of a GO
    return None


def _send_request(connection: socket.socket) -> None:
    request = {
        "words": sys.argv[1:],
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "surroundings": surroundings(),
    }
    text = json.dumps(request).encode()
    socket.send_fds(connection, [len(text).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(text)


def _receive_byte(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


if __name__ == "__main__":
    main()
