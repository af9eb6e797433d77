"""Workers of the gloo fabric without a launcher: ``gloo.py ADDRESS COMMANDS`` hosts their store, and reports failures.

COMMANDS is a JSON list: the words of each worker's command, by rank.
"""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

from holdfast.membership import Hub, open_store


def command(script, *words):
    """The command of one worker, with a watcher that records how it ends."""
    return [sys.executable, "-m", "holdfast.launch.supervise.worker", str(script), *map(str, words)]


def launcher(commands, address="127.0.0.1"):
    """The command that starts all of them, and ends when they have ended."""
    return [sys.executable, str(Path(__file__)), address, json.dumps(commands)]


def main(address, commands):
    token, started, ranks = secrets.token_hex(16), [], {}
    with Hub(token, address) as hub:
        url = f"holdfast://{hub.address}/test"
        store = open_store(url, token)
        all_ranks = ",".join(map(str, range(len(commands))))
        common = {"FABRIC": "gloo", "WORKERS": str(len(commands)), "RANKS": all_ranks, "STORE": url, "TOKEN": token}
        for rank, words in enumerate(commands):
            ours = {f"HOLDFAST_{name}": value for name, value in (common | {"RANK": str(rank)}).items()}
            started.append(subprocess.Popen(words, env=os.environ | ours))
            ranks[started[-1].pid] = rank
        while ranks:
            pid, status = os.wait()
            rank = ranks.pop(pid)
            if code := os.waitstatus_to_exitcode(status):
                store.put(f"dead/{rank}", f"it ended with {code}")
        store.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
