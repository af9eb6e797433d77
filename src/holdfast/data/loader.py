"""Loading the inputs of slices: on demand, or ahead of time in loader processes.

A slice depends only on (seed, step, slice), so it makes no difference which process loads it, or when. Slices
loaded ahead of time are kept when workers fail or join: most of them are needed anyway. The rest was loaded in vain.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from holdfast.base.side_work import say
from holdfast.data.plan import Ids, MiniBatch
from holdfast.data.samples import fetch
from holdfast.data.seeds import seed_slice
from holdfast.errors import ScriptError

ENDS_S = 1.0
"""A broken pipe may be noticed before the end of the process that wrote to it."""
MOST_RESTARTS = 3
"""Maximum number of consecutive restarts of the loader processes without a loaded slice in between."""

Ahead = Callable[[MiniBatch], Iterator[MiniBatch]]
"""Returns the mini-batches that follow one, provided that no worker fails or joins."""
Mine = Callable[[MiniBatch], Sequence[int]]
"""Returns the slices of a mini-batch whose inputs are needed here."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """The input of a training loop, as given by the script."""

    dataset: Any  # anything with `len` and `[]`
    collate: Any = None  # makes a batch from a list of samples; None: torch's default
    num_workers: int = 0  # loader processes of each worker; 0: it loads in its own process
    prefetch_factor: int = 2  # slices that each of them loads ahead
    worker_init: Callable[[int], None] | None = None  # called in each loader process with its number
    timeout_s: float = 0.0  # of waiting for a loader process; 0: none
    multiprocessing_context: Any = None  # starts the loader processes; None: torch's default

    @property
    def may_draw(self) -> bool:
        """Whether loading may draw random numbers; indexing tensors does not."""
        return not (self.collate is None and type(self.dataset) is TensorDataset)

    def load(self, seed: int, step: int, number: int, ids: Ids) -> Any:
        """Return the inputs of a slice; random numbers in it depend only on the arguments."""
        seed_slice(seed, step, number)
        return fetch(self.dataset, ids, self.collate)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A slice to load; ``step`` is -1 for none."""

    seed: int
    step: int
    number: int
    ids: Ids

    def is_same(self, other: _Wanted) -> bool:
        return (self.seed, self.step, self.number) == (other.seed, other.step, other.number) and np.array_equal(
            self.ids, other.ids
        )


_NOTHING = _Wanted(0, -1, -1, np.empty(0, dtype=np.int64))


class _Slices(Dataset[Any]):
    """The data set of the loader processes: each slice is one of its samples."""

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self.dataset = source.dataset

    def __getitem__(self, wanted: _Wanted) -> tuple[_Wanted, Any]:
        if wanted.step < 0:
            return wanted, None
        return wanted, self._source.load(wanted.seed, wanted.step, wanted.number, wanted.ids)


class _Queue(Iterable[_Wanted]):
    """The queue of slices to load, without an end: at the end of the plan it is idle, but a failure may add work."""

    def __init__(self) -> None:
        self.first: deque[_Wanted] = deque()
        self.then: Iterator[_Wanted] = iter(())
        self.outstanding: deque[_Wanted] = deque()

    def __iter__(self) -> Iterator[_Wanted]:
        while True:
            wanted = self.first.popleft() if self.first else next(self.then, _NOTHING)
            self.outstanding.append(wanted)
            yield wanted


