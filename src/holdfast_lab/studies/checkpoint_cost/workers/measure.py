"""Measure the cost of a framework's checkpoints: ``python measure.py FRAMEWORK TASK.json ROWS.jsonl``.

Clock, files and checks are the same for every framework; ``with_FRAMEWORK.py`` beside this file defines how that
framework makes, saves and loads a state: it is a :class:`MeasuredFramework`, or a :class:`TrainedFramework`. Needs only Python, numpy and the framework.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import platform
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

Row = dict[str, Any]


class SaveMeter:
    """Seconds per part of a save; time that no part claims is serialisation."""

    def __init__(self) -> None:
        self.parts_s: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a part."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.parts_s[name] = self.parts_s.get(name, 0.0) + time.perf_counter() - start_s

    @contextmanager
    def file(self, path: Path) -> Iterator[Any]:
        """Open a file whose writes are counted as ``write``."""
        file = path.open("wb")
        try:
            yield TimedFile(file, self)
        finally:
            with self.part("write"):
                file.close()


class TimedFile:
    """A file that reports its write times to a meter; all other calls pass through."""

    def __init__(self, file: BinaryIO, meter: SaveMeter) -> None:
        self._file = file
        self._meter = meter

    def write(self, data: Any) -> int:
        """Write, and count the time."""
        with self._meter.part("write"):
            return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@dataclass(frozen=True)
class SaveMethod:
    """One way of a framework to save.

    Args:
        save: ``save(state, folder, meter)`` writes into an empty folder; returns when training may resume.
        load: ``load(state, folder)`` overwrites the state.
        divided: The parts of a save can be timed separately; otherwise only gathering and syncing can.
        packed: It compresses.
        whole: It also saves the optimizer's state, if there is one.
        finish: ``finish(state)`` waits for the background part of a save.
        keep: ``keep(state, folder, count)`` saves ``count`` steps with the framework's own rotation; None if it has
            none.
    """

    save: Callable[[Any, Path, SaveMeter], None]
    load: Callable[[Any, Path], None]
    divided: bool = False
    packed: bool = False
    whole: bool = True
    finish: Callable[[Any], None] | None = None
    keep: Callable[[Any, Path, int], None] | None = field(default=None)


class MeasuredFramework(Protocol):
    """What ``with_FRAMEWORK.py`` defines for the cost of its saves."""

    def versions(self) -> dict[str, str]:
        """Return the versions measured."""

    def make(self, task: Row, seed: int) -> Any:
        """Return a network of the task's layers, and the task's optimizer after a step."""

    def parameters(self, state: Any) -> int:
        """Return the number of parameters."""

    def values(self, state: Any, whole: bool) -> Iterator[Any]:
        """Yield every saved array; if not ``whole``, without the optimizer's."""

    def ways(self) -> dict[str, SaveMethod]:
        """Return the ways to save, by name."""


class MeasuredTraining(Protocol):
    """A small training whose state consists of the framework's pieces."""

    def step(self, number: int, /) -> None:
        """Train on one mini-batch."""

    def save(self, path: Path) -> None:
        """Save every piece."""

    def load(self, path: Path, loaded: list[str]) -> None:
        """Load the named pieces."""

    def weights(self) -> list[Any]:
        """Return parameters and buffers."""


@runtime_checkable
class TrainedFramework(MeasuredFramework, Protocol):
    """What ``with_FRAMEWORK.py`` defines for trainings, alone and of several workers."""

    def pieces(self) -> list[str]:
        """Return the pieces of a run's state."""

    def saved_by_default(self) -> list[str]:
        """Return the pieces that the one line of the framework's tutorial saves."""

    def training(self, task: Row) -> MeasuredTraining:
        """Return a new training."""

    def share(self, task: Row) -> list[Row]:
        """Train and save as one of several workers."""

    def load_together(self, task: Row, scheme: str, folder: Path, rank: int) -> list[Any]:
        """Load as a rank of another number of workers; return every array."""


def main() -> None:
    """Run the task in the file that the second argument names."""
    name, task_path, rows_path = sys.argv[1:4]
    framework = importlib.import_module(f"with_{name}")
    task = json.loads(Path(task_path).read_text())
    random.seed(task["seed"])
    rows = DOING[task["do"]](framework, task)
    rows_path += os.environ.get("OMPI_COMM_WORLD_RANK", "").strip("0")  # mpirun gives all ranks the same name
    draft = Path(rows_path + ".tmp")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draft.replace(rows_path)


def describe(framework: MeasuredFramework, _: Row) -> list[Row]:
    """Report versions, ways of saving, and the pieces of a run's state."""
    return [
        {
            "versions": {"python": platform.python_version(), **framework.versions()},
            "ways": list(framework.ways()),
            "rotates": [name for name, way in framework.ways().items() if way.keep is not None],
            "pieces": framework.pieces() if isinstance(framework, TrainedFramework) else [],
            "default": framework.saved_by_default() if isinstance(framework, TrainedFramework) else [],
        }
    ]


