"""``.pt``: the format of ``torch.save``. It is a pickle, which torch reads here with everything except data forbidden."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.format import flatten, scalars_of
from holdfast.errors import CheckpointError
from holdfast.tools.formats.base import TensorInfo, TensorReader, TensorSource
from holdfast.tools.formats.checks import check_size, check_zip, not_a, refuse, step_in, total_bytes

MAX_VALUES = 3_000_000
"""Maximum number of values: a pickle of a few hundred bytes can reference one list 10**12 times."""

ZIP = b"PK\x03\x04"
_REASON = re.compile(r"WeightsUnpickler error:\s*([^\n]{1,100})")
_FORBIDDEN = re.compile(r"GLOBAL ([\w.]{1,100})")


class Torch(TensorReader):
    """See :class:`~holdfast.tools.formats.base.TensorReader`."""

    def open(self, path: Path, stack: ExitStack) -> TensorSource:
        """See :meth:`TensorReader.open`; the whole file is read immediately."""
        data = load_data(path)
        try:
            state = plain(data, [MAX_VALUES])
            leaves, skeleton = flatten(state)
        except RecursionError as error:
            refuse(path, "holds lists nested without end; save the plain state_dict()", error)
        except CheckpointError as error:
            refuse(path, f"cannot be read: {str(error).removeprefix('the state cannot be saved: ')}", error)
        tensors = {name: leaf.detach() for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        entries = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        check_size(path, total_bytes(entries))  # a tensor may be a single value, expanded 10**12 times
        scalars, ties = scalars_of(skeleton, tensors)
        entries |= {name: entries[first] for name, first in ties.items()}
        steps = (step_in(scalars.get(key)) for key in ("step", "global_step"))
        return TensorSource(
            name=str(path),
            kind="torch",
            tensors=entries,
            read=lambda name: tensors[ties.get(name, name)].resolve_conj().resolve_neg().contiguous(),
            load=lambda: state,
            scalars=scalars,
            step=next((step for step in steps if step is not None), None),
            ties=ties,
        )


def load_data(path: Path) -> Any:
    """Return the content that torch finds in a file, which must be plain data.

    Raises:
        CheckpointCorrupt: if it is not a file of torch.save.
        CheckpointError: if it asks to execute something.
    """
    with path.open("rb") as file:
        is_zip = file.read(4) == ZIP
    if is_zip:
        try:
            with zipfile.ZipFile(path) as archive:
                check_zip(path, archive, (zipfile.ZIP_STORED,))
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
            not_a("a file of torch.save", path, f"{error}; was it cut short?", error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # if torch cannot read a foreign file, it raises
            return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        _explain(path, error)
    except Exception as error:  # a malicious pickle can make its reader raise anything
        why = " ".join(str(error).split())
        not_a("a file of torch.save", path, f"{type(error).__name__}: {why:.200}", error)


def _explain(path: Path, error: pickle.UnpicklingError) -> Any:
    match = _FORBIDDEN.search(str(error))
    if match is None:
        # Only a part of torch's message: the rest advises to read such a file without protection.
        why = _REASON.search(str(error))
        not_a("a file of torch.save", path, f"it is no pickle of plain data: {why[1] if why else 'unknown'}", error)
    refuse(
        path,
        f"asks to run {match[1]}, which is not data; nothing of it was run. If you trust it, load it with torch and save "
        "its state_dict() of tensors, numbers and strings",
        error,
    )


def plain(value: Any, left: list[int], on_tensor: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Return a state without torch's own types, such as ``torch.Size``; counts values, so that it terminates."""
    left[0] -= 1
    if left[0] < 0:
        raise CheckpointError(f"it holds more than {MAX_VALUES} values besides its tensors; save them as tensors")
    if isinstance(value, torch.Size):
        return tuple(value)
    if on_tensor is not None and isinstance(value, torch.Tensor):
        return on_tensor(value)
    if type(value) is torch.nn.Parameter:
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(plain(item, left, on_tensor) for item in value)
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: plain(item, left, on_tensor) for key, item in value.items()})
    return value
