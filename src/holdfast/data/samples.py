"""Getting samples out of a dataset."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from holdfast.data.plan import Ids
from holdfast.errors import ConfigError


def check_dataset(dataset: Any) -> None:
    """Make sure that samples can be asked for by number."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"dataset must have len and [], got {type(dataset).__name__}; an IterableDataset cannot be cut into slices"
        )


def fetch(dataset: Any, ids: Ids, collate: Any) -> Any:
    """Return the samples ``ids`` of ``dataset`` as one batch, made by ``collate``; None takes torch's default.

    The dataset is anything with ``len`` and ``[]``; a ``TensorDataset`` is indexed at once.
    """
    if collate is None and type(dataset) is TensorDataset:  # a subclass may have a [] of its own
        index = torch.from_numpy(ids)
        return tuple(tensor[index] for tensor in dataset.tensors)
    many = getattr(dataset, "__getitems__", None)
    samples = many(ids.tolist()) if many is not None else [dataset[i] for i in ids.tolist()]
    return (collate or default_collate)(samples)
