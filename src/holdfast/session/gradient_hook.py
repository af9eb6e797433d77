"""Lets a prepared loop see ``loss.backward()``: the gradient of a slice counts by the slice's number of samples.

DDP hooks into parameters instead. A hook there would come too late: scaled after the pass, gradients would have other
bits than those of a session, which differentiates the loss summed over the slice.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from holdfast.errors import ScriptError


class _Loop(Protocol):
    """What the hook needs of a prepared loop."""

    @property
    def hooks_backward(self) -> bool: ...
    def backward(self, root: torch.Tensor) -> None: ...


_loop: _Loop | None = None
_thread = 0
_original: Callable[..., None] | None = None
_options: dict[str, Any] | None = None
"""Options of the call in progress, for the one that the session makes."""
_is_inside = False
"""Whether the session computes gradients, so that calls are part of that, as those of gradient checkpointing are."""


def install(loop: _Loop) -> None:
    """From now on, pass each ``backward`` of this thread to ``loop``.

    Raises:
        ScriptError: if another loop is open.
    """
    global _loop, _thread, _original
    if _loop is not None and _loop is not loop:
        raise ScriptError("another prepared loop is open: end it first, or prepare all models together")
    _loop, _thread = loop, threading.get_ident()
    if _original is None:
        _original = torch.autograd.backward
        torch.autograd.backward = functools.wraps(_original)(_backward)


def forget() -> None:
    """Forget a loop that was torn down with its application."""
    if _loop is not None:
        remove(_loop)


def remove(loop: _Loop) -> None:
    """Stop doing so; the function is torch's again."""
    global _loop, _original
    if _loop is loop:
        _loop = None
        if _original is not None:
            torch.autograd.backward, _original = _original, None


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward``, or the prepared loop's way to compute the gradients of a slice."""
    global _options, _is_inside
    assert _original is not None
    options: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
    if _options is not None:  # the session's own call
        options, _options = _options, None
        _original(tensors, grad_tensors, **options)
        return
    loop = _loop
    if _is_inside or loop is None or threading.get_ident() != _thread or not loop.hooks_backward:
        _original(tensors, grad_tensors, grad_variables=grad_variables, **options)
        return
    roots: Sequence[Any] = tensors if isinstance(tensors, list | tuple) else [tensors]
    if len(roots) != 1 or not _is_empty(grad_tensors) or grad_variables is not None:
        raise ScriptError(
            "in a loop over a prepared loader call backward on one scalar, the mean loss over the slice, without gradients"
        )
    _options, _is_inside = options, True
    try:
        loop.backward(roots[0])
    finally:
        _options, _is_inside = None, False


def _is_empty(gradients: Any) -> bool:
    return gradients is None or (isinstance(gradients, list | tuple) and all(one is None for one in gradients))
