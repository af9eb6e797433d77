"""Digests of blocks, and doing something with many blocks at a time.

A tensor's values are digested in blocks, so that several threads can share a large one, each byte is read once, and
damage is known to a few megabytes. Reading, writing and digesting leave Python's lock to the training loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import xxhash

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

BLOCK_BYTES = 16 << 20
"""Values are digested in blocks of this size, the last one shorter."""

_ALONE_BYTES = 4 << 20
"""Less than this is not worth a second thread."""

PART_BYTES = 1 << 20
"""What the second cache of a core may hold: one thing after the other is done with so much of a block."""


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


def parts_of(data: memoryview, part_bytes: int = PART_BYTES) -> Iterator[tuple[int, memoryview]]:
    """Yield data in parts that stay in a processor's cache while two things are done with them, and where each begins."""
    for start in range(0, len(data), part_bytes):
        yield start, data[start : start + part_bytes]


def digest_of(ranges: Iterable[tuple[int, int]], read_into: Callable[[int, memoryview], int]) -> str | None:
    """Return XXH3-64 of ranges of a file behind one another, holding a little of it at a time; None if it ends before they do.

    A range is its first byte, and the byte behind it. ``read_into`` is :meth:`Reader.read_into` of the file.
    """
    whole, memory = xxhash.xxh3_64(), memoryview(bytearray(_ALONE_BYTES))
    for start, end in ranges:
        for first in range(start, end, len(memory)):
            part = memory[: min(end - first, len(memory))]
            if read_into(first, part) != len(part):
                return None
            whole.update(part)
    return whole.hexdigest()


def threads() -> int:
    """Return how many threads share the work of a checkpoint: as many as the cores that this process may use, up to 8."""
    return min(8, len(os.sched_getaffinity(0)))


def run(do: Callable[[_Job], _Result], jobs: Sequence[_Job], size_bytes: int) -> list[_Result]:
    """Return what ``do`` says of each job, in their order; in several threads if it is much, of which the caller's is one.

    Raises:
        Exception: what a job raised; no other is begun then.
    """
    if size_bytes < _ALONE_BYTES or len(jobs) < 2 or threads() < 2:
        return [do(job) for job in jobs]
    results: list[Any] = [None] * len(jobs)
    numbers = iter(range(len(jobs)))

    def work() -> None:
        # A future for each of thousands of small jobs would cost more than the jobs.
        for number in numbers:
            try:
                results[number] = do(jobs[number])
            except BaseException:
                for _ in numbers:  # nobody begins another one
                    pass
                raise

    with ThreadPoolExecutor(threads() - 1, thread_name_prefix="holdfast-checkpoint") as pool:
        others = [pool.submit(work) for _ in range(threads() - 1)]
        work()
    for other in others:
        other.result()
    return results
