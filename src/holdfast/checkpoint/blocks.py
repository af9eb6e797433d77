"""Digests of blocks, and doing something with many blocks at a time.

A tensor's values are digested in blocks, so that several threads can share a large one, each byte is read once, and
damage is known to a few megabytes. Reading, writing and digesting leave Python's lock to the training loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

BLOCK_BYTES = 16 << 20
"""Values are digested in blocks of this size, the last one shorter."""

_ALONE_BYTES = 4 << 20
"""Less than this is not worth a second thread."""


def num_blocks(size_bytes: int) -> int:
    """Return how many blocks there are; an empty tensor has an empty one."""
    return max(1, -(-size_bytes // BLOCK_BYTES))


def block_ranges(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each block, and the byte behind it."""
    for start in range(0, max(1, size_bytes), BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, size_bytes)


def digest(data: memoryview | bytes | bytearray) -> str:
    """Return XXH3-64 as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def threads() -> int:
    """Return how many threads share the work of a checkpoint: as many as the cores that this process may use, up to 8."""
    return min(8, len(os.sched_getaffinity(0)))


def run(do: Callable[[_Job], _Result], jobs: Sequence[_Job], size_bytes: int) -> list[_Result]:
    """Return what ``do`` says of each job, in their order; in several threads if it is much.

    Raises:
        Exception: the first that a job raised.
    """
    if size_bytes < _ALONE_BYTES or len(jobs) < 2 or threads() < 2:
        return [do(job) for job in jobs]
    with ThreadPoolExecutor(threads(), thread_name_prefix="holdfast-checkpoint") as pool:
        return list(pool.map(do, jobs))
