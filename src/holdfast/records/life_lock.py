"""The life lock of a process: a word in shared memory in which the kernel itself notes that the process is ending.

The process holds a robust mutex (POSIX: ``pthread_mutexattr_setrobust``) for life. When its main thread ends, for whatever
reason, the kernel sets a bit in the mutex. It does so before it frees the memory of the process, which takes milliseconds
for a process that has imported torch. Everything else that shows the end comes after that: the exit status, the PID file
descriptor of its watcher, the closed sockets.

Other processes only read the word, and no process writes the bit, so it cannot be set too early: a process that is
stopped, slow or unreachable still holds its lock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

LOCK_BYTES = 64
"""Bytes reserved for the mutex; glibc takes 40 or 48."""

_OWNER_DIED = 0x40000000
"""Set by the kernel in the word; see futex(2), under robust futexes."""
_WORD, _PID = struct.Struct("<I"), struct.Struct("<q")
_ATTRIBUTES_BYTES = 64
_IS_EXITING = 0x4
"""In the flags of ``/proc/PID/stat``: the process has begun to end (PF_EXITING in the kernel)."""
_FLAGS, _CORE = 5, 35
"""Numbers of the flags and of the core among the fields after the state."""


def hold_life_lock(memory: mmap.mmap, at: int) -> None:
    """Take a lock in shared memory and keep it until this process ends; ``at`` is divisible by 8.

    Nothing happens in a thread other than the main one, which may end before its process, or if the system has no such
    locks: then others learn of the end of this process in other ways, later.
    """
    if threading.get_native_id() != os.getpid():
        return
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory, at)))
    library = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    library.pthread_mutexattr_init(attributes)
    library.pthread_mutexattr_setpshared(attributes, 1)
    library.pthread_mutexattr_setrobust(attributes, 1)
    if library.pthread_mutex_init(place, attributes) == 0:
        library.pthread_mutex_lock(place)
        # Never unmapped, not even when the interpreter ends: the C library links the locks of a thread to each other.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


class PeerLocks:
    """The life locks of other processes, in files that they have mapped.

    Args:
        path_of: Returns the file of a rank. It is read first when the worker is connected, so it exists, or never will.
        at: Position of the lock in each file.
        pid_at: Position of the process ID, 64 bits.
    """

    def __init__(self, path_of: Callable[[int], Path], at: int, pid_at: int) -> None:
        self._path_of = path_of
        self._at = at
        self._pid_at = pid_at
        self._maps: dict[int, mmap.mmap | None] = {}

    def core_of_end(self, rank: int) -> int | None:
        """Return None while the process of ``rank`` goes on; else the core that frees its memory, -1 once that is done."""
        if rank not in self._maps:
            self._maps[rank] = self._map(rank)
        memory = self._maps[rank]
        if memory is None or not _WORD.unpack_from(memory, self._at)[0] & _OWNER_DIED:
            return None
        return _core_of_end(_PID.unpack_from(memory, self._pid_at)[0])

    def _map(self, rank: int) -> mmap.mmap | None:
        try:
            with self._path_of(rank).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it has none, or an empty one
            return None


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
        try:
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            state, *fields = stat[stat.rindex(")") + 2 :].split()
            if state in "ZX":
                continue
            if not int(fields[_FLAGS]) & _IS_EXITING:
                return None
            core = int(fields[_CORE])
            os.sched_setaffinity(int(thread), {core})
        except OSError:  # it has ended meanwhile
            continue
        return core
    return -1
