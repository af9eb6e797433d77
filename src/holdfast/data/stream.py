"""A stream: a dataset that is read in order, without ``len`` and ``[]``. Every sample has a number, its position in the epoch.

All workers read the same stream and keep the samples of the mini-batch in progress and of the next one, so a recovery
never goes back in it. It is read in chunks of :data:`CHUNK` samples. Random numbers that are drawn while a chunk is read
depend only on the seed, the epoch and the position of the chunk, so it makes no difference where reading begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from holdfast.base.side_work import say
from holdfast.data.loader import ENDS_S, MOST_RESTARTS, WorkerInit, as_it_is, start_processes
from holdfast.data.seeds import seed_of, seeded
from holdfast.data.stream_state import decode_state, encode_state
from holdfast.errors import ConfigError, InternalError

CHUNK = 64
"""Samples that are read at once; the first position of a chunk is a multiple of it."""


def is_stream(data: Any) -> bool:
    """Return whether samples can only be read in order: an ``IterableDataset``, another iterable, or a function that returns one."""
    if isinstance(data, IterableDataset):
        return True
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return False
    return hasattr(data, "__iter__") or (callable(data) and not isinstance(data, type))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMark:
    """A chunk of an epoch, from which reading can begin again, in this process or in another run.

    Args:
        position: Of the first sample of the chunk.
        state: The dataset's state before the chunk, encoded; None: the epoch must be read from its beginning.
        digest: Of the chunk; 0: it was not read yet.
        head: The dataset's state before the epoch; None: it has none.
        first: The digest of the first chunk of the epoch; 0: it was not read yet.
    """

    position: int = 0
    state: str | None = None
    digest: int = 0
    head: str | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Samples that were read at once."""

    first: int  # position of the first one
    size: int
    samples: list[Any]  # none if they are skipped
    state: str | None  # the dataset's state before it, encoded; None if it has none that can be saved
    digest: int
    tail: str | None  # the dataset's state after it, if the epoch ends with it

    @property
    def stop(self) -> int:
        return self.first + self.size

    @property
    def is_last(self) -> bool:
        return self.size < CHUNK


@dataclass(frozen=True, slots=True)
class _Start:
    """Where to begin reading."""

    seed: int
    epoch: int
    position: int = 0
    state: str | None = None  # the dataset's state to load; None: it is in the right one
    skipped: int = 0  # samples of chunks before this position are not needed
    passes: int = 0  # times that the dataset must be begun before, because it may count its epochs itself

    def key(self, *place: int | str) -> int:
        return seed_of("stream", self.seed, self.epoch, *place)


class _Chunks(IterableDataset[_Chunk]):
    """The chunks of an epoch from a position on."""

    def __init__(self, dataset: Any, start: _Start) -> None:
        self.dataset = dataset
        self._start = start

    def __iter__(self) -> Iterator[_Chunk]:
        start, dataset = self._start, self.dataset
        with _begun(start.key("begin")):
            if callable(set_epoch := getattr(dataset, "set_epoch", None)):
                set_epoch(start.epoch)
            if start.state is not None:
                dataset.load_state_dict(decode_state(start.state))
            for _ in range(start.passes):
                next(iter(dataset), None)
            state = _state_of(dataset) if start.position == 0 else start.state
            samples = iter(dataset if hasattr(dataset, "__iter__") else dataset())
        for first in itertools.count(start.position, CHUNK):
            with _begun(start.key(first)):
                taken = list(itertools.islice(samples, CHUNK))
                after = _state_of(dataset)
            needed = taken if first >= start.skipped else []
            yield _Chunk(first, len(taken), needed, state, _digest_of(taken), after if len(taken) < CHUNK else None)
            if len(taken) < CHUNK:
                return
            state = after


