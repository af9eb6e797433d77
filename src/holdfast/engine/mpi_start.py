"""A process beside ``MPI_Init``, which keeps Python's lock: says for which processes of mpirun its parent waits.

Run as a file, with the seconds until the parent gives up, and since when they count (``time.monotonic``); it imports nothing of Holdfast, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

_FIRST_LINE_S, _LINE_EVERY_S = 10.0, 30.0
_LOOK_S = 0.5


def main(limit_s: float, began_s: float) -> None:
    """Say it after 10 s, 30 s and then every 30 s, and at the end, in the lowest rank of this machine that runs."""
    parent, due_s = os.getppid(), _FIRST_LINE_S
    while os.getppid() == parent and (waited_s := time.monotonic() - began_s) < limit_s:
        if waited_s >= due_s:
            due_s = _LINE_EVERY_S * (waited_s // _LINE_EVERY_S + 1)
            _say(f"for {waited_s:.0f} s", "waits for", f"after {limit_s:g} s (HOLDFAST_START_TIMEOUT_S) the job ends")
        time.sleep(max(0.0, min(_LOOK_S, began_s + limit_s - time.monotonic())))
    if os.getppid() == parent:
        _say(f"after {limit_s:g} s", "ends; it waited for", "HOLDFAST_START_TIMEOUT_S sets another limit")


def _say(when: str, does: str, then: str) -> None:
    env = os.environ
    running = _running(env.get("PMIX_NAMESPACE", ""))
    rank, size = int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"])
    if rank != min(running, default=rank):
        return
    knows_all = running and env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
    missing = sorted(set(range(size)) - running) if knows_all else []
    awaited = (
        "processes that have not called MPI_Init" if not missing else ", ".join(f"rank {rank}" for rank in missing)
    )
    dead = ", which no longer run" if len(missing) > 1 else ", which no longer runs" if missing else ""
    sys.stderr.write(f"holdfast: {when} rank {rank} {does} {awaited} of {size} processes of mpirun{dead}; {then}\n")
    sys.stderr.flush()


def _running(job: str) -> set[int]:
    """Return the ranks of an MPI job whose processes run on this machine."""
    ranks = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is another user's
            with open(f"/proc/{name}/environ", "rb") as file:
                env = dict(pair.partition(b"=")[::2] for pair in file.read().split(b"\0"))
            with open(f"/proc/{name}/cmdline", "rb") as file:
                is_beside = __file__.encode() in file.read()
            if job and env.get(b"PMIX_NAMESPACE") == job.encode() and not is_beside:
                ranks.add(int(env[b"OMPI_COMM_WORLD_RANK"]))
    return ranks


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
