"""Fetching samples from a dataset."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from holdfast.data.plan import Ids
from holdfast.errors import ConfigError

_WITHOUT_SELECT = {torch.uint16, torch.uint32, torch.uint64}
"""Types that torch's ``index_select`` lacks."""


def check_dataset(dataset: Any) -> None:
    """Check that samples can be accessed by index."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(f"dataset must have len and [], got {type(dataset).__name__}")


def fetch(dataset: Any, ids: Ids, collate: Any) -> Any:
    """Return the samples ``ids`` of ``dataset`` as one batch, made by ``collate``; None: torch's default.

    The dataset is anything with ``len`` and ``[]``; a ``TensorDataset`` is indexed in one operation.
    """
    if collate is None and type(dataset) is TensorDataset:  # a subclass may override []
        index = torch.from_numpy(ids)
        return tuple(_rows(tensor, index) for tensor in dataset.tensors)
    many = getattr(dataset, "__getitems__", None)
    samples = many(ids.tolist()) if many is not None else [dataset[i] for i in ids.tolist()]
    return (collate or default_collate)(samples)


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor; the index is in host memory, which ``index_select`` takes only if the tensor is, too."""
    if tensor.device.type != "cpu" or tensor.dtype in _WITHOUT_SELECT:
        return tensor[index]
    return tensor.index_select(0, index)  # faster than []
