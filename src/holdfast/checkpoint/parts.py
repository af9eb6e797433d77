"""Parts of a state: merging those of several writers, and selecting one from a whole state.

Both operate on the state itself, with stand-ins in place of tensors. So paths and skeleton are the same as
if the state had been whole from the beginning, or had only ever been the part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.format import DTYPES, flatten, tensor_path, unflatten
from holdfast.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from holdfast.errors import CheckpointError

Wanted = Callable[[str], bool]
"""Returns whether the dict entry at a path, such as ``replica/parts/2``, is selected. It is not called for entries below
one that is not selected."""


def all_but(place: str, *kept: str) -> Wanted:
    """Return a selector of everything except what is below a place, plus the named paths below it.

    ``all_but("replica/parts", "replica/parts/2")`` selects the state common to all workers of a split model, and part 2.

    Args:
        place: A path; see :func:`~holdfast.checkpoint.format.tensor_path`.
        kept: Paths below it.
    """

    def is_wanted(path: str) -> bool:
        return not _is_below(path, place) or any(
            path == keep or _is_below(path, keep) or _is_below(keep, path) for keep in kept
        )

    return is_wanted


def _is_below(path: str, place: str) -> bool:
    return path.startswith(f"{place}/")


def pick(state: Any, only: Wanted) -> Any:
    """Return a state without the dict entries that are not selected; nothing is copied."""
    return _pick(state, only, ())


def _pick(value: Any, only: Wanted, where: tuple[Any, ...]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_pick(item, only, (*where, i)) for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    picked = type(value)()
    for key, inner in value.items():
        if only(tensor_path((*where, key))):
            picked[key] = _pick(inner, only, (*where, key))
    return picked


def select(manifest: Manifest, only: Wanted) -> Manifest:
    """Return the manifest of the selected part alone, with only those files that hold its values."""
    stand_ins = _stand_ins(manifest.tensors)
    whole = _rearranged(manifest, stand_ins, pick(unflatten(stand_ins, manifest.skeleton), only))
    used = {piece.file for entry in whole.tensors.values() for piece in entry.pieces}
    return dataclasses.replace(whole, files={name: file for name, file in whole.files.items() if name in used})


def merge(parts: Sequence[Manifest]) -> Manifest:
    """Return the manifest of all parts together, as a single writer would have written it.

    If only the first part has a skeleton, that is the structure of the whole state. Otherwise each skeleton is the structure of
    its own part, and they are merged: a dict that several parts have gets the entries of all, in the order of the writers, or
    in numerical order if all keys are numbers.

    Raises:
        CheckpointError: if parts contradict each other. Whether they are complete is not checked.
    """
    first = parts[0]
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        is_alike = (part.step, part.format, part.folder) == (first.step, first.format, first.folder)
        if not is_alike or files.keys() & part.files:
            raise CheckpointError(
                f"the writers of step {first.step} do not write the same checkpoint: one writes {sorted(part.files)} as {part.format} of step {part.step}"
            )
        files |= part.files
        for path, entry in part.tensors.items():
            earlier_entry = tensors.get(path)
            if earlier_entry is not None and (earlier_entry.dtype, earlier_entry.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"the writers of step {first.step} hold different tensors {path!r}: {earlier_entry.dtype} {list(earlier_entry.shape)} and {entry.dtype} {list(entry.shape)}"
                )
            pieces = (earlier_entry.pieces if earlier_entry else ()) + entry.pieces
            tensors[path] = dataclasses.replace(entry, pieces=pieces)
    whole = dataclasses.replace(first, files=files, tensors=tensors)
    return whole if all(part.skeleton is None for part in parts[1:]) else _join_all(whole, parts)


def _join_all(whole: Manifest, parts: Sequence[Manifest]) -> Manifest:
    """Merge the skeletons of all parts."""
    stand_ins = _stand_ins(whole.tensors)
    held_bytes = dict.fromkeys(whole.tensors, 0)
    states: list[Any] = []
    for part in parts:
        if part.skeleton is None:
            raise CheckpointError(
                f"part {len(states)} of the checkpoint of step {whole.step} is not distinct, but other parts are; all writers must pass the same distinct= to take()"
            )
        states.append(unflatten({path: stand_ins[path] for path in part.tensors}, part.skeleton))
        for path, entry in part.tensors.items():
            held_bytes[path] += entry.size_bytes
            if held_bytes[path] > math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
                raise _twice(path, len(states) - 1, whole.step)
    state = states[0]
    for number, more in enumerate(states[1:], 1):
        state = _join(state, more, (), number, whole.step)
    return _rearranged(whole, stand_ins, state)


def _join(one: Any, other: Any, where: tuple[Any, ...], number: int, step: int) -> Any:
    if isinstance(one, torch.Tensor) and one is other:
        return one  # shards of one tensor
    if not isinstance(one, dict) or type(one) is not type(other):
        raise _twice(tensor_path(where), number, step)
    joined = type(one)(one)
    for key, inner in other.items():
        joined[key] = _join(one[key], inner, (*where, key), number, step) if key in one else inner
    if 0 < len(one) < len(joined) and all(_is_number(key) for key in joined):
        return type(one)((key, joined[key]) for key in sorted(joined, key=lambda key: (len(str(key)), str(key))))
    return joined


def _is_number(key: Any) -> bool:
    return type(key) in (int, str) and str(key).isdecimal()


def _twice(path: str, number: int, step: int) -> CheckpointError:
    return CheckpointError(
        f"part {number} of the checkpoint of step {step} holds {path!r}, and so does a part before it; of distinct parts, "
        "only one may hold each value"
    )


def _stand_ins(paths: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return a one-element tensor for each path: an empty one would have no memory to be identified by."""
    return {path: torch.empty(1) for path in paths}


def _rearranged(manifest: Manifest, stand_ins: Mapping[str, torch.Tensor], state: Any) -> Manifest:
    """Return a manifest with the structure of a state whose leaves are stand-ins for the manifest's tensors."""
    paths = {id(stand_in): path for path, stand_in in stand_ins.items()}
    leaves, skeleton = flatten(state)
    tensors = {path: manifest.tensors[paths[id(leaf)]] for path, leaf in leaves.items()}
    return dataclasses.replace(manifest, tensors=tensors, skeleton=skeleton)
