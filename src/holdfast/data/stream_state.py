"""The state of a stream as text, to keep in a checkpoint: plain data, tensors, arrays and bytes, never code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from holdfast.errors import CheckpointError

_PLAIN = (bool, int, float, str)

_WRONG = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RuntimeError,
    StopIteration,
    SyntaxError,  # of NumPy, for a dtype
)


def encode_state(state: Any) -> str | None:
    """Return ``state`` as JSON; None if it contains anything but plain data, tensors, arrays and bytes."""
    try:
        return json.dumps(_said(state))
    except TypeError:
        return None


def decode_state(text: str) -> Any:
    """Return the state that :func:`encode_state` encoded.

    Raises:
        CheckpointError: if it is none: the checkpoint was altered.
    """
    try:
        return _read(json.loads(text))
    except _WRONG as error:
        raise CheckpointError(f"the checkpoint holds no state of a stream: {error!r:.200}") from error


def _said(value: Any) -> Any:
    """Return a value as plain JSON: everything that JSON lacks is a dict with its kind."""
    if value is None or type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_said(part) for part in value]
    if type(value) is tuple:
        return {"tuple": [_said(part) for part in value]}
    if type(value) is dict:
        return {"dict": [[_said(name), _said(part)] for name, part in value.items()]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"scalar": value.tobytes().hex(), "dtype": value.dtype.str}
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return {"array": value.tobytes().hex(), "dtype": value.dtype.str, "shape": list(value.shape)}
    if type(value) is torch.Tensor:
        return _said_tensor(value)
    raise TypeError(f"a {type(value).__name__} cannot be saved")


def _said_tensor(value: torch.Tensor) -> dict[str, Any]:
    data = value.detach().cpu().contiguous().reshape(-1)
    digits = data.view(torch.uint8).numpy().tobytes().hex() if data.numel() else ""
    return {"tensor": digits, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}


def _read(said: Any) -> Any:
    if isinstance(said, list):
        return [_read(part) for part in said]
    if not isinstance(said, dict):
        return said
    kind = next(iter(said))
    content = said[kind]
    if kind == "tuple":
        return tuple(_read(part) for part in content)
    if kind == "dict":
        return {_read(name): _read(part) for name, part in content}
    data = bytes.fromhex(content)
    if kind == "bytes":
        return data
    if kind == "scalar":
        return np.frombuffer(data, dtype=np.dtype(said["dtype"]))[0]
    if kind == "array":
        return np.frombuffer(data, dtype=np.dtype(said["dtype"])).reshape(said["shape"]).copy()
    dtype = getattr(torch, said["dtype"])
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(said["shape"])
