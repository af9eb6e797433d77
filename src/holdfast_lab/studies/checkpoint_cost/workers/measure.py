"""Measure what a framework's checkpoints cost: ``python measure.py FRAMEWORK TASK.json ROWS.jsonl``.

The same clock, files and checks for every framework; ``with_FRAMEWORK.py`` beside this file says how that framework
makes, saves and loads a state. Needs nothing but Python, numpy and the framework.
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
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

Row = dict[str, Any]


class Meter:
    """Time by part of a save; what no part claims is serialisation."""

    def __init__(self) -> None:
        self.parts_s: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to a part."""
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

    @contextmanager
    def compressor(self) -> Iterator[None]:
        """Count the time in zlib as ``compress``."""
        original = zlib.compressobj

        def timed(*args: Any, **options: Any) -> TimedCompressor:
            return TimedCompressor(original(*args, **options), self)

        zlib.compressobj = timed  # type: ignore[assignment]
        try:
            yield
        finally:
            zlib.compressobj = original


class TimedFile:
    """A file that tells a meter how long it writes; everything else goes through."""

    def __init__(self, file: BinaryIO, meter: Meter) -> None:
        self._file = file
        self._meter = meter

    def write(self, data: Any) -> int:
        """Write, and count the time."""
        with self._meter.part("write"):
            return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TimedCompressor:
    """A zlib compressor that tells a meter how long it works."""

    def __init__(self, compressor: Any, meter: Meter) -> None:
        self._compressor = compressor
        self._meter = meter

    def compress(self, data: Any) -> bytes:
        """Compress, and count the time."""
        with self._meter.part("compress"):
            return bytes(self._compressor.compress(data))

    def flush(self, *mode: int) -> bytes:
        """Finish, and count the time."""
        with self._meter.part("compress"):
            return bytes(self._compressor.flush(*mode))


@dataclass(frozen=True)
class Way:
    """One way in which a framework saves.

    Args:
        save: ``save(state, folder, meter)`` writes into an empty folder; returns when training might go on.
        load: ``load(state, folder)`` overwrites the state.
        divided: The parts of a save can be told apart; otherwise only gathering and syncing can.
        packed: It compresses.
        whole: The optimizer's state is saved too, if there is one.
        finish: Waits for what a save left to the background; ``finish(state)``.
        keep: ``keep(state, folder, count)`` saves so many steps with the framework's own rotation; None if it has none.
    """

    save: Callable[[Any, Path, Meter], None]
    load: Callable[[Any, Path], None]
    divided: bool = False
    packed: bool = False
    whole: bool = True
    finish: Callable[[Any], None] | None = None
    keep: Callable[[Any, Path, int], None] | None = field(default=None)


def main() -> None:
    """Carry out the task in the file that the second argument names."""
    name, task_path, rows_path = sys.argv[1:4]
    framework = importlib.import_module(f"with_{name}")
    task = json.loads(Path(task_path).read_text())
    random.seed(task["seed"])
    rows = DOING[task["do"]](framework, task)
    rows_path += os.environ.get("OMPI_COMM_WORLD_RANK", "").strip("0")  # under mpirun all ranks are given one name
    draft = Path(rows_path + ".tmp")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draft.replace(rows_path)


def describe(framework: Any, _: Row) -> list[Row]:
    """Say which versions these are, which ways of saving they have, and of what a run consists."""
    return [
        {
            "versions": {"python": platform.python_version(), **framework.versions()},
            "ways": list(framework.ways()),
            "rotates": [name for name, way in framework.ways().items() if way.keep is not None],
            "pieces": framework.pieces() if hasattr(framework, "pieces") else [],
            "default": framework.saved_by_default() if hasattr(framework, "saved_by_default") else [],
        }
    ]


def cost(framework: Any, task: Row) -> list[Row]:
    """Save and load states in every way, several times each; a way that cannot is no reason to leave out the rest."""
    rows = [{"part": "versions", **row} for row in describe(framework, task)] if task["describe"] else []
    for optimizer in task["optimizers"]:
        about = {**task, "optimizer": optimizer}
        state, other = (framework.make(about, task["seed"] + k) for k in (0, 1))
        for name in framework.ways():
            rows += [
                {"optimizer": optimizer, "way": name, **row} for row in _cost_of(framework, about, name, state, other)
            ]
    return rows


def _cost_of(framework: Any, task: Row, name: str, state: Any, other: Any) -> list[Row]:
    way: Way = framework.ways()[name]
    if not way.whole and task["optimizer"] != "none":
        return [{"status": "not run", "why": "holds no optimizer's state: measured without one"}]
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
    except Exception as error:  # whatever a framework says
        rows.append({"status": "not run", "why": f"{type(error).__name__}: {error}"[:300]})
    shutil.rmtree(task["folder"], ignore_errors=True)
    return rows


def _equal(ours: Iterator[Any], theirs: Iterator[Any]) -> bool:
    """Return whether these arrays have the same bytes."""
    return all(_bytes(a) == _bytes(b) for a, b in itertools.zip_longest(ours, theirs))


def _bytes(array: Any) -> Any:
    """Return the bytes of an array, None of None."""
    if array is None:
        return None
    return memoryview(array.reshape(-1)).cast("B") if array.size else b""


