"""Checkpoints: one directory per step, with the tensors in files and a manifest that is written last.

::

    checkpoints = CheckpointStore("runs/a")                               # or s3://bucket/runs/a
    pending = checkpoints.write_tensors(20, {"model": model.state_dict()}, info={})
    pending.commit(generation=0)                                          # from here on it counts

    loaded = checkpoints.load_newest()                                    # every byte was read and verified
    model.load_state_dict(loaded.state["model"])

A process may be killed at any moment: complete checkpoints stay complete, incomplete ones are never loaded.
Nothing is ever unpickled. ``docs/reference/checkpoint-format.md`` specifies the bytes.

``save.py`` has the order of operations, ``loading.py`` and ``values.py`` the checks, ``format.py`` the types that can be
saved, ``manifest.py`` the manifest, ``parts.py`` parts from several writers, ``files/`` the tensor file formats,
``storage/`` the storage back ends, ``writer.py`` writing in the background, ``store.py`` all checkpoints of a run. The
manager of a session is in ``state/manager.py``. What the ``ckpt`` command does beyond this is in ``tools/checkpoints/``,
files of other programs in ``tools/formats/``.

Importing this does not load torch: each name is loaded on first use. So no module may have the name of a function here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast.checkpoint.files.registry import FORMATS
    from holdfast.checkpoint.format import Shard, flatten, unflatten
    from holdfast.checkpoint.loading import (
        LoadedCheckpoint,
        find_damage,
        load,
        load_box,
        load_newest,
        newest_intact,
        read_manifest,
        steps,
        verify,
    )
    from holdfast.checkpoint.manifest import Manifest, TensorEntry, TensorPiece
    from holdfast.checkpoint.parts import all_but
    from holdfast.checkpoint.save import PendingCheckpoint, SavedCheckpoint, write, write_tensors
    from holdfast.checkpoint.storage import Storage, open_storage
    from holdfast.checkpoint.store import CheckpointStore
    from holdfast.checkpoint.values import DamagedBytes
    from holdfast.checkpoint.write_plan import WritePlan, take

_NAMES = {
    "files.registry": "FORMATS",
    "format": "Shard flatten unflatten",
    "loading": "LoadedCheckpoint find_damage load load_box load_newest newest_intact read_manifest steps verify",
    "manifest": "Manifest TensorEntry TensorPiece",
    "parts": "all_but",
    "save": "PendingCheckpoint SavedCheckpoint write write_tensors",
    "storage": "Storage open_storage",
    "store": "CheckpointStore",
    "values": "DamagedBytes",
    "write_plan": "WritePlan take",
}
_WHERE = {name: f"holdfast.checkpoint.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "FORMATS",
    "CheckpointStore",
    "DamagedBytes",
    "LoadedCheckpoint",
    "Manifest",
    "PendingCheckpoint",
    "SavedCheckpoint",
    "Shard",
    "Storage",
    "TensorEntry",
    "TensorPiece",
    "WritePlan",
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

__getattr__ = lazy(__name__, _WHERE)
