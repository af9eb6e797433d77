"""Known properties of optimizers: which leave gradients unmodified, and which update each parameter independently."""

from __future__ import annotations

from torch import optim

from holdfast.base.torch_private import has_step_hooks

UPDATING_EACH_ALONE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop)
"""Classes known to update a parameter from its gradient and its own state only."""


def may_write_gradients(optimizer: optim.Optimizer) -> bool:
    """Return whether a step may modify ``.grad``, so that it needs a private copy.

    Reduced gradients lie in memory that other workers still read. SGD, Adam and AdamW are known not to modify them,
    except with some options; every other optimizer is assumed to, which costs one copy and changes no bit.
    """
    if type(optimizer) not in (optim.SGD, optim.Adam, optim.AdamW) or _is_extended(optimizer):
        return True
    return any(
        group.get("nesterov")
        or group.get("maximize")
        or group.get("differentiable")
        # A tensor as weight decay takes another code path.
        or not isinstance(group["weight_decay"], int | float)
        for group in optimizer.param_groups
    )


def updates_each_alone(optimizer: optim.Optimizer) -> bool:
    """Return whether steps with the gradients of a few parameters at a time give the bits of one step with all."""
    return type(optimizer) in UPDATING_EACH_ALONE and not _is_extended(optimizer)


def _is_extended(optimizer: optim.Optimizer) -> bool:
    """Return whether a step does more than its class defines."""
    return has_step_hooks(optimizer) or _has_a_step_of_its_own(optimizer)


def _has_a_step_of_its_own(optimizer: optim.Optimizer) -> bool:
    """Return whether this instance's ``step`` differs from that of its class; a scheduler's wrapper does not count."""
    step = vars(optimizer).get("step")
    return step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step
