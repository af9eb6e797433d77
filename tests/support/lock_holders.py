"""Processes that hold a life lock as workers do, without torch."""

import subprocess
import sys
import time

from holdfast.records.paths import beacon_path

WORKER = """
import os, sys, time
from pathlib import Path
from holdfast.records.beacon import show_life
show_life(Path(sys.argv[1]), 0.0)
{then}
print("ready", flush=True)
sys.stdin.readline()
{last}
"""
DEADLINE_S = 20.0


class LockHolder:
    """A process that holds its life lock."""

    def __init__(self, folder, rank, then="", last="time.sleep(60)"):
        script = WORKER.format(then=then, last=last)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(beacon_path(folder, rank))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def wait_for(is_so):
    ends_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.001)