def cost(framework: MeasuredFramework, task: Row) -> list[Row]:
    """Save and load states in every way, several times each; a failing way does not end the measurement."""
    rows = [{"part": "versions", **row} for row in describe(framework, task)] if task["describe"] else []
    for optimizer in task["optimizers"]:
        about = {**task, "optimizer": optimizer}
        state, other = (framework.make(about, task["seed"] + k) for k in (0, 1))
        for name in framework.ways():
            rows += [
                {"optimizer": optimizer, "way": name, **row} for row in _cost_of(framework, about, name, state, other)
            ]
    return rows


def _cost_of(framework: MeasuredFramework, task: Row, name: str, state: Any, other: Any) -> list[Row]:
    way = framework.ways()[name]
    if not way.whole and task["optimizer"] != "none":
        return [{"status": "not run", "why": "saves no optimizer state: measured without one"}]
    rows: list[Row] = []
    try:
        _warm_up(framework, task, way)
        for repetition in range(task["repetitions"]):
            folder = fresh(task["folder"])
            row = {"whole": way.whole, "packed": way.packed, "repetition": repetition}
            row |= {"parameters": framework.parameters(state), **save(way, state, folder), **load(way, other, folder)}
            if repetition == 0:
                equal = _equal(framework.values(state, way.whole), framework.values(other, way.whole))
            rows.append({**row, "status": "measured", "loads_equal": equal})
    except Exception as error:  # frameworks raise anything
        rows.append({"status": "failed", "why": f"{name}: {type(error).__name__}: {error}"[:300]})
    shutil.rmtree(task["folder"], ignore_errors=True)
    return rows


def _equal(ours: Iterator[Any], theirs: Iterator[Any]) -> bool:
    """Return whether the arrays have the same bytes."""
    return all(_bytes(a) == _bytes(b) for a, b in itertools.zip_longest(ours, theirs))


def _bytes(array: Any) -> Any:
    """Return the bytes of an array; None for None."""
    if array is None:
        return None
    return memoryview(array.reshape(-1)).cast("B") if array.size else b""


def _warm_up(framework: MeasuredFramework, task: Row, way: SaveMethod) -> None:
    """Save and load something small, because a framework's first use imports and compiles."""
    layer = {"kind": "linear", "inputs": 8, "outputs": 8, "bias": True}
    small = framework.make({**task, "layers": [layer]}, 0)
    folder = fresh(task["folder"])
    finish_save(way, small, folder)
    way.load(small, folder)


def save(way: SaveMethod, state: Any, folder: Path) -> Row:
    """Save once; return seconds by part, and bytes."""
    meter = SaveMeter()
    start_s = time.perf_counter()
    way.save(state, folder, meter)
    returned_s = time.perf_counter() - start_s
    if way.finish is not None:
        way.finish(state)
    with meter.part("sync"):
        sync(folder)
    save_s = time.perf_counter() - start_s
    files = [path for path in folder.rglob("*") if path.is_file()]
    parts_s = meter.parts_s
    rest_s = save_s - sum(parts_s.values())
    return {
        "save_s": save_s,
        "blocked_s": returned_s,
        "gather_s": parts_s.get("gather", 0.0),
        "serialise_s": rest_s if way.divided else None,
        "compress_s": 0.0 if way.divided else None,
        "write_s": parts_s.get("write", 0.0) if way.divided else None,
        "undivided_s": None if way.divided else rest_s,
        "sync_s": parts_s["sync"],
        "bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
    }


def load(way: SaveMethod, state: Any, folder: Path) -> Row:
    """Load once from the disk, and once from the page cache."""
    times_s = []
    for cold in (True, False):
        if cold:
            forget(folder)
        start_s = time.perf_counter()
        way.load(state, folder)
        times_s.append(time.perf_counter() - start_s)
    return {"load_cold_s": times_s[0], "load_s": times_s[1]}


def save_times(framework: MeasuredFramework, task: Row) -> list[Row]:
    """Measure how long each way takes to save over an older checkpoint."""
    old, new = (framework.make(task, task["seed"] + k) for k in (0, 1))
    rows = []
    for name in task["ways"]:
        way = framework.ways()[name]
        _warm_up(framework, task, way)
        folder = fresh(task["folder"])
        finish_save(way, old, folder)
        start_s = time.perf_counter()
        finish_save(way, new, folder)
        rows.append({"way": name, "save_s": time.perf_counter() - start_s})
    return rows


def killed_save(framework: MeasuredFramework, task: Row) -> list[Row]:
    """Die in the middle of a save over an older checkpoint; the kernel's alarm kills, so no handler runs."""
    way = framework.ways()[task["way"]]
    folder = fresh(task["folder"])
    old, new = (framework.make(task, task["seed"] + k) for k in (0, 1))
    finish_save(way, old, folder)
    sync(folder)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, task["after_s"])
    finish_save(way, new, folder)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return []


def after_kill(framework: MeasuredFramework, task: Row) -> list[Row]:
    """Report what can be loaded after each :func:`killed_save`."""
    return [{"way": case["way"], "found": what_loads(framework, {**task, **case})} for case in task["cases"]]


