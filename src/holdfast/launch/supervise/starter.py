"""What mpirun or the launcher starts for each worker: ``python -m holdfast.launch.supervise.starter SCRIPT [ARGS]...``.

It asks the fork server of its node, see :mod:`holdfast.launch.supervise.fork_server`, for a watcher with a worker, and ends
as the watcher does. Without a server that answers, it becomes the watcher itself: the worker then imports torch on its own.

This module imports little, because it runs once a worker.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
from typing import NoReturn

from holdfast.launch.supervise.fork_protocol import FORK_SERVER, GO, READY, SUCCEEDED, connect_to, surroundings

_ANSWER_S = 60.0
"""Time that the server may take to answer: it imports torch first."""
_WAKE_S = 1.0
"""Interval at which the watcher is resumed once the launcher has ended."""
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def main() -> NoReturn:
    """Have the worker forked, and end as its watcher does."""
    answer = _ask(os.environ.get(FORK_SERVER, ""))
    if answer is None:
        from holdfast.launch.supervise import worker

        worker.main()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, which saves
    if _wait_for_end(*answer) == SUCCEEDED:
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _ask(path: str) -> tuple[socket.socket, list[int]] | None:
    """Return the connection to our watcher, with its pidfd and that of the launcher if both are on this node.

    None if there is no server, or it does not answer or refuses.
    """
    if not path:
        return None
    try:
        connection = connect_to(path)
    except OSError:
        return None
    try:
        _send_request(connection)
        connection.settimeout(_ANSWER_S)
        word, handles, _, _ = socket.recv_fds(connection, 1, 2)
        if word == READY:
            connection.sendall(GO)
            connection.settimeout(None)
            return connection, handles
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


def _wait_for_end(connection: socket.socket, handles: list[int]) -> bytes:
    """Return what the watcher says at its end. Without a launcher, nothing else resumes one that is stopped."""
    if len(handles) == 2:  # fewer arrive if this process may not open more files
        watcher, launcher = handles
        select.select([connection.fileno(), launcher], [], [])
        while not select.select([connection], [], [], _WAKE_S)[0]:
            try:
                signal.pidfd_send_signal(watcher, signal.SIGCONT)
            except ProcessLookupError:  # killed, while a process that it forked still has the connection
                return b""
    return _receive_byte(connection)


def _receive_byte(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


if __name__ == "__main__":
    main()
