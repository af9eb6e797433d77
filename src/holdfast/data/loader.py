"""Getting the inputs of slices: where they are needed, or ahead of time in processes of their own.

What a slice looks like depends on (seed, step, slice) alone, so it makes no difference who loads it, or when. What was
loaded ahead of time is kept when workers die or come: most of it is needed all the same. What is not is loaded in vain.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, TensorDataset

from holdfast.data.plan import Ids, MiniBatch
from holdfast.data.samples import fetch
from holdfast.data.seeds import seed_slice

_ENDS_S = 1.0
"""What cannot be read any more may be known before the end of who wrote it."""
_MOST_RESTARTS = 3
"""Processes that load are started anew so often without having brought anything in between."""

Ahead = Callable[[MiniBatch], Iterator[MiniBatch]]
"""Returns the mini-batches that follow one, as long as nobody dies or comes."""
Mine = Callable[[MiniBatch], Sequence[int]]
"""Returns the slices of a mini-batch whose inputs are needed here."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a training loop is fed with, as the script gave it."""

    dataset: Any  # anything with `len` and `[]`
    collate: Any = None  # makes a batch of a list of samples; None takes torch's
    num_workers: int = 0  # processes beside each worker that load ahead of time; 0: it loads by itself
    prefetch_factor: int = 2  # slices that each of them is ahead by

    @property
    def may_draw(self) -> bool:
        """Whether loading may draw random numbers; tensors that are only indexed do not."""
        return not (self.collate is None and type(self.dataset) is TensorDataset)

    def load(self, seed: int, step: int, number: int, ids: Ids) -> Any:
        """Return the inputs of a slice; what it draws is a function of the arguments."""
        seed_slice(seed, step, number)
        return fetch(self.dataset, ids, self.collate)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A slice that is to be loaded; ``step`` -1 for none."""

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
    """What the processes load from: a slice is one sample of it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, wanted: _Wanted) -> tuple[_Wanted, Any]:
        if wanted.step < 0:
            return wanted, None
        return wanted, self._source.load(wanted.seed, wanted.step, wanted.number, wanted.ids)


class _Queue(Iterable[_Wanted]):
    """What is to be loaded next, without an end: at the end of the plan there is nothing to do, but a death may change that."""

    def __init__(self) -> None:
        self.first: deque[_Wanted] = deque()
        self.then: Iterator[_Wanted] = iter(())
        self.outstanding: deque[_Wanted] = deque()

    def __iter__(self) -> Iterator[_Wanted]:
        while True:
            wanted = self.first.popleft() if self.first else next(self.then, _NOTHING)
            self.outstanding.append(wanted)
            yield wanted


class Loading:
    """Gives a training loop the inputs of its slices: of those that are ``mine``, and of what lies ``ahead``."""

    def __init__(self, source: Source, ahead: Ahead, mine: Mine) -> None:
        self._source = source
        self._ahead = ahead
        self._mine = mine
        self._queue = _Queue()
        self._loader: Iterator[tuple[_Wanted, Any]] | None = None
        self._ready: list[tuple[_Wanted, Any]] = []
        self._planned: tuple[int, tuple[int, ...], tuple[int, ...]] = (-1, (), ())
        self._processes: list[BaseProcess] = []
        self._restarts = 0

    def __call__(self, seed: int, batch: MiniBatch, number: int) -> Any:
        """Return the inputs of a slice, and leave the generators as they are to be for computing it."""
        ids = batch.slices[number]
        if not self._source.num_workers:
            inputs = self._source.load(seed, batch.step, number, ids)
            if self._source.may_draw:  # in a process it would not have been drawn here
                seed_slice(seed, batch.step, number)
            return inputs
        inputs = self._take(seed, batch, _Wanted(seed, batch.step, number, ids))
        seed_slice(seed, batch.step, number)
        return inputs

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        self._loader = None  # the last reference to it
        self._queue, self._ready, self._planned = _Queue(), [], (-1, (), ())

    def _take(self, seed: int, batch: MiniBatch, wanted: _Wanted) -> Any:
        """Return what was loaded ahead, or wait for it."""
        self._plan(seed, batch, wanted)
        self._ready = [(known, inputs) for known, inputs in self._ready if known.step >= batch.step]
        while True:
            for place, (known, inputs) in enumerate(self._ready):
                if known.is_same(wanted):
                    del self._ready[place]
                    return inputs
            if not any(asked.is_same(wanted) for asked in (*self._queue.outstanding, *self._queue.first)):
                self._queue.first.append(wanted)
            known, inputs = self._next()
            if known.step >= batch.step:  # else nobody waits for it any more
                self._ready.append((known, inputs))

    def _plan(self, seed: int, batch: MiniBatch, wanted: _Wanted) -> None:
        """Say what follows, where that is not what was said before: at first, and when somebody has died or come.

        The same slices may hold other samples than before, where a mini-batch is cut anew: then their sizes are others.
        """
        mine, sizes = tuple(self._mine(batch)), tuple(map(len, batch.slices))
        step, *before = self._planned
        self._planned = (batch.step, mine, sizes)
        if before == [mine, sizes] and step in (batch.step, batch.step - 1):
            return
        self._queue.first.clear()
        known = [*self._queue.outstanding, *(one for one, _ in self._ready)]
        self._queue.then = (
            one
            for following in self._follow(batch)
            for number in self._mine(following)
            if following.step > wanted.step or number >= wanted.number
            for one in [_Wanted(seed, following.step, number, following.slices[number])]
            if not any(one.is_same(other) for other in known)
        )

    def _follow(self, batch: MiniBatch) -> Iterator[MiniBatch]:
        yield batch
        yield from self._ahead(batch)

    def _next(self) -> tuple[_Wanted, Any]:
        """Return what comes next from the processes; where one of them was lost they are started anew."""
        if self._loader is None:
            self._loader = self._start()
        try:
            known, inputs = next(self._loader)
        except (RuntimeError, OSError, EOFError) as error:
            lost = wait([process.sentinel for process in self._processes], timeout=_ENDS_S)
            if not lost or self._restarts == _MOST_RESTARTS:
                raise
            self._restarts += 1
            sys.stderr.write(f"holdfast: a process that loads data was lost ({error}); they are started anew\n")
            first = [wanted for wanted in (*self._queue.outstanding, *self._queue.first) if wanted.step >= 0]
            self._queue.outstanding.clear()
            self._queue.first = deque(first)
            self._loader = None
            return _NOTHING, None
        self._restarts = 0
        self._queue.outstanding.popleft()
        return known, inputs

    def _start(self) -> Iterator[tuple[_Wanted, Any]]:
        source = self._source
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGCHLD)
        loader: DataLoader[Any] = DataLoader(
            _Slices(source),
            batch_size=None,
            sampler=self._queue,
            collate_fn=_as_it_is,
            num_workers=source.num_workers,
            prefetch_factor=source.prefetch_factor,
        )
        others = multiprocessing.active_children()
        slices = iter(loader)
        self._processes = [process for process in multiprocessing.active_children() if process not in others]
        if is_main and before is not None:
            # Torch's handler raises wherever this worker is, in the middle of a sum, too; who waits for data finds it out anyway.
            signal.signal(signal.SIGCHLD, before)
        return slices


def _as_it_is(loaded: Any) -> Any:
    return loaded
