"""Three ways to read the values of a checkpoint and verify every byte, beside safetensors, which verifies none.

    python benchmarks/checkpoint/reads.py [--bytes 1e9] [--layers 21] [--rounds 9] [--cold-rounds 3] [--dir DIR]
                                          [--json FILE]

======  =========================================================================================================
way     how the values get into the memory of the model
======  =========================================================================================================
read    ``preadv`` of a MiB into the tensor, digest of it while it is in the cache: what Holdfast does
mapped  The file is mapped, the pages of each block are populated first (``MADV_POPULATE_READ``, which reports errors
        where touching a page would end the process), copied by the MiB, and the copy is digested
direct  ``O_DIRECT`` reads past the page cache into aligned memory, copied from there, and the copy is digested
======  =========================================================================================================

Each is Holdfast's own load, with manifest, checks and threads; only the reading of a block is exchanged. Warm: the file is
in the page cache. Cold: it is not, which ``mincore`` proves before each load. All ways take turns, in another order
each round; ratios are those of medians, with a 95 % interval by bootstrap over rounds. The misaligned file has the
order of tensors that the package ``safetensors`` chooses: a scalar between others moves all that follow by 4 bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import xxhash
from checkpoint.page_cache import evict
from common import cells, command_line, table, take_turns, timed, times, write_json
from peers.stores import Holdfast, Safetensors, State, make_state

from holdfast.checkpoint import values
from holdfast.checkpoint.files import safetensors as layout

_C = ctypes.CDLL(None, use_errno=True)
_POPULATE_READ = 22
_PART = 1 << 20
_PAGE = 4096


class Mapped:
    """Copies from a mapping whose pages are populated."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[mmap.mmap, np.ndarray[Any, Any]]] = {}

    def close(self) -> None:
        """Forget the mappings: the next load opens the files again."""
        self._maps.clear()

    def __call__(self, file: Any, first: int, into: memoryview) -> tuple[int, str]:
        """See :func:`holdfast.checkpoint.values._read_digested`."""
        if file._number not in self._maps:
            whole = mmap.mmap(file._number, file.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._maps[file._number] = whole, np.frombuffer(whole, np.uint8)
        source = self._maps[file._number][1]
        start = first // _PAGE * _PAGE
        size = ctypes.c_size_t(first + len(into) - start)
        if len(into) and _C.madvise(ctypes.c_void_p(source.ctypes.data + start), size, _POPULATE_READ):
            raise OSError(ctypes.get_errno(), "cannot populate the mapping")
        digest, target = xxhash.xxh3_64(), np.frombuffer(into, np.uint8)
        for at in range(0, len(into), _PART):
            part = target[at : at + _PART]
            np.copyto(part, source[first + at : first + at + len(part)])
            digest.update(part)
        return len(into), digest.hexdigest()


class Direct:
    """Reads past the page cache, over aligned memory of each thread."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._memory: dict[int, mmap.mmap] = {}

    def close(self) -> None:
        """Close the files."""
        for number in self._numbers.values():
            os.close(number)
        self._numbers.clear()

    def __call__(self, file: Any, first: int, into: memoryview) -> tuple[int, str]:
        """See :func:`holdfast.checkpoint.values._read_digested`."""
        path = str(file._path)
        if path not in self._numbers:
            self._numbers[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
        own = self._memory.setdefault(threading.get_ident(), mmap.mmap(-1, 2 * _PART))
        digest, done, target = xxhash.xxh3_64(), 0, np.frombuffer(into, np.uint8)
        while done < len(into):
            start = (first + done) // _PAGE * _PAGE
            skip = first + done - start
            want = min(_PART, len(into) - done)
            size = -(-(skip + want) // _PAGE) * _PAGE
            got = os.preadv(self._numbers[path], [memoryview(own)[:size]], start) - skip
            part = target[done : done + min(got, want)]
            np.copyto(part, np.frombuffer(own, np.uint8)[skip : skip + len(part)])
            digest.update(part)
            done += len(part)
        return len(into), digest.hexdigest()


class Ways:
    """The ways to load one state, which all of them saved."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state = state
        self._model = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        self.folders = {name: folder / name for name in ("safetensors", "aligned", "misaligned")}
        Safetensors().save(self.folders["safetensors"], state)
        Holdfast().save(self.folders["aligned"], state)
        with mock.patch.object(layout, "_order", lambda item: -item[1].element_size()):
            Holdfast().save(self.folders["misaligned"], state)

    def all(self) -> dict[str, tuple[str, Callable[[], None]]]:
        """Return each way with the folder that it reads."""
        found: dict[str, tuple[str, Callable[[], None]]] = {
            "safetensors, nothing verified": ("safetensors", self._safetensors),
            "read": ("aligned", self._holdfast),
            "read, misaligned file": ("misaligned", lambda: self._holdfast("misaligned")),
            "mapped": ("aligned", lambda: self._exchanged(Mapped())),
            "direct": ("aligned", lambda: self._exchanged(Direct())),
        }
        return found

    def _safetensors(self) -> None:
        Safetensors().load(self.folders["safetensors"], dict(self._model))

    def _holdfast(self, which: str = "aligned") -> None:
        Holdfast().load(self.folders[which], dict(self._model))

    def _exchanged(self, reading: Mapped | Direct) -> None:
        with mock.patch.object(values, "_read_digested", reading):
            self._holdfast()
        reading.close()

    def is_right(self) -> bool:
        """Return whether the last way loaded what was saved; forgets it."""
        right = all(torch.equal(self._model[key], tensor) for key, tensor in self._state.items())
        for tensor in self._model.values():
            tensor.zero_()
        return right


def measure(ways: Ways, rounds: int, *, cold: bool) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, after a warm-up round."""

    def one(name: str, folder: str, load: Callable[[], None]) -> float:
        if cold:
            evict(ways.folders[folder])
        taken_s = timed(load)
        if not ways.is_right():
            raise SystemExit(f"{name} loaded other values than were saved")
        return taken_s

    turns = {name: lambda name=name, way=way: one(name, *way) for name, way in ways.all().items()}
    return take_turns(turns, rounds, warm_up=0 if cold else 1)


def show(title: str, found: Mapping[str, list[float]]) -> str:
    """Return a table of the ways."""
    base = next(iter(found.values()))
    rows = []
    for name, taken in found.items():
        p50, p10, p90 = cells(taken, 3)
        rows.append([name, p50, f"{p10}-{p90}", times(taken, base)])
    return table(title, ["way", "p50, s", "p10-p90", "to safetensors"], rows)


def main() -> None:
    """Measure and print both tables."""
    options = command_line(
        __doc__, bytes=(1e9, "size of the state"), layers=21, rounds=9, cold_rounds=3,
        dir=(None, "folder on the disk to measure; default: a temporary directory"),
    ).parse_args()  # fmt: skip
    torch.set_num_threads(os.cpu_count() or 1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        ways = Ways(make_state(options.bytes, options.layers), Path(folder))
        results["warm"] = measure(ways, options.rounds, cold=False)
        print(show("Load, files in the page cache", results["warm"]), end="\n\n", flush=True)
        if options.cold_rounds:
            results["cold"] = measure(ways, options.cold_rounds, cold=True)
            print(show("Load, files not in the page cache", results["cold"]))
    write_json(options.json, bytes=options.bytes, rounds=options.rounds, results=results)


if __name__ == "__main__":
    main()
