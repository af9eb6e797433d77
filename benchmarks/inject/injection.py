"""Flipping bits in an HDF5 file in place, compared with a loop over values in h5py; and in an array in memory.

    python benchmarks/inject/injection.py [--bytes 1e9] [--tensors 60] [--flips 1000] [--rounds 5]
                                   [--values 1e8] [--live-flips 1e6 1e7] [--dir DIR] [--json FILE]

=============  ==================================================================================================
way            what runs
=============  ==================================================================================================
holdfast       ``inject`` as the command calls it: opens the file, draws uniformly from all values, alters, closes
with a record  The same, and writes the record, with the content of the 2022 injector's log for each flip
injector       The method of the injector of 2022, with its log: ``peers/injector_2022.py`` refers to its source
by value       The same loop as short as possible: no log, one seed; collects the names, counts the values, and for each
               flip looks the data set up, reads one value by h5py, flips a bit of its text, writes it by h5py
by tensor      What a script with numpy would do: reads every data set in which something is to be flipped
               whole, flips, and writes it whole
pwrite         The limit: as many reads and writes of four bytes at random places of the file, nothing else
command        ``holdfast inject FILE --flips N --in-place --record`` from the start of its process to its end
script         The injector of 2022 from the start of its process to its end
live           ``draw`` and ``apply`` on a float32 array in memory, one thread
=============  ==================================================================================================

The methods take turns on one file, which is in the page cache, so no method waits for the disk. Processor time is given
too, for machines that are busy. ``--dir /dev/shm`` excludes the time that a disk's file system takes to track dirty
pages, which is half of Holdfast's time there.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
import numpy as np
from common import cells, command_line, interval, processor_s, ratio, spread, table, take_turns, timed, write_json
from inject import injector_2022

from holdfast.faults.alteration import Alteration, ValueChange, ValuePosition, apply, draw
from holdfast.faults.formats import FORMATS
from holdfast_lab.inject.files import InjectionTarget
from holdfast_lab.inject.inject import inject


def make_file(path: Path, size_bytes: float, tensors: int) -> None:
    """Write a file of float32 data sets of two sizes, one with four times as many values as the other."""
    rng = np.random.default_rng(0)
    unit = int(size_bytes / 4 / (tensors * 2.5))
    with h5py.File(path, "w") as file:
        for number in range(tensors):
            shape = (unit // 64 * (4 if number % 2 else 1), 64)
            file.create_dataset(f"layer{number:03d}/kernel", data=rng.standard_normal(shape, np.float32))


def by_holdfast(path: Path, flips: int, seed: int) -> None:
    """Flip as ``holdfast inject`` does."""
    inject(InjectionTarget(path), Alteration(count=flips, seed=seed), in_place=True)


def with_a_record(path: Path, flips: int, seed: int) -> None:
    """Flip as ``holdfast inject --record`` does."""
    record = path.with_suffix(".json")
    record.unlink(missing_ok=True)
    inject(InjectionTarget(path), Alteration(count=flips, seed=seed), in_place=True, record=record)


def by_command(path: Path, flips: int, seed: int) -> None:
    """Flip by the command, as a process."""
    record = path.with_suffix(".json")
    record.unlink(missing_ok=True)
    options = ["--flips", str(flips), "--seed", str(seed), "--in-place", "--record", str(record)]
    _run("-m", "holdfast", "inject", str(path), *options)


def by_injector(path: Path, flips: int, _: int) -> None:
    """Flip as the injector of 2022 does."""
    injector_2022.corrupt(str(path), flips, injector_2022.logger(str(path.with_suffix(".log"))))


def by_script(path: Path, flips: int, _: int) -> None:
    """Flip as the injector of 2022 does, as a process."""
    _run(injector_2022.__file__, str(path), str(flips), str(path.with_suffix(".log")))


def _run(*words: str) -> None:
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, timeout=300)


def by_value(path: Path, flips: int, seed: int) -> None:
    """Flip one value after another through h5py."""
    rng = random.Random(seed)
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visititems(lambda name, thing: names.append(name) if isinstance(thing, h5py.Dataset) else None)
        sum(int(np.prod(file[name].shape)) for name in names)
        for _ in range(flips):
            dataset = file[rng.choice(names)]
            index = tuple(rng.randrange(size) for size in dataset.shape)
            (bits,) = struct.unpack(">L", struct.pack(">f", dataset[index]))
            text, bit = f"{bits:032b}", rng.randrange(32)
            text = text[:bit] + ("1" if text[bit] == "0" else "0") + text[bit + 1 :]
            dataset[index] = struct.unpack(">f", struct.pack(">L", int(text, 2)))[0]


def by_tensor(path: Path, flips: int, seed: int) -> None:
    """Flip in whole data sets."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visititems(lambda name, thing: names.append(name) if isinstance(thing, h5py.Dataset) else None)
        counts = np.array([file[name].size for name in names])
        for name, share in zip(names, rng.multinomial(flips, counts / counts.sum()), strict=True):
            if share:
                values = file[name][()]
                raw = values.reshape(-1).view(np.uint32)
                raw[rng.integers(len(raw), size=share)] ^= np.uint32(1) << rng.integers(32, size=share).astype(
                    np.uint32
                )
                file[name][...] = values


