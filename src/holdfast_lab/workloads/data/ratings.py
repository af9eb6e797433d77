"""Ratings of items by users: MovieLens, Jester, and generated ratings."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data.base import (
    Dataset,
    check_range,
    find_folder,
    held_out,
    opened,
    parse_numbers,
    read_numbers,
)

_MOVIELENS_AT = "https://grouplens.org/datasets/movielens/"
_MOVIELENS = ("u.data", "ratings.dat", "ratings.csv", "ratings.csv.gz")
_MOVIELENS_FOLDERS = (
    *("ml-100k", "ml-1m", "ml-10M100K", "ml-20m", "ml-25m", "ml-32m"),
    *("ml-latest-small", "ml-latest", "movielens-latest-small", "movielens"),
)
_JESTER_AT = "https://eigentaste.berkeley.edu/dataset/"
_JESTER = ("jester_ratings.dat", "*jester*.csv", "*jester*.zip", "*jester*.xls")
_NOT_RATED = 99
_MOST_BYTES = 1 << 30  # largest file in a zip: ten times Jester's largest
_TEST_SHARE = 0.1

Triples = npt.NDArray[np.float64]
"""One row per rating: user, item, value."""
_Found = tuple[Triples, tuple[int, int]]
"""Ratings; numbers of users and items."""


def movielens(data: Path, *, seed: int = 0) -> Dataset:
    """Return MovieLens: ratings of films by users, from 0.5 to 5.

    Users and films are numbered from 0 in the order of their numbers in the file. ml-100k is split as by its authors,
    by ``u1.base`` and ``u1.test``, if these exist; otherwise a random tenth is held out.

    Args:
        data: Directory with ``u.data`` (ml-100k), ``ratings.dat`` (ml-1m, ml-10m) or ``ratings.csv`` (the others), the
            last compressed with gzip or not; or its parent.
        seed: Seed of the split, if the authors define none.

    Raises:
        ConfigError: if a file is missing or has another content.
    """
    folder = find_folder(data, _MOVIELENS_FOLDERS, _MOVIELENS, "MovieLens", _MOVIELENS_AT)
    path = next(folder / name for name in _MOVIELENS if (folder / name).is_file())
    published = [folder / "u1.base", folder / "u1.test"]
    if path.name == "u.data" and all(file.is_file() for file in published):
        parts = [_movielens_rows(file) for file in published]
        order = torch.arange(len(parts[0]) + len(parts[1]))
        rows, split = np.concatenate(parts), "published split u1"
        numbers = (order[: len(parts[0])], order[len(parts[0]) :])
    else:
        rows, split = _movielens_rows(path), _seeded(seed)
        numbers = held_out(len(rows), _TEST_SHARE, seed, path)
    users, items = (np.unique(rows[:, column], return_inverse=True) for column in (0, 1))
    rows[:, 0], rows[:, 1] = users[1], items[1]
    return _dataset(
        f"MovieLens ({path.name})", f"read from {folder}", split, rows, (len(users[0]), len(items[0])), numbers
    )


def _movielens_rows(path: Path) -> Triples:
    options: dict[str, Any] = {"usecols": (0, 1, 2), "dtype": np.float64}
    if path.suffix == ".dat":
        with opened(path) as file:
            content = io.BytesIO(file.read().replace(b"::", b","))
        rows = parse_numbers(content, path, delimiter=",", **options)
    elif path.name.startswith("ratings.csv"):
        with opened(path) as file:
            if not file.readline(100).startswith(b"userId,movieId,rating"):
                raise ConfigError(
                    f"{path} must start with the line userId,movieId,rating,timestamp. It is at {_MOVIELENS_AT}"
                )
            rows = parse_numbers(file, path, delimiter=",", **options)
    else:
        rows = read_numbers(path, **options)
    _check_triples(path, rows, 0.5, 5)
    return rows


def jester(data: Path, *, seed: int = 0) -> Dataset:
    """Return Jester: ratings of jokes by users, from -10 to 10. A random tenth is held out.

    Args:
        data: Directory, or its parent, with ``jester_ratings.dat`` (dataset 2: user, joke, value), or with the tables
            of dataset 1 or 3 as ``*jester*.csv``: one row per user, with the number of rated jokes, then one column per
            joke, 99 where it was not rated. A ``.zip`` may contain either. The tables are published as ``.xls``, which
            is not supported: save them as CSV first. Several tables are concatenated.
        seed: Seed of the split.

    Raises:
        ConfigError: if a file is missing, is an ``.xls``, or has another content.
    """
    folder = find_folder(data, ("jester", "Jester"), _JESTER, "Jester", _JESTER_AT)
    triples, tables = folder / _JESTER[0], sorted(folder.glob(_JESTER[1]))
    if triples.is_file():
        found = [_jester_triples(read_numbers(triples, usecols=(0, 1, 2)), triples)]
    elif tables:
        found = [_jester_table(read_numbers(path, delimiter=","), path) for path in tables]
    else:
        found = [some for path in sorted(folder.glob(_JESTER[2])) for some in _jester_zip(path)]
    if not found:
        raise ConfigError(_xls(next(folder.glob(_JESTER[3]))))
    rows, shape = _one_below_the_other(found, folder)
    return _dataset(
        "Jester", f"read from {folder}", _seeded(seed), rows, shape, held_out(len(rows), _TEST_SHARE, seed, folder)
    )


def _xls(path: object) -> str:
    return f"{path} is an Excel file, which is not supported: save it as CSV beside it, e.g. libreoffice --headless --convert-to csv"


def _jester_table(table: npt.NDArray[np.float64], path: Path) -> _Found:
    values = table[:, 1:]
    rated = values != _NOT_RATED
    wrong = np.flatnonzero(table[:, 0] != rated.sum(1))
    if wrong.size:
        row = int(wrong[0])
        raise ConfigError(
            f"{path}: row {row + 1} says that {table[row, 0]:g} jokes were rated, but has {rated[row].sum()} values: "
            f"expected the number of rated jokes, then one column per joke, {_NOT_RATED} for none"
        )
    for worst in (values.max(1, initial=0, where=rated), values.min(1, initial=0, where=rated)):
        check_range(path, "a rating", worst, -10, 10)
    users, items = np.nonzero(rated)
    return np.column_stack([users, items, values[rated]]), (len(values), values.shape[1])


def _jester_zip(path: Path) -> list[_Found]:
    try:
        with zipfile.ZipFile(path) as file:
            names = sorted(name for name in file.namelist() if name.endswith((".csv", ".dat")))
            if not names:
                raise ConfigError(_xls(f"{path}: {', '.join(file.namelist()[:3])}"))
            return [_jester_member(file, name, path) for name in names]
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        OSError,
        RuntimeError,
        UnicodeDecodeError,
    ) as error:
        raise ConfigError(
            f"cannot read {path} as a zip file: {error}. Copy or download it again, it is at {_JESTER_AT}"
        ) from error


def _jester_member(archive: zipfile.ZipFile, name: str, path: Path) -> _Found:
    inside = path / name
    size = archive.getinfo(name).file_size
    if size > _MOST_BYTES:
        raise ConfigError(f"{inside} claims {size} bytes, but at most {_MOST_BYTES} are read")
    with archive.open(name) as member:  # ends after file_size bytes, whatever the compressed data contain
        if name.endswith(".csv"):
            return _jester_table(parse_numbers(member, inside, delimiter=","), inside)
        return _jester_triples(parse_numbers(member, inside, usecols=(0, 1, 2)), inside)


def _jester_triples(rows: Triples, path: Path) -> _Found:
    _check_triples(path, rows, -10, 10)
    users = np.unique(rows[:, 0], return_inverse=True)
    items = np.unique(rows[:, 1], return_inverse=True)
    return np.column_stack([users[1], items[1], rows[:, 2]]), (len(users[0]), len(items[0]))


def _one_below_the_other(found: Sequence[_Found], folder: Path) -> _Found:
    widths = sorted({items for _, (_, items) in found})
    if len(widths) != 1:
        raise ConfigError(
            f"the files in {folder} have {' and '.join(map(str, widths))} jokes: keep only those of one dataset there"
        )
    users = 0
    for rows, (more, _) in found:
        rows[:, 0] += users
        users += more
    return np.concatenate([rows for rows, _ in found]), (users, widths[0])


def _check_triples(path: Path, rows: Triples, low: float, high: float) -> None:
    for column, what in enumerate(("a user", "an item")):
        check_range(
            path, f"the number of {what}", rows[:, column], 0, 2**53
        )  # integers that a double represents exactly
    check_range(path, "a rating", rows[:, 2], low, high)


def generated_ratings(
    *, users: int = 500, items: int = 300, rank: int = 8, density: float = 0.1, noise: float = 0.1, seed: int = 0
) -> Dataset:
    """Return generated ratings: sampled entries of a product of two random low-rank factors, with noise.

    Args:
        users: Rows, ``>= 1``.
        items: Columns, ``>= 1``.
        rank: Rank of the product, ``>= 1``. Factors are normal; a value has variance 1 before noise.
        density: Share of the matrix that is sampled without replacement, above 0 and at most 1. A tenth of it is for
            testing.
        noise: Standard deviation of the noise of each value, ``>= 0``: no model has a smaller error.
        seed: Seed of everything random.

    Raises:
        ConfigError: if a number is out of range.
    """
    seen = round(users * items * density)
    if min(users, items, rank) < 1 or not 0 < density <= 1 or not noise >= 0 or seen < 2:
        raise ConfigError(
            "users, items and rank must be at least 1, density above 0 and at most 1 and large enough for two "
            f"values, and noise at least 0, got {users}, {items}, {rank}, {density:g} and {noise:g}"
        )
    rng = np.random.default_rng(seed)
    left, right = (rng.standard_normal((count, rank)) for count in (users, items))
    user, what = np.divmod(rng.choice(users * items, seen, replace=False), items)
    values = (left[user] * right[what]).sum(1) / np.sqrt(rank) + noise * rng.standard_normal(seen)
    rows = np.column_stack([user, what, values])
    source = f"generated: rank {rank}, noise {noise:g}, seed {seed}"
    return _dataset(
        "generated ratings", source, _seeded(seed), rows, (users, items), held_out(seen, _TEST_SHARE, seed, source)
    )


def _seeded(seed: int) -> str:
    return f"a random tenth held out, seed {seed}"


def _dataset(
    title: str,
    source: str,
    split: str,
    rows: Triples,
    shape: tuple[int, int],
    numbers: tuple[torch.Tensor, torch.Tensor],
) -> Dataset:
    ids, values = torch.from_numpy(rows[:, :2].astype(np.int64)), torch.from_numpy(rows[:, 2].astype(np.float32))
    train, test = (TensorDataset(ids[chosen, 0], ids[chosen, 1], values[chosen]) for chosen in numbers)
    return Dataset(
        title=title, kind="ratings", source=source, split=split, shape=shape, num_classes=0, train=train, test=test
    )
