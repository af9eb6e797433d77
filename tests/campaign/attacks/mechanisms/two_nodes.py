"""Starts a command of ``holdfast run`` on two nodes; the process of the first is that of this program.

    python two_nodes.py OPTIONS COMMAND...

OPTIONS is JSON: ``{"prefixes": [[...], [...]], "options": [...]}``, what comes before the command on each node, and what
options of ``holdfast run`` are the same on both. The second node's launcher goes on without a parent, as on a machine of
its own, and writes its report beside that of the first.
"""

from __future__ import annotations

import json
import os
import sys


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
            os.execvp(second[0], second)  # noqa: S606
        os._exit(0)
    os.wait()
    os.execvp(first[0], first)  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
