"""CoverType: rows of features, and the type of forest cover."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data.base import Dataset, check_range, find_folder, held_out, read_numbers

_WHERE = "https://archive.ics.uci.edu/dataset/31/covertype"
_FILES = ("covtype.data", "covtype.data.gz", "covtype*.data", "covtype*.data.gz", "covtype*.csv", "covtype*.csv.gz")
_FEATURES, _MEASURED = 54, 10  # the first ten are measurements, the others are 0 or 1
_CLASSES = 7
_ALL_ROWS, _TRAINING_ROWS = 581_012, 15_120
_TEST_SHARE = 0.2


def covertype(data: Path, *, seed: int = 0) -> Dataset:
    """Return CoverType: rows of 54 features, seven types of forest cover.

    The ten measured features have mean 0 and variance 1 over the training rows, the other 44 are 0 or 1. The whole file
    is split as by its authors: 15,120 rows for training (11,340 and 3,780 for validation), 565,892 for testing. From a
    part of it a random fifth is held out.

    Args:
        data: The file, ``covtype.data``, compressed with gzip or not; or its directory, or the parent. A directory with
            several parts gives the largest one, because parts may overlap.
        seed: Seed of the split, if the authors define none.

    Raises:
        ConfigError: if the file is missing or has another content.
    """
    path = data if data.is_file() else _choose(find_folder(data, ("covtype", "covertype"), _FILES, "CoverType", _WHERE))
    table = read_numbers(path, delimiter=",", dtype=np.int32)
    if table.shape[1] != _FEATURES + 1:
        raise ConfigError(
            f"{path} has {table.shape[1]} columns, expected {_FEATURES} features and the class. It is at {_WHERE}"
        )
    check_range(path, "a class", table[:, -1], 1, _CLASSES)
    if len(table) == _ALL_ROWS:
        order = torch.arange(_ALL_ROWS)
        (train, test), split = (order[:_TRAINING_ROWS], order[_TRAINING_ROWS:]), "published split"
    else:
        (train, test), split = held_out(len(table), _TEST_SHARE, seed, path), f"a random fifth held out, seed {seed}"
    x, y = _scaled(torch.from_numpy(table[:, :-1]).float(), train), torch.from_numpy(table[:, -1].astype(np.int64) - 1)
    return Dataset(
        title="CoverType",
        kind="table",
        source=f"read from {path}",
        split=split,
        shape=(_FEATURES,),
        num_classes=_CLASSES,
        train=TensorDataset(x[train], y[train]),
        test=TensorDataset(x[test], y[test]),
    )


def _choose(folder: Path) -> Path:
    whole = [folder / name for name in _FILES[:2] if (folder / name).is_file()]
    return (
        whole[0]
        if whole
        else max((f for p in _FILES for f in folder.glob(p)), key=lambda f: (f.stat().st_size, f.name))
    )


def _scaled(x: torch.Tensor, train: torch.Tensor) -> torch.Tensor:
    measured = x[train, :_MEASURED].double()
    spread = measured.std(0, correction=0)
    x[:, :_MEASURED] = ((x[:, :_MEASURED] - measured.mean(0)) / spread.where(spread > 0, 1)).float()
    return x
