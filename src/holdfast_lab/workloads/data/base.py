"""What every dataset offers, and how a file is read that may be missing, cut short, or made to do harm."""

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
_LINE_BYTES = 1 << 16  # a longer line is read as several, which then have too few columns


class DataMissing(ConfigError):
    """The files of a dataset are not where they were looked for. You do not get it for files that are damaged."""


class Part(Protocol):
    """The samples to train on, or those to test with."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: Any) -> Any:
        """Return one sample for a number, and stacked samples for a slice or a list of numbers: a tuple of tensors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples to train on and samples to test with, and where they come from; unpacks as ``train, test = dataset``.

    ============ ===================================================================== =========================
    kind         a sample                                                              ``shape``
    ============ ===================================================================== =========================
    images       pixels float32 in [0, 1] of shape (channels, height, width); class    channels, height, width
    table        features float32; class                                               features
    ratings      user; item; value float32                                             users, items
    documents    how often each word occurs, float32; class                            words of the vocabulary
    text         tokens; the tokens that follow them, both of the length of a block    tokens of a block
    ============ ===================================================================== =========================

    Classes, users, items and tokens are int64 from 0.
    """

    title: str
    """What people call it."""
    kind: Kind
    """What a sample is."""
    source: str
    """Where it was read from, or how it was made."""
    split: str
    """Who divided it into the two parts, and how."""
    shape: tuple[int, ...]
    """See above."""
    num_classes: int
    """Classes; of text the size of the alphabet; of ratings 0."""
    train: Part
    """The samples to train on."""
    test: Part
    """The samples to test with."""
    instead_of: str | None = None
    """The dataset of the published experiment whose place it takes, if that is another."""

    def __iter__(self) -> Iterator[Part]:
        """Yield the two parts."""
        return iter((self.train, self.test))

    def describe(self) -> str:
        """Return one line for a page: what it is, in whose place, how much, and how it was divided."""
        name = self.title if self.instead_of is None else f"{self.title} in the place of {self.instead_of}"
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
        return f"{name}: {len(self.train)} {what} to train on, {len(self.test)} to test with{counted}; {self.split}; {self.source}"


def find_folder(data: Path, folders: Sequence[str], patterns: Sequence[str], title: str, where: str) -> Path:
    """Return ``data``, or the first of its ``folders``, that holds a file that matches one of ``patterns``.

    Raises:
        DataMissing: if none does; the line says what was expected, and ``where`` it can be had.
    """
    for folder in (data, *(data / name for name in folders)):
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            return folder
    problem = f"is not in {data}" if data.is_dir() else f"is looked for in {data}, which is no directory"
    raise DataMissing(
        f"{title} {problem}: expected {' or '.join(patterns)}, there or in {' or '.join(folders)}. It is at {where}"
    )


@contextmanager
def opened(path: Path, where: str = "") -> Iterator[IO[bytes]]:
    """Open a file, unpacked if its name ends with ``.gz``; whatever is wrong with its bytes becomes one line.

    Raises:
        ConfigError: if it is missing, cut short, or not what its name says.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield cast("IO[bytes]", file)
    except FileNotFoundError:
        raise DataMissing(f"{path} does not exist" + (f". It is at {where}" if where else "")) from None
    except EOFError:
        raise ConfigError(
            f"{path} is cut short: its compressed data ends too early. Copy or download it again"
        ) from None
    except (OSError, zlib.error) as error:
        kind = " as a gzip file" if path.suffix == ".gz" else ""
        raise ConfigError(f"cannot read {path}{kind}: {error}") from error


def read_up_to(file: IO[bytes], count: int) -> bytes:
    """Return the next ``count`` bytes, or fewer where the file ends; holds no more memory than there are bytes.

    ``file.read(count)`` may allocate ``count`` bytes first, and a header can promise more than any memory holds.
    """
    pieces = []
    while count > 0 and (piece := file.read(min(count, _PIECE_BYTES))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read_numbers(path: Path, **options: Any) -> npt.NDArray[Any]:
    """Return the table of numbers in a text file; ``options`` are those of :func:`numpy.loadtxt`.

    Raises:
        ConfigError: if the file cannot be read, holds no row, or holds something else than such numbers.
    """
    with opened(path) as file:
        return parse_numbers(file, path, **options)


def parse_numbers(file: IO[bytes], path: Path, **options: Any) -> npt.NDArray[Any]:
    """Return what :func:`read_numbers` does, from an open file; ``path`` is for the message."""
    pieces = iter(lambda: file.readline(_LINE_BYTES), b"")
    lines = (line for line in pieces if line.strip())
    try:
        first = next(lines)
    except StopIteration:
        raise ConfigError(f"{path} holds no row of numbers") from None
    try:
        return np.loadtxt(_chain(first, lines), ndmin=2, **options)
    except ValueError as error:  # numpy names the row, the column and what stands there
        raise ConfigError(f"{path} is not the table that was expected: {str(error).splitlines()[0]}") from error


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[str]:
    yield first.decode("latin-1")
    for line in rest:
        yield line.decode("latin-1")


def check_range(path: Path, what: str, values: npt.NDArray[Any], low: float, high: float) -> None:
    """Raise a line about the first of ``values``, one a row, that is not from ``low`` to ``high``."""
    wrong = np.flatnonzero(~((values >= low) & (values <= high)))
    if wrong.size:
        row = int(wrong[0])
        raise ConfigError(f"{path}: {what} must be from {low:g} to {high:g}, row {row + 1} has {values[row]:g}")


def held_out(count: int, share: float, seed: int, source: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of samples to train on and to test with: a random ``share``, at least one, is held out.

    Both are in random order, so that the first samples of a file that is sorted by class are of all classes.

    Raises:
        ConfigError: if there is no sample left to train on; the line names ``source``.
    """
    if count < 2:
        raise ConfigError(f"{source} has {count} samples, at least 2 are needed: one to train on, one to test with")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    tested = max(1, round(count * share))
    return order[tested:], order[:tested]


def first(part: Part, count: int) -> Part:
    """Return the first ``count`` samples of ``part``."""
    if isinstance(part, TensorDataset):
        return TensorDataset(*(tensor[:count] for tensor in part.tensors))
    return part.first(count)  # type: ignore[attr-defined,no-any-return]  # every other part has it
