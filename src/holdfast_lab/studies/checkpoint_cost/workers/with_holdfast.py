"""Holdfast's own checkpoints of a PyTorch state, in every format that it has."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.checkpoint import FORMATS, CheckpointStore, load, open_storage, take, write
from holdfast.checkpoint.retention import to_remove
from holdfast.checkpoint.writer import CheckpointWriter

Row = dict[str, Any]


def _torch() -> Any:
    return importlib.import_module("with_torch")


def versions() -> dict[str, str]:
    """Return the versions measured."""
    return {"holdfast": importlib.import_module("holdfast").__version__, **_torch().versions()}


def make(task: Row, seed: int) -> Any:
    """Return the state that PyTorch's own ways are measured with."""
    return _torch().make(task, seed)


def parameters(state: Any) -> int:
    """Return the number of parameters."""
    count: int = _torch().parameters(state)
    return count


def values(state: Any, whole: bool) -> Iterator[Any]:
    """Yield every saved array."""
    yield from _torch().values(state, whole)


def ways() -> dict[str, Any]:
    """Return the formats, and asynchronous saving."""
    way = importlib.import_module("measure").SaveMethod
    formats = {
        name: way(save=partial(_save, name), load=_load, divided=True, keep=partial(_keep, name)) for name in FORMATS
    }
    return formats | {"safetensors async": way(save=_save_async, load=_load, finish=_finish)}


class _TimedStorage:
    """A storage that reports the time of the disk to a meter.

    The threads that write values also digest them, so digests count as ``write``.
    """

    def __init__(self, folder: Path, meter: Any) -> None:
        self._storage = open_storage(folder)
        self._meter = meter
        self._start_s = 0.0

    def prepare(self, folder: str) -> Path:
        path = self._storage.prepare(folder)
        self._start_s = time.perf_counter()
        return path

    def store(self, folder: str, names: tuple[str, ...]) -> None:
        self._meter.parts_s["write"] = time.perf_counter() - self._start_s
        with self._meter.part("sync"):
            self._storage.store(folder, names)

    def put(self, path: str, data: bytes) -> None:
        with self._meter.part("sync"):
            self._storage.put(path, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def _save(name: str, state: Any, folder: Path, meter: Any) -> None:
    with meter.part("gather"):
        content = take(_torch().gathered(state))
    storage: Any = _TimedStorage(folder, meter)
    write(storage, 1, content, {}, format=name).commit(0)


def _load(state: Any, folder: Path) -> None:
    torch = _torch()
    loaded = load(folder, 1, into=torch.gathered(state))
    torch._scatter(state, loaded.state)


def _save_async(state: Any, folder: Path, meter: Any) -> None:
    with meter.part("gather"):
        content = take(_torch().gathered(state))
    if "writer" not in state:
        state["writer"] = {}
    # The snapshot's memory is reused for the next one, as in a session, where one writer lives as long as training.
    writer = state["writer"].get(folder) or CheckpointWriter(CheckpointStore(folder), background=True)
    state["writer"][folder] = writer
    writer.begin(1, content, {})
    writer.commit(0)


def _finish(state: Any) -> None:
    for writer in state["writer"].values():
        writer.wait()
        for outcome in writer.poll():
            if outcome.error is not None:
                raise outcome.error


def _keep(name: str, state: Any, folder: Path, count: int) -> None:
    checkpoints = CheckpointStore(folder, format=name)
    for step in range(1, count + 1):
        checkpoints.write_tensors(step, _torch().gathered(state), {}).commit(0)
        for old in to_remove(checkpoints.steps(), keep_last=2):
            checkpoints.remove(old)
