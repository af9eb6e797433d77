"""Starts a command of ``holdfast run`` on two nodes; the process of the first is that of this program.

    python two_nodes.py OPTIONS COMMAND...

OPTIONS is JSON: ``{"prefixes": [[...], [...]], "options": [...], "folder": PATH}``, what comes before the command on each
node, what options of ``holdfast run`` are the same on both, and where to write the second launcher's PID and exit code.
The second node's launcher does not end with the first, as on a machine of its own, and writes its report beside that of
the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

SECOND = "second-launcher"
"""File of the second launcher's PID and, after its end, its exit code."""


@dataclass(frozen=True)
class Second:
    """The second node's launcher; ``code`` is its exit code, None if it had to be killed."""

    pid: int
    code: int | None


def read_second(folder: Path) -> Second | None:
    """Return the second node's launcher, None if there is none."""
    try:
        text = (folder / SECOND).read_text()
    except OSError:
        return None
    if not text.endswith("\n"):  # the plan permits only files that are smaller
        return None
    pid, code = (*map(int, text.split()), None)[:2]
    assert pid is not None
    return Second(pid, code)


def words_of_node(node: int, prefix: list[str], options: list[str], command: list[str]) -> list[str]:
    """The command of one node."""
    at = command.index("run") + 1
    words = [*command[:at], "--nnodes", "2", "--node-rank", str(node), *options, *command[at:]]
    if node and "--report" in words:
        words[words.index("--report") + 1] += f"-of-node-{node}"
    return [*prefix, *words]


def main(told: str, *command: str) -> None:
    found = json.loads(told)
    first, second = (
        words_of_node(node, prefix, found["options"], list(command)) for node, prefix in enumerate(found["prefixes"])
    )
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            keep(second, Path(found["folder"]) / SECOND)
        os._exit(0)
    os.wait()
    os.execvp(first[0], first)  # noqa: S606


def keep(words: list[str], path: Path) -> None:
    """Run a command; write down its PID at once, and its exit code after its end."""
    pid = os.fork()
    if pid == 0:
        os.execvp(words[0], words)  # noqa: S606
    with contextlib.suppress(OSError):  # the plan may permit no files
        path.write_text(f"{pid}\n")
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        path.write_text(f"{pid} {os.waitstatus_to_exitcode(status)}\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:  # the plan may permit no more processes
        sys.exit(f"error: the nodes cannot be started: {error}")
