"""Shared memory between the processes of one host, without a name that could be left behind.

A segment is an anonymous file (``memfd_create``) with all pages reserved (``posix_fallocate``). A killed job leaves
nothing behind, and too little memory is an error at creation instead of a SIGBUS later. Other processes open a segment
through ``/proc/PID/fd/N``, at any time, for reading or for writing.
"""

from __future__ import annotations

import functools
import mmap
import os
import socket
import warnings
from pathlib import Path

import torch
import xxhash

_KEEP_FREE = 0.1
"""Fraction of the free memory that must stay free."""


class SharedSegment:
    """A shared memory segment created by this process, of ``size_bytes >= 1``; ``OSError`` if memory is too short."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = os.memfd_create("holdfast", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)
            self.bytes = _map(self.fd, size_bytes, writable=True)
        except OSError:
            os.close(self.fd)
            raise

    def __del__(self) -> None:
        """Close the file; the memory lasts as long as any process maps it."""
        fd = self.__dict__.pop("fd", -1) if "bytes" in self.__dict__ else -1
        if fd >= 0:
            os.close(fd)


class OpenSegments:
    """The segments that this process has opened for reading; none is mapped twice.

    A mapping keeps its segment alive, and the system reuses no live inode number: equal numbers are the same memory.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], torch.Tensor] = {}
        self._asked: dict[tuple[int, int], torch.Tensor] = {}

    def get(self, fd: int, size_bytes: int) -> torch.Tensor:
        """Return the memory of an open file, and map it first if necessary."""
        status = os.fstat(fd)
        number = (status.st_dev, status.st_ino)
        segment = self._known.get(number)
        if segment is None or segment.numel() != size_bytes:
            segment = _map(fd, size_bytes, writable=False)
        self._known[number] = self._asked[number] = segment
        return segment

    def forget_others(self) -> None:
        """Forget every segment that was not requested since the last call."""
        self._known, self._asked = self._asked, {}


def open_segment(
    pid: int, fd: int, size_bytes: int, *, writable: bool = False, opened: OpenSegments | None = None
) -> torch.Tensor:
    """Return the bytes of a segment that process ``pid`` of this host created.

    Args:
        pid: The owning process.
        fd: The file descriptor in that process.
        size_bytes: Size of the segment.
        writable: A write to a read-only tensor kills this process (SIGSEGV) and harms no other.
        opened: Cache of segments mapped for reading.

    Raises:
        OSError: if it cannot be opened, for instance because that process has died, or belongs to another user.
    """
    own_fd = os.open(f"/proc/{pid}/fd/{fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if os.fstat(own_fd).st_size != size_bytes:
            raise OSError(f"the shared memory segment of process {pid} does not have the expected {size_bytes} bytes")
        return _map(own_fd, size_bytes, writable=writable) if opened is None else opened.get(own_fd, size_bytes)
    finally:
        os.close(own_fd)


def _map(fd: int, size_bytes: int, *, writable: bool) -> torch.Tensor:
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, access)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)  # holds the mapping for its own lifetime


@functools.cache
def host_id() -> int:
    """Return a number equal on processes that can open each other's segments: hostname, boot and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return xxhash.xxh3_64_intdigest(f"{socket.gethostname()} {boot} {namespace}".encode()) >> 1


def free_bytes() -> int:
    """Return how much memory may be shared: most of what this host, and this process's cgroup, have left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return int((1 - _KEEP_FREE) * min(free_kib << 10, _cgroup_free()))


def _cgroup_free() -> int:
    group = next((g for g in Path("/proc/self/cgroup").read_text().splitlines() if g.startswith("0::")), "0::/")
    folder = Path("/sys/fs/cgroup", group[3:].lstrip("/"))
    try:
        limit, used = (Path(folder, name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no cgroup v2, or its root, which has no limit
        return 1 << 62
    return 1 << 62 if limit == "max" else int(limit) - int(used)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor without copying."""
    # PyTorch calls a one-element tensor contiguous whatever its stride, and then view(uint8) would fail.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
