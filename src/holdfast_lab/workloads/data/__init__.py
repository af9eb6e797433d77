"""Datasets by name: read from their published files, shipped with scikit-learn, or generated.

See docs/papers/data.md for the list.

Nothing is downloaded, unpickled or written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data.base import DataMissing, Dataset, DatasetPart, Kind, first
from holdfast_lab.workloads.data.documents import Documents, generated_documents, newsgroups, reuters
from holdfast_lab.workloads.data.imagenet import ImageFiles, imagenet
from holdfast_lab.workloads.data.images import cifar10, cifar100, digits, fashion_mnist, mnist, read_idx, resize
from holdfast_lab.workloads.data.ratings import generated_ratings, jester, movielens
from holdfast_lab.workloads.data.tables import covertype
from holdfast_lab.workloads.data.text import shakespeare

__all__ = [
    "DATASETS",
    "IMAGE_DATASETS",
    "DataMissing",
    "Dataset",
    "DatasetPart",
    "Documents",
    "ImageFiles",
    "cifar10",
    "cifar100",
    "covertype",
    "digits",
    "fashion_mnist",
    "generated_documents",
    "generated_ratings",
    "imagenet",
    "jester",
    "load_dataset",
    "load_first",
    "mnist",
    "movielens",
    "newsgroups",
    "read_idx",
    "resize",
    "reuters",
    "shakespeare",
]


@dataclass(frozen=True, slots=True)
class _Entry:
    load: Callable[..., Dataset]
    kind: Kind
    takes: tuple[str, ...] = ()
    """Options that ``load`` itself accepts."""
    from_files: bool = True


_ENTRIES = {
    "digits": _Entry(digits, "images", from_files=False),
    "fashion": _Entry(fashion_mnist, "images"),
    "mnist": _Entry(mnist, "images"),
    "cifar10": _Entry(cifar10, "images"),
    "cifar100": _Entry(cifar100, "images"),
    "imagenet": _Entry(imagenet, "images", ("size", "seed")),
    "covertype": _Entry(covertype, "table", ("seed",)),
    "movielens": _Entry(movielens, "ratings", ("seed",)),
    "jester": _Entry(jester, "ratings", ("seed",)),
    "ratings": _Entry(generated_ratings, "ratings", ("seed",), from_files=False),
    "newsgroups": _Entry(newsgroups, "documents", ("vocabulary", "seed")),
    "reuters": _Entry(reuters, "documents", ("vocabulary",)),
    "documents": _Entry(generated_documents, "documents", ("vocabulary", "seed"), from_files=False),
    "shakespeare": _Entry(shakespeare, "text", ("block",)),
}

DATASETS = tuple(_ENTRIES)
"""Names that :func:`load_dataset` accepts."""

IMAGE_DATASETS = tuple(name for name, entry in _ENTRIES.items() if entry.kind == "images")
"""Names of datasets whose samples are images."""

_ONLY_FOR: dict[str, Kind] = {"size": "images", "channels": "images", "vocabulary": "documents", "block": "text"}


def load_dataset(
    name: str,
    data: Path | None = None,
    *,
    limit: int | None = None,
    test_limit: int | None = None,
    seed: int = 0,
    size: int | None = None,
    channels: int | None = None,
    vocabulary: int | None = None,
    block: int | None = None,
    instead_of: str | None = None,
) -> Dataset:
    """Return the dataset called ``name``.

    Args:
        name: One of :data:`DATASETS`.
        data: Directory of the files, for datasets that are read from files, or a directory that contains it under its
            published name.
        limit: Keep only the first ``limit`` training samples, ``>= 1``; None keeps all. Files sorted by class are
            shuffled first.
        test_limit: The same for the test samples.
        seed: Seed of a split or an order that the publisher does not define, and of generated data.
        size: Images: height and width to scale to, ``>= 1``; None keeps them (ImageNet: 224).
        channels: Images: number of times to repeat a single channel, ``>= 1``.
        vocabulary: Documents: number of words that are counted, ``>= 1``.
        block: Text: characters of a block, ``>= 1``.
        instead_of: The published experiment's dataset that this one replaces; :meth:`Dataset.describe` mentions it.

    Raises:
        ConfigError: if the dataset is unknown, if an option does not apply or is out of range, or if its files are
            missing (:class:`DataMissing`) or damaged.
    """
    if name not in _ENTRIES:
        raise ConfigError(f"dataset must be one of {', '.join(DATASETS)}, got {name!r}")
    entry = _ENTRIES[name]
    given = {"size": size, "channels": channels, "vocabulary": vocabulary, "block": block}
    _check(name, entry, {"limit": limit, "test_limit": test_limit, **given})
    options: dict[str, Any] = {
        option: value for option, value in (given | {"seed": seed}).items() if option in entry.takes
    }
    if not entry.from_files:
        dataset = entry.load(**options)
    elif data is None:
        raise DataMissing(f"the dataset {name} is read from files: give their directory")
    else:
        dataset = entry.load(data, **options)
    # Samples are dropped before scaling, because all of them scaled up might not fit in memory.
    kept = [
        part if most is None else first(part, most) for part, most in zip(dataset, (limit, test_limit), strict=True)
    ]
    train, test = (_scaled(part, size, channels) for part in kept)
    shape = tuple(train[0][0].shape) if size or channels else dataset.shape
    return replace(dataset, train=train, test=test, shape=shape, instead_of=instead_of)


def load_first(names: Sequence[str], data: Path | None = None, *, instead_of: str, **options: Any) -> Dataset:
    """Return the first of ``names`` whose files are in ``data``; it replaces ``instead_of`` if it is another dataset.

    Only missing files are passed over; damaged files are an error.

    Args:
        names: Datasets, the preferred one first, preferably ending with one that needs no files.
        data: See :func:`load_dataset`.
        instead_of: The usual name of the preferred dataset, as in :attr:`Dataset.title`.
        options: Options of :func:`load_dataset`.

    Raises:
        ConfigError: see :func:`load_dataset`; for the last dataset, if all are missing.
    """
    for name in names[:-1]:
        try:
            return _named(load_dataset(name, data, **options), instead_of)
        except DataMissing:
            continue
    return _named(load_dataset(names[-1], data, **options), instead_of)


def _named(dataset: Dataset, wanted: str) -> Dataset:
    return replace(dataset, instead_of=None if dataset.title == wanted else wanted)


def _check(name: str, entry: _Entry, given: dict[str, int | None]) -> None:
    for option, value in given.items():
        if value is None:
            continue
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}")
        if _ONLY_FOR.get(option, entry.kind) != entry.kind:
            raise ConfigError(
                f"{option} is for {_ONLY_FOR[option]}, but the dataset {name} is {entry.kind}: leave it out"
            )


def _scaled(part: DatasetPart, size: int | None, channels: int | None) -> DatasetPart:
    if isinstance(part, TensorDataset):
        return resize(part, size, channels) if size or channels else part
    if channels not in (None, 3) and isinstance(part, ImageFiles):
        raise ConfigError(f"channels must be 3, as in the images, got {channels}")
    return part
