"""Converts a training state into named tensors and a JSON skeleton, and back.

A state consists of data only: dicts, lists, tuples, tensors, numbers, strings, None. So nothing needs to be unpickled, and
every tensor has a readable path: ``model/conv1.weight``, ``optimizer/state/0/exp_avg``. The skeleton is the structure around
the tensors. ``docs/reference/checkpoint-format.md`` has its grammar. In short: scalars and lists are themselves, and everything
else is an object with one key, ``{"tensor": path}``, ``{"tied": path}``, ``{"tuple": [...]}``, ``{"dict": [[key, value],
...]}``, ``{"float": bits}``.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from holdfast.errors import CheckpointCorrupt, CheckpointError

MAX_DEPTH = 64
"""Maximum nesting depth of containers. A state that contains itself exceeds it."""

MAX_INT_BITS = 4096
"""Maximum size of an integer: Python refuses to parse integers of more than 4,300 digits."""

_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz complex128 complex64 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES.split()}
"""The dtypes that a checkpoint can hold, by name."""

_DTYPES = frozenset(DTYPES.values())
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_MAPPING_NAMES = {kind: name for name, kind in _MAPPINGS.items()}
_SCALARS = (str, int, float, bool, type(None))
# The safetensors header reserves the second name; an empty name would be lost in messages.
_RESERVED_PATHS = ("", "__metadata__")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one worker holds; it takes the place of the whole tensor in a state."""

    tensor: torch.Tensor  # The part
    start: tuple[int, ...]  # Its first index in each dimension of the whole tensor
    shape: tuple[int, ...]  # Shape of the whole tensor


Leaf = torch.Tensor | Shard
"""The value at the end of a path."""


class _Taken:
    """The tensors found so far, and the first path of each memory range."""

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.paths: dict[tuple[object, ...], str] = {}


def flatten(state: Any) -> tuple[dict[str, Leaf], Any]:
    """Split a state into tensors and skeleton.

    Tensors are returned as they are, not copied; one that occurs in several places (tied weights) has one path.

    Args:
        state: Nested dicts, lists, tuples, tensors, shards, ints, floats, bools, strings and None.

    Returns:
        The tensors by path, in the order of traversal, and the skeleton as plain JSON.

    Raises:
        CheckpointError: if the state contains anything else; the message names the path.
    """
    taken = _Taken()
    skeleton = _encode(state, (), taken)
    return taken.leaves, skeleton


