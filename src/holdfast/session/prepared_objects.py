"""What ``holdfast.prepare`` returns for a script's optimizer, scheduler, scaler and average: each acts once per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import optim
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import ScriptError


class _Loop(Protocol):
    """What they need of the prepared loop; see :class:`~holdfast.session.prepared_loop.PreparedLoop`."""

    @property
    def counts(self) -> bool: ...
    @property
    def is_decided(self) -> bool: ...
    def capture(self, number: int) -> None: ...
    def apply(self, update: Callable[[], Any]) -> None: ...


class OptimizerGroup(optim.Optimizer):
    """Several optimizers of different parameters as one.

    Args:
        optimizers: The optimizers, stepped in this order.
    """

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})
        self._share_groups()

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of all parameters."""
        return defaultdict(dict, {parameter: kept for one in self.optimizers for parameter, kept in one.state.items()})

    @state.setter
    def state(self, _: Any) -> None:
        """Ignore the empty state that the base class sets."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every optimizer."""
        for one in self.optimizers:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers in the form of one, with their parameters numbered throughout."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, own in self._states():
            state |= {first + number: kept for number, kept in own["state"].items()}
            groups += [
                group | {"params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        groups = list(state_dict["param_groups"])
        for one, (first, own) in zip(self.optimizers, list(self._states()), strict=True):
            count = sum(len(group["params"]) for group in own["param_groups"])
            own_groups, groups = groups[: len(own["param_groups"])], groups[len(own["param_groups"]) :]
            numbers = range(first, first + count)
            one.load_state_dict(
                {
                    "state": {n - first: state_dict["state"][n] for n in numbers if n in state_dict["state"]},
                    "param_groups": [group | {"params": [n - first for n in group["params"]]} for group in own_groups],
                }
            )
        self._share_groups()

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each optimizer's first parameter, and its state."""
        first = 0
        for one in self.optimizers:
            own = one.state_dict()
            yield first, own
            first += sum(len(group["params"]) for group in own["param_groups"])

    def _share_groups(self) -> None:
        """Take over the parameter groups of the optimizers, which loading replaces.

        A group's options belong to its optimizer.
        """
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


class PreparedOptimizer(optim.Optimizer):
    """A script's optimizer in a prepared loop. Everything but :meth:`step` is that of the optimizer itself."""

    def __init__(self, loop: _Loop, optimizer: optim.Optimizer, number: int, count: int) -> None:
        self.optimizer = optimizer
        self._loop, self._number, self._count = loop, number, count

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer itself, such as ``param_groups``."""
        return getattr(self.__dict__["optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a scheduler that would count calls of this ``step``, and not the steps that are applied."""
        if name == "step":
            raise ScriptError("create the scheduler before holdfast.prepare, and pass it: prepare(..., scheduler)")
        object.__setattr__(self, name, value)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters if this was the step's last slice and the step is committed; else do nothing.

        Raises:
            ScriptError: if ``closure`` is given: it would compute other samples than those of the step.
        """
        if closure is not None:
            raise ScriptError("optimizer.step(closure) cannot be used in a prepared loop: call it without a closure")
        if self._count > 1:
            self._loop.capture(self._number)
        else:
            self._loop.apply(self.optimizer.step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the set of parameters must not change.

        Raises:
            ScriptError: always.
        """
        raise ScriptError("parameters cannot be added after holdfast.prepare: add them before it")

    def __repr__(self) -> str:
        """Return that of the optimizer."""
        return repr(self.optimizer)


class PreparedScheduler:
    """A script's learning-rate scheduler; in the loop it is stepped only where a step was committed."""

    def __init__(self, loop: _Loop, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the scheduler itself."""
        return getattr(self.__dict__["scheduler"], name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, if it is due: once per committed step, and wherever it is called outside the loop."""
        if self._loop.counts:
            self.scheduler.step(*args, **kwargs)


class PreparedScaler:
    """A script's ``GradScaler``: it unscales and checks the mean gradients."""

    def __init__(self, loop: _Loop, scaler: Any) -> None:
        self.scaler = scaler
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the scaler itself."""
        return getattr(self.__dict__["scaler"], name)

    def scale(self, outputs: Any) -> Any:
        """Scale a loss."""
        return self.scaler.scale(outputs)

    def unscale_(self, optimizer: optim.Optimizer) -> None:
        """Unscale the mean gradients, once the step is committed; do nothing before."""
        if self._loop.is_decided:
            self.scaler.unscale_(_own(optimizer))

    def step(self, optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Run the optimizer unless a mean gradient is not finite, once the step is committed; do nothing before."""
        self._loop.apply(lambda: self.scaler.step(_own(optimizer), *args, **kwargs))

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale after a committed step; do nothing in other iterations."""
        if self._loop.counts:
            self.scaler.update(new_scale)


class PreparedAverage:
    """A script's average of the weights; it takes the weights of each committed step once."""

    def __init__(self, loop: _Loop, average: AveragedModel) -> None:
        self.average = average
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the average itself, such as ``module``."""
        return getattr(self.__dict__["average"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the averaged weights."""
        return self.average(*args, **kwargs)

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Add the weights of ``model``, if a step was committed in this iteration."""
        if self._loop.counts:
            self.average.update_parameters(model)


def _own(optimizer: optim.Optimizer) -> optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
