"""A text as numbered characters, cut into blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data.base import Dataset, find_folder, opened

BLOCK = 128
"""Default number of characters of a block."""

_WHERE = "https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt"
_TRAINING_SHARE = 0.9


def shakespeare(data: Path, *, block: int | None = None) -> Dataset:
    """Return a text, such as Tiny Shakespeare, by characters; its last tenth is for testing.

    The distinct characters are numbered from 0 in the order of their code points. Blocks do not overlap. The second
    tensor of a sample is the first one shifted by a character. A remainder shorter than a block is dropped.

    Args:
        data: The file, in UTF-8; or a directory with ``input.txt``, or its parent.
        block: Characters of a block, ``>= 1``; None: :data:`BLOCK`.

    Raises:
        ConfigError: if the file is missing, is not UTF-8, or is shorter than two blocks.
    """
    length = BLOCK if block is None else block
    folders = ("tinyshakespeare", "shakespeare", "tiny-shakespeare")
    path = data if data.is_file() else find_folder(data, folders, ("input.txt",), "Shakespeare", _WHERE) / "input.txt"
    with opened(path, _WHERE) as file:
        content = file.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    alphabet, tokens = np.unique(points, return_inverse=True)
    cut = round(len(tokens) * _TRAINING_SHARE)
    train, test = (_blocks(part.astype(np.int64), length) for part in (tokens[:cut], tokens[cut:]))
    if not (len(train) and len(test)):
        raise ConfigError(
            f"{path} has {len(tokens)} characters: its last tenth must contain a block of {length} plus one character"
        )
    return Dataset(
        title="Shakespeare" if path.name == "input.txt" else path.name,
        kind="text",
        source=f"read from {path}",
        split="the last tenth held out",
        shape=(length,),
        num_classes=len(alphabet),
        train=train,
        test=test,
    )


def _blocks(tokens: np.ndarray[tuple[int], np.dtype[np.int64]], length: int) -> TensorDataset:
    count = max(0, (len(tokens) - 1) // length)
    inputs, targets = (torch.from_numpy(tokens[at : at + count * length].reshape(count, length)) for at in (0, 1))
    return TensorDataset(inputs, targets)
