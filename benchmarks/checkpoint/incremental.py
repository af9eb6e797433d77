"""Incremental checkpoints: what is written, and how long it takes, when parts of a state do not change.

    python benchmarks/checkpoint/incremental.py [--bytes 3e8] [--layers 21] [--rounds 8] [--dir DIR] [--json FILE]

The state is that of ``save_load.py``: a transformer with Adam. Between checkpoints one of these changes:

==========  =====================================================================================================
case        what changes between two checkpoints
==========  =====================================================================================================
fine-tuned  The last layer and its optimizer state; the other layers are frozen
embedding   All layers; of the embedding and its optimizer state, 50 rows. The embedding is half of the state
everything  All tensors, as in ordinary training: what an incremental checkpoint must not make slower
==========  =====================================================================================================

``holdfast`` writes incrementally, ``holdfast, full`` does not (``--full-checkpoints``). In each round all stores save the
same state, in another order each time, until it is synced. Each keeps its two newest checkpoints. *Written* counts the files that
were made: their bytes, and not those of files that only got another name. The first two checkpoints of each case, which
are full, and the two of the comparison that finds that everything changes, are not counted.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import cells, command_line, table, timed, times, write_json
from peers.stores import Dcp, Safetensors, State, make_state, sync_all

from holdfast.checkpoint import CheckpointStore, take
from holdfast.checkpoint.writer import CheckpointWriter

WARM_UP = 4
ROWS = 50
Save = Callable[[int, State], None]


def holdfast_saver(root: Path, *, incremental: bool) -> Save:
    """Return what saves a step as a session does, and waits until it is complete."""
    store = CheckpointStore(root)
    writer = CheckpointWriter(store, background=True, incremental=incremental)

    def save(step: int, state: State) -> None:
        writer.begin(step, take(state), {})
        writer.commit(0)
        writer.wait()
        for outcome in writer.poll():
            if outcome.error is not None:
                raise outcome.error

    return save


def savers(folder: Path) -> dict[str, Save]:
    """Return the stores, each with a folder of its own."""
    return {
        "holdfast": holdfast_saver(folder / "holdfast", incremental=True),
        "holdfast, full": holdfast_saver(folder / "holdfast, full", incremental=False),
        "safetensors": lambda step, state: Safetensors().save(folder / "safetensors" / f"step-{step:08d}", state),
        "dcp": lambda step, state: Dcp().save(folder / "dcp" / f"step-{step:08d}", state),
    }


def parts_of(state: State, case: str) -> list[torch.Tensor]:
    """Return the tensors that change as a whole."""
    names = [name.removeprefix("model.") for name in state if name.startswith("model.")]

    def parameter(key: str) -> str:
        return key.removeprefix("model.") if key.startswith("model.") else names[int(key.split(".")[2])]

    last = max(int(name.split(".")[1]) for name in names if name.startswith("layers."))
    changes = {
        "fine-tuned": lambda name: name.startswith(f"layers.{last}."),
        "embedding": lambda name: not name.startswith("embedding."),
        "everything": lambda name: True,
    }[case]
    return [tensor for key, tensor in state.items() if changes(parameter(key))]


def make(case: str, size_bytes: float, layers: int) -> State:
    """Return the state of a case: for the embedding, half of it is one."""
    if case != "embedding":
        return make_state(size_bytes, layers)
    state = make_state(size_bytes / 2, layers)
    width = state["model.embedding.weight"].shape[1]
    for key in [key for key, tensor in state.items() if tensor.shape == state["model.embedding.weight"].shape]:
        state[key] = torch.rand(round(size_bytes / 24 / width), width)
    return state


def train(state: State, case: str, rng: random.Random) -> None:
    """Change what a case changes."""
    for tensor in parts_of(state, case):
        tensor.add_(1e-3)
    if case == "embedding":
        tables = [tensor for tensor in state.values() if tensor.shape == state["model.embedding.weight"].shape]
        rows = [rng.randrange(len(tables[0])) for _ in range(ROWS)]
        for tensor in tables:
            tensor[rows] += 1e-3


def inodes(folder: Path) -> dict[int, int]:
    """Return the size of each file below a folder, whatever names it has."""
    return {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def measure(case: str, options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return seconds and bytes of each store in each round."""
    state, rng = make(case, options.bytes, options.layers), random.Random(0)
    stores = savers(folder)
    found: dict[str, dict[str, list[float]]] = {name: {"s": [], "bytes": []} for name in stores}
    order = [*stores]
    for step in range(1, WARM_UP + options.rounds + 1):
        train(state, case, rng)
        rng.shuffle(order)
        for name in order:
            root = folder / name
            root.mkdir(exist_ok=True)
            before = inodes(root)
            os.sync()
            taken_s = timed(lambda: (stores[name](step, state), sync_all(root / f"step-{step:08d}")))  # noqa: B023
            if step > WARM_UP:
                found[name]["s"].append(taken_s)
                found[name]["bytes"].append(sum(size for node, size in inodes(root).items() if node not in before))
            shutil.rmtree(root / f"step-{step - 2:08d}", ignore_errors=True)
    return found


def show(title: str, found: dict[str, dict[str, list[float]]]) -> str:
    """Return the table of a case."""
    base = found["holdfast, full"]
    rows = []
    for name, numbers in found.items():
        written, whole = statistics.mean(numbers["bytes"]), statistics.mean(base["bytes"])
        share = [f"{written / 1e6:.1f}", f"{100 * written / whole:.1f} %"]
        rows.append([name, *share, *cells(numbers["s"], 3, keys=["p50"]), times(numbers["s"], base["s"])])
    return table(title, ["store", "written, MB", "of a full one", "p50, s", "to a full one"], rows)


def main() -> None:
    """Measure all cases and print their tables."""
    options = command_line(
        __doc__, bytes=(3e8, "size of the state"), layers=21, rounds=8,
        dir=(None, "folder on the disk to measure; default: a temporary directory"),
    ).parse_args()  # fmt: skip
    results: dict[str, Any] = {}
    for case in ("fine-tuned", "embedding", "everything"):
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            results[case] = measure(case, options, Path(folder))
        print(show(f"{case}, {options.bytes / 1e9:.2f} GB", results[case]), end="\n\n", flush=True)
    write_json(options.json, bytes=options.bytes, rounds=options.rounds, results=results)


if __name__ == "__main__":
    main()
