"""Collectives of tensors on a device: they run in host memory, between a copy there and a copy back.

::

    the caller queues a collective        its inputs are copied to host memory, beside what is computed
    the communication thread              waits for these copies, and runs the collective of host memory
                                          copies the results to the device, beside what is computed
    the caller waits for the work         until the copies back are queued; its stream waits for them

So DDP's buckets are copied during the backward pass that computes the following ones. All work in streams is queued on
the device of the tensors: the communication thread has no current device. Each :class:`~holdfast.comm.device.Wait`
prevents the accident that it names; a test removes each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from holdfast.comm.device import DEVICES, Device, DeviceEvent, DeviceStream, Wait, device_of
from holdfast.errors import ConfigError


class Staging:
    """The tensors of one collective, and their twins in host memory; made by the thread that calls it.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: Device) -> None:
        self._on = device
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copied: DeviceEvent = None
        self._sent: DeviceEvent = None
        device.hold(DeviceStream.TO_HOST, device.mark(DeviceStream.COMPUTE), Wait.COMPUTED)

    @property
    def devices(self) -> list[torch.device | str | int]:
        """The device of the tensors, for torch's futures; empty if it is host memory, which has no streams."""
        return [] if self._on.device.type == "cpu" else [self._on.device]

    def twins_of(self, tree: Any, *, reads: bool) -> Any:
        """Return tensors of host memory in place of ``tree``, a tensor or nested lists; copied if it ``reads`` them."""
        if isinstance(tree, list | tuple):
            return [self.twins_of(item, reads=reads) for item in tree]
        return self._twin_of(tree, reads=reads) if isinstance(tree, torch.Tensor) else tree

    def _twin_of(self, tensor: torch.Tensor, *, reads: bool) -> torch.Tensor:
        twin = self._on.host_memory(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        if reads and tensor.numel():
            self._on.copy(twin, tensor.detach(), DeviceStream.TO_HOST)
        self._twins[id(twin)] = (twin, tensor)
        return twin

    def begin(self) -> None:
        """Note that all copies to host memory are queued. They end after all that was computed before the call."""
        self._copied = self._on.mark(DeviceStream.TO_HOST)

    def originals(self, twins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors on the device."""
        return [self._twins[id(twin)][1] for twin in twins]

    def forget(self) -> None:
        """Let go of the twins, which those that still need them have by now: the work may be kept for long."""
        self._twins.clear()

    # -- in the communication thread

    def after_copies(self, act: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``act``, which then waits until its inputs have arrived in host memory."""

        def wait_and_act() -> Any:
            self._on.wait(self._copied, Wait.COPIED)
            return act()

        return wait_and_act

    def before_copies(self, finish: Callable[[], None], results: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Return ``finish``, which then copies the results that it has written in host memory to the device."""
        pairs = list(zip(results, self.originals(results), strict=True))

        def finish_and_send() -> None:
            finish()  # all that was queued before the call is complete, because its copies were
            for twin, tensor in pairs:
                if tensor.numel():
                    self._on.copy(tensor.detach(), twin.detach(), DeviceStream.TO_DEVICE)
            self._sent = self._on.mark(DeviceStream.TO_DEVICE)

        return finish_and_send

    # -- in a thread that uses the results

    def arrive(self) -> None:
        """Make the caller's stream wait for the results."""
        self._on.hold(DeviceStream.COMPUTE, self._sent, Wait.ARRIVED)


_current: ContextVar[Staging | None] = ContextVar("staging", default=None)


def current_staging() -> Staging | None:
    """Return the staging of the collective that this thread is queueing; None if its tensors are in host memory."""
    return _current.get()


def staged(
    call: Callable[..., Any], what: str, args: Sequence[Any], kwargs: dict[str, Any], reads: Sequence[int]
) -> Any:
    """Call a collective with twins in host memory if its tensors are on a device.

    Args:
        call: Queues the collective for tensors in host memory.
        what: Its name, for messages.
        args: Its arguments; the first two have all tensors.
        kwargs: Other arguments.
        reads: Which of the first two it reads.

    Raises:
        ConfigError: if the tensors are on several devices, or on one that the backend does not support.
    """
    tensors = list(_tensors_in(args[:2]))
    if current_staging() is not None or not tensors:
        return call(*args, **kwargs)
    device = _device_of(tensors, what)
    if device.is_host or any(tensor.layout != torch.strided for tensor in tensors):
        return call(*args, **kwargs)  # other layouts are refused there
    staging = Staging(device)
    twins = [staging.twins_of(arg, reads=place in reads) for place, arg in enumerate(args[:2])]
    staging.begin()
    before = _current.set(staging)
    try:
        return call(*twins, *args[2:], **kwargs)
    finally:
        _current.reset(before)
        staging.forget()


def check_supported(device: torch.device, what: str) -> None:
    """Raise ``ConfigError`` unless the backend takes tensors on ``device``."""
    if device.type not in DEVICES:
        raise ConfigError(f"{what}: the holdfast backend takes tensors on {' or '.join(DEVICES)}, got one on {device}")


def _device_of(tensors: Sequence[torch.Tensor], what: str) -> Device:
    devices = {tensor.device for tensor in tensors}
    for device in devices:
        check_supported(device, what)
    if len(devices) > 1:
        raise ConfigError(
            f"{what}: its tensors must be on one device, got some on {' and '.join(sorted(map(str, devices)))}"
        )
    return device_of(devices.pop())


def _tensors_in(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors_in(item)