@contextlib.contextmanager
def _begun(key: int) -> Iterator[None]:
    """Seed the global generators, and hide the variables by which some datasets split their samples among workers."""
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ[name] for name in alone if name in os.environ}
    os.environ.update({name: alone[name] for name in before})
    try:
        with seeded(key):
            yield
    finally:
        os.environ.update(before)


def _state_of(dataset: Any) -> str | None:
    return encode_state(dataset.state_dict()) if _has_state(dataset) else None


def _has_state(dataset: Any) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


_begun_times: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How often each dataset was begun in this process, of those that may count their epochs themselves."""


def _may_count(dataset: Any) -> bool:
    """Return whether a dataset may count how often it was begun, as those of webdataset do, to shuffle in another order each time."""
    try:
        hash(dataset)
        weakref.ref(dataset)
    except TypeError:
        return False
    return hasattr(dataset, "__iter__") and not (_has_state(dataset) or hasattr(dataset, "set_epoch"))


class Stream:
    """Reads a stream in order, and keeps what may be needed again.

    Args:
        dataset: An iterable, or a function that returns one; the same on every worker.
        seed: The job's seed.
        num_workers: 1: a loader process reads ahead; 0: this process reads.
        prefetch_factor: Chunks that the loader process reads ahead.
        worker_init: Called in the loader process, with 0.
        timeout_s: Of waiting for the loader process; 0: none.
        multiprocessing_context: Starts the loader process; None: torch's default.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        worker_init: Callable[[int], None] | None = None,
        timeout_s: float = 0.0,
        multiprocessing_context: Any = None,
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._has_process = num_workers > 0
        self._options: dict[str, Any] = (
            {}
            if not num_workers
            else {
                "num_workers": 1,
                "prefetch_factor": prefetch_factor,
                "worker_init_fn": None if worker_init is None else WorkerInit(worker_init),
                "timeout": timeout_s,
                "multiprocessing_context": multiprocessing_context,
            }
        )
        self._epoch = -1
        self._offset = 0
        self._kept: deque[_Chunk] = deque()
        self._chunks: Iterator[_Chunk] | None = None
        self._processes: list[BaseProcess] = []
        self._restarts = 0
        self._begin = StreamMark()
        self._must_seek = False
        self.say: Callable[[str], None] = say
        """Prints a line for the user."""

    # -- reading

    @property
    def must_seek(self) -> bool:
        """Whether the next read first has to find a position, which may take as long as reading all samples before it."""
        return self._must_seek

    def limit(self, epoch: int, upto: int) -> int:
        """Read until the sample ``upto`` of ``epoch`` is known to exist or not; return ``upto``, or the epoch's length if that is less.

        Raises:
            ConfigError: if the epoch has no samples, or a position that a checkpoint names cannot be found again.
        """
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        while not self._kept or (self._kept[-1].stop < upto and not self._kept[-1].is_last):
            self._kept.append(self._read())
            self._drop()
        length = self._kept[-1].stop
        if not length:
            raise ConfigError(
                f"the stream gives no samples in epoch {epoch}: it must have some, and begin again for every epoch"
            )
        return min(length, upto)

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return samples of the current epoch, by position. A dict or list is a copy, which may be changed.

        Raises:
            InternalError: if a sample is no longer kept, or was not read yet.
        """
        kept = self._kept
        if not kept or min(positions) < kept[0].first or max(positions) >= kept[-1].stop:
            raise InternalError(f"samples {min(positions)} to {max(positions)} of a stream are not kept")
        return [_copied(kept[(number - kept[0].first) // CHUNK].samples[number % CHUNK]) for number in positions]

    def forget(self, epoch: int, offset: int) -> None:
        """Samples before ``offset`` of ``epoch`` are not needed any more; a later epoch: none of the current one."""
        if epoch == self._epoch:
            self._offset = offset
            self._drop()

    def _drop(self) -> None:
        while len(self._kept) > 1 and self._kept[0].stop < self._offset:
            self._kept.popleft()

    def digest(self, offset: int, end: int) -> int:
        """Return a digest of the chunks with the samples from ``offset`` to ``end``, from 0 to 2**62 - 1."""
        chunks = [chunk.digest for chunk in self._kept if chunk.stop > offset and chunk.first < end]
        return xxhash.xxh3_64_intdigest(repr((offset, end, chunks)).encode()) >> 2

    def close(self) -> None:
        """End the loader process. If an epoch was left before its end, the next one must still begin at the beginning."""
        self._chunks = None  # the last reference to the process
        is_within = self._kept and not self._kept[-1].is_last
        if is_within and not self._has_process and self._begin.head is not None:
            self.dataset.load_state_dict(decode_state(self._begin.head))

    # -- positions

    def mark(self, epoch: int, offset: int) -> StreamMark:
        """Return the last chunk with a sample before ``offset`` of ``epoch``."""
        if epoch != self._epoch:
            return StreamMark(head=self._tail()) if epoch == self._epoch + 1 else self._begin
        if offset == 0 or not self._kept:
            return self._begin
        chunk = next(chunk for chunk in reversed(self._kept) if chunk.first < offset)
        return self._mark(chunk)

    def _mark(self, chunk: _Chunk) -> StreamMark:
        return StreamMark(
            position=chunk.first,
            state=chunk.state,
            digest=chunk.digest,
            head=self._begin.head,
            first=self._begin.first,
        )

    def _tail(self) -> str | None:
        return self._kept[-1].tail if self._kept else None

    def seek(self, epoch: int, offset: int, mark: StreamMark) -> None:
        """Continue with the sample ``offset`` of ``epoch``, which lies in or after the chunk ``mark``."""
        self._offset = offset
        if epoch == self._epoch and self._kept and self._kept[0].first <= max(offset - 1, 0):
            return
        self._chunks = None
        self._kept.clear()
        self._epoch, self._begin, self._must_seek = epoch, mark, True

    def _begin_epoch(self, epoch: int) -> None:
        head = self._tail()
        self._chunks = None
        self._kept.clear()
        self._epoch, self._offset, self._begin, self._must_seek = epoch, 0, StreamMark(head=head), False
        # In this process the dataset is in the state in which the last epoch left it; a new process has that of the script.
        self._open(0, head if self._has_process else None)

    def _open(self, position: int, state: str | None, *, skipped: int = 0, passes: int = 0) -> None:
        if not self._has_process and _may_count(self.dataset):
            _begun_times[self.dataset] = _begun_times.get(self.dataset, 0) + passes + 1
        chunks = _Chunks(self.dataset, _Start(self._seed, self._epoch, position, state, skipped, passes))
        if not self._has_process:
            self._chunks = iter(chunks)
            return
        loader: DataLoader[Any] = DataLoader(chunks, batch_size=None, collate_fn=as_it_is, **self._options)
        self._chunks, self._processes = start_processes(loader)

    def _read(self) -> _Chunk:
        """Return the next chunk."""
        if self._must_seek:
            return self._find(self._begin)
        if self._chunks is None:
            return self._read_again()
        try:
            chunk = next(self._chunks)
        except (RuntimeError, OSError, EOFError) as error:
            lost = wait([process.sentinel for process in self._processes], timeout=ENDS_S)
            if not lost or self._restarts == MOST_RESTARTS:
                raise
            self._restarts += 1
            say(f"the process that reads the stream was lost ({error}); it is restarted")
            return self._read_again()
        self._restarts = 0
        return self._noted(chunk)

    def _read_again(self) -> _Chunk:
        """Return the next chunk after reading has begun anew, before it."""
        if not self._kept:
            return self._find(self._begin)
        self._find(self._mark(self._kept[-1]))
        assert self._chunks is not None
        return self._noted(next(self._chunks))

    def _noted(self, chunk: _Chunk) -> _Chunk:
        if chunk.first == 0:
            self._begin = StreamMark(head=chunk.state, first=chunk.digest)
        elif chunk.state is None and _has_state(self.dataset):
            self.say(
                "the stream's state_dict has values that cannot be saved in a checkpoint: a resumed run reads the epoch"
                " from its beginning"
            )
        return chunk

    # -- finding a position again

    def _find(self, mark: StreamMark) -> _Chunk:
        """Begin to read with the chunk ``mark``, and return it: by the state of the dataset if possible, else from the beginning."""
        chunk = self._load(mark) if mark.state is not None and mark.position else None
        if chunk is None:
            self._open(0, mark.head, skipped=mark.position)
            chunk = self._search(mark)
        if chunk is None and (passes := self._missing_passes()) >= 0:
            self._open(0, mark.head, skipped=mark.position, passes=passes)
            chunk = self._search(mark)
        if chunk is None:
            raise ConfigError(
                f"the stream of epoch {self._epoch} is not the one that was read before: up to sample {mark.position} it"
                " gives other samples; it must depend on nothing but its arguments, the epoch and random numbers"
            )
        self._must_seek = False
        if mark.first:
            self._begin = dataclasses.replace(mark, position=0, state=None, digest=mark.first)
        return chunk

    def _load(self, mark: StreamMark) -> _Chunk | None:
        """Return the chunk ``mark``, read from the dataset's state before it; None if the state leads elsewhere."""
        self._open(mark.position, mark.state)
        assert self._chunks is not None
        if (chunk := next(self._chunks)).digest == mark.digest:
            return chunk
        self.say(
            f"the stream does not continue at sample {mark.position} after load_state_dict, as with a shuffle buffer"
            " that its state_dict leaves out: the epoch is read from its beginning"
        )
        return None

    def _search(self, mark: StreamMark) -> _Chunk | None:
        """Return the chunk ``mark``, read from the beginning of the epoch; None if it is not there."""
        assert self._chunks is not None
        for chunk in self._chunks:
            wanted = {mark.position: mark.digest, 0: mark.first or mark.digest}.get(chunk.first, 0)
            if wanted not in (0, chunk.digest):
                return None
            if chunk.first == mark.position:
                return self._noted(chunk)
        return None

    def _missing_passes(self) -> int:
        """Return how often the dataset must be begun before this epoch, if it counts that itself; -1 if it was begun too often."""
        if not self._epoch or not _may_count(self.dataset):
            return -1
        return self._epoch - (0 if self._has_process else _begun_times.get(self.dataset, 0))


