"""What the processes of a job use, at one moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from long.job import SURVIVOR, LongJob

from holdfast.errors import StoreLost
from holdfast.launch.processes import children_of
from holdfast.membership import Store, open_store

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses: resident and proportional memory in bytes, file descriptors, threads, memory mappings."""

    rss: int
    pss: int
    files: int
    threads: int
    maps: int


def usage(pid: int) -> Usage | None:
    """Return what a process uses; None if it has ended."""
    proc = Path("/proc", str(pid))
    try:
        rollup = dict(line.split(":", 1) for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
        return Usage(
            rss=int((proc / "statm").read_text().split()[1]) * _PAGE_BYTES,
            pss=int(rollup["Pss"].split()[0]) * 1024,
            files=len(os.listdir(proc / "fd")),
            threads=len(os.listdir(proc / "task")),
            maps=(proc / "maps").read_bytes().count(b"\n"),
        )
    except (OSError, KeyError, IndexError):
        return None


class Sampler:
    """Samples a job; its store is read through a client of its own."""

    def __init__(self, job: LongJob) -> None:
        self._job = job
        url, token = job.store()
        self._store: Store | None = open_store(url, token) if url else None

    def close(self) -> None:
        """Close the client of the store."""
        if self._store is not None:
            self._store.close()

    def take(self) -> dict[str, Any]:
        """Return a sample: quantities by name, of processes as ``KIND QUANTITY``, and the ages of the workers."""
        step, training = self._job.step(), self._job.training()
        found: dict[str, Any] = {"step": step, "workers": len(training)}
        for kind, pid in self._processes():
            if (used := usage(pid)) is not None:
                found |= {f"{kind} {name}": getattr(used, name) for name in Usage.__slots__}
        found["all pss"] = sum(used.pss for pid in self._tree() if (used := usage(pid)) is not None)
        found["processes"] = sum(1 for _ in self._tree())
        found["store keys"] = 0 if self._store is None else len(self._store.under(""))
        found["run files"], found["run bytes"] = _size(self._job.run_dir)
        return found

    def _processes(self) -> Iterator[tuple[str, int]]:
        launcher = self._job.process.pid
        yield "launcher", launcher
        for pid in children_of(launcher):
            if b"fork_server" in _command(pid):
                yield "fork server", pid
        pair = self._job.pair(SURVIVOR)
        if pair is not None:
            yield "survivor", pair.worker.pid
            yield "watcher", pair.watcher.pid
        newest = max(self._job.training(), default=SURVIVOR)
        pair = self._job.pair(newest)
        if newest != SURVIVOR and pair is not None:
            yield "newcomer", pair.worker.pid

    def _tree(self) -> Iterator[int]:
        waiting = [self._job.process.pid]
        while waiting:
            pid = waiting.pop()
            yield pid
            waiting += children_of(pid)


def keys_by_kind(store: Store) -> dict[str, int]:
    """Return how many keys a store has, by their names with numbers left out."""
    counts: dict[str, int] = {}
    for key in store.under(""):
        kind = "/".join("N" if part.isdecimal() else part for part in key.split("/"))
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _command(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def _size(folder: Path) -> tuple[int, int]:
    """Return the number of files below a folder, and their bytes."""
    files = total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            about = path.stat()
            files, total = files + 1, total + about.st_size
    return files, total


__all__ = ["Sampler", "StoreLost", "Usage", "keys_by_kind", "usage"]
