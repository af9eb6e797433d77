"""Hosts the membership store of forked ranks, and reports which have ended, as a launcher does.

``python membership_store.py TOKEN`` prints the address of the store. Each line of its input names a process: the job,
the rank and the pid. It ends with its input.
"""

import contextlib
import os
import select
import sys
import threading

from holdfast.membership import Hub, open_store


def report_end(url: str, token: str, rank: str, pid: int) -> None:
    """Wait for the end of a process, and tell the other ranks of its job."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(pid)], [], [])
    store = open_store(url, token)
    store.put(f"dead/{rank}", "its process has ended")
    store.close()


def main() -> None:
    """Host the store until the input ends."""
    token = sys.argv[1]
    with Hub(token, "127.0.0.1") as hub:
        print(hub.address, flush=True)
        for line in sys.stdin:
            job, rank, pid = line.split()
            url = f"holdfast://{hub.address}/{job}"
            threading.Thread(target=report_end, args=(url, token, rank, int(pid)), daemon=True).start()


if __name__ == "__main__":
    main()
