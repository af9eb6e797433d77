"""Several processes that save and load at once, by the rules of MLPerf Storage for checkpoints.

The part ``ranks`` of ``benchmarks/checkpoint/save_load.py``. The rules: writes are synced, within the time that counts; the cache is
cleared between write and read; the time of a round is the longest of all ranks, its throughput the lowest; the result is the
mean of five rounds, by eight ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from checkpoint.page_cache import evict
from common import PEERS_PYTHON, mean_interval, table
from peers.store_worker import Elsewhere
from peers.stores import PEERS

RANK_STORES = ("holdfast", "safetensors", "torch", "dcp", *PEERS)


def measure_ranks(stores: Sequence[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Save and load with several processes at once, by the rules of MLPerf Storage; print a table."""
    results: dict[str, Any] = {}
    share = options.bytes / options.ranks
    for name in stores:
        python = str(PEERS_PYTHON) if name in PEERS else sys.executable
        with ExitStack() as stack:
            ranks = [stack.enter_context(Elsewhere(python, share, options.layers)) for _ in range(options.ranks)]
            for rank in ranks:  # imports, and what a store does only the first time
                rank.ask("save", store=name, folder=str(folder / f"{name} first {id(rank)}"))
            rounds = [
                _round_of_ranks(name, ranks, folder / f"{name} {number}", share) for number in range(options.rounds)
            ]
        for place in folder.iterdir():
            shutil.rmtree(place)
        results[name] = {key: [each[key] for each in rounds] for key in rounds[0]}
    heads = ["store", "write, s", "write, GB/s a rank", "cold read, s", "read, GB/s a rank"]
    keys = ("write_s", "write_gb_per_s", "read_s", "read_gb_per_s")
    shown = "{:.3f} ({:.3f}-{:.3f})"
    rows = [[name, *(shown.format(*mean_interval(found[key])) for key in keys)] for name, found in results.items()]
    title = f"{options.ranks} ranks, {share / 1e9:.3f} GB each: slowest rank of each round, mean of {options.rounds}"
    print("\n" + table(title, heads, rows), end="\n\n", flush=True)
    return results


def _round_of_ranks(name: str, ranks: Sequence[Elsewhere], folder: Path, share_bytes: float) -> dict[str, float]:
    places = [folder / f"rank-{number}" for number in range(len(ranks))]
    folder.mkdir()

    def ask_all(do: str) -> list[float]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            asked = [
                pool.submit(rank.ask, do, store=name, folder=str(place))
                for rank, place in zip(ranks, places, strict=True)
            ]
            return [each.result()["held_s"] for each in asked]

    writes = ask_all("save")
    evict(folder)
    reads = ask_all("load")
    shutil.rmtree(folder)
    os.sync()
    return {
        "write_s": max(writes),
        "write_gb_per_s": min(1e-9 * share_bytes / taken_s for taken_s in writes),
        "read_s": max(reads),
        "read_gb_per_s": min(1e-9 * share_bytes / taken_s for taken_s in reads),
    }
