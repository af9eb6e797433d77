"""A digest of some samples of a dataset in memory, by which workers notice that they do not have the same data.

Only data that can be read without running code of the script are read: its samples may be slow, differ each time, or
change what a dataset of the script holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from holdfast.data.loader import DataSource

_MOST = 256
"""Samples that are read, evenly spaced."""
_MOST_BYTES = 1 << 24
"""Of a tensor or an array, so that a loop does not begin noticeably later."""
_MOST_VALUES, _MOST_PARTS = 1 << 16, 64
"""Of a tensor or an array in a sample, and of a list or a dict in it: the first ones."""


def sample_digest(source: DataSource, num_samples: int) -> int:
    """Return a digest of some samples, from 0 to 2**62 - 1; -1 if there is none, because they are not in memory."""
    if num_samples < 1:
        return -1
    digest = xxhash.xxh3_64()
    spaced = np.linspace(0, num_samples - 1, min(num_samples, _MOST)).astype(np.int64)
    try:
        is_plain = _add_samples(digest, source.dataset, spaced.tolist())
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError):  # raised again where the sample is trained on
        return -1
    return digest.intdigest() >> 2 if is_plain else -1


def _add_samples(digest: Any, data: Any, places: list[int]) -> bool:
    """Add the samples at ``places``; return False if reading them may run code of the script."""
    kind = type(data)
    if kind is Subset:
        if type(data.indices) not in (list, tuple, range, torch.Tensor, np.ndarray):
            return False
        return _add_samples(digest, data.dataset, [int(data.indices[place]) for place in places])
    if kind is ConcatDataset:
        ends = data.cumulative_sizes
        parts = np.searchsorted(ends, places, side="right").tolist()
        begun = [0, *ends]
        return all(
            _add_samples(digest, part, [place - begun[i] for place, at in zip(places, parts, strict=True) if at == i])
            for i, part in enumerate(data.datasets)
        )
    if kind is StackDataset:
        parts = data.datasets
        return all(_add_samples(digest, part, places) for part in (parts.values() if type(parts) is dict else parts))
    if kind is TensorDataset:
        return all(_add_samples(digest, tensor, places) for tensor in data.tensors)
    if kind is torch.Tensor or kind is np.ndarray:
        stride = max(1, -(-len(places) * data.nbytes // (_MOST_BYTES * max(1, len(data)))))
        rows = data[places[::stride]]  # at once, because each read from a GPU waits for it
        digest.update(repr((str(rows.dtype), tuple(rows.shape))).encode())
        _add(digest, rows, most=rows.size if kind is np.ndarray else rows.numel())
        return True
    if kind in (list, tuple):
        for place in places:
            _add(digest, data[place])
        return True
    return False


def _add(digest: Any, value: Any, most: int = _MOST_VALUES) -> None:
    """Add the tensors, numbers and texts of a sample; paths may differ between machines, and other objects are left out."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)[:most].cpu().contiguous()
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(np.ascontiguousarray(value.reshape(-1)[:most]).tobytes())
    elif isinstance(value, dict):
        digest.update(b"{%d" % len(value))
        for name in sorted(filter(_is_plain, value), key=repr)[:_MOST_PARTS]:
            digest.update(repr(name).encode(errors="surrogatepass"))
            _add(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(b"(%d" % len(value))
        for part in value[:_MOST_PARTS]:
            _add(digest, part)
    elif isinstance(value, str) and ("/" in value or "\\" in value):
        digest.update(b"/")
    elif _is_plain(value):
        digest.update(repr(value).encode(errors="surrogatepass"))
    else:
        digest.update(type(value).__qualname__.encode())


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | int | float | complex | np.generic)
