"""What must be undone though this process may be killed at any moment: mounts, namespaces, control groups."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

WAITS = 'trap "" HUP INT TERM; read -r _; '
"""The shell waits until its standard input is closed, which the kernel does at the death of the process that holds it."""
LIMIT_S = 40


@contextlib.contextmanager
def afterwards(script: str, *arguments: object) -> Iterator[None]:
    """Run a shell script, with its arguments, after the block, or when this process has died."""
    words = ["sh", "-c", WAITS + script, "sh", *map(str, arguments)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as shell:
        try:
            yield
        finally:
            assert shell.stdin is not None
            shell.stdin.close()
            shell.wait(LIMIT_S)
