"""Which tensors of a running job planned bit flips alter; see :mod:`holdfast.faults.tensors` for how."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from holdfast.faults.kinds import Fault
from holdfast.faults.names import chosen
from holdfast.faults.process import Due, Injector

NOT_WATCHED = ExitStack()
"""Returned by :func:`flip_outputs` if no flip is due."""


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's state tensors, named like ``fc1.weight/exp_avg``; empty before its first step."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    }


def flip_outputs(model: nn.Module, flips: Sequence[Due], faults: Injector, prefix: str = "") -> ExitStack:
    """Flip bits in the outputs of modules during the next forward pass. Closing the returned stack removes the hooks.

    Each flip strikes one module, drawn from the modules that it names, or else from those without submodules.

    Args:
        model: The model whose modules are altered.
        flips: The flips that are due.
        faults: Carries them out.
        prefix: Prefix of the module names.
    """
    if not flips:
        return NOT_WATCHED
    watched = ExitStack()
    for due in flips:
        name, module = _drawn(model, due[1], prefix)
        strike = functools.partial(_strike, faults, due, name)
        handle: RemovableHandle = module.register_forward_hook(strike)
        watched.callback(handle.remove)
    return watched


def module_names(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the modules of a model by name; the root module is called ``model``."""
    return {f"{prefix}{name or 'model'}": module for name, module in model.named_modules()}


def _drawn(model: nn.Module, fault: Fault, prefix: str) -> tuple[str, nn.Module]:
    assert fault.flip is not None
    named = module_names(model, prefix)
    if fault.flip.at:
        named = chosen(named, fault.flip.at)
    else:
        named = {name: module for name, module in named.items() if not any(module.children())}
    name = random.Random(fault.flip.how.seed).choice(list(named))
    return name, named[name]


def _strike(faults: Injector, due: Due, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    faults.carry_out(due, _tensors(name, output))


def _tensors(name: str, output: Any) -> dict[str, torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return {name: output}
    parts = output.items() if isinstance(output, Mapping) else enumerate(output if isinstance(output, Sequence) else ())
    return {f"{name}/{key}": part for key, part in parts if isinstance(part, torch.Tensor)}