def _warm_up(framework: Any, task: Row, way: Way) -> None:
    """Save and load something small: the first time, a framework imports and compiles."""
    layer = {"kind": "linear", "inputs": 8, "outputs": 8, "bias": True}
    small = framework.make({**task, "layers": [layer]}, 0)
    folder = fresh(task["folder"])
    finish_save(way, small, folder)
    way.load(small, folder)


def save(way: Way, state: Any, folder: Path) -> Row:
    """Save once; return seconds by part, and bytes."""
    meter = Meter()
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
        "compress_s": parts_s.get("compress", 0.0) if way.divided else None,
        "write_s": parts_s.get("write", 0.0) if way.divided else None,
        "undivided_s": None if way.divided else rest_s,
        "sync_s": parts_s["sync"],
        "bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
    }


def load(way: Way, state: Any, folder: Path) -> Row:
    """Load once from the disk, and once from the page cache."""
    times_s = []
    for cold in (True, False):
        if cold:
            forget(folder)
        start_s = time.perf_counter()
        way.load(state, folder)
        times_s.append(time.perf_counter() - start_s)
    return {"load_cold_s": times_s[0], "load_s": times_s[1]}


def save_times(framework: Any, task: Row) -> list[Row]:
    """Say how long each way takes to save over an older checkpoint."""
    old, new = (framework.make(task, task["seed"] + k) for k in (0, 1))
    rows = []
    for name in task["ways"]:
        way: Way = framework.ways()[name]
        _warm_up(framework, task, way)
        folder = fresh(task["folder"])
        finish_save(way, old, folder)
        start_s = time.perf_counter()
        finish_save(way, new, folder)
        rows.append({"way": name, "save_s": time.perf_counter() - start_s})
    return rows


def killed_save(framework: Any, task: Row) -> list[Row]:
    """Die in the middle of a save over an older checkpoint; the alarm is the kernel's, no handler runs."""
    way: Way = framework.ways()[task["way"]]
    folder = fresh(task["folder"])
    old, new = (framework.make(task, task["seed"] + k) for k in (0, 1))
    finish_save(way, old, folder)
    sync(folder)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, task["after_s"])
    finish_save(way, new, folder)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return []


def after_kill(framework: Any, task: Row) -> list[Row]:
    """Say what can be loaded after each :func:`killed_save`."""
    return [{"way": case["way"], "found": what_loads(framework, {**task, **case})} for case in task["cases"]]


def damage(framework: Any, task: Row) -> list[Row]:
    """For each way: flip seven bits in the largest file, and say what loading makes of it; count what rotation keeps."""
    return [
        {"way": name, "found": _damage_of(framework, {**task, "way": name}), "kept": _kept(framework, task, name)}
        for name in task["ways"]
    ]


def _damage_of(framework: Any, task: Row) -> str:
    way: Way = framework.ways()[task["way"]]
    folder = fresh(task["folder"])
    finish_save(way, framework.make(task, task["seed"]), folder)
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as file:
        for tenth in range(2, 9):  # several, because one may fall where no value is
            file.seek(largest.stat().st_size * tenth // 10)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x40]))
    return what_loads(framework, task)


def _kept(framework: Any, task: Row, name: str) -> int | None:
    """Save seven steps with the framework's own rotation, told to keep two; return how many are left, None without one."""
    way: Way = framework.ways()[name]
    if way.keep is None:
        return None
    state = framework.make(task, task["seed"])
    sizes = []
    for count in (1, 7):
        folder = fresh(task["folder"])
        way.keep(state, folder, count)
        sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    return round(sizes[1] / sizes[0])


def what_loads(framework: Any, task: Row) -> str:
    """Return "old" or "new" if one of these states is loaded, "other" if another one is, "nothing" if it is refused."""
    way: Way = framework.ways()[task["way"]]
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
    ) as error:  # whatever a framework says; the CheckpointException of PyTorch's DCP is no Exception
        return f"nothing ({type(error).__name__})"
    return known.get(digest(framework.values(state, way.whole)), "other")


def train(framework: Any, task: Row) -> list[Row]:
    """Train a small network several times: from the beginning, or from what an earlier run saved, or from a part of it."""
    import numpy as np

    rows = []
    for run in task["runs"]:
        job = framework.Training(task)
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


def share(framework: Any, task: Row) -> list[Row]:
    """Train and save with several workers; worker 0 has the rows."""
    rows: list[Row] = framework.share(task)
    return rows


def elsewhere(framework: Any, task: Row) -> list[Row]:
    """Load what another number of workers saved; each worker writes down what it got."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
    for scheme in task["schemes"]:
        folder = Path(task["folder"])
        try:
            found = digest(framework.load_together(task, scheme, folder / scheme, rank))
            what = "loads it" if found == task["sha256"] else "has another state, and no error"
        except Exception as error:  # whatever a framework says
            what = f"refuses ({type(error).__name__})"
        (folder / f"{scheme}.found.{rank}").write_text(what)
    return []


def finish_save(way: Way, state: Any, folder: Path) -> None:
    """Save, and wait for the background."""
    way.save(state, folder, Meter())
    if way.finish is not None:
        way.finish(state)


def fresh(folder: str | Path) -> Path:
    """Return the folder, empty."""
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


DOING = {
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
    sys.modules["measure"] = sys.modules["__main__"]  # the framework's file takes Way from here
    main()
