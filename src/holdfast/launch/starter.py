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
import sys
from typing import NoReturn

from holdfast.launch.fork_protocol import FORK_SERVER, GO, READY, SUCCEEDED, connect_to, surroundings

_ANSWER_S = 60.0
"""Time that the server may take to answer: it imports torch first."""
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


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