def bare(path: Path, flips: int, seed: int) -> None:
    """Read and write four bytes at random places: what the kernel takes for as many changes."""
    rng, size = random.Random(seed), path.stat().st_size
    number = os.open(path, os.O_RDWR)
    try:
        for _ in range(flips):
            at = rng.randrange(size // 2, size - 4)  # behind the header, so that the file stays one
            os.pwrite(number, os.pread(number, 4, at), at)
    finally:
        os.close(number)


class Memory:
    """An array as :class:`~holdfast.faults.alteration.Values`."""

    def __init__(self, values: int) -> None:
        self.raw = np.full(values, 0x3F000000, np.uint32)
        self.places = [ValuePosition("w", FORMATS["float32"], (values,))]

    def read(self, wanted: Sequence[tuple[int, Any]]) -> list[Any]:
        """Return values."""
        return [self.raw[index] for _, index in wanted]

    def write(self, changes: Sequence[ValueChange]) -> None:
        """Write the changed values."""
        for change in changes:
            self.raw[change.index] = change.after


def live(memory: Memory, flips: int, seed: int) -> tuple[float, float]:
    """Return the elapsed time and the processor time, in seconds."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    apply(memory, draw(memory, Alteration(count=flips, seed=seed)))
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


Times = dict[str, list[float]]


def measure_files(args: argparse.Namespace, folder: str) -> tuple[Times, Times]:
    """Return the seconds that each method took, in turns: elapsed time and processor time."""
    path = Path(folder) / "weights.h5"
    make_file(path, args.bytes, args.tensors)
    path.read_bytes()  # into the page cache
    ways: dict[str, Callable[[Path, int, int], None]] = {
        "holdfast": by_holdfast, "with a record": with_a_record, "injector": by_injector, "by value": by_value,
        "by tensor": by_tensor, "pwrite": bare, "command": by_command, "script": by_script,
    }  # fmt: skip
    seed = itertools.count()

    def one(way: Callable[[Path, int, int], None]) -> tuple[float, float]:
        before_s = processor_s()
        taken_s = timed(lambda: way(path, args.flips, next(seed)))
        used_s = processor_s() - before_s
        os.sync()
        return taken_s, used_s

    # In the first turn the methods import their libraries.
    turns = take_turns({name: lambda way=way: one(way) for name, way in ways.items()}, args.rounds)
    clock, processor = ({name: [pair[i] for pair in pairs] for name, pairs in turns.items()} for i in (0, 1))
    return clock, processor


def main() -> None:
    """Measure, print, and write the results."""
    parser = command_line(
        __doc__, bytes=1e9, tensors=60, flips=1000, rounds=5, values=1e8, dir=(None, "folder for the file")
    )
    parser.add_argument("--live-flips", type=float, nargs="*", default=[1e6, 1e7])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        measured = dict(zip(("clock", "processor"), measure_files(args, folder), strict=True))
    # Each is compared with its equivalent: a loop without a log with Holdfast without a record, processes likewise.
    beside = {"injector": "with a record", "command": "command", "script": "command"}
    ratios = {
        kind: {name: ratio(taken, times[beside.get(name, "holdfast")], paired=True) for name, taken in times.items()}
        for kind, times in measured.items()
    }
    rows = []
    for name in measured["clock"]:
        row = [name, beside.get(name, "holdfast")]
        for kind, times in measured.items():
            row += [*cells(times[name], 1, scale=1e3, keys=["p50"]), interval(ratios[kind][name], 1)]
        rows.append(row)
    title = f"{args.flips:,} flips in place, HDF5 of {args.bytes / 1e9:g} GB, {args.tensors} data sets"
    print(table(title, ("way", "beside", "ms", "times that", "ms of processor", "times that"), rows))
    memory = Memory(int(args.values))
    lives = {}
    for flips in map(int, args.live_flips):
        live(memory, flips, 0)
        lives[flips] = [live(memory, flips, turn + 1) for turn in range(args.rounds)]
    rows = [
        [f"{flips:,}", *(f"{flips / spread([pair[i] for pair in taken])['p50'] / 1e6:.1f}" for i in (0, 1))]
        for flips, taken in lives.items()
    ]
    print()
    title = f"live flips in {args.values:,.0f} float32 values, millions a second"
    print(table(title, ("flips", "by the clock", "of processor time"), rows))
    write_json(args.json, settings=vars(args), seconds=measured, ratios=ratios, live=lives)


if __name__ == "__main__":
    main()
