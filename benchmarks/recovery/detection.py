"""How soon the death of a process can be seen: in its life lock, and by its watcher.

    python benchmarks/recovery/detection.py [--kills 20] [--json FILE]

Processes are forked from one that has imported torch, as workers are by their fork server, and compute a little. Each
receives SIGKILL. Milliseconds from there until this process, which polls both without a pause, reads

``life lock``   that the kernel has marked the lock, before it frees the memory of the process
``watcher``     that the PID file descriptor is readable, for which watchers wait; the kernel has freed the memory then

and the processor time of the kernel that the process took from the SIGKILL on, nearly all of it for freeing its memory.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import cells, command_line, spread, table, write_json

from holdfast.records.life_lock import hold_life_lock

OWNER_DIED = 0x40000000
PARTS = ("life lock", "watcher", "processor time")


def main() -> None:
    """Kill, measure, print."""
    options = command_line(__doc__, kills=20).parse_args()
    rows = [kill_once() for _ in range(options.kills)]
    spreads = {part: spread([row[part] for row in rows]) for part in PARTS}
    lines = [[part, *cells([row[part] for row in rows], keys=("p10", "p50", "p90"))] for part in PARTS]
    print(table(f"From the SIGKILL, ms: {options.kills} kills", ["", "p10", "p50", "p90"], lines))
    write_json(options.json, settings=vars(options), rows=rows, summary=spreads)


def kill_once() -> dict[str, float]:
    """Return the times of one kill in milliseconds."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    ready, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        live(memory, tells)
    before_s = float(struct.unpack("d", os.read(ready, 8))[0])
    os.close(ready)
    os.close(tells)
    ended = select.poll()
    handle = os.pidfd_open(pid)
    ended.register(handle, select.POLLIN)
    start_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    noted_s = watched_s = 0.0
    while not (noted_s and watched_s):
        now_s = time.monotonic()
        if not noted_s and struct.unpack_from("<I", memory)[0] & OWNER_DIED:
            noted_s = now_s
        if not watched_s and ended.poll(0):
            watched_s = now_s
    os.close(handle)
    _, _, used = os.wait4(pid, 0)
    moments = (noted_s - start_s, watched_s - start_s, used.ru_stime - before_s)
    return dict(zip(PARTS, (1e3 * moment for moment in moments), strict=True))


def live(memory: mmap.mmap, tells: int) -> Any:
    """Hold a lock, compute a little, tell how much time of the kernel that took, and wait for the end."""
    hold_life_lock(memory, 0)
    model = torch.nn.Linear(1000, 1000)
    model(torch.randn(64, 1000)).sum().backward()
    os.write(tells, struct.pack("d", resource.getrusage(resource.RUSAGE_SELF).ru_stime))
    while True:
        time.sleep(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
