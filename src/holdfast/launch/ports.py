"""Closes the ports of mpirun on one machine, for which mpirun has no option.

PRRTE listens on all interfaces for daemons on other machines, of which a job on one machine has none. PMIx listens on
the loopback interface for the workers, each of which connects once at its start. It waits indefinitely for the first
bytes of a connection, so a connection that sends nothing keeps mpirun from reporting a death. As the parent of mpirun,
the launcher may duplicate its sockets, and have the kernel drop all packets to the listening ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program for the kernel's packet filter: return 0, which drops every packet."""
_LIBC = ctypes.CDLL(None, use_errno=True)

_Address = tuple[str, int]


def shut_ports(mpirun: int, workers: Sequence[int] | None) -> int | None:
    """Block connections to mpirun from other machines, and from this one once its workers are connected.

    Other connections made before are closed. If duplicating mpirun's sockets is not permitted, the ports stay open.

    Args:
        mpirun: PID of mpirun.
        workers: PIDs of its live workers; None as long as some have not started.

    Returns:
        Number of closed connections; None if the workers are not connected yet. Connections that wait to be accepted
        are left to later calls.
    """
    with contextlib.ExitStack() as copies:
        try:
            sockets = [copies.enter_context(copy) for copy in _tcp_sockets(mpirun)]
            listening = [one for one in sockets if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
            near = {_address(one) for one in listening if ipaddress.ip_address(_address(one)[0]).is_loopback}
            endpoints = None if workers is None else _connections(workers, near)
            if not near:
                return None
            for one in listening:
                if endpoints is not None or _address(one) not in near:
                    _drop_all(one)
        except PermissionError:
            return 0
        if endpoints is None:
            return None
        ports = {_address(one)[1] for one in listening}
        strange = [one for one in sockets if _address(one)[1] in ports and _peer(one) not in {None, *endpoints}]
        for one in strange:
            with contextlib.suppress(OSError):  # its peer has just closed it
                one.shutdown(socket.SHUT_RDWR)
        return len(strange)


def _connections(workers: Sequence[int], to: set[_Address]) -> set[_Address] | None:
    """Return the workers' ends of their connections to any of the addresses ``to``; None if a worker has none yet."""
    endpoints: set[_Address] = set()
    for worker in workers:
        with contextlib.ExitStack() as copies:
            sockets = [copies.enter_context(copy) for copy in _tcp_sockets(worker)]
            own = {_address(one) for one in sockets if _peer(one) in to}
        if not own:
            return None
        endpoints |= own
    return endpoints


def _tcp_sockets(pid: int) -> Iterator[socket.socket]:
    """Yield duplicates of the TCP sockets of a process; none if it has ended.

    Raises:
        PermissionError: if the system does not permit it.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number in _socket_numbers(pid):
            handle = _LIBC.syscall(_PIDFD_GETFD, process, number, 0)
            if handle >= 0:
                copy = socket.socket(fileno=handle)
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    yield copy
                else:
                    copy.close()
            elif ctypes.get_errno() not in (errno.EBADF, errno.ESRCH):  # neither closed nor ended in the meantime
                raise PermissionError
    finally:
        os.close(process)


def _socket_numbers(pid: int) -> Iterator[int]:
    folder = Path("/proc", str(pid), "fd")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # closed, or ended, in the meantime
        for number in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(folder / number).startswith("socket:"):
                    yield int(number)


def _address(one: socket.socket) -> _Address:
    host, port = one.getsockname()[:2]
    return host, port


def _peer(one: socket.socket) -> _Address | None:
    """Return the address of the peer, None if there is none."""
    try:
        host, port = one.getpeername()[:2]
    except OSError:
        return None
    return host, port


def _drop_all(listening: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP)
    listening.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP) // 8, ctypes.addressof(program))
    )
