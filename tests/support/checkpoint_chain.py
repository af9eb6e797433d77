"""Incremental checkpoints of a state with an embedding of which few rows change, a frozen part and a dense part."""

import os

import torch

from holdfast.checkpoint import CheckpointStore, load, steps, take
from holdfast.checkpoint import reuse as reuses
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.writer import CheckpointWriter
from holdfast.errors import CheckpointCorrupt

ROWS = 64


def small_blocks(monkeypatch):
    """Compare blocks of 4 rows, so that a state of kilobytes has many."""
    monkeypatch.setattr(reuses, "GRAIN_BYTES", 4 * 8 * 4)
    monkeypatch.setattr(reuses, "_LEAST_BYTES", 256)


def first_state():
    values = torch.arange(ROWS * 8.0)
    return {
        "embedding": values.reshape(ROWS, 8).clone(),
        "frozen": -values.reshape(32, 16),
        "dense": values[:200].clone(),
    }


def train(state, rows):
    """Change the whole dense part, and some rows of the embedding."""
    state["dense"] += 1
    for row in rows:
        state["embedding"][row] += 0.5


def copy_of(state):
    return {name: tensor.clone() for name, tensor in state.items()}


class Killed(BaseException):
    """Stands for SIGKILL: nothing that the process does afterwards reaches the disk."""


class MortalStorage(LocalStorage):
    """Dies before its n-th operation that changes something; afterwards nothing has any effect."""

    dies_after = -1
    """Operations that are left; -1: it lives."""

    def _pass(self):
        if self.dies_after == 0:
            raise Killed
        self.dies_after -= self.dies_after > 0

    def prepare(self, folder):
        self._pass()
        return super().prepare(folder)

    def store(self, folder, names):
        self._pass()
        super().store(folder, names)

    def link(self, path, name):
        self._pass()
        return super().link(path, name)

    def put(self, path, data):
        self._pass()
        super().put(path, data)

    def remove(self, path):
        self._pass()
        super().remove(path)


class Chain:
    """Checkpoints of one run in a folder; a writer that dies is followed by another one, as after ``--resume``."""

    def __init__(self, root, storage=MortalStorage):
        self.root, self._storage = root, storage
        self.state, self.step, self.saved = first_state(), 0, {}
        self.resume()

    def resume(self):
        self.store = CheckpointStore(self.root)
        self.store.storage = self._storage(self.root)
        self.writer = CheckpointWriter(self.store, background=False, incremental=True)

    def save(self, rows=(), dies_after=-1, commits=True):
        """Train a step and save; return the outcome, None if the writer died or the checkpoint was abandoned."""
        train(self.state, rows)
        self.step += 1
        self.saved[self.step] = copy_of(self.state)
        self.store.storage.dies_after = dies_after
        try:
            self.writer.begin(self.step, take(self.state), {})
            if not commits:
                self.writer.abandon()
                self.writer.poll()
                return None
            self.writer.commit(0)
        except Killed:
            self.resume()
            return None
        self.store.storage.dies_after = -1
        (outcome,) = self.writer.poll()
        assert outcome.error is None, outcome.error
        return outcome.saved

    def check(self):
        """Every listed checkpoint loads with the right bits, or says that it is damaged; return the damaged steps."""
        damaged = []
        for step in steps(self.root):
            try:
                loaded = load(self.root, step).state
            except CheckpointCorrupt:
                damaged.append(step)
                continue
            assert all(torch.equal(loaded[name], tensor) for name, tensor in self.saved[step].items()), step
        return damaged


def files_of(root, step):
    """The files of a checkpoint that count, by inode."""
    folder = root / f"step-{step:08d}"
    return {path.stat().st_ino: path for path in folder.glob("data-*/*") if os.path.isfile(path)}
