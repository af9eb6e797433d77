"""Going back, in memory, to where a training was: what a trial starts from, without a new process.

It is sound for what :class:`Held` says it holds. Whatever else a trial alters and does not put back, the next one finds:
:func:`holdfast_lab.studies.campaign_plan.check_alone` is there to find that.
"""

from __future__ import annotations

import copy
import random
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.torch_private import buffers_of, parameters_of


class Stateful(Protocol):
    """Anything with a state that it can be given again, such as a schedule of the learning rate."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state."""
        ...


class Held:
    """Where a training was when this was made.

    It holds the bits of parameters, gradients and buffers, those too that no ``state_dict`` has; the optimizer's state and
    settings, without the casts of ``load_state_dict``; and the global generators of torch (of the CPU, and of GPUs in
    use), NumPy and Python. Modules, parameters and their optimizer stay the objects they are, so hooks, wrappers and
    schedules go on knowing them. It does not hold other attributes of modules, hooks, or what other objects remember.

    Args:
        module: The model.
        optimizer: Its optimizer, if it has one.
        others: Have states of their own.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *others: Stateful) -> None:
        self._modules = [(part, part.training) for part in module.modules()]
        self._tensors = [
            _HeldTensor(tensors, name, tensor)
            for part, _ in self._modules
            for tensors in (parameters_of(part), buffers_of(part))
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self._optimizer = None if optimizer is None else _HeldOptimizer(optimizer)
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._generators = _generator_states()

    def restore(self) -> None:
        """Go back there."""
        for part, was_training in self._modules:
            part.training = was_training
        for held in self._tensors:
            held.restore()
        if self._optimizer is not None:
            self._optimizer.restore()
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        _set_generator_states(self._generators)


class _HeldTensor:
    def __init__(self, tensors: dict[str, Any], name: str, tensor: Tensor) -> None:
        self._tensors, self._name, self._tensor = tensors, name, tensor
        self._needs_grad = tensor.requires_grad
        self._data = tensor.data  # where the values are
        self._values = tensor.data.clone()
        self._grad = None if tensor.grad is None else tensor.grad.clone()

    def restore(self) -> None:
        self._data.copy_(self._values)
        self._tensor.data = self._data  # a trial may have put other memory there, or another dtype
        self._tensor.grad = None if self._grad is None else self._grad.clone()
        self._tensor.requires_grad_(self._needs_grad)
        self._tensors[self._name] = self._tensor


class _HeldOptimizer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._states = [(parameter, copy.deepcopy(state)) for parameter, state in optimizer.state.items()]
        self._groups = [(group, list(group["params"]), _without(group)) for group in optimizer.param_groups]

    def restore(self) -> None:
        self._optimizer.state.clear()
        for parameter, state in self._states:
            self._optimizer.state[parameter] = copy.deepcopy(state)
        for group, parameters, settings in self._groups:
            group.clear()
            group.update({"params": list(parameters), **copy.deepcopy(settings)})
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]


def _without(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def _generator_states() -> tuple[Any, ...]:
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), gpus, np.random.get_state(), random.getstate()


def _set_generator_states(states: tuple[Any, ...]) -> None:
    cpu, gpus, numpy, python = states
    torch.set_rng_state(cpu)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)
    np.random.set_state(numpy)
    random.setstate(python)