def damage(framework: MeasuredFramework, task: Row) -> list[Row]:
    """For each way: flip seven bits in the largest file and report what is loaded; count what rotation keeps."""
    return [
        {"way": name, "found": _damage_of(framework, {**task, "way": name}), "kept": _kept(framework, task, name)}
        for name in task["ways"]
    ]


def _damage_of(framework: MeasuredFramework, task: Row) -> str:
    way = framework.ways()[task["way"]]
    folder = fresh(task["folder"])
    finish_save(way, framework.make(task, task["seed"]), folder)
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as file:
        for tenth in range(2, 9):  # several, because one may fall where no value is stored
            file.seek(largest.stat().st_size * tenth // 10)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x40]))
    return what_loads(framework, task)


def _kept(framework: MeasuredFramework, task: Row, name: str) -> int | None:
    """Save seven steps with the framework's own rotation set to keep two.

    Return how many remain, or None without rotation.
    """
    way = framework.ways()[name]
    if way.keep is None:
        return None
    state = framework.make(task, task["seed"])
    sizes = []
    for count in (1, 7):
        folder = fresh(task["folder"])
        way.keep(state, folder, count)
        sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    return round(sizes[1] / sizes[0])


def what_loads(framework: MeasuredFramework, task: Row) -> str:
    """Return "old" or "new" if one of these states is loaded, "other" for another state, "nothing ..." for an error."""
    way = framework.ways()[task["way"]]
    known = {
        digest(framework.values(framework.make(task, task["seed"] + k), way.whole)): name
        for k, name in enumerate(("old", "new"))
    }
    state = framework.make(task, task["seed"] + 2)
    try:
        way.load(state, Path(task["folder"]))
    except (KeyboardInterrupt, SystemExit):
        raise
    except (
        BaseException
    ) as error:  # frameworks raise anything; CheckpointException of PyTorch's DCP is not an Exception
        return f"nothing ({type(error).__name__})"
    return known.get(digest(framework.values(state, way.whole)), "other")


def train(framework: TrainedFramework, task: Row) -> list[Row]:
    """Train a small network several times: from the beginning, or from all or some of the pieces of an earlier save."""
    import numpy as np

    rows = []
    for run in task["runs"]:
        job = framework.training(task)
        first = 0
        if run["resumed"]:
            first = task["save_at"]
            job.load(Path(task["checkpoint"]), [piece for piece in framework.pieces() if piece not in run["leave_out"]])
        for step in range(first, task["steps"]):
            if step == task["save_at"] and run["saves"]:
                job.save(Path(task["checkpoint"]))
            job.step(step)
        weights = [np.asarray(array) for array in job.weights()]
        np.savez(f"{task['weights']}-{run['name']}.npz", *weights)
        rows.append({"run": run["name"], "sha256": digest(weights)})
    return rows


def share(framework: TrainedFramework, task: Row) -> list[Row]:
    """Train and save with several workers; worker 0 returns the rows."""
    return framework.share(task)


def elsewhere(framework: TrainedFramework, task: Row) -> list[Row]:
    """Load what another number of workers saved; each worker records the result."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
    for scheme in task["schemes"]:
        folder = Path(task["folder"])
        try:
            found = digest(framework.load_together(task, scheme, folder / scheme, rank))
            what = "loads it" if found == task["sha256"] else "has another state, and no error"
        except Exception as error:  # frameworks raise anything
            what = f"refuses ({type(error).__name__})"
        (folder / f"{scheme}.found.{rank}").write_text(what)
    return []


def finish_save(way: SaveMethod, state: Any, folder: Path) -> None:
    """Save, and wait for the background part."""
    way.save(state, folder, SaveMeter())
    if way.finish is not None:
        way.finish(state)


def fresh(folder: str | Path) -> Path:
    """Empty or create the folder, and return it."""
    path = Path(folder)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def sync(folder: Path) -> None:
    """Wait until all files in the folder are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def sync_files(folder: Path, stem: str) -> None:
    """Wait until the files whose names begin with ``stem`` are on the disk."""
    for path in folder.iterdir():
        if path.name.startswith(stem):
            number = os.open(path, os.O_RDONLY)
            os.fsync(number)
            os.close(number)


def forget(folder: Path) -> None:
    """Ask the kernel to drop the folder's files from its page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def digest(arrays: Any) -> str:
    """Return the sha256 of the bytes of some arrays."""
    result = hashlib.sha256()
    for array in arrays:
        result.update(_bytes(array))
    return result.hexdigest()


DOING: dict[str, Callable[[Any, Row], list[Row]]] = {
    "describe": describe,
    "cost": cost,
    "save_times": save_times,
    "killed_save": killed_save,
    "after_kill": after_kill,
    "damage": damage,
    "train": train,
    "share": share,
    "elsewhere": elsewhere,
}

if __name__ == "__main__":
    sys.modules["measure"] = sys.modules["__main__"]  # the framework's file imports SaveMethod from here
    main()
