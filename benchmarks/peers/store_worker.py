"""Times and tests checkpoint stores, in this process or in another one that takes one command in each line.

::

    > .venv-peers/bin/python benchmarks/peers/store_worker.py '{"size_bytes": 1e9, "layers": 21}'
    > {"do": "save", "store": "orbax", "folder": "/data/a"}
    {"held_s": 2.1, "durable_s": 2.1}
"""

from __future__ import annotations

import json
import os
import resource
import select
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Self

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.stores import State, Store, make_state, open_store, sync_all

Numbers = dict[str, float]
ADDRESS_BYTES = 64 << 30
"""Memory limit: a flip can make a length huge, which must not take all memory of the machine."""


class Bench:
    """One state, the memory of one model, and the requested stores.

    Args:
        size_bytes: Approximate size of the state.
        layers: Layers of the model.
    """

    def __init__(self, size_bytes: float, layers: int = 21) -> None:
        self.state = make_state(size_bytes, layers)
        self.model: State = {key: torch.zeros_like(value) for key, value in self.state.items()}
        self._stores: dict[str, Store] = {}
        self._copy = {key: torch.zeros_like(value) for key, value in self.state.items()}

    def save(self, store: str, folder: str) -> Numbers:
        """Save the state; return the time in seconds until every file is synced, whether the store does that or not."""
        opened = self._store(store)
        start_s = time.perf_counter()
        opened.save(Path(folder), self.state)
        sync_all(Path(folder))
        taken_s = time.perf_counter() - start_s
        return {"held_s": taken_s, "durable_s": taken_s}

    def begin(self, store: str, folder: str) -> Numbers:
        """Save asynchronously; return how long the loop was blocked, and the time until the state was durable."""
        opened = self._store(store)
        start_s = time.perf_counter()
        wait = opened.begin(Path(folder), self.state)
        held_s = time.perf_counter() - start_s
        wait()
        return {"held_s": held_s, "durable_s": time.perf_counter() - start_s}

    def load(self, store: str, folder: str) -> Numbers:
        """Load into the model's memory; return the time it took, after a check of the values."""
        opened = self._store(store)
        for tensor in self.model.values():
            tensor.zero_()
        model = dict(self.model)
        start_s = time.perf_counter()
        opened.load(Path(folder), model)
        taken_s = time.perf_counter() - start_s
        if not same(model, self.state):
            sys.exit(f"{store} loaded other values than it saved")
        return {"held_s": taken_s}

    def copy(self) -> Numbers:
        """Copy the state into reused memory."""
        start_s = time.perf_counter()
        for key, tensor in self._copy.items():
            tensor.copy_(self.state[key])
        return {"held_s": time.perf_counter() - start_s}

    def train(self, store: str, folder: str) -> Numbers:
        """Run steps of a loop like training alone, then while a checkpoint is written; return the effect on them.

        ``lost_s`` is the additional time of everything compared with the same steps alone.
        """
        opened, threads = self._store(store), torch.get_num_threads()
        torch.set_num_threads(1)
        alone = [step() for _ in range(150)][50:]
        start_s = time.perf_counter()
        wait = opened.begin(Path(folder), self.state)
        held_s = time.perf_counter() - start_s
        waiting = threading.Thread(target=wait)
        waiting.start()
        beside = []
        while waiting.is_alive():
            beside.append(step())
        durable_s = time.perf_counter() - start_s
        torch.set_num_threads(threads)
        base_s = statistics.mean(alone)
        return {
            "step_s": base_s,
            "held_s": held_s,
            "durable_s": durable_s,
            "slower": statistics.mean(beside) / base_s,
            "longest_s": max(beside),
            "longest_alone_s": max(alone),
            "lost_s": durable_s - len(beside) * base_s,
        }

    def flip(self, store: str, folder: str, file: str, offset: int, bit: int) -> str:
        """Load with one bit flipped; return ``found``, ``wrong`` or ``no effect``."""
        number = os.open(Path(folder) / file, os.O_RDWR)
        try:
            byte = os.pread(number, 1, offset)
            os.pwrite(number, bytes([byte[0] ^ 1 << bit]), offset)
            outcome = self._outcome(store, folder)
            os.pwrite(number, byte, offset)
        finally:
            os.close(number)
        return outcome

    def _outcome(self, store: str, folder: str) -> str:
        for tensor in self.model.values():
            tensor.zero_()
        model = dict(self.model)
        try:
            self._store(store).load(Path(folder), model)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # some libraries raise a BaseException
            return "found"
        return "no effect" if same(model, self.state) else "wrong"

    def _store(self, name: str) -> Store:
        if name not in self._stores:
            self._stores[name] = open_store(name)
        return self._stores[name]


def step() -> float:
    """Compute many small operations, as a training loop does; return the time taken."""
    start_s = time.perf_counter()
    value = WEIGHT
    for _ in range(20):
        value = torch.tanh(value @ WEIGHT).add_(1e-3)
    return time.perf_counter() - start_s


WEIGHT = torch.rand(256, 256)


def same(found: State, wanted: State) -> bool:
    """Return whether two states are bit-identical."""
    return all(
        found[key].dtype == tensor.dtype
        and found[key].shape == tensor.shape
        and torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for key, tensor in wanted.items()
    )


class Elsewhere:
    """A :class:`Bench` in another process, possibly of another environment. Its standard error is discarded.

    Args:
        python: Path of the interpreter.
        size_bytes: See :class:`Bench`.
        layers: See :class:`Bench`.
    """

    def __init__(self, python: str, size_bytes: float, layers: int = 21) -> None:
        asked = json.dumps({"size_bytes": size_bytes, "layers": layers})
        self._process = subprocess.Popen(
            [python, __file__, asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, do: str, limit_s: float = 600.0, **arguments: Any) -> Any:
        """Return the result of a method of :class:`Bench`.

        Raises:
            EOFError: if the process died.
            TimeoutError: if it does not answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise TimeoutError(do)
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(do)
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Execute commands from standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    bench = Bench(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(bench, asked.pop("do"))(**asked)), file=answers, flush=True)


if __name__ == "__main__":
    main()
