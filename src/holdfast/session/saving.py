"""Files that the script writes: complete or not at all, whichever worker dies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors
from torch import nn

from holdfast.errors import CheckpointError

SAFETENSORS = ".safetensors"


def model_state(model: Any) -> dict[str, Any]:
    """Return the ``state_dict`` of a module, or of the whole module of a Pipeline or Sharded model."""
    state: dict[str, Any] = (model if isinstance(model, nn.Module) else model.module).state_dict()
    return state


def save_atomically(obj: Any, path: Path, rank: int) -> None:
    """Write ``obj`` to ``path`` by a temporary file beside it, which replaces the file once it is complete and on disk.

    Args:
        obj: For a name that ends in ``.safetensors`` a dict of tensors, else anything that ``torch.save`` takes.
        path: The file.
        rank: This worker, so that no two write the same temporary file.

    Raises:
        CheckpointError: if the file cannot be written, or has a format that cannot hold ``obj``.
    """
    draft = path.with_name(f".{path.name}.tmp-{rank}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            if path.suffix == SAFETENSORS:
                file.write(safetensors(_apart(obj)))
            else:
                torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        with contextlib.suppress(OSError):  # complete, it is there no more; the failure of the write is what counts
            draft.unlink(missing_ok=True)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in host memory, with copies of those that share memory, such as tied weights: safetensors refuses them."""
    made: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        place = flat.untyped_storage().data_ptr()
        made[name] = flat.clone() if place in taken else flat
        taken.add(place)
    return made
