"""ImageNet in directories: one directory per class, one file per image, decoded on access."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data.base import Dataset, find_folder

SIZE = 224
"""Default height and width of an image."""

_WHERE = "https://www.image-net.org/challenges/LSVRC/2012/ (after registration)"
_ENDINGS = {".jpeg", ".jpg", ".png"}
_BORDER = 1 / 16  # scale to 256 pixels and crop the middle 224, the usual test transform


class ImageFiles(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images in files, and their classes; each access reads and decodes the file.

    The middle 7/8 of an image, cropped to a square and scaled, as float32 in [0, 1] of shape (3, size, size).

    Args:
        files: One file per image.
        labels: Classes of the images, int64.
        size: Height and width, pixels, ``>= 1``.
    """

    def __init__(self, files: list[Path], labels: torch.Tensor, size: int) -> None:
        self._files = files
        self.labels = labels
        self.size = size

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._files)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an image and its class for a number, several stacked for a slice or a list.

        Raises:
            ConfigError: if the file is missing, damaged, or claims more pixels than Pillow reads (178,956,970).
        """
        if isinstance(index, slice):
            index = list(range(len(self))[index])
        if isinstance(index, list | torch.Tensor) and np.ndim(index):
            chosen = [int(number) for number in index]
            images = [self._image(self._files[number]) for number in chosen]
            return torch.stack(images) if images else torch.empty(0, 3, self.size, self.size), self.labels[chosen]
        return self._image(self._files[int(index)]), self.labels[int(index)]

    def first(self, count: int) -> ImageFiles:
        """Return the first ``count`` images."""
        return ImageFiles(self._files[:count], self.labels[:count], self.size)

    def _image(self, path: Path) -> torch.Tensor:
        from PIL import Image, ImageOps

        if path.exists() and not path.is_file():
            raise ConfigError(f"cannot decode {path}: it is no file")
        try:
            with Image.open(path) as file:
                square = ImageOps.fit(file.convert("RGB"), (self.size, self.size), Image.Resampling.BILINEAR, _BORDER)
        except FileNotFoundError:
            raise ConfigError(f"{path} no longer exists") from None
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's errors for damaged files
            raise ConfigError(f"cannot decode {path}: {error}") from error
        return torch.from_numpy(np.asarray(square, np.float32) / np.float32(255)).permute(2, 0, 1).contiguous()


def imagenet(data: Path, *, size: int | None = None, seed: int = 0) -> Dataset:
    """Return ImageNet, or any images in the same layout: 1,281,167 for training, 50,000 for testing.

    Args:
        data: Directory with ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, or its parent.
        size: Height and width to scale to, ``>= 1``; None: :data:`SIZE`.
        seed: Seed of the order of the images, which are sorted by class.

    Raises:
        ConfigError: if Pillow, which decodes images, is not installed; if a directory is missing or empty; or if
            the directories of the two parts differ.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("decoding ImageNet needs Pillow, which is not installed: pip install 'holdfast[lab]'")
    folder = find_folder(
        data,
        ("imagenet", "ILSVRC/Data/CLS-LOC"),
        ("train/*/*.JPEG", "train/*/*.jpg", "train/*/*.png"),
        "ImageNet",
        _WHERE,
    )
    classes = sorted(place.name for place in (folder / "train").iterdir() if place.is_dir())
    train, test = (_part(folder / name, classes, size or SIZE, seed) for name in ("train", "val"))
    return Dataset(
        title="ImageNet",
        kind="images",
        source=f"read from {folder}",
        split="published split",
        shape=(3, size or SIZE, size or SIZE),
        num_classes=len(classes),
        train=train,
        test=test,
    )


def _part(folder: Path, classes: list[str], size: int, seed: int) -> ImageFiles:
    found = sorted(place.name for place in folder.iterdir() if place.is_dir()) if folder.is_dir() else []
    if found != classes:
        odd = sorted(set(found) ^ set(classes))
        raise ConfigError(
            f"{folder} must have the same {len(classes)} class directories as train, and has {len(found)} (first "
            f"difference: {odd[0]}); the validation images are published in one directory: sort them into their "
            "classes first"
        )
    files, labels = [], []
    for label, name in enumerate(classes):
        images = sorted(file for file in (folder / name).iterdir() if file.suffix.lower() in _ENDINGS)
        if not images:
            raise ConfigError(f"{folder / name} contains no image: expected *{', *'.join(sorted(_ENDINGS))}")
        files += images
        labels += [label] * len(images)
    order = np.random.default_rng(seed).permutation(len(files)).tolist()
    return ImageFiles([files[number] for number in order], torch.tensor(labels)[order], size)
