"""A digest of some samples of a dataset, by which workers notice that they do not have the same data.

Data in memory is read at many places. Any other dataset is a class of the script, whose samples may be slow, differ each
time, or change what the dataset holds: one sample is loaded several times, within a short time, and has no digest
unless it is the same each time. A dataset that loader processes read is not touched in the worker's own process: it may
open a file that they must open themselves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from holdfast.data.loader import DataSource
from holdfast.data.seeds import seed_of, seeded

_IN_MEMORY = 256
"""Samples of a dataset in memory that are read, evenly spaced."""
_LOADS, _WITHIN_S = 8, 0.02
"""How often a sample of any other dataset is loaded, and the time for it.

A sample with random numbers of its own is the same in all of the loads at one worker, and another one at a second worker,
at most once in 30,000 times.
"""


def sample_digest(source: DataSource, num_samples: int) -> int:
    """Return a digest of some samples, from 0 to 2**62 - 1; -1 if there is none, for a stream or samples that may differ."""
    if num_samples < 1:
        return -1
    try:
        if _is_in_memory(source.dataset):
            spaced = np.linspace(0, num_samples - 1, min(num_samples, _IN_MEMORY)).astype(np.int64)
            return _digest([source.dataset[i] for i in spaced.tolist()])
        return -1 if source.num_workers else _of_same_loads(source.dataset)
    except Exception:  # of the script's dataset: it raises again where the sample is trained on, if that is not caught
        return -1


def _is_in_memory(dataset: Any) -> bool:
    """Return whether reading the dataset runs no code of the script."""
    if type(dataset) is Subset:
        return _is_in_memory(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_in_memory, dataset.datasets))
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(map(_is_in_memory, parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) in (TensorDataset, list, tuple, torch.Tensor, np.ndarray)


def _of_same_loads(dataset: Any) -> int:
    ends_s = time.monotonic() + _WITHIN_S
    digests = set()
    for _ in range(_LOADS):
        with seeded(seed_of("digest of samples")):
            digests.add(_digest(dataset[0]))
        if time.monotonic() > ends_s or len(digests) > 1:
            return -1
    return digests.pop()


def _digest(value: Any) -> int:
    digest = xxhash.xxh3_64()
    _add(digest, value)
    return digest.intdigest() >> 2


def _add(digest: Any, value: Any) -> None:
    """Add the tensors, numbers and texts of a sample; paths may differ between machines, and other objects are left out."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            digest.update(repr(name).encode())
            _add(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(b"(")
        for part in value:
            _add(digest, part)
    elif isinstance(value, str) and ("/" in value or "\\" in value):
        digest.update(b"/")
    elif value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        digest.update(repr(value).encode(errors="surrogatepass"))
    else:
        digest.update(type(value).__qualname__.encode())
