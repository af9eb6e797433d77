"""Workers of the gloo fabric without a launcher: ``gloo.py ADDRESS COMMANDS`` hosts their store, and reports failures.

COMMANDS is a JSON list: the words of each worker's command, by rank.
"""

import gc
import importlib
import json
import os
import secrets
import sys
from pathlib import Path

import inside

from holdfast.membership import Hub, open_store

_WORKER = "holdfast.launch.supervise.worker"


def command(script, *words):
    """The command of one worker, with a watcher that records how it ends."""
    return [sys.executable, "-m", _WORKER, str(script), *map(str, words)]


def launcher(commands, address="127.0.0.1"):
    """The command that starts all of them, and ends when they have ended."""
    return [sys.executable, str(Path(__file__)), address, json.dumps(commands)]


def import_torch():
    """Import what workers need, once; they are forked, as by the fork server of a launcher."""
    from holdfast.launch.supervise.fork_server import _PRELOADED

    gc.disable()
    for name in (*_PRELOADED, _WORKER):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"


def fork_worker(words, others):
    """Fork a worker, which begins once its variables are written to the pipe that is returned with its PID.

    Args:
        words: Its command.
        others: The same of the workers before it.
    """
    host, words = inside.split(words)
    assert words[:3] == command("")[:3], words
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reads)
        return pid, writes
    for pipe in (writes, *(pipe for _, pipe in others)):
        os.close(pipe)
    with open(reads) as pipe:
        if not (variables := pipe.read()):
            os._exit(1)
    if host:
        inside.enter(host)
    os.environ.update(json.loads(variables))
    sys.argv = [_WORKER, *words[3:]]
    sys.modules["numpy.random"].seed()
    sys.modules["holdfast.distributed"].adapt_to_job()
    sys.modules[_WORKER].main()
    raise AssertionError


def main(address, commands):
    import_torch()
    forked = []
    for words in commands:  # before the hub has threads
        forked.append(fork_worker(words, forked))
    token, ranks = secrets.token_hex(16), {pid: rank for rank, (pid, _) in enumerate(forked)}
    with Hub(token, address) as hub:
        url = f"holdfast://{hub.address}/test"
        store = open_store(url, token)
        all_ranks = ",".join(map(str, range(len(commands))))
        common = {"FABRIC": "gloo", "WORKERS": str(len(commands)), "RANKS": all_ranks, "STORE": url, "TOKEN": token}
        for rank, (_, writes) in enumerate(forked):
            ours = {f"HOLDFAST_{name}": value for name, value in (common | {"RANK": str(rank)}).items()}
            with open(writes, "w") as pipe:
                pipe.write(json.dumps(ours))
        while ranks:
            pid, status = os.wait()
            rank = ranks.pop(pid)
            if code := os.waitstatus_to_exitcode(status):
                store.put(f"dead/{rank}", f"it ended with {code}")
        store.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
