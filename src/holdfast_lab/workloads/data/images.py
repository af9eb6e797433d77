"""Images that fit in memory: scikit-learn's digits, MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100.

Pixels are float32 in [0, 1]: the file's values divided by their maximum (digits 16, all others 255).
Images are not centred, cropped or flipped.
"""

from __future__ import annotations

import importlib.util
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data.base import Dataset, check_range, find_folder, opened, read_up_to

HELD_OUT_EVERY = 6
"""One of this many digits of a class is in the test set."""

_UINT8 = 0x08  # the only idx element type in these files
_MNIST_AT = "https://yann.lecun.com/exdb/mnist (a mirror: https://ossci-datasets.s3.amazonaws.com/mnist/)"
_FASHION_AT = "https://github.com/zalandoresearch/fashion-mnist"
_CIFAR_AT = "https://www.cs.toronto.edu/~kriz/cifar-{classes}-binary.tar.gz"
_CIFAR_PIXELS = 3 * 32 * 32


def digits() -> Dataset:
    """Return scikit-learn's handwritten digits: 1497 images of 8x8 for training, 300 for testing.

    Every sixth image of each class is held out. Both sets contain digits of the same writers, so the
    accuracy is that on new digits, but not on new writers.

    Raises:
        ConfigError: if scikit-learn, which contains them, is not installed.
    """
    table = _digits_table()
    x = torch.tensor(table[:, :-1] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(table[:, -1], dtype=torch.int64)
    kept_out = np.zeros(len(table), dtype=bool)
    kept_out[np.argsort(table[:, -1], kind="stable")[::HELD_OUT_EVERY]] = True
    test = torch.from_numpy(kept_out)
    return _dataset(
        "scikit-learn's digits",
        "comes with scikit-learn",
        f"one in {HELD_OUT_EVERY} of each class held out",
        TensorDataset(x[~test], y[~test]),
        TensorDataset(x[test], y[test]),
        num_classes=10,
    )


def _digits_table() -> npt.NDArray[np.float64]:
    """Return one row per digit: 64 pixels from 0 to 16, then the label.

    Read from scikit-learn's own file, because importing scikit-learn would cost every worker of every run a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ConfigError("the dataset digits comes with scikit-learn: pip install 'holdfast[lab]'")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def mnist(data: Path) -> Dataset:
    """Return MNIST: 60,000 handwritten digits of 28x28 for training, 10,000 for testing.

    Args:
        data: Directory with the four original idx files, compressed with gzip or not; or its parent.

    Raises:
        ConfigError: if a file is missing, truncated, not in the idx format, or inconsistent with its companion.
    """
    return _idx_dataset("MNIST", data, ("mnist", "MNIST/raw"), _MNIST_AT)


def fashion_mnist(data: Path) -> Dataset:
    """Return Fashion-MNIST: 60,000 images of 28x28 for training, 10,000 for testing.

    Arguments and errors: :func:`mnist`.
    """
    return _idx_dataset("Fashion-MNIST", data, ("fashion-mnist", "FashionMNIST/raw"), _FASHION_AT)


def _idx_dataset(title: str, data: Path, folders: Sequence[str], where: str) -> Dataset:
    folder = find_folder(data, folders, ("train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"), title, where)
    parts = [_images_and_labels(folder, name, where) for name in ("train", "t10k")]
    if parts[0].tensors[0].shape[1:] != parts[1].tensors[0].shape[1:]:
        raise ConfigError(
            f"{folder}: the images of train and t10k must have the same size; these are from different datasets"
        )
    return _dataset(title, f"read from {folder}", "published split", *parts, num_classes=10)


def _images_and_labels(folder: Path, name: str, where: str) -> TensorDataset:
    images_path, labels_path = (
        _plain_or_gz(folder / f"{name}-{what}-ubyte") for what in ("images-idx3", "labels-idx1")
    )
    images = read_idx(images_path, dimensions=3, where=where)
    labels = read_idx(labels_path, dimensions=1, where=where)
    if len(images) != len(labels):
        raise ConfigError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels")
    check_range(labels_path, "a label", labels, 0, 9)
    return TensorDataset(_pixels(images[:, np.newaxis]), torch.from_numpy(labels.astype(np.int64)))


def _plain_or_gz(path: Path) -> Path:
    return path if path.is_file() else path.with_name(f"{path.name}.gz")


def read_idx(path: Path, *, dimensions: int, where: str = "") -> npt.NDArray[np.uint8]:
    """Return the array in an idx file of unsigned bytes, decompressed if its name ends with ``.gz``.

    The format: two zero bytes, the element type (8: unsigned byte), the number of dimensions, each
    dimension as a big-endian uint32, then the elements. Memory is allocated only for bytes that exist, not for
    what a header claims.

    Args:
        path: The file.
        dimensions: Required number of dimensions, ``>= 1``.
        where: Where to get the file, for the message.

    Raises:
        ConfigError: if the file is missing or is not such a file.
    """
    magic = bytes((0, 0, _UINT8, dimensions))
    size = 4 + 4 * dimensions
    with opened(path, where) as file:
        head = file.read(size)
        if head[:4] != magic:
            raise ConfigError(
                f"{path} is not an idx file: it starts with {head[:4].hex(' ')}, expected {magic.hex(' ')}"
            )
        if len(head) < size:
            raise ConfigError(f"{path} is truncated: its header has {len(head)} bytes, expected {size}")
        shape = struct.unpack_from(f">{dimensions}I", head, 4)
        expected = math.prod(shape)
        content = read_up_to(file, expected + 1)  # one more byte shows excess data, and makes gzip verify its checksum
    if len(content) != expected:
        held = len(content) if len(content) < expected else f"more than {expected}"
        raise ConfigError(f"{path} has {held} bytes of data, expected {expected} for shape {shape}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def cifar10(data: Path) -> Dataset:
    """Return CIFAR-10: 50,000 images of 3x32x32 for training, 10,000 for testing.

    Args:
        data: Directory with the binary version, ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``,
            or its parent.

    Raises:
        ConfigError: if a file is missing or damaged, or if it is the pickled version, because nothing is unpickled.
    """
    train = [f"data_batch_{number}.bin" for number in range(1, 6)]
    return _cifar(data, 10, ("cifar-10-batches-bin",), ("cifar-10-batches-py", "data_batch_1"), train, "test_batch.bin")


def cifar100(data: Path) -> Dataset:
    """Return CIFAR-100 with its 100 fine classes: 50,000 images of 3x32x32 for training, 10,000 for testing.

    Args:
        data: Directory with the binary version, ``train.bin`` and ``test.bin``, or its parent.

    Raises:
        ConfigError: if a file is missing or damaged, or if it is the pickled version, because nothing is unpickled.
    """
    return _cifar(data, 100, ("cifar-100-binary",), ("cifar-100-python", "train"), ["train.bin"], "test.bin")


def _cifar(
    data: Path, classes: int, folders: Sequence[str], pickled: tuple[str, str], train: Sequence[str], test: str
) -> Dataset:
    title, where = f"CIFAR-{classes}", _CIFAR_AT.format(classes=classes)
    try:
        folder = find_folder(data, folders, train[:1], title, where)
    except ConfigError:
        there, name = pickled
        if any((place / name).is_file() for place in (data, data / there)):
            raise ConfigError(
                f"{data} has the pickled version of {title}, which is not read for safety: use the binary version, "
                f"{where}"
            ) from None
        raise
    parts = [_cifar_part([folder / name for name in names], classes, where) for names in (train, [test])]
    return _dataset(title, f"read from {folder}", "published split", *parts, num_classes=classes)


def _cifar_part(paths: Sequence[Path], classes: int, where: str) -> TensorDataset:
    """Read records of one label (CIFAR-100: a coarse and a fine one) and 3072 pixels: red, green, blue, row by row."""
    num_labels = 1 if classes == 10 else 2
    record = num_labels + _CIFAR_PIXELS
    tables = []
    for path in paths:
        with opened(path, where) as file:
            content = file.read()
        if not content or len(content) % record:
            raise ConfigError(
                f"{path} has {len(content)} bytes, expected whole records of {record}: it is truncated, or another "
                f"file. It is at {where}"
            )
        table = np.frombuffer(content, np.uint8).reshape(-1, record)
        check_range(path, "a label", table[:, num_labels - 1], 0, classes - 1)
        tables.append(table)
    table = np.concatenate(tables)
    labels = torch.from_numpy(table[:, num_labels - 1].astype(np.int64))
    return TensorDataset(_pixels(table[:, num_labels:].reshape(-1, 3, 32, 32)), labels)


def resize(
    part: TensorDataset, size: int | None = None, channels: int | None = None, mode: str = "bilinear"
) -> TensorDataset:
    """Return the same images in another size, or with their single channel repeated.

    Args:
        part: Images of shape (samples, channels, height, width), and labels.
        size: New height and width, ``>= 1``; None keeps both.
        channels: New number of channels; images of one channel can have any number, others only their own. Repeated
            channels use no additional memory.
        mode: ``"bilinear"`` (half-pixel centres, no antialiasing when downscaling) or ``"nearest"``.

    Raises:
        ConfigError: if a value is not allowed.
    """
    images, *labels = part.tensors
    if mode not in ("bilinear", "nearest"):
        raise ConfigError(f"mode must be bilinear or nearest, got {mode!r}")
    if size is not None and images.shape[2:] != (size, size):
        smooth = {"align_corners": False} if mode == "bilinear" else {}
        images = F.interpolate(images, size=(size, size), mode=mode, **smooth)
    if channels is not None and channels != images.shape[1]:
        if images.shape[1] != 1:
            raise ConfigError(
                f"channels must be {images.shape[1]}, as in the images, got {channels}: only a single channel can be "
                "repeated"
            )
        images = images.expand(-1, channels, -1, -1)
    return TensorDataset(images, *labels)


def _pixels(values: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32) / np.float32(255))


def _dataset(
    title: str, source: str, split: str, train: TensorDataset, test: TensorDataset, *, num_classes: int
) -> Dataset:
    return Dataset(
        title=title,
        kind="images",
        source=source,
        split=split,
        shape=tuple(train.tensors[0].shape[1:]),
        num_classes=num_classes,
        train=train,
        test=test,
    )
