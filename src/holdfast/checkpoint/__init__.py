"""Checkpoints: a directory a step, with the tensors in files and a manifest that is written last.

::

    checkpoints = Checkpoints("runs/a")                                   # or s3://bucket/runs/a
    pending = checkpoints.write_tensors(20, {"model": model.state_dict()}, info={})
    pending.commit(generation=0)                                          # now it counts

    loaded = checkpoints.load_newest()                                    # every byte was read and checked
    model.load_state_dict(loaded.state["model"])

A process may be killed at any moment: what was complete stays complete, what was not is never loaded.
Nothing is ever unpickled. The bytes are specified in ``docs/checkpoint-format.md``.

Read ``save.py`` for what happens in which order, ``loading.py`` and ``values.py`` for what is checked, ``format.py`` for what may be saved,
``manifest.py`` for what is written down, ``parts.py`` for what several writers hold apart, ``files/`` for the files of the tensors, ``storage/`` for where they are,
``writer.py`` for writing beside the training loop, ``retain.py`` and ``interval.py`` for which are kept and how often
one is taken. ``engine.py`` is the seam that a session talks to. The ``ckpt`` command stands on ``inventory.py`` (what is
there), ``source.py`` (tensors one by one), ``compare.py``, ``convert.py`` and ``files/`` (also of other programs).

Importing this loads no torch: every name is loaded when it is first used. So no module has the name of a function here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.files.kinds import FORMATS
    from holdfast.checkpoint.format import Shard, flatten, unflatten
    from holdfast.checkpoint.loading import (
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
    from holdfast.checkpoint.values import Damage
    from holdfast.checkpoint.write_plan import Content, take

_WHERE = {
    "Checkpoints": "holdfast.checkpoint.manager",
    "Content": "holdfast.checkpoint.write_plan",
    "Damage": "holdfast.checkpoint.values",
    "FORMATS": "holdfast.checkpoint.files.kinds",
    "Loaded": "holdfast.checkpoint.loading",
    "Manifest": "holdfast.checkpoint.manifest",
    "PendingCheckpoint": "holdfast.checkpoint.save",
    "Piece": "holdfast.checkpoint.manifest",
    "SavedCheckpoint": "holdfast.checkpoint.save",
    "Shard": "holdfast.checkpoint.format",
    "Storage": "holdfast.checkpoint.storage",
    "TensorEntry": "holdfast.checkpoint.manifest",
    "all_but": "holdfast.checkpoint.parts",
    "find_damage": "holdfast.checkpoint.loading",
    "flatten": "holdfast.checkpoint.format",
    "load": "holdfast.checkpoint.loading",
    "load_box": "holdfast.checkpoint.loading",
    "load_newest": "holdfast.checkpoint.loading",
    "newest_intact": "holdfast.checkpoint.loading",
    "open_storage": "holdfast.checkpoint.storage",
    "read_manifest": "holdfast.checkpoint.loading",
    "steps": "holdfast.checkpoint.loading",
    "take": "holdfast.checkpoint.write_plan",
    "unflatten": "holdfast.checkpoint.format",
    "verify": "holdfast.checkpoint.loading",
    "write": "holdfast.checkpoint.save",
    "write_tensors": "holdfast.checkpoint.save",
}

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


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
