"""``register``: what a newcomer needs to take the rank of a failed process in a script that owns its loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

# This module is loaded with torch: what only a registered script needs is imported there.
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn, optim

    from holdfast.distributed.comm_thread import CommThread
    from holdfast.distributed.group import HoldfastGroup

_registered: list[Registered] = []
"""What the script of this process has registered; at most one."""


def register(
    model: nn.Module | Sequence[nn.Module],
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    position: Any,
    **others: Any,
) -> None:
    """Let a spare or a new process take the rank of a failed one (``--spares``, ``--respawn``).

    Call it once on every rank, when model and optimizer are complete, before the first step::

        position = {"epoch": 0, "batch": 0}
        holdfast.distributed.register(model, optimizer, position)
        for epoch in range(position["epoch"], 10):
            sampler.set_epoch(epoch)
            for batch, (x, y) in enumerate(loader):
                if (epoch, batch) < (position["epoch"], position["batch"]):
                    continue  # a newcomer skips what the others have trained
                position.update(epoch=epoch, batch=batch)
                ...

    A newcomer returns from this call in the middle of the training, with the weights, buffers, optimizer state and
    position of a surviving rank; its first step is the one that the others make next. The others pass their state on
    right before a forward pass in training mode, the first after a step of the (last) optimizer. At that moment
    ``position`` must name the batch of that forward pass.

    Args:
        model: The ``DistributedDataParallel`` model, or several.
        optimizer: Its optimizer, or several.
        position: Where the loop is: a dict of plain values that the script updates, an object with ``state_dict`` and
            ``load_state_dict``, or a pair of functions, one that returns such a state and one that takes it.
        **others: Further state of the loop, equal on all ranks, by name: the same kinds, such as a learning-rate
            scheduler.

    Raises:
        ConfigError: if an argument is not allowed, or this was called before.
        HoldfastError: on a newcomer, if the others do not reach a boundary between steps within the timeout of the
            process group.
    """
    models, optimizers = _several(model), _several(optimizer)
    group = _group_of(models)
    _check(models, optimizers)
    registered = Registered(group, models, optimizers, {"position": position, **others})
    _registered.append(registered)
    registered.begin()


class Registered:
    """The registered objects of this process, and the hooks that find the boundaries between its steps."""

    def __init__(
        self, group: HoldfastGroup, models: Sequence[Any], optimizers: Sequence[optim.Optimizer], parts: dict[str, Any]
    ) -> None:
        self._group = group
        self._engine: CommThread = group.engine
        self._timeout_s = group.timeout_s
        self._models = models
        self._optimizers = optimizers
        self._parts = {name: _accessors(name, part) for name, part in parts.items()}
        self._is_at_boundary = True
        for name, (state, _) in self._parts.items():
            _check_plain(name, state())

    def begin(self) -> None:
        """Take a seat, on a newcomer; then watch the steps."""
        joining = self._engine.joining
        if not joining.is_seated:
            self._engine.meeting.take_seat(self._timeout_s)
            self._group.guard.remove()  # type: ignore[attr-defined]  # a newcomer's group has it
            self._load(joining.state)
            joining.state = None
            self._is_at_boundary = False  # the others have stopped at the one before its first step
        self._optimizers[-1].register_step_post_hook(self._note_step)
        for model in self._models:
            model.register_forward_pre_hook(self._before_forward)

    def _note_step(self, *_: Any) -> None:
        self._is_at_boundary = True

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        import torch

        if not self._is_at_boundary or not model.training or not torch.is_grad_enabled():
            return
        self._is_at_boundary = False
        joining, seated = self._engine.joining, self._engine.joining.num_seated
        self._engine.meeting.arrive(self._state, self._timeout_s)
        if joining.num_seated > seated:
            self._rebuild_reducers()

    def _rebuild_reducers(self) -> None:
        """Let all ranks make the collectives of a first step, as the newcomers will."""
        from holdfast.base.torch_private import rebuild_reducer

        for model in self._models:
            rebuild_reducer(model)

    def _state(self) -> dict[str, Any]:
        """Return what a newcomer needs; ``ConfigError``, on all ranks alike, if it cannot be sent."""
        from holdfast.comm.device import device_of
        from holdfast.distributed.parts import seen

        state = {
            "models": [
                {"state": model.module.state_dict(), "buffers": dict(model.module.named_buffers())}
                for model in self._models
            ],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "parts": {name: state() for name, (state, _) in self._parts.items()},
            "step": self._engine.recorder.step,
            "seen": vars(seen),
        }
        _check_plain("model and optimizer", state)
        for device in {parameter.device for model in self._models for parameter in model.parameters()}:
            device_of(device).synchronize()  # the thread that sends the state does not wait for the script's stream
        return state

    def _load(self, state: dict[str, Any]) -> None:
        import torch

        from holdfast.distributed.parts import seen

        for model, model_state in zip(self._models, state["models"], strict=True):
            model.module.load_state_dict(model_state["state"])
            with torch.no_grad():
                for name, buffer in model.module.named_buffers():  # also those that a state_dict leaves out
                    buffer.copy_(model_state["buffers"][name])
        for optimizer, optimizer_state in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        for name, (_, load) in self._parts.items():
            load(state["parts"][name])
        self._engine.recorder.begin_at(state["step"])
        vars(seen).update(state["seen"])  # of the calls that this newcomer has not made


def _accessors(name: str, part: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return how the state of a part is read and replaced."""
    if isinstance(part, dict):

        def replace(state: dict[str, Any]) -> None:
            part.clear()
            part.update(state)

        return lambda: dict(part), replace
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict, part.load_state_dict
    if isinstance(part, tuple) and len(part) == 2 and all(map(callable, part)):
        return part
    raise ConfigError(
        f"{name} must be a dict, an object with state_dict and load_state_dict, or a pair of functions (get, set),"
        f" got {type(part).__name__}"
    )


def _check_plain(name: str, state: Any) -> None:
    """Make sure at the start that the state can be sent, not only once a newcomer needs it."""
    from holdfast.checkpoint.format import flatten
    from holdfast.errors import CheckpointError

    try:
        flatten(state)
    except CheckpointError as error:
        raise ConfigError(f"the state of {name} must consist of plain values and tensors: {error}") from error


def _group_of(models: Sequence[Any]) -> HoldfastGroup:
    """Return the process group of the models: that of all ranks."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from holdfast.distributed.group import HoldfastGroup

    for model in models:
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(f"model must be a DistributedDataParallel, or several, got {type(model).__name__}")
        if model.process_group is not dist.group.WORLD or not isinstance(model.process_group, HoldfastGroup):
            raise ConfigError('model must use the group of all ranks, of init_process_group("holdfast")')
    return models[0].process_group  # type: ignore[no-any-return]


def _check(models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    from torch import optim

    from holdfast.base.torch_private import why_not_rebuilt

    if _registered:
        raise ConfigError("holdfast.distributed.register was called before: register all models in one call")
    for optimizer in optimizers:
        if not isinstance(optimizer, optim.Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, or several, got {type(optimizer).__name__}")
    for model in models:
        if why := why_not_rebuilt(model):
            raise ConfigError(f"register does not support DistributedDataParallel(..., {why}): no rank can take a seat")


def _several(value: Any) -> tuple[Any, ...]:
    several = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not several:
        raise ConfigError("model and optimizer must not be empty")
    return several
