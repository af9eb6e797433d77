"""Standard output and error of a command that runs long: it neither waits for their reader nor fails with it.

A terminal may be closed or held (Ctrl-S), an ssh connection lost, a pager or a log collector slow or killed, a disk full.
Workers must be supervised all the same, and saved on request.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

CAPACITY_BYTES = 16 << 20
"""Output that waits for its reader; more is dropped."""
PATIENCE_S = 60.0
"""At its end, the command waits so long for a reader that takes nothing."""
_POLL_S = 0.02
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunOutput:
    """A context in which ``sys.stdout`` and ``sys.stderr`` are queues, which threads of their own write out at once."""

    def __init__(self) -> None:
        self.patience_s = PATIENCE_S
        """At the end of the context, wait so long for a reader that takes nothing."""
        self.error: OSError | None = None
        """The first error with which the system refused to take stdout."""
        self._before = sys.stdout, sys.stderr
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._gave_up = False

    def __enter__(self) -> Self:
        sys.stdout, sys.stderr = self._queued(sys.stdout, self._lose), self._queued(sys.stderr, lambda error: None)
        return self

    def __exit__(self, *_: object) -> None:
        self.drain()
        sys.stdout, sys.stderr = self._before

    def drain(self) -> None:
        """Wait until all output is written, until nothing has taken any for some time, or for a signal."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            ignored = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
            before = {each: signal.signal(each, self._give_up) for each in _SIGNALS if each not in ignored}
        try:
            for queue in self._queues.values():
                while not self._gave_up and queue.is_waiting() and queue.idle_s() < self.patience_s:
                    time.sleep(_POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _give_up(self, *_: object) -> None:
        self._gave_up = True

    def _queued(self, stream: TextIO, refused: Callable[[OSError], None]) -> TextIO:
        """Return the stream with a queue; the streams of one file have one queue, which keeps their order."""
        try:
            stream.flush()
            fd = stream.fileno()
            info = os.fstat(fd)
        except (OSError, AttributeError):  # in a test it is no file
            return stream
        place = info.st_dev, info.st_ino
        if place not in self._queues:
            self._queues[place] = _Queue()  # starts a thread
        file = io.BufferedWriter(_QueuedFile(fd, self._queues[place], refused))
        return io.TextIOWrapper(
            file, encoding=stream.encoding, errors="backslashreplace", line_buffering=True, write_through=True
        )  # a worker may print what the encoding of the terminal has not

    def _lose(self, error: OSError) -> None:
        """Say once that stdout is lost."""
        if self.error is None:
            self.error = error
            print(f"holdfast: cannot write to stdout: {error.strerror}; the job continues", file=sys.stderr)


class _Queue:
    """Output that a thread writes to the files that it is for. What cannot be written is dropped."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[_QueuedFile, bytes]] = deque()
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._dropped = 0
        self._moved_s = 0.0
        threading.Thread(target=self._write_all, name="holdfast-output", daemon=True).start()

    def add(self, file: _QueuedFile, piece: bytes) -> None:
        """Queue ``piece``, or drop it if the queue is full."""
        with self._changed:
            if not self._num_bytes:
                self._moved_s = time.monotonic()
            elif self._num_bytes + len(piece) > CAPACITY_BYTES:
                self._dropped += len(piece)
                return
            if self._dropped:
                note = f"\nholdfast: {self._dropped} bytes of output are left out here, because nothing read them\n"
                piece = note.encode() + piece
                self._dropped = 0
            self._pieces.append((file, piece))
            self._num_bytes += len(piece)
            self._changed.notify()

    def is_waiting(self) -> bool:
        """Return whether something is still to be written."""
        return self._num_bytes > 0

    def idle_s(self) -> float:
        """Return for how long nothing of it was taken."""
        return time.monotonic() - self._moved_s

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces)
                file, piece = self._pieces.popleft()
            self._write(file, memoryview(piece))
            with self._changed:
                self._num_bytes -= len(piece)

    def _write(self, file: _QueuedFile, left: memoryview) -> None:
        while left:
            try:
                written = os.write(file.fileno(), left)
            except BlockingIOError:  # another program made the same terminal non-blocking
                with suppress(OSError, ValueError):
                    select.select([], [file.fileno()], [], 1.0)
                continue
            except OSError as error:
                file.refused(error)
                return
            self._moved_s = time.monotonic()
            left = left[written:]


class _QueuedFile(io.RawIOBase):
    """A file that never refuses what is written: it goes to a queue.

    Args:
        fd: Where the queue writes it.
        queue: Takes what is written.
        refused: Called in the thread of the queue with an error of the system.
    """

    def __init__(self, fd: int, queue: _Queue, refused: Callable[[OSError], None]) -> None:
        super().__init__()
        self._fd = fd
        self._queue = queue
        self.refused = refused

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether this is a terminal."""
        return os.isatty(self._fd)

    def write(self, data: Buffer) -> int:
        """Queue ``data``."""
        piece = bytes(data)
        self._queue.add(self, piece)
        return len(piece)