def _copied(sample: Any) -> Any:
    return sample.copy() if type(sample) in (dict, list) else sample


# -- digests of samples


def _digest_of(samples: Sequence[Any]) -> int:
    """Return a digest of a few samples of a chunk, and of their number, from 1 to 2**62."""
    digest = xxhash.xxh3_64(str(len(samples)).encode())
    for number in sorted({0, len(samples) // 2, len(samples) - 1} & set(range(len(samples)))):
        _add(digest, samples[number])
    return (digest.intdigest() >> 2) + 1


def _add(digest: Any, value: Any) -> None:
    """Add the content of a value; of an object of another class, what its dictionary has."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().reshape(-1)
        digest.update(value.view(torch.uint8).numpy() if value.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes | bytearray):
        digest.update(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if not (isinstance(name, str) and name.startswith("__")):  # such as the place of a shard on this machine
                digest.update(repr(name).encode())
                _add(digest, part)
    elif isinstance(value, list | tuple | np.ndarray):
        digest.update(b"(")
        for part in value:
            _add(digest, part)
    elif value is None or isinstance(value, str | int | float | complex | np.generic):
        digest.update(repr(value).encode(errors="surrogatepass"))
    else:
        digest.update(type(value).__qualname__.encode())
        content = value.tobytes() if callable(getattr(value, "tobytes", None)) else getattr(value, "__dict__", {})
        _add(digest, content)
