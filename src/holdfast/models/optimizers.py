"""What is known of optimizers: which of them leave the gradients as they are, and which update each parameter alone."""

from __future__ import annotations

from torch import optim

from holdfast.torch_private import has_step_hooks

UPDATING_EACH_ALONE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop)
"""The classes that are known to update a parameter from its gradient and its own state, and nothing else."""


def may_write_gradients(optimizer: optim.Optimizer) -> bool:
    """Return whether a step may write ``.grad``, so that it needs a copy of its own.

    Summed gradients lie in memory that other workers still read. SGD, Adam and AdamW are known to leave them alone,
    but for some of their options; of everything else it is assumed that it writes, which costs one copy and no bit.
    """
    if type(optimizer) not in (optim.SGD, optim.Adam, optim.AdamW) or _is_extended(optimizer):
        return True
    return any(
        group.get("nesterov")
        or group.get("maximize")
        or group.get("differentiable")
        # A decay that is a tensor goes a way of its own.
        or not isinstance(group["weight_decay"], int | float)
        for group in optimizer.param_groups
    )


def updates_each_alone(optimizer: optim.Optimizer) -> bool:
    """Return whether steps with the gradients of some parameters at a time give the bits of one step with all of them."""
    return type(optimizer) in UPDATING_EACH_ALONE and not _is_extended(optimizer)


def _is_extended(optimizer: optim.Optimizer) -> bool:
    """Return whether a step does more than that of its class."""
    return has_step_hooks(optimizer) or _has_a_step_of_its_own(optimizer)


def _has_a_step_of_its_own(optimizer: optim.Optimizer) -> bool:
    """Return whether this instance was given another ``step`` than its class has; schedulers wrap it, which is fine."""
    step = vars(optimizer).get("step")
    return step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step