def unflatten(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> Any:
    """Reassemble a state that :func:`flatten` split.

    Raises:
        CheckpointCorrupt: if the skeleton violates its grammar, or does not use each tensor once.
    """
    used: set[str] = set()
    state = _decode(skeleton, (), tensors, used)
    if left := tensors.keys() - used:
        raise CheckpointCorrupt(
            f"the skeleton does not say where tensor {min(left)!r} belongs; every tensor must be in it once"
        )
    return state


def scalars_of(skeleton: Any, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a state that are not tensors, by path; and the repeated paths of tied tensors, with the first one."""
    stand_ins = {path: torch.empty(0) for path in tensors}
    first = {id(stand_in): path for path, stand_in in stand_ins.items()}
    scalars: dict[str, Any] = {}
    ties: dict[str, str] = {}
    used: set[str] = set()
    for where, value in _leaves(unflatten(stand_ins, skeleton), ()):
        if not isinstance(value, torch.Tensor):
            scalars[tensor_path(where)] = value
        elif (path := first[id(value)]) in used:
            ties[tensor_path(where)] = path
        else:
            used.add(path)
    return scalars, ties


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, not copied."""
    # Not reshape(-1): torch calls a one-element tensor contiguous whatever its stride, and would keep the stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _leaves(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    children: Iterable[tuple[Any, Any]]
    if isinstance(value, dict) and value:
        children = value.items()
    elif isinstance(value, list | tuple) and value:
        children = enumerate(value)
    else:
        yield where, value
        return
    for key, child in children:
        yield from _leaves(child, (*where, key))


# ---------------------------------------------------------------------------------------------
# State to skeleton


def _encode(value: Any, where: tuple[Any, ...], tensors: _Taken) -> Any:
    if isinstance(value, torch.Tensor | Shard):
        return _take_leaf(value, where, tensors)
    if type(value) in _SCALARS:
        return _encode_scalar(value, where)
    if len(where) >= MAX_DEPTH:
        _refuse(where, f"is nested deeper than {MAX_DEPTH} levels", "does it contain itself?")
    if type(value) is list:
        return [_encode(item, (*where, i), tensors) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_encode(item, (*where, i), tensors) for i, item in enumerate(value)]}
    if name := _MAPPING_NAMES.get(type(value)):
        return {name: [[_check_key(k, where), _encode(v, (*where, k), tensors)] for k, v in value.items()]}
    return _refuse(where, f"has type {_type_name(value)}", "turn it into one of these in its state_dict()")


def _encode_scalar(value: Any, where: tuple[Any, ...]) -> Any:
    if type(value) is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        _refuse(where, f"is an integer of {value.bit_length()} bits", f"at most {MAX_INT_BITS} can be read back")
    if type(value) is str and not _is_unicode(value):
        _refuse(where, f"is the string {value!r}, which is not valid Unicode", "save it as a list of integers")
    return value


def _check_key(key: Any, where: tuple[Any, ...]) -> Any:
    if type(key) not in _SCALARS or (type(key) is float and not math.isfinite(key)):
        _refuse(where, f"has the key {key!r} of type {_type_name(key)}", "keys are strings, numbers, bools or None")
    return _encode_scalar(key, where)


def _take_leaf(leaf: Leaf, where: tuple[Any, ...], taken: _Taken) -> dict[str, str]:
    tensor = leaf.tensor if isinstance(leaf, Shard) else leaf
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        _refuse(where, f"has type {_type_name(tensor)}", "save its plain local tensor, or a Shard")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        _refuse(where, f"is a tensor of layout {tensor.layout} on {tensor.device}", "only dense tensors have bytes")
    if tensor.dtype not in _DTYPES:
        _refuse(where, f"is a tensor of {tensor.dtype}", f"tensors may be {', '.join(DTYPES)}")
    if isinstance(leaf, Shard):
        _check_shard(leaf, where)
    memory = _memory(tensor)
    if memory in taken.paths and not isinstance(leaf, Shard):
        return {"tied": taken.paths[memory]}
    path = tensor_path(where)
    if path in taken.leaves or path in _RESERVED_PATHS:
        path = next(p for n in range(2, len(taken.leaves) + 3) if (p := f"{path}~{n}") not in taken.leaves)
    taken.leaves[path] = leaf
    if tensor.numel() and not isinstance(leaf, Shard):
        taken.paths[memory] = path
    return {"tensor": path}


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share only if they are views of exactly the same elements."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _check_shard(shard: Shard, where: tuple[Any, ...]) -> None:
    sizes = tuple(shard.tensor.shape)
    fits = len(sizes) == len(shard.start) == len(shard.shape) and all(
        first >= 0 and first + size <= whole for first, size, whole in zip(shard.start, sizes, shard.shape, strict=True)
    )
    if not fits:
        _refuse(
            where,
            f"is a shard of shape {list(sizes)} at {list(shard.start)} of {list(shard.shape)}",
            "it must lie inside the whole",
        )


def tensor_path(where: tuple[Any, ...]) -> str:
    """Return the keys that lead to a value as one string.

    As in a JSON pointer (RFC 6901), ``~`` in a key becomes ``~0`` and ``/`` becomes ``~1``.
    """
    return "/".join([str(key).replace("~", "~0").replace("/", "~1") for key in where])


def _refuse(where: tuple[Any, ...], what: str, advice: str) -> NoReturn:
    place = tensor_path(where[:6]) + ("/..." if len(where) > 6 else "")
    raise CheckpointError(
        f"the state cannot be saved: {place or 'the state itself'} {what}; allowed are dict, list, tuple, "
        f"tensor, int, float, bool, str and None ({advice})"
    )


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------------------------------------
# Skeleton to state


def _decode(node: Any, where: tuple[Any, ...], tensors: Mapping[str, torch.Tensor], used: set[str]) -> Any:
    if type(node) in _SCALARS:
        return _decode_scalar(node, where)
    if len(where) > MAX_DEPTH:
        _damaged(where, f"is nested deeper than {MAX_DEPTH} levels")
    if type(node) is list:
        return [_decode(item, (*where, i), tensors, used) for i, item in enumerate(node)]
    if type(node) is not dict or len(node) != 1:
        _damaged(where, "must be a scalar, a list or an object with one key")
    ((kind, body),) = node.items()
    if kind == "tensor":
        return _use_tensor(body, where, tensors, used)
    if kind == "tied":
        return _use_again(body, where, tensors, used)
    if kind == "float":
        return _decode_float(body, where)
    if type(body) is list and kind == "tuple":
        return tuple(_decode(item, (*where, i), tensors, used) for i, item in enumerate(body))
    if type(body) is list and kind in _MAPPINGS:
        return _decode_mapping(_MAPPINGS[kind], body, where, tensors, used)
    return _damaged(where, f"has the unknown kind {kind!r:.80}, or a body of another kind")


def _decode_scalar(value: Any, where: tuple[Any, ...]) -> Any:
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        _damaged(where, f"is an integer of {value.bit_length()} bits, at most {MAX_INT_BITS} are allowed")
    if type(value) is str and not _is_unicode(value):
        _damaged(where, f"is the string {value!r:.80}, which is not valid Unicode")
    return value


def _decode_mapping(
    kind: type[dict[Any, Any]],
    pairs: list[Any],
    where: tuple[Any, ...],
    tensors: Mapping[str, torch.Tensor],
    used: set[str],
) -> dict[Any, Any]:
    mapping = kind()
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in _SCALARS or pair[0] in mapping:
            _damaged(where, "must be a list of pairs [key, value] with different scalar keys")
        key, node = _decode_scalar(pair[0], where), pair[1]
        mapping[key] = _decode(node, (*where, key), tensors, used)
    return mapping


def _use_tensor(path: Any, where: tuple[Any, ...], tensors: Mapping[str, torch.Tensor], used: set[str]) -> torch.Tensor:
    if type(path) is not str or path not in tensors or path in used:
        _damaged(where, f"names the tensor {path!r:.200}, which the manifest does not list or uses twice")
    used.add(path)
    return tensors[path]


def _use_again(path: Any, where: tuple[Any, ...], tensors: Mapping[str, torch.Tensor], used: set[str]) -> torch.Tensor:
    if type(path) is not str or path not in used:
        _damaged(where, f"is tied to the tensor {path!r:.200}, which does not occur before it")
    return tensors[path]


def _decode_float(bits: Any, where: tuple[Any, ...]) -> float:
    try:
        (value,) = struct.unpack(">d", bytes.fromhex(bits))
    except (TypeError, ValueError, struct.error):
        _damaged(where, f"has {bits!r:.80} where the 16 hexadecimal digits of a float should be")
    return float(value)


def _damaged(where: tuple[Any, ...], what: str) -> NoReturn:
    msg = f"the skeleton is damaged: {tensor_path(where[:6]) or 'its root':.200} {what}"
    raise CheckpointCorrupt(msg if msg.isprintable() else msg.encode("unicode_escape").decode())
