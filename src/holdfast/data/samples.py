"""Fetching samples from a dataset."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from holdfast.data.plan import Ids
from holdfast.errors import ConfigError


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
        return tuple(tensor.index_select(0, index) for tensor in dataset.tensors)
    many = getattr(dataset, "__getitems__", None)
    samples = many(ids.tolist()) if many is not None else [dataset[i] for i in ids.tolist()]
    return (collate or default_collate)(samples)
