"""The life lock of a process: a word in shared memory in which the kernel itself notes that the process is ending.

The process holds a robust mutex (POSIX: ``pthread_mutexattr_setrobust``) for life. When its main thread ends, for whatever
reason, the kernel sets a bit in the mutex. It does so before it frees the memory of the process, which takes milliseconds
for a process that has imported torch. Everything else that shows the end comes after that: the exit status, the PID file
descriptor of its watcher, the closed sockets.

Other processes read the word, or wait for the lock. No process writes the bit, so it cannot be set too early: a process
that is stopped, slow or unreachable still holds its lock.

Each lock says on which host it was taken. Elsewhere its word means nothing, though a shared folder may show the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

LOCK_BYTES = 64
"""Bytes reserved for the mutex; glibc takes 40 or 48, the host of its process the last 8."""

_MUTEX_BYTES = 56

_OWNER_DIED = 0x40000000
"""Set by the kernel in the word; see futex(2), under robust futexes."""
_HOST = struct.Struct("<Q")
_MAP_FAILED = ctypes.c_void_p(-1).value
_ATTRIBUTES_BYTES = 64
_IS_EXITING = 0x4
"""In the flags of ``/proc/PID/stat``: the process has begun to end (PF_EXITING in the kernel)."""
_FLAGS, _CORE = 5, 35
"""Numbers of the flags and of the core among the fields after the state."""

_LIBRARY = ctypes.CDLL(None, use_errno=True)  # not PyDLL: a thread that waits for a lock must not hold the GIL
_LIBRARY.mmap.restype = ctypes.c_void_p
_LIBRARY.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBRARY.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_taken: list[tuple[int, int]] = []
"""Address and position of locks that threads of this process have taken: each stays mapped until its thread has ended."""
_taken_lock = threading.Lock()


def hold_life_lock(memory: mmap.mmap, at: int) -> None:
    """Take a lock in shared memory and keep it until this process ends; ``at`` is divisible by 8.

    Nothing happens in a thread other than the main one, which may end before its process, or if the system has no such
    locks: then others learn of the end of this process in other ways, later.
    """
    if threading.get_native_id() != os.getpid():
        return
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory, at)))
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    _LIBRARY.pthread_mutexattr_init(attributes)
    _LIBRARY.pthread_mutexattr_setpshared(attributes, 1)
    _LIBRARY.pthread_mutexattr_setrobust(attributes, 1)
    if _LIBRARY.pthread_mutex_init(place, attributes) == 0:
        _LIBRARY.pthread_mutex_lock(place)
        _HOST.pack_into(memory, at + _MUTEX_BYTES, _this_host())  # last: others take the lock only where they see it
        # Never unmapped, not even when the interpreter ends: the C library links the locks of a thread to each other.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def wait_for_end(path: Path, at: int) -> bool:
    """Block until the process that holds the lock at ``at`` in a file begins to end.

    The calling thread then holds the lock, without the mark, and must end at once: the kernel sets the mark again as it
    does. Until then other readers of the lock take the process for alive.

    Returns:
        Whether a process of this host held the lock. If not, this returns at once.
    """
    _unmap_released()
    address = _map_lock(path, at, mmap.PROT_READ | mmap.PROT_WRITE)
    if not address:
        return False
    code: int = _LIBRARY.pthread_mutex_lock(ctypes.c_void_p(address + at))
    with _taken_lock:
        _taken.append((address, at))
    return code == errno.EOWNERDEAD


def _unmap_released() -> None:
    """Unmap the locks whose threads have ended, which the mark shows; until then the C library links them to the threads."""
    with _taken_lock:
        for address, at in tuple(_taken):
            if _has_mark(address + at):
                _taken.remove((address, at))
                _LIBRARY.munmap(address, at + LOCK_BYTES)


def _has_mark(address: int) -> bool:
    """Return whether the kernel has noted in the word at ``address`` that the holder of the lock has begun to end."""
    return bool(ctypes.c_uint32.from_address(address).value & _OWNER_DIED)


@functools.cache
def _this_host() -> int:
    """Return a number equal on processes that see each other's process IDs, those of this boot and PID namespace.

    0 if that is not known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        named = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return 0
    return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=_HOST.size).digest(), "little") | 1


class PeerLocks:
    """The life locks of other processes of this host, in files that they have mapped.

    Args:
        path_of: Returns the file of a rank. It is read first when the worker is connected, so it exists, or never will.
        at: Position of the lock in each file.
        pid_at: Position of the process ID, 64 bits.
    """

    def __init__(self, path_of: Callable[[int], Path], at: int, pid_at: int) -> None:
        self._path_of = path_of
        self._at = at
        self._pid_at = pid_at
        self._addresses: dict[int, int] = {}

    def on_this_host(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` whose end can be seen here: they hold a lock, and run on this host."""
        for rank in ranks:
            if rank not in self._addresses:
                self._addresses[rank] = _map_lock(self._path_of(rank), self._at, mmap.PROT_READ)
        return [rank for rank in ranks if self._addresses[rank]]

    def core_of_end(self, rank: int) -> int | None:
        """Return None while the process of ``rank`` goes on; else the core that frees its memory, -1 once that is done.

        None, too, if its end cannot be seen here.
        """
        if not self.on_this_host([rank]):
            return None
        address = self._addresses[rank]
        if not _has_mark(address + self._at):
            return None
        return _core_of_end(ctypes.c_int64.from_address(address + self._pid_at).value)


def _map_lock(path: Path, at: int, access: int) -> int:
    """Return the address of a file that stays mapped; 0 if it has no lock of this host at ``at``."""
    try:
        with path.open("rb+" if access & mmap.PROT_WRITE else "rb", buffering=0) as file:
            host = os.pread(file.fileno(), _HOST.size, at + _MUTEX_BYTES)
            is_here = _this_host() != 0 and host == _HOST.pack(_this_host())
            return _map(file.fileno(), at + LOCK_BYTES, access) if is_here else 0
    except OSError:  # there is none, or it cannot be mapped
        return 0


def _map(fd: int, size_bytes: int, access: int) -> int:
    """Map a file and return the address; Python's ``mmap`` would keep a file descriptor for each."""
    address: int | None = _LIBRARY.mmap(None, size_bytes, access, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "cannot map a life lock")
    return address


def is_over(state: str, fields: list[str]) -> bool:
    """Return whether a process or thread has ended, or the kernel has begun to end it: none of its own code runs then."""
    return state in "ZX" or bool(int(fields[_FLAGS]) & _IS_EXITING)


def stat_of(pid: int | str) -> tuple[str, list[str]]:
    """Return the state of a process or ``PID/task/THREAD``, and the fields behind it; "X" and none if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", []
    state, *fields = stat[stat.rindex(")") + 2 :].split()  # the process name before it may contain spaces
    return state, fields


def _core_of_end(pid: int) -> int | None:
    """Return the core on which a process ends, and keep it there; -1 if it has ended, None if it has not begun to.

    Asked only where its lock says that it has: a second witness, should the process have overwritten its own lock, or
    have replaced its program (``exec``), which also releases it. The last thread to end frees the memory.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return -1
    for thread in threads:
        state, fields = stat_of(f"{pid}/task/{thread}")
        if state in "ZX":
            continue
        if not is_over(state, fields):
            return None
        core = int(fields[_CORE])
        with contextlib.suppress(OSError):  # it has ended meanwhile, or may not be kept there
            os.sched_setaffinity(int(thread), {core})
        return core
    return -1
