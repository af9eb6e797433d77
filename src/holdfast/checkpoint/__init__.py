"""Checkpoints: a directory a step, with the tensors in one file and a manifest that is written last.

::

    pending = write_tensors(root, step=20, state={"model": model.state_dict()}, info={})
    pending.commit(generation=0)            # now it counts

    step = newest_intact(root)              # every byte was read and checked
    model.load_state_dict(load(root, step).state["model"])

A process may be killed at any moment: what was complete stays complete, what was not is never loaded.
Nothing is ever unpickled. The bytes are specified in ``docs/checkpoint-format.md``.

Read ``save.py`` for what happens in which order, ``load.py`` for what is checked, ``format.py`` for what
may be saved, ``manifest.py`` for what is written down, ``tensors.py`` for the file of the tensors and
``storage.py`` for names and fsync. ``engine.py`` is the seam that a session talks to.
"""

from __future__ import annotations

from holdfast.checkpoint.engine import Checkpoints, LocalCheckpoints, Pending
from holdfast.checkpoint.format import flatten, unflatten
from holdfast.checkpoint.load import Loaded, load, newest_intact, read_manifest, steps, verify
from holdfast.checkpoint.manifest import Manifest, TensorEntry
from holdfast.checkpoint.save import PendingCheckpoint, SavedCheckpoint, write_tensors

__all__ = [
    "Checkpoints",
    "Loaded",
    "LocalCheckpoints",
    "Manifest",
    "Pending",
    "PendingCheckpoint",
    "SavedCheckpoint",
    "TensorEntry",
    "flatten",
    "load",
    "newest_intact",
    "read_manifest",
    "steps",
    "unflatten",
    "verify",
    "write_tensors",
]
