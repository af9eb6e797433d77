"""A command in a terminal of its own: what it writes there, keys that are pressed, the state that it leaves."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

from jobs import clean_env

_MOVES = re.compile(rb"\x1b\[[0-9;]*[ABHJK]|\x1b\[\?1049[hl]")
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>78]|\x1b\][^\x07]*\x07")


class Terminal:
    """A terminal of ``columns`` by ``lines``, in which ``holdfast`` runs with these words."""

    def __init__(self, *words, columns=100, lines=24, cwd=None, env=None):
        self.master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.attributes = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *map(str, words)],
            stdin=self._slave, stdout=self._slave, stderr=self._slave, cwd=cwd, start_new_session=True,
            # pytest-xdist sets COLUMNS, which would count instead of the terminal's own size
            env={k: v for k, v in clean_env(TERM="xterm-256color").items() if k not in ("COLUMNS", "LINES")} | (env or {}),
        )  # fmt: skip
        self.written = b""

    @property
    def text(self):
        """Everything that was written so far, without escape sequences."""
        return _ESCAPES.sub(b"", self.written).decode(errors="replace")

    def widest(self):
        """The length of the longest line that was drawn on purpose as one line."""
        drawn = _ESCAPES.sub(b"", _MOVES.sub(b"\n", self.written)).decode(errors="replace")
        return max((len(line.rstrip()) for line in re.split(r"[\r\n]+", drawn)), default=0)

    def read(self, seconds):
        """Take what is written within this time; return False at the end of the command."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left_s)[0]:
                continue
            self.written += os.read(self.master, 65536)
            return True
        return self.process.poll() is None

    def wait_for(self, text, seconds=90):
        """Wait until a text was written; return whether it was."""
        ends_s = time.monotonic() + seconds
        while text not in self.text and time.monotonic() < ends_s and self.read(0.1):
            pass
        return text in self.text

    def press(self, keys):
        """Press keys."""
        os.write(self.master, keys)

    def end(self, seconds=90):
        """Wait for the end of the command; return its exit code."""
        ends_s = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < ends_s:
            self.read(0.1)
        while select.select([self.master], [], [], 0)[0]:
            self.written += os.read(self.master, 65536)
        return self.process.wait(max(0.1, ends_s - time.monotonic()))

    def is_as_before(self):
        """Return whether the terminal's modes are what they were, its cursor is shown, and its first screen is back."""
        shown = self.written.rfind(b"\x1b[?25h") >= self.written.rfind(b"\x1b[?25l")
        first = self.written.rfind(b"\x1b[?1049l") >= self.written.rfind(b"\x1b[?1049h")
        return termios.tcgetattr(self._slave) == self.attributes and shown and first

    def close(self):
        """End the command, if it runs, and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self._slave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
