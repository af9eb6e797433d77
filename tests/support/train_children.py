"""Training in which every worker has children: those of a data loader, an executed one, and one forked by a thread.

``train_children.py FOLDER [--deed DEED]... [--await-end-of RANK]``; the process IDs of rank R's children are written to
``FOLDER/children-R``, and ``FOLDER/ended`` appears once the children of RANK have ended while training continues.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from train_saving import Deeds, Training


def fork_and_sleep():
    """A child that does not detect its parent's end, and keeps all of its parent's file descriptors open."""
    pid = os.fork()
    if pid == 0:
        time.sleep(300)
        os._exit(0)
    return pid


def fork_in_a_thread():
    """A child whose thread has ended long before the worker does."""
    found = []
    thread = threading.Thread(target=lambda: found.append(fork_and_sleep()))
    thread.start()
    thread.join()
    return found[0]


class Children:
    """Starts them in the first step, when the connections to the other workers are open."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []
        self.loader = None

    def start(self, rank):
        data = TensorDataset(torch.arange(1000))
        self.loader = iter(DataLoader(data, batch_size=1, num_workers=2, persistent_workers=True))
        self.started = [
            *(process.pid for process in self.loader._workers),
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid,
            fork_in_a_thread(),
            fork_and_sleep(),
        ]
        draft = self.folder / f"draft-{rank}"
        draft.write_text(" ".join(map(str, self.started)))
        draft.replace(self.folder / f"children-{rank}")

    def check(self):
        """All children are alive, and the loader's deliver."""
        next(self.loader)
        for pid in self.started:
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                raise RuntimeError(f"child {pid} has ended")


def await_end(folder, rank):
    """Wait until the children of another worker have ended."""
    left, ends_s = set((folder / f"children-{rank}").read_text().split()), time.monotonic() + 60
    while left := {number for number in left if Path("/proc", number).exists()}:
        if time.monotonic() > ends_s:
            raise TimeoutError(f"children of rank {rank} outlive it: {left}")
        time.sleep(0.005)
    (folder / "ended").touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--deed", action="append", default=[])
    parser.add_argument("--await-end-of", type=int, default=-1)
    options = parser.parse_args()
    training = Training()
    deeds, children = Deeds(training, options.deed), Children(options.folder)

    def each(step):
        if not children.started:
            children.start(training.session.rank)
        time.sleep(0.02)
        children.check()
        deeds.in_step(step)
        if step.number == 9 and options.await_end_of >= 0 and training.session.is_lead:
            await_end(options.folder, options.await_end_of)

    training.run(each)
