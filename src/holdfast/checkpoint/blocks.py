"""Digests of blocks, and processing many blocks in parallel.

A tensor's values are digested in blocks, so that several threads can share a large tensor, each byte is read once, and
damage is located to a few megabytes. Reading, writing and digesting release the GIL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import xxhash

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

BLOCK_BYTES = 16 << 20
"""Size of the blocks in which values are digested; the last one may be shorter."""

_ALONE_BYTES = 4 << 20
"""Less than this is not worth a second thread."""

PART_BYTES = 1 << 20
"""A chunk that fits into a core's L2 cache: a block is processed chunk by chunk."""


def num_blocks(size_bytes: int) -> int:
    """Return the number of blocks; an empty tensor has one empty block."""
    return max(1, -(-size_bytes // BLOCK_BYTES))


def block_ranges(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and end byte of each block."""
    for start in range(0, max(1, size_bytes), BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, size_bytes)


def digest(data: memoryview | bytes | bytearray) -> str:
    """Return XXH3-64 as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def parts_of(data: memoryview, part_bytes: int = PART_BYTES) -> Iterator[tuple[int, memoryview]]:
    """Yield cache-sized chunks of data, each with its offset."""
    for start in range(0, len(data), part_bytes):
        yield start, data[start : start + part_bytes]


def digest_of(ranges: Iterable[tuple[int, int]], read_into: Callable[[int, memoryview], int]) -> str | None:
    """Return XXH3-64 of consecutive ranges of a file, holding little of it in memory; None if the file is too short.

    A range is its start and end byte. ``read_into`` is :meth:`StorageReader.read_into` of the file.
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
    """Return the number of threads for checkpoint work: one per available core, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


def run(do: Callable[[_Job], _Result], jobs: Sequence[_Job], size_bytes: int) -> list[_Result]:
    """Return ``do(job)`` for each job, in order; large work is shared by several threads, including the caller's.

    Raises:
        Exception: the first exception that a job raised; the remaining jobs are not started.
    """
    if size_bytes < _ALONE_BYTES or len(jobs) < 2 or threads() < 2:
        return [do(job) for job in jobs]
    results: list[Any] = [None] * len(jobs)
    numbers = iter(range(len(jobs)))

    def work() -> None:
        # One future per job would cost more than thousands of small jobs.
        for number in numbers:
            try:
                results[number] = do(jobs[number])
            except BaseException:
                for _ in numbers:  # drain, so that no other thread starts a job
                    pass
                raise

    with ThreadPoolExecutor(threads() - 1, thread_name_prefix="holdfast-checkpoint") as pool:
        futures: list[Future[None]] = []
        with contextlib.suppress(RuntimeError):  # at the end of the process there are no more threads: do it all here
            futures.extend(pool.submit(work) for _ in range(threads() - 1))  # those before an error count
        work()
    for future in futures:
        future.result()
    return results
