"""Saving and loading a checkpoint: how long it takes, how long it blocks the loop, and which corruption it detects.

    python benchmarks/checkpoint/save_load.py [--bytes 1e9] [--layers 21] [--rounds 5] [--parts save async train load flips]
                                    [--ways holdfast safetensors ...] [--dir DIR] [--json FILE]

The state is that of a transformer with Adam: about a thousand tensors of random numbers, from 4 bytes to 64 MB of a
gigabyte. Every store gets the same state, as a flat dict.

======  =========================================================================================================
part    what runs
======  =========================================================================================================
save    From memory until all bytes are synced to the disk; Holdfast computes digests meanwhile and commits. ``dd``
        is the disk's own speed: the same bytes from a file in memory, ``bs=16M conv=fsync``
async   How long the loop is blocked, and how long until the checkpoint is durable. ``copy`` is one copy of the state
        into reused memory, as are the copies of Holdfast and DCP
train   A loop of small matrix products on one thread, alone and while a checkpoint is written
load    From files in the page cache until all bytes are in the memory of the model. Holdfast verifies
        every byte; the other stores verify none. Orbax creates new arrays
cold    The same from files that are not in the page cache, which ``mincore`` proves before each load
ranks   Several processes at once, each with its share of the bytes, by the rules of MLPerf Storage for checkpoints: all
        files are synced within the time of a save, reads are cold, the time of a round is that of the slowest rank, its
        throughput that of the rank with the lowest, and the result is the mean of the rounds
flips   One random bit of one file flipped, loaded, flipped back: half of the bits are in values, half elsewhere.
        Is it detected (an error), or is the state silently wrong? In processes that may die of it
======  =========================================================================================================

In each round all stores take turns, in a different order each time; files of the previous one are removed and synced
first. Ratios are ratios of medians in one run, with a 95 % interval by bootstrap over rounds. Peers that are not
installed (``make bench-peers``) are skipped. The defaults take ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from checkpoint.page_cache import evict
from checkpoint.ranks import RANK_STORES, measure_ranks
from common import PEERS_PYTHON, cells, command_line, table, take_turns, times, write_json
from peers.store_worker import Bench, Elsewhere, Numbers
from peers.stores import PEERS, STORES, State, make_state

from holdfast.checkpoint import FORMATS

PARTS = ("save", "async", "train", "load", "cold", "ranks", "flips")
FLIP_LAYERS, FLIP_BYTES = 2, 2e5
"""Size of a small model for flips: a third of its files are not values, and thousands of loads take a minute."""
FLIP_LIMIT_S = 60.0

Way = Callable[[Path], Numbers]
Found = dict[str, list[Numbers]]


# ---------------------------------------------------------------------------------------------
# Times


class Ways:
    """The stores that take turns: in this process, and those of the peers in their own environment."""

    def __init__(
        self, size_bytes: float, layers: int, names: Sequence[str], folder: Path, peers: Elsewhere | None
    ) -> None:
        self._bench = Bench(size_bytes, layers)
        self._names = names
        self._folder = folder
        self._peers = peers

    @property
    def size_bytes(self) -> int:
        """Size of the state."""
        return sum(tensor.nbytes for tensor in self._bench.state.values())

    @property
    def num_tensors(self) -> int:
        """Number of tensors of the state."""
        return len(self._bench.state)

    def save(self, source: Path) -> dict[str, Way]:
        """Return the stores for synchronous saves; ``dd`` copies ``source``."""
        with source.open("wb") as file:
            for tensor in self._bench.state.values():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return {"dd": lambda folder: dd(source, folder)} | self._ways(
            "save", "holdfast", "safetensors", "torch", "dcp", *PEERS
        )

    def begin(self) -> dict[str, Way]:
        """Return the stores for asynchronous saves."""
        return {"copy": lambda _: self._bench.copy()} | self._ways("begin", "holdfast", "dcp", "dcp, process", *PEERS)

    def train(self) -> dict[str, Way]:
        """Return the stores for saves during a loop that computes."""
        return self._ways("train", "holdfast", "dcp", "dcp, process", *PEERS)

    def load(self) -> dict[str, Way]:
        """Return the stores for loading; each has saved the state that it loads."""
        names = ("holdfast", "safetensors", "torch", "torch, mapped", "dcp", *PEERS)
        for name, way in self._ways("save", *names).items():
            if not self.saved(name).exists():
                way(self.saved(name))
        return {"copy": lambda _: self._bench.copy()} | {
            name: lambda _, name=name, way=way: way(self.saved(name))
            for name, way in self._ways("load", *names).items()
        }

    def saved(self, store: str) -> Path:
        """Return the folder that a store loads from."""
        return self._folder / f"{store} to load"

    def _ways(self, do: str, *stores: str) -> dict[str, Way]:
        def way(store: str) -> Way:
            if store in PEERS:
                assert self._peers is not None
                ask = self._peers.ask
                return lambda folder: ask(do, store=store, folder=str(folder))
            return lambda folder: getattr(self._bench, do)(store, str(folder))

        return {store: way(store) for store in stores if store in self._names}


def dd(source: Path, folder: Path) -> Numbers:
    """Copy a file to the disk as fast as possible."""
    folder.mkdir()
    command = ["dd", f"if={source}", f"of={folder / 'copy'}", "bs=16M", "conv=fsync"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"}).stderr
    taken_s = float(text.split(" copied, ")[1].split(" s,")[0])
    return {"held_s": taken_s, "durable_s": taken_s}


def measure_ways(
    ways: Mapping[str, Way], folder: Path, rounds: int, before: Callable[[str], None] = lambda name: None
) -> Found:
    """Run every store once a round, after a warm-up round; ``before`` is called with the store, untimed."""
    number = itertools.count()

    def one(name: str) -> Numbers:
        place = folder / f"{name} {next(number)}"
        before(name)
        numbers = ways[name](place)
        if place.exists():
            shutil.rmtree(place)
            os.sync()  # otherwise the next store waits for writes of this one
        return numbers

    return take_turns({name: lambda name=name: one(name) for name in ways}, rounds)


def show(title: str, found: Found, size_bytes: int, base: str, more: Sequence[str] = ()) -> str:
    """Return a table of how long the loop was blocked, relative to ``base``, or to the first store without ``base``."""
    base = base if base in found else next(iter(found))
    columns = {"held_s": "p50, s", "durable_s": "durable, s"}
    head = ["store", "p50, s", "p10-p90", "GB/s", f"to {base}", *(columns.get(name, name) for name in more)]
    rows = []
    for name, numbers in found.items():
        values = [each["held_s"] for each in numbers]
        p50, p10, p90 = cells(values, 3)
        rate = f"{1e-9 * size_bytes / statistics.median(values):.2f}"
        to = times(values, [each["held_s"] for each in found[base]])
        columns_of = (f"{statistics.median(each.get(key, 0.0) for each in numbers):.3f}" for key in more)
        rows.append([name, p50, f"{p10}-{p90}", rate, to, *columns_of])
    return table(title, head, rows)


def show_train(title: str, found: Found) -> str:
    """Return a table of the effect of a checkpoint on a loop."""
    head = [
        "store",
        "blocked, s",
        "steps while it is written",
        "longest step, ms",
        "alone",
        "durable, s",
        "time lost, s",
    ]
    keys = {"held_s": 1.0, "slower": 1.0, "longest_s": 1e3, "longest_alone_s": 1e3, "durable_s": 1.0, "lost_s": 1.0}
    rows = [
        [name, *(f"{scale * statistics.median(each[key] for each in numbers):.2f}" for key, scale in keys.items())]
        for name, numbers in found.items()
    ]
    return table(title, head, rows)


# ---------------------------------------------------------------------------------------------
# Flips

Place = tuple[str, int]
"""A byte: its file, and its offset."""


def flip_bits(store: str, python: str, flips: int, folder: Path, seed: int) -> dict[str, Counter[str]]:
    """Flip bits of a saved state, one at a time; return the outcomes, by the kind of bytes."""
    outcomes: dict[str, Counter[str]] = {"values": Counter(), "rest": Counter()}
    worker = Elsewhere(python, FLIP_BYTES, FLIP_LAYERS)
    try:
        worker.ask("save", store=store, folder=str(folder))
        saved = shutil.copytree(folder, folder.with_name(f"{folder.name} as saved"))
        ranges = where_values_are(saved, make_state(FLIP_BYTES, FLIP_LAYERS))
        rng = random.Random(seed)
        for number in range(flips):
            kind = ("values", "rest")[number % 2] if ranges["values"] else "rest"
            file, offset = draw(ranges[kind], rng)
            try:
                place = {"store": store, "folder": str(folder), "file": file, "offset": offset, "bit": rng.randrange(8)}
                outcome = worker.ask("flip", FLIP_LIMIT_S, **place)
            except (EOFError, TimeoutError) as error:
                outcome = "died" if isinstance(error, EOFError) else "hung"
                worker.__exit__()
                shutil.rmtree(folder)
                shutil.copytree(saved, folder)
                worker = Elsewhere(python, FLIP_BYTES, FLIP_LAYERS)
            outcomes[kind][outcome] += 1
    finally:
        worker.__exit__()
    return outcomes


def where_values_are(folder: Path, state: State) -> dict[str, list[tuple[str, int, int]]]:
    """Return the ranges of files that hold values, and the other ranges; compressed values are not recognized."""
    ranges: dict[str, list[tuple[str, int, int]]] = {"values": [], "rest": []}
    wanted = [bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in state.values()]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data, name = path.read_bytes(), str(path.relative_to(folder))
        places = sorted((at, at + len(values)) for values in wanted if (at := data.find(values)) >= 0)
        end = 0
        for first, last in [*places, (len(data), len(data))]:
            if first > end:
                ranges["rest"].append((name, end, first))
            if last > max(first, end):
                ranges["values"].append((name, max(first, end), last))
            end = max(end, last)
    return ranges


def draw(ranges: Sequence[tuple[str, int, int]], rng: random.Random) -> Place:
    """Return a random byte of some ranges, all bytes equally likely."""
    file, first, last = rng.choices(ranges, [last - first for _, first, last in ranges])[0]
    return file, rng.randrange(first, last)


def flip_all(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Counter[str]]]:
    """Flip bits of all stores, several in parallel."""
    cases = {f"holdfast:{name}": (sys.executable, options.flips) for name in FORMATS if "holdfast" in options.ways}
    for name in RANK_STORES[1:]:
        if name in options.ways:
            cases[name] = (str(PEERS_PYTHON) if name in PEERS else sys.executable, options.peer_flips)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {
            name: pool.submit(flip_bits, name, python, flips, folder / name.replace(":", " "), seed)
            for seed, (name, (python, flips)) in enumerate(cases.items())
        }
        return {name: future.result() for name, future in running.items()}


def show_flips(found: Mapping[str, Mapping[str, Counter[str]]]) -> str:
    """Return a table of the outcomes."""
    outcomes = ("found", "wrong", "no effect", "died", "hung")
    rows = [
        [name, kind, f"{sum(counts.values()):,}", *(f"{counts[outcome]:,}" for outcome in outcomes)]
        for name, kinds in found.items()
        for kind, counts in kinds.items()
        if counts
    ]
    head = ["store", "bit in", "flips", "detected", "silently wrong", "no effect", "process died", "hung"]
    return table("One bit flipped", head, rows)


# ---------------------------------------------------------------------------------------------
# The benchmark


def is_installed(store: str) -> bool:
    """Return whether the environment of the peers has a store; print a line if it has not."""
    if PEERS_PYTHON.exists():
        asked = [str(PEERS_PYTHON), "-c", f"import {PEERS[store]}"]
        if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return True
    print(f"{store} is not in .venv-peers and is skipped: run `make bench-peers`\n")
    return False


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__,
        bytes=(1e9, "size of the state"),
        layers=(21, "layers of the model: fewer layers make fewer and larger tensors"),
        rounds=5,
        ranks=(8, "processes that save and load at once"),
        flips=(10_000, "flips for each format of Holdfast"),
        peer_flips=(400, "flips for each peer"),
        parts=([*PARTS], None, PARTS),
        ways=([*STORES], None, [*STORES]),
        dir=(None, "folder on the disk to measure; default: a temporary directory"),
    )
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: Path, peers: Elsewhere | None) -> dict[str, Any]:
    """Measure, and print a table of each part."""
    torch.set_num_threads(os.cpu_count() or 1)
    ways = Ways(options.bytes, options.layers, options.ways, folder, peers)
    what = f"{ways.size_bytes / 1e9:.2f} GB in {ways.num_tensors:,} tensors"
    results: dict[str, Any] = {}
    if "save" in options.parts:
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as source:
            results["save"] = found = measure_ways(ways.save(Path(source.name)), folder, options.rounds)
        print(show(f"Save, synced: {what}", found, ways.size_bytes, "dd"), end="\n\n", flush=True)
    if "async" in options.parts:
        results["async"] = found = measure_ways(ways.begin(), folder, options.rounds)
        title = f"Asynchronous save, time that the loop is blocked: {what}"
        print(show(title, found, ways.size_bytes, "copy", ["durable_s"]), end="\n\n", flush=True)
    if "train" in options.parts:
        results["train"] = found = measure_ways(ways.train(), folder, options.rounds)
        print(show_train(f"A loop while a checkpoint is written: {what}", found), end="\n\n", flush=True)
    if "load" in options.parts:
        results["load"] = found = measure_ways(ways.load(), folder, options.rounds)
        title = f"Load, files in the page cache: {what}"
        print(show(title, found, ways.size_bytes, "safetensors"), end="\n\n", flush=True)
    if "cold" in options.parts:
        loads = ways.load()
        results["cold"] = found = measure_ways(
            loads, folder, options.rounds, before=lambda name: evict(ways.saved(name))
        )
        print(show(f"Load, cold: {what}", found, ways.size_bytes, "safetensors"), flush=True)
    return results


def main() -> None:
    """Measure everything and print the tables."""
    options = parse()
    warnings.simplefilter("ignore")
    options.ways = [name for name in options.ways if name not in PEERS or is_installed(name)]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        if {*options.parts} - {"flips", "ranks"}:
            if PEERS.keys() & {*options.ways}:
                with Elsewhere(str(PEERS_PYTHON), options.bytes, options.layers) as peers:
                    results = measure(options, Path(name), peers)
            else:
                results = measure(options, Path(name), None)
        if "ranks" in options.parts:
            place = Path(name) / "ranks"
            place.mkdir()
            results["ranks"] = measure_ranks([store for store in RANK_STORES if store in options.ways], options, place)
        if "flips" in options.parts:
            results["flips"] = found = flip_all(options, Path(name))
            print("\n" + show_flips(found))
    write_json(options.json, bytes=options.bytes, rounds=options.rounds, results=results)


if __name__ == "__main__":
    main()
