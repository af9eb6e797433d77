"""Two image datasets: scikit-learn's digits, which come with it, and Fashion-MNIST, read from its files.

Images are float32 in [0, 1] of shape ``(samples, 1, height, width)``, labels int64 of shape ``(samples,)``.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError

DATASETS = ("digits", "fashion")
"""What :func:`load_dataset` knows."""

HELD_OUT_EVERY = 6
"""Of so many digits of a class one is kept for the test set."""

_UINT8 = 0x08  # the only idx element type in these files
_FASHION_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


def load_dataset(
    name: str, *, data_dir: Path | None = None, limit: int | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set called ``name``.

    Args:
        name: One of :data:`DATASETS`.
        data_dir: Where the files are, for datasets that are read from files.
        limit: Keep only the first so many training samples, ``>= 1``; None keeps all.

    Raises:
        ConfigError: if there is no such dataset, or its files are missing or damaged.
    """
    if limit is not None and limit < 1:
        msg = f"limit must be at least 1, got {limit}"
        raise ConfigError(msg)
    if name == "digits":
        train, test = digits()
    elif name == "fashion":
        if data_dir is None:
            msg = "the dataset fashion is read from files: say in which directory they are"
            raise ConfigError(msg)
        train, test = fashion_mnist(data_dir)
    else:
        msg = f"dataset must be one of {', '.join(DATASETS)}, got {name!r}"
        raise ConfigError(msg)
    return (train if limit is None else TensorDataset(*(t[:limit] for t in train.tensors))), test


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's handwritten digits: 1497 images of 8x8 to train on, 300 to test with.

    Every sixth image of each class is kept out of training. Both sets hold digits of the same writers, so the
    accuracy is that on new digits, not on new hands.

    Raises:
        ConfigError: if scikit-learn, which brings them, is not installed.
    """
    table = _digits_table()
    x = torch.tensor(table[:, :-1] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(table[:, -1], dtype=torch.int64)
    held_out = np.zeros(len(table), dtype=bool)
    held_out[np.argsort(table[:, -1], kind="stable")[::HELD_OUT_EVERY]] = True
    test = torch.from_numpy(held_out)
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def _digits_table() -> npt.NDArray[np.float64]:
    """Return one row a digit: 64 pixels from 0 to 16, then the label.

    Read from scikit-learn's own file: importing scikit-learn takes a second of every worker of every run.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        msg = "the dataset digits comes with scikit-learn: pip install 'holdfast[study]'"
        raise ConfigError(msg)
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def fashion_mnist(data_dir: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return Fashion-MNIST: 60,000 images of 28x28 to train on, 10,000 to test with.

    Args:
        data_dir: Directory with the four original ``.gz`` files.

    Raises:
        ConfigError: if a file is missing, cut short, not in the idx format, or does not fit its companion.
    """
    train, test = (
        _images_and_labels(data_dir / images, data_dir / labels) for images, labels in _FASHION_FILES.values()
    )
    return train, test


def _images_and_labels(images_path: Path, labels_path: Path) -> TensorDataset:
    images, labels = read_idx(images_path, dimensions=3), read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        msg = f"{images_path} holds {len(images)} images, but {labels_path} holds {len(labels)} labels"
        raise ConfigError(msg)
    x = torch.from_numpy(images.astype(np.float32) / np.float32(255)).unsqueeze(1)
    return TensorDataset(x, torch.from_numpy(labels.astype(np.int64)))


def read_idx(path: Path, *, dimensions: int) -> npt.NDArray[np.uint8]:
    """Return the array in a gzip-compressed idx file of unsigned bytes.

    The format: two zero bytes, the element type (8: unsigned byte), the number of dimensions, each
    dimension as a big-endian int32, then the elements.

    Args:
        path: The file.
        dimensions: How many dimensions it must have, ``>= 1``.

    Raises:
        ConfigError: if the file is missing or is not such a file.
    """
    content = _unpack(path)
    magic = bytes((0, 0, _UINT8, dimensions))
    if content[:4] != magic:
        msg = f"{path} is not an idx file: it starts with {content[:4].hex(' ')}, expected {magic.hex(' ')}"
        raise ConfigError(msg)
    start = 4 + 4 * dimensions
    if len(content) < start:
        msg = f"{path} is cut short: its header has {len(content)} bytes, expected {start}"
        raise ConfigError(msg)
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - start != math.prod(shape):
        msg = f"{path} holds {len(content) - start} bytes of data, expected {math.prod(shape)} for shape {shape}"
        raise ConfigError(msg)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _unpack(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read()
    except FileNotFoundError:
        names = ", ".join(name for pair in _FASHION_FILES.values() for name in pair)
        msg = f"{path} does not exist; expected in {path.parent}: {names}"
        raise ConfigError(msg) from None
    except EOFError:
        msg = f"{path} is cut short: its compressed data ends too early. Copy or download it again"
        raise ConfigError(msg) from None
    except (OSError, zlib.error) as error:
        msg = f"cannot read {path} as a gzip file: {error}"
        raise ConfigError(msg) from error
