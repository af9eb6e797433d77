"""What a script trains on, taken apart: a dataset, a ``DataLoader`` or a stream, as the samples and the plan of a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from holdfast.data.loader import DataSource
from holdfast.data.samples import check_dataset
from holdfast.data.sampling import SamplerOrder
from holdfast.data.stream import CHUNK, Stream, is_stream
from holdfast.errors import ConfigError

_SET_IN_LOADER = "batch_size", "shuffle", "drop_last", "collate", "num_workers", "prefetch_factor"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """The arguments of ``session.steps`` about its data; None is what the script left out."""

    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int | None = None
    prefetch_factor: int | None = None

    def given(self) -> list[str]:
        """Return the names of the arguments that the script gave."""
        return [name for name in _SET_IN_LOADER if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """The data of a training loop.

    Args:
        source: Loads samples.
        num_samples: Samples of the dataset; -1 for a stream.
        batch_size: Samples of a mini-batch, over all workers.
        shuffle: Shuffle in an order that depends only on the seed and the epoch.
        drop_last: Drop the short mini-batch at the end of an epoch.
        sampler: The order of each epoch, if the script gave a sampler; ``shuffle`` is then False.
        stream: The samples, if they can only be read in order.
        notes: Lines about what is done in another way than by a ``DataLoader`` in one process.
    """

    source: DataSource
    num_samples: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    sampler: SamplerOrder | None = None
    stream: Stream | None = None
    notes: tuple[str, ...] = ()


def open_source(data: Any, options: DataOptions, *, seed: int) -> OpenedSource:
    """Return the data of a loop over ``data``.

    Args:
        data: A dataset with ``len`` and ``[]``, a stream (see :func:`~holdfast.data.stream.is_stream`), or a
            ``DataLoader`` of one.
        options: What the script gave besides; nothing for a ``DataLoader``, which has it all.
        seed: The job's seed.

    Raises:
        ConfigError: if an argument is not allowed, or something of a ``DataLoader`` cannot be honoured.
    """
    if isinstance(data, DataLoader):
        if names := options.given():
            raise ConfigError(f"{names[0]} is set in the DataLoader: leave it out of session.steps")
        return _open_loader(data, seed)
    return _open_dataset(data, options, seed)


def _open_dataset(dataset: Any, options: DataOptions, seed: int) -> OpenedSource:
    if options.batch_size is None:
        raise ConfigError("batch_size is missing: the samples of a mini-batch, over all workers")
    workers = 0 if options.num_workers is None else options.num_workers
    factor = 2 if options.prefetch_factor is None else options.prefetch_factor
    if is_stream(dataset):
        if options.shuffle:
            raise ConfigError(
                "a stream cannot be shuffled by session.steps, which reads it in order: let it shuffle itself"
            )
        source = DataSource(dataset, options.collate, workers, factor)
        return _streamed(source, options.batch_size, drop_last=bool(options.drop_last), seed=seed)
    check_dataset(dataset)
    return _checked(
        OpenedSource(
            source=DataSource(dataset, options.collate, workers, factor),
            num_samples=len(dataset),
            batch_size=options.batch_size,
            shuffle=options.shuffle is None or options.shuffle,
            drop_last=bool(options.drop_last),
        )
    )


def _streamed(source: DataSource, batch_size: int, *, drop_last: bool, seed: int) -> OpenedSource:
    """Return the data of a stream; ``source`` has it as its dataset."""
    if isinstance(source.dataset, Iterator):
        raise ConfigError(
            f"a {type(source.dataset).__name__} can be read only once, and a resumed run must read it again: pass a function"
            " that returns it"
        )
    workers = source.num_workers
    note = (
        f"a stream is read in order, so each worker has one loader process instead of num_workers={workers}, which reads"
        " ahead; collate runs in the worker itself"
    )
    opened = OpenedSource(
        source=source,
        num_samples=-1,
        batch_size=batch_size,
        shuffle=False,
        drop_last=drop_last,
        notes=(note,) if workers > 1 else (),
    )
    _checked(dataclasses.replace(opened, num_samples=1))
    stream = Stream(
        source.dataset,
        seed,
        num_workers=workers,
        prefetch_factor=-(-source.prefetch_factor * batch_size // CHUNK),
        worker_init=source.worker_init,
        timeout_s=source.timeout_s,
        multiprocessing_context=source.multiprocessing_context,
    )
    return dataclasses.replace(opened, source=DataSource(stream, source.collate), stream=stream)


def _checked(opened: OpenedSource) -> OpenedSource:
    for name, value, least in (
        ("len(dataset)", opened.num_samples, 1),
        ("batch_size", opened.batch_size, 1),
        ("num_workers", opened.source.num_workers, 0),
        ("prefetch_factor", opened.source.prefetch_factor, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    return opened


# -- a DataLoader


def _open_loader(loader: DataLoader[Any], seed: int) -> OpenedSource:
    """Return the data of a ``DataLoader``."""
    if not _is_torchs_loader(loader):
        raise ConfigError(
            f"{type(loader).__name__} has an __iter__ of its own, which cannot be taken apart: pass a torch.utils.data.DataLoader"
        )
    source = DataSource(
        loader.dataset,
        None if loader.collate_fn is default_collate else loader.collate_fn,
        loader.num_workers,
        loader.prefetch_factor or 2,
        worker_init=loader.worker_init_fn,
        timeout_s=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
    )
    if is_stream(source.dataset):
        if loader.batch_size is None:
            raise ConfigError(
                "a DataLoader with batch_size=None does not make batches of samples, and a mini-batch is cut into slices of"
                " samples: let the stream give samples, and the DataLoader the batch_size of a mini-batch"
            )
        return _streamed(source, loader.batch_size, drop_last=loader.drop_last, seed=seed)
    check_dataset(source.dataset)
    return _checked(_sampled(loader, source, seed))


def _sampled(loader: DataLoader[Any], source: DataSource, seed: int) -> OpenedSource:
    """Return the data with the mini-batches that the samplers of a ``DataLoader`` make."""
    size = len(source.dataset)
    batches: Any = loader.batch_sampler
    if batches is None:
        raise ConfigError(
            "a DataLoader with batch_size=None does not make batches of samples: give it the batch_size of a mini-batch"
        )
    if not _is_torchs(batches, BatchSampler):
        order = SamplerOrder(batches, size, seed, in_batches=True)
        return OpenedSource(
            source=source,
            num_samples=size,
            batch_size=order.first_batch_size(0),
            shuffle=False,
            drop_last=False,
            sampler=order,
        )
    sampler = batches.sampler
    plain = OpenedSource(
        source=source, num_samples=size, batch_size=batches.batch_size, shuffle=False, drop_last=batches.drop_last
    )
    if _is_torchs(sampler, SequentialSampler) and len(sampler) == size:
        return plain
    if _is_torchs(sampler, RandomSampler) and _is_permutation(sampler, size):
        return dataclasses.replace(plain, shuffle=True)
    if type(sampler) is DistributedSampler and len(source.dataset) == _size_of(sampler):
        return _undistributed(plain, sampler)
    return dataclasses.replace(plain, sampler=SamplerOrder(sampler, size, seed))


def _size_of(sampler: Any) -> int:
    return len(sampler.dataset)


def _is_torchs_loader(loader: DataLoader[Any]) -> bool:
    """Return whether torch or torchdata, and no class of the script or another package, decides what the loader yields."""
    own = type(loader).__iter__
    return own is DataLoader.__iter__ or own.__module__.startswith("torchdata.stateful_dataloader")


def _is_torchs(sampler: Any, kind: type) -> bool:
    """Return whether a sampler is torch's own of this kind, or torchdata's of the same name, and no class of the script's."""
    own = type(sampler)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.startswith("torchdata.stateful_dataloader"))


def _is_permutation(sampler: Any, size: int) -> bool:
    return not sampler.replacement and len(sampler.data_source) == size and sampler.num_samples == size


def _undistributed(plain: OpenedSource, sampler: Any) -> OpenedSource:
    batch_size = plain.batch_size * sampler.num_replicas
    note = (
        f"the DistributedSampler is replaced by the job's own {'shuffled ' * sampler.shuffle}order: a mini-batch has"
        f" {plain.batch_size} x {sampler.num_replicas} = {batch_size} samples over all workers, and no sample is repeated"
    )
    return dataclasses.replace(plain, batch_size=batch_size, shuffle=sampler.shuffle, notes=(note,))
