"""Messages that lie in the sender's memory, where the other workers of its host read them.

::

    table       one line per message, in the order of sending, for all receivers; its first word is written last
    segments    the contents of the messages; they live as long as the worker

Only its owner writes an outbox; other workers map it for reading. Every generation has a new table, so a stopped worker
that wakes up late writes where no worker reads any more. Segments are reused, also in later generations: their readers
have synchronised with the owner since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.comm.allreduce.path import aligned
from holdfast.comm.allreduce.shm import DTYPES
from holdfast.comm.memory import OpenSegments, SharedSegment, open_segment

MAX_DIMS = 8
"""Maximum number of dimensions of a message."""

ELSEWHERE = -1
"""In place of the file descriptor: the message comes over the communicator, because there was no memory for it."""

_LINES, _WORDS = 256, 16
TABLE_BYTES = _LINES * _WORDS * 8
_STAMP, _TO, _FD, _SIZE, _OFFSET, _DTYPE, _DIMS, _SHAPE = range(8)
_GOES_ON = -1
"""In place of the receiver, in the last line of a table: the line holds the file descriptor of the next table."""

_LEAST_BYTES = 1 << 20

_Words = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def _words(table: torch.Tensor) -> _Words:
    return table.view(torch.int64).numpy().reshape(_LINES, _WORDS)


@dataclass(slots=True)
class _Part:
    """A segment, and how many of its bytes hold messages of this attempt."""

    segment: SharedSegment
    used: int = 0


class ShmOutbox:
    """The messages that this worker sends; ``may_share(held, more)`` decides whether it may share ``more`` bytes.

    Methods raise ``OSError`` if there is no memory even for a table.
    """

    def __init__(self, may_share: Callable[[int, int], bool]) -> None:
        self._may_share = may_share
        self._parts: list[_Part] = []
        self._tables: list[SharedSegment] = []
        self._table = self._line = self._attempt = 0

    def renew(self) -> int:
        """Start a new table; return its file descriptor."""
        self._tables = [SharedSegment(TABLE_BYTES)]
        return self._tables[0].fd

    def begin(self, attempt: int) -> None:
        """Start the given ``attempt``, ``>= 1`` and equal on all workers: earlier messages may be overwritten."""
        self._table, self._line, self._attempt = 0, 0, attempt
        for part in self._parts:
            part.used = 0

    def put(self, to: Collection[int], data: torch.Tensor) -> bool:
        """Send one copy of ``data`` to several ranks; without memory, tell them in the table and return False."""
        size = data.numel() * data.element_size()
        part = self._find_room(size)
        if part is None:
            for rank in to:
                self._append(rank, [ELSEWHERE])
            return False
        start = part.used
        part.used += aligned(size)
        memory = part.segment.bytes
        memory[start : start + size].view(data.dtype).view(data.shape).copy_(data)
        shape = list(data.shape)
        for rank in to:
            self._append(rank, [part.segment.fd, memory.numel(), start, DTYPES.index(data.dtype), len(shape), *shape])
        return True

    def _append(self, to: int, words: list[int]) -> None:
        if self._line == _LINES - 1:
            if self._table + 1 == len(self._tables):
                self._tables.append(SharedSegment(TABLE_BYTES))
            self._write(_GOES_ON, [self._tables[self._table + 1].fd])
            self._table, self._line = self._table + 1, 0
        self._write(to, words)
        self._line += 1

    def _write(self, to: int, words: list[int]) -> None:
        line = _words(self._tables[self._table].bytes)[self._line]
        line[_TO : _FD + len(words)] = [to, *words]
        line[_STAMP] = self._attempt  # last: a reader that sees the stamp sees the line and the message

    def _find_room(self, size: int) -> _Part | None:
        """Return the first segment with room; the choice repeats in every step that sends the same messages."""
        for part in self._parts:
            if part.used + size <= part.segment.bytes.numel():
                return part
        held = sum(part.segment.bytes.numel() for part in self._parts)
        wanted = aligned(max(size, held, _LEAST_BYTES))
        if not self._may_share(held, wanted):
            return None
        try:
            self._parts.append(_Part(SharedSegment(wanted)))
        except OSError:
            return None
        return self._parts[-1]


@dataclass(slots=True)
class ShmInbox:
    """Messages from process ``pid`` of this host to worker ``me`` in one generation; ``table`` is the sender's fd.

    Methods raise ``OSError`` if the sender's memory cannot be opened: it has died.
    """

    me: int
    pid: int
    table: int
    opened: OpenSegments
    _attempt: int = 0
    _line: int = 0
    _now: _Words = field(init=False)
    _tables: dict[int, _Words] = field(init=False, default_factory=dict)
    _segments: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._open_table(self.table)

    def begin(self, attempt: int) -> None:
        """From now on, read the messages of this ``attempt``."""
        self._attempt, self._line = attempt, 0
        self._now = self._tables[self.table]

    def has_next(self) -> bool:
        """Return whether the next message to this worker has arrived."""
        while self._now[self._line, _STAMP] == self._attempt:
            to = self._now[self._line, _TO]
            if to == self.me:
                return True
            if to == _GOES_ON:
                self._open_table(int(self._now[self._line, _FD]))
                self._line = 0
            else:
                self._line += 1
        return False

    def take(self) -> torch.Tensor | None:
        """Return the next message, which has arrived, read-only; None if it comes over the communicator."""
        line = [int(word) for word in self._now[self._line]]
        self._line += 1
        if line[_FD] == ELSEWHERE:
            return None
        memory = self._segments.get(line[_FD])
        if memory is None:
            memory = open_segment(self.pid, line[_FD], line[_SIZE], opened=self.opened)
            self._segments[line[_FD]] = memory
        dtype, shape = DTYPES[line[_DTYPE]], line[_SHAPE : _SHAPE + line[_DIMS]]
        start = line[_OFFSET]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return memory[start : start + size].view(dtype).view(shape)

    def _open_table(self, fd: int) -> None:
        if fd not in self._tables:
            self._tables[fd] = _words(open_segment(self.pid, fd, TABLE_BYTES))
        self._now = self._tables[fd]
