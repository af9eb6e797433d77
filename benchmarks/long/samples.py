"""What the processes of a job use, at one moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import pss_bytes

from holdfast.launch.supervise.processes import children_of, name_of
from holdfast.membership import Store, open_store
from long.job import SURVIVOR, LongJob

_SHM = Path("/dev/shm")  # noqa: S108 - only read
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses: resident memory in bytes, file descriptors, threads, memory mappings."""

    rss: int
    files: int
    threads: int
    maps: int


def usage(pid: int) -> Usage | None:
    """Return what a process uses; None if it has ended."""
    proc = Path("/proc", str(pid))
    try:
        return Usage(
            rss=int((proc / "statm").read_text().split()[1]) * _PAGE_BYTES,
            files=len(os.listdir(proc / "fd")),
            threads=len(os.listdir(proc / "task")),
            maps=(proc / "maps").read_bytes().count(b"\n"),
        )
    except (OSError, IndexError):
        return None


class Sampler:
    """Samples a job; its store is read through a client of its own.

    Args:
        job: The job, which trains.
    """

    def __init__(self, job: LongJob) -> None:
        self._job = job
        url, token = job.store()
        self._store: Store | None = open_store(url, token) if url else None

    def close(self) -> None:
        """Close the client of the store."""
        if self._store is not None:
            self._store.close()

    def take(self) -> dict[str, Any]:
        """Return the quantities by name; those of a process as ``KIND QUANTITY``."""
        found: dict[str, Any] = {"step": self._job.step(), "workers": len(self._job.training())}
        for kind, pid in self._processes():
            if (used := usage(pid)) is not None:
                found |= {f"{kind} {name}": getattr(used, name) for name in Usage.__slots__}
        tree = list(self._tree())
        found |= {"all pss": sum(map(pss_bytes, tree)), "processes": len(tree)}
        if self._store is not None:
            found["store keys"] = len(self._store.under(""))
        found["run files"], found["run bytes"] = _size([self._job.run_dir])
        found["shm files"], _ = _size(_SHM.glob(f"holdfast-{self._job.process.pid}-*"))
        return found

    def _processes(self) -> Iterator[tuple[str, int]]:
        """Yield the processes that are sampled, each with its kind."""
        launcher = self._job.process.pid
        yield "launcher", launcher
        for pid in children_of(launcher):
            kind = "fork server" if b"fork_server" in _command(pid) else "mpirun" if name_of(pid) == "prterun" else ""
            if kind or name_of(pid) == "mpirun":
                yield kind or "mpirun", pid
        if (pair := self._job.pair(SURVIVOR)) is not None:
            yield "survivor", pair.worker.pid
            yield "watcher", pair.watcher.pid
        newest = max(self._job.training(), default=SURVIVOR)
        if newest >= self._job.num_first and (pair := self._job.pair(newest)) is not None:
            yield "newcomer", pair.worker.pid

    def _tree(self) -> Iterator[int]:
        """Yield the launcher and all processes below it."""
        waiting = [self._job.process.pid]
        while waiting:
            pid = waiting.pop()
            yield pid
            waiting += children_of(pid)


def _command(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def _size(folders: Iterable[Path]) -> tuple[int, int]:
    """Return the number of files below folders, and their bytes."""
    files = total = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        with contextlib.suppress(OSError):
            about = path.stat()
            files, total = files + 1, total + about.st_size
    return files, total
