"""The interface of datasets, and safe reading of files that may be missing, truncated or malicious."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError

Kind = Literal["images", "table", "ratings", "documents", "text"]

_PIECE_BYTES = 1 << 20
_LINE_BYTES = 1 << 16  # a longer line is split, and its parts then have too few columns


class DataMissing(ConfigError):
    """The files of a dataset were not found. Damaged files raise :class:`ConfigError` instead."""


class DatasetPart(Protocol):
    """The training or the test samples."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: Any) -> Any:
        """Return one sample for a number, and stacked samples for a slice or a list of numbers: a tuple of tensors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and test samples, and their source; unpacks as ``train, test = dataset``.

    ============ ===================================================================== =========================
    kind         a sample                                                              ``shape``
    ============ ===================================================================== =========================
    images       pixels float32 in [0, 1] of shape (channels, height, width); class    channels, height, width
    table        features float32; class                                               features
    ratings      user; item; value float32                                             users, items
    documents    count of each word, float32; class                                    words of the vocabulary
    text         tokens; the tokens that follow them, both of the length of a block    tokens of a block
    ============ ===================================================================== =========================

    Classes, users, items and tokens are int64 from 0.
    """

    title: str
    """The usual name of the dataset."""
    kind: Kind
    """The kind of a sample."""
    source: str
    """The source of the samples: where they were read, or how they were generated."""
    split: str
    """How and by whom the samples were split."""
    shape: tuple[int, ...]
    """See the table above."""
    num_classes: int
    """Number of classes; for text the size of the alphabet; for ratings 0."""
    train: DatasetPart
    """The samples to train on."""
    test: DatasetPart
    """The samples to test with."""
    instead_of: str | None = None
    """The published experiment's dataset that this one replaces, if any."""

    def __iter__(self) -> Iterator[DatasetPart]:
        """Yield the two parts."""
        return iter((self.train, self.test))

    def describe(self) -> str:
        """Return one line for a page: the dataset, what it replaces, its size, and its split."""
        name = self.title if self.instead_of is None else f"{self.title} instead of {self.instead_of}"
        size = " x ".join(map(str, self.shape))
        what = {
            "images": f"images of {size}",
            "table": f"rows of {size} features",
            "ratings": f"ratings in {size} of users and items",
            "documents": f"documents over {size} words",
            "text": f"blocks of {size} characters",
        }[self.kind]
        classes = {"ratings": "", "text": f", {self.num_classes} different characters"}
        counted = classes.get(self.kind, f", {self.num_classes} classes")
        return f"{name}: {len(self.train)} {what} for training, {len(self.test)} for testing{counted}; {self.split}; {self.source}"


def find_folder(data: Path, folders: Sequence[str], patterns: Sequence[str], title: str, where: str) -> Path:
    """Return ``data``, or the first of its ``folders``, that contains a file that matches one of ``patterns``.

    Raises:
        DataMissing: if none does; the message says what was expected and where to get it (``where``).
    """
    for folder in (data, *(data / name for name in folders)):
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            return folder
    problem = f"is not in {data}" if data.is_dir() else f"cannot be read from {data}, which is not a directory"
    raise DataMissing(
        f"{title} {problem}: expected {' or '.join(patterns)}, there or in {' or '.join(folders)}. It is at {where}"
    )


@contextmanager
def opened(path: Path, where: str = "") -> Iterator[IO[bytes]]:
    """Open a file, decompressed if its name ends with ``.gz``; errors in its bytes become one-line messages.

    Raises:
        ConfigError: if it is missing, truncated, or of another type than its name says.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot read {path}: it is no file")  # a pipe would be waited for without end
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield cast("IO[bytes]", file)
    except FileNotFoundError:
        raise DataMissing(f"{path} does not exist" + (f". It is at {where}" if where else "")) from None
    except EOFError:
        raise ConfigError(
            f"{path} is truncated: its compressed data ends too early. Copy or download it again"
        ) from None
    except (OSError, zlib.error) as error:
        kind = " as a gzip file" if path.suffix == ".gz" else ""
        raise ConfigError(f"cannot read {path}{kind}: {error}") from error


def read_up_to(file: IO[bytes], count: int) -> bytes:
    """Return the next ``count`` bytes, or fewer where the file ends; uses no more memory than there are bytes.

    ``file.read(count)`` may allocate ``count`` bytes first, and a header can claim more than any memory holds.
    """
    pieces = []
    while count > 0 and (piece := file.read(min(count, _PIECE_BYTES))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read_numbers(path: Path, **options: Any) -> npt.NDArray[Any]:
    """Return the table of numbers in a text file; ``options`` are those of :func:`numpy.loadtxt`.

    Raises:
        ConfigError: if the file cannot be read, has no row, or contains anything but such numbers.
    """
    with opened(path) as file:
        return parse_numbers(file, path, **options)


def parse_numbers(file: IO[bytes], path: Path, **options: Any) -> npt.NDArray[Any]:
    """Do the same as :func:`read_numbers` for an open file; ``path`` is for the message."""
    pieces = iter(lambda: file.readline(_LINE_BYTES), b"")
    lines = (line for line in pieces if line.strip())
    try:
        first = next(lines)
    except StopIteration:
        raise ConfigError(f"{path} has no row of numbers") from None
    try:
        return np.loadtxt(_chain(first, lines), ndmin=2, **options)
    except ValueError as error:  # numpy names the row, the column and the content
        raise ConfigError(f"{path} is not the expected table: {str(error).splitlines()[0]}") from error


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[str]:
    yield first.decode("latin-1")
    for line in rest:
        yield line.decode("latin-1")


def check_range(path: Path, what: str, values: npt.NDArray[Any], low: float, high: float) -> None:
    """Raise an error for the first of ``values``, one per row, that is not from ``low`` to ``high``."""
    wrong = np.flatnonzero(~((values >= low) & (values <= high)))
    if wrong.size:
        row = int(wrong[0])
        raise ConfigError(f"{path}: {what} must be from {low:g} to {high:g}, row {row + 1} has {values[row]:g}")


def held_out(count: int, share: float, seed: int, source: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of training and of test samples: a random ``share``, at least one sample, is held out.

    Both are in random order, so that the first samples of a file sorted by class contain all classes.

    Raises:
        ConfigError: if no training sample is left; the message names ``source``.
    """
    if count < 2:
        raise ConfigError(f"{source} has {count} samples, but at least 2 are needed, for training and for testing")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    tested = max(1, round(count * share))
    return order[tested:], order[:tested]


def first(part: DatasetPart, count: int) -> DatasetPart:
    """Return the first ``count`` samples of ``part``."""
    if isinstance(part, TensorDataset):
        return TensorDataset(*(tensor[:count] for tensor in part.tensors))
    return part.first(count)  # type: ignore[attr-defined,no-any-return]  # every other part has this method
