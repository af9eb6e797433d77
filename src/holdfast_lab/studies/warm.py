"""In-memory snapshot of a training, so that each trial starts from the same state without a new process.

:class:`HeldTraining` documents what it restores. Any other state that a trial changes leaks into the next trial;
:func:`holdfast_lab.studies.campaign_plan.check_alone` detects that.
"""

from __future__ import annotations

import copy
import random
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.base.torch_private import buffers_of, parameters_of


class WarmState(Protocol):
    """An object whose state can be saved and loaded, such as a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state."""
        ...


class HeldTraining:
    """A snapshot of a training's state, taken when the object is created.

    It holds the bits of parameters, gradients and buffers, including buffers that are not in ``state_dict``; the state
    and settings of the optimizer, without the casts of ``load_state_dict``; and the global random generators of torch
    (CPU, and GPUs in use), NumPy and Python. Modules, parameters and the optimizer keep their identity, so hooks,
    wrappers and schedulers keep working. It does not hold other attributes of modules, hooks, or the state of other
    objects.

    Args:
        module: The model.
        optimizer: Its optimizer, if it has one.
        others: Further objects with a state.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *others: WarmState) -> None:
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
        """Restore the snapshot."""
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
        self._data = tensor.data  # shares the tensor's storage
        self._values = tensor.data.clone()
        self._grad = None if tensor.grad is None else tensor.grad.clone()

    def restore(self) -> None:
        self._data.copy_(self._values)
        self._tensor.data = self._data  # a trial may have replaced the storage or the dtype
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
