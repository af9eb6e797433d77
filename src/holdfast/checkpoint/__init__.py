"""Checkpoints: a directory a step, with the tensors in files and a manifest that is written last.

::

    checkpoints = Checkpoints("runs/a")                                   # or s3://bucket/runs/a
    pending = checkpoints.write_tensors(20, {"model": model.state_dict()}, info={})
    pending.commit(generation=0)                                          # now it counts

    loaded = checkpoints.load_newest()                                    # every byte was read and checked
    model.load_state_dict(loaded.state["model"])

A process may be killed at any moment: what was complete stays complete, what was not is never loaded.
Nothing is ever unpickled. The bytes are specified in ``docs/checkpoint-format.md``.

Read ``save.py`` for what happens in which order, ``load.py`` for what is checked, ``format.py`` for what may be saved,
``manifest.py`` for what is written down, ``parts.py`` for what several writers hold apart, ``formats/`` for the files of the tensors, ``storage/`` for where they are,
``writer.py`` for writing beside the training loop, ``retain.py`` and ``interval.py`` for which are kept and how often
one is taken. ``engine.py`` is the seam that a session talks to. The ``ckpt`` command stands on ``inventory.py`` (what is
there), ``source.py`` (tensors one by one), ``compare.py``, ``convert.py`` and ``foreign/`` (files of other programs).
"""

from __future__ import annotations

from holdfast.checkpoint.format import Shard, flatten, unflatten
from holdfast.checkpoint.formats import FORMATS
from holdfast.checkpoint.load import (
    Damage,
    Loaded,
    find_damage,
    load,
    load_box,
    load_newest,
    newest_intact,
    read_manifest,
    steps,
    verify,
)
from holdfast.checkpoint.manager import Checkpoints
from holdfast.checkpoint.manifest import Manifest, Piece, TensorEntry
from holdfast.checkpoint.parts import all_but
from holdfast.checkpoint.save import PendingCheckpoint, SavedCheckpoint, write, write_tensors
from holdfast.checkpoint.storage import Storage, open_storage
from holdfast.checkpoint.write_plan import Content, take

__all__ = [
    "FORMATS",
    "Checkpoints",
    "Content",
    "Damage",
    "Loaded",
    "Manifest",
    "PendingCheckpoint",
    "Piece",
    "SavedCheckpoint",
    "Shard",
    "Storage",
    "TensorEntry",
    "all_but",
    "find_damage",
    "flatten",
    "load",
    "load_box",
    "load_newest",
    "newest_intact",
    "open_storage",
    "read_manifest",
    "steps",
    "take",
    "unflatten",
    "verify",
    "write",
    "write_tensors",
]