class SliceLoader:
    """Provides the inputs of slices to a training loop: those that are ``mine``, and those of the mini-batches ``ahead``."""

    def __init__(self, source: DataSource, ahead: Ahead, mine: Mine) -> None:
        self._source = source
        self._ahead = ahead
        self._own_numbers = mine
        self._queue = _Queue()
        self._loader: Iterator[tuple[_Wanted, Any]] | None = None
        self._ready: list[tuple[_Wanted, Any]] = []
        self._planned: tuple[int, tuple[int, ...], tuple[int, ...]] = (-1, (), ())
        self._processes: list[BaseProcess] = []
        self._restarts = 0

    def __call__(self, seed: int, batch: MiniBatch, number: int) -> Any:
        """Return the inputs of a slice, and seed the generators for computing it."""
        ids = batch.slices[number]
        if not self._source.num_workers:
            inputs = self._source.load(seed, batch.step, number, ids)
            if self._source.may_draw:  # a loader process would not have used this process's generators
                seed_slice(seed, batch.step, number)
            return inputs
        inputs = self._take(seed, batch, _Wanted(seed, batch.step, number, ids))
        seed_slice(seed, batch.step, number)
        return inputs

    def close(self) -> None:
        """End the loader processes; they restart on demand."""
        self._loader = None  # the last reference to it
        self._queue, self._ready, self._planned = _Queue(), [], (-1, (), ())

    def _take(self, seed: int, batch: MiniBatch, wanted: _Wanted) -> Any:
        """Return the slice loaded ahead, or wait for it."""
        self._plan(seed, batch, wanted)
        self._ready = [(key, inputs) for key, inputs in self._ready if key.step >= batch.step]
        while True:
            for place, (key, inputs) in enumerate(self._ready):
                if key.is_same(wanted):
                    del self._ready[place]
                    return inputs
            if not any(request.is_same(wanted) for request in (*self._queue.outstanding, *self._queue.first)):
                self._queue.first.append(wanted)
            key, inputs = self._next()
            if key.step >= batch.step:  # otherwise it is no longer needed
                self._ready.append((key, inputs))

    def _plan(self, seed: int, batch: MiniBatch, wanted: _Wanted) -> None:
        """Set the slices to load next, if they differ from the previous plan: at the start, and after a worker failed or joined.

        Slices may contain other samples than before if a mini-batch is cut anew: then their sizes differ.
        """
        numbers, sizes = tuple(self._own_numbers(batch)), tuple(map(len, batch.slices))
        step, *before = self._planned
        self._planned = (batch.step, numbers, sizes)
        if before == [numbers, sizes] and step in (batch.step, batch.step - 1):
            return
        self._queue.first.clear()
        requests = [*self._queue.outstanding, *(one for one, _ in self._ready)]
        self._queue.then = (
            one
            for following in self._follow(batch)
            for number in self._own_numbers(following)
            if following.step > wanted.step or number >= wanted.number
            for one in [_Wanted(seed, following.step, number, following.slices[number])]
            if not any(one.is_same(other) for other in requests)
        )

    def _follow(self, batch: MiniBatch) -> Iterator[MiniBatch]:
        yield batch
        yield from self._ahead(batch)

    def _next(self) -> tuple[_Wanted, Any]:
        """Return the next loaded slice; restart the loader processes if one of them was lost."""
        if self._loader is None:
            self._loader = self._start()
        try:
            key, inputs = next(self._loader)
        except (RuntimeError, OSError, EOFError) as error:
            lost = wait([process.sentinel for process in self._processes], timeout=ENDS_S)
            code = max((process.exitcode or 0 for process in self._processes), default=0)
            if code > 0:  # nothing ended it from outside, so another one would end like it
                raise ScriptError(
                    f"a data loading process ended with exit code {code}, see what it printed; where it imports the script"
                    ' (spawn, forkserver), what trains must stand under `if __name__ == "__main__":`'
                ) from error
            if not lost or self._restarts == MOST_RESTARTS:
                raise
            self._restarts += 1
            say(f"a data loading process was lost ({error}); all of them are restarted")
            first = [wanted for wanted in (*self._queue.outstanding, *self._queue.first) if wanted.step >= 0]
            self._queue.outstanding.clear()
            self._queue.first = deque(first)
            self._loader = None
            return _NOTHING, None
        self._restarts = 0
        self._queue.outstanding.popleft()
        return key, inputs

    def _start(self) -> Iterator[tuple[_Wanted, Any]]:
        source = self._source
        loader: DataLoader[Any] = DataLoader(
            _Slices(source),
            batch_size=None,
            sampler=self._queue,
            collate_fn=as_it_is,
            num_workers=source.num_workers,
            prefetch_factor=source.prefetch_factor,
            worker_init_fn=None if source.worker_init is None else WorkerInit(source.worker_init),
            timeout=source.timeout_s,
            multiprocessing_context=source.multiprocessing_context,
        )
        slices, self._processes = start_processes(loader)
        return slices


def start_processes(loader: DataLoader[Any]) -> tuple[Iterator[Any], list[BaseProcess]]:
    """Start the processes of a loader; return what they load, and the processes."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD)
    other_processes = multiprocessing.active_children()
    loaded = iter(loader)
    processes = [process for process in multiprocessing.active_children() if process not in other_processes]
    if is_main and before is not None:
        # Torch's handler raises anywhere in this process, even during an all-reduce; reading the data detects the loss anyway.
        signal.signal(signal.SIGCHLD, before)
    return loaded, processes


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """Calls the script's ``worker_init_fn`` in a loader process, where ``get_worker_info().dataset`` is the script's dataset."""

    init: Callable[[int], None]

    def __call__(self, number: int) -> None:
        """Call the script's function with the number of the process."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen, and has the dataset of slices
        self.init(number)


def as_it_is(loaded: Any) -> Any:
    """Return what a loader process made, which is not collated again."""
    return loaded
