"""Tensors of the model that no slice may change: each worker would change them by its own slices, and differently often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from holdfast.base.torch_private import buffers_of, version_of
from holdfast.errors import ScriptError

HOW_TO_CHOOSE = (
    'or "sum" (all changes) or "first" (the value after the first slice); in a framework set holdfast_buffers of the'
    " module that has the buffer"
)
"""What follows in a message that names a choice."""

_ONCE_A_STEP = (
    "Change it once a step: in session.steps before the slices of the next step, where step.number > 0 and step.attempt =="
    " 0; in a prepared loop where loader.committed is true"
)
_Mark = tuple[int, int]
"""Version and address of a tensor."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Constants:
    """Finds a slice that changed a parameter, or a buffer that is too large to be sent with every slice.

    The first slice of a process compares the bits of parameters without gradient, which may be changed in ways that torch
    does not count (``p.data.mul_()``). Later slices compare versions and addresses, which are integers. Trainable
    parameters are compared in the first slice only, and then named, not refused: every slice may change them alike.

    Args:
        model: The module.
        buffers: The large buffers: name, module, name there, tensor.
        limit: Elements of the largest buffer that may change, and of the largest trainable parameter whose bits are
            compared.
    """

    def __init__(
        self, model: nn.Module, buffers: Sequence[tuple[str, nn.Module, str, torch.Tensor]], limit: int
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if not nn.parameter.is_lazy(p)]
        # What was made in inference mode has no version, and torch lets nothing change it outside of that.
        self._frozen = {name: p for name, p in named if not (p.requires_grad or p.is_inference())}
        self._trained = {name: p for name, p in named if p.requires_grad and not p.is_inference()}
        self._buffers = buffers
        self._limit = limit
        self._is_first = True
        self._marks: list[_Mark] = []
        self._marks_of_buffers: list[_Mark] = []
        self._marks_of_trained: list[_Mark] = []
        self._sums: dict[str, int] = {}
        self.trained_changed: tuple[str, ...] = ()
        """Trainable parameters that the first slice has changed."""

    def forget(self) -> None:
        """Between steps: the script may change anything."""
        self._marks = []

    def begin_slice(self) -> None:
        """Note what the slice must not change."""
        if self._is_first:
            self._sums = dict(self._sums_of_bits())
            self._marks_of_trained = _marks(self._trained.values())
        self._marks = _marks(self._frozen.values())
        self._marks_of_buffers = _marks(buffer for *_, buffer in self._buffers)

    def check_between(self) -> None:
        """Check that no parameter without gradient has changed since the previous slice of the step, if there was one.

        Raises:
            ScriptError: if one has.
        """
        for name in _changed(self._frozen, self._marks):
            raise ScriptError(
                f"the loop changed the parameter {name}, which has no gradient, within a step: a worker computes the step, or"
                f" more slices of it, again after a failure. {_ONCE_A_STEP}"
            )

    def check(self) -> None:
        """Check that the slice has changed nothing, as soon as it is computed.

        Raises:
            ScriptError: if it has.
        """
        for (path, module, name, buffer), mark in zip(self._buffers, self._marks_of_buffers, strict=True):
            if _marks([buffer]) != [mark] or buffers_of(module)[name] is not buffer:
                raise ScriptError(
                    f"the forward pass changed the buffer {path} of {buffer.numel()} elements; one of more than"
                    f" {self._limit} may change only by choice, because its values are sent with every slice: pass"
                    f' buffers={{"{path}": "mean"}}, {HOW_TO_CHOOSE}'
                )
        changed = _changed(self._frozen, self._marks)
        if self._is_first:
            sums = dict(self._sums_of_bits())
            is_other = {name for name in sums if sums[name] != self._sums[name]}
            moved = _changed(self._trained, self._marks_of_trained)
            self.trained_changed = tuple(name for name in self._trained if name in is_other or name in moved)
            # What has another version and the same bits was written with its own values, as in every later slice.
            self._frozen = {n: p for n, p in self._frozen.items() if n in is_other or n not in changed}
            self._marks, self._marks_of_trained = _marks(self._frozen.values()), []
            changed = [name for name in self._frozen if name in is_other]
            self._is_first, self._sums = False, {}
        for name in changed:
            raise ScriptError(
                f"the forward pass changed the parameter {name}, which has no gradient: each worker changes it once per"
                f" slice, so workers would differ after a failure. {_ONCE_A_STEP}. Or make it a buffer, and choose:"
                f' buffers={{"{name}": "first"}}'
            )

    def _sums_of_bits(self) -> Iterator[tuple[str, int]]:
        for name, parameter in (*self._frozen.items(), *self._trained.items()):
            tensor = parameter.detach()
            is_compared = not parameter.requires_grad or tensor.numel() <= self._limit
            if is_compared and type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta:
                tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                yield name, int(tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))


def _marks(tensors: Iterable[torch.Tensor]) -> list[_Mark]:
    return [(version_of(tensor), tensor.data_ptr()) for tensor in tensors]


def _changed(tensors: Mapping[str, torch.Tensor], marks: Sequence[_Mark]) -> list[str]:
    """Return the names of tensors that no longer have their marks, if there are marks."""
    if not marks or (now := _marks(tensors.values())) == marks:  # names cost as much again, in every slice
        return []
    return [name for name, one, other in zip(tensors, marks, now, strict=True) if one != other]
