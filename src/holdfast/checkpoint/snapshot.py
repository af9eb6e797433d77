"""A snapshot of the data to write, so that training continues during the write.

Values on a device are copied straight into pinned memory, all at once. Training is held only until they have arrived.
"""

from __future__ import annotations

import dataclasses
import mmap
import warnings

import torch

from holdfast.checkpoint.write_plan import WriteBox, WritePlan
from holdfast.comm.device import Device, DeviceStream, Wait, device_of
from holdfast.errors import JobError

_ALIGN = 64


class SnapshotBuffer:
    """Memory that is reused for every checkpoint: at most one extra copy of this worker's part.

    Args:
        pins: Pin it for copies from a device; :meth:`close` unpins it.
    """

    def __init__(self, *, pins: bool = True) -> None:
        self._pins = pins
        self._pinned_by: Device | None = None
        self._memory = _memory(0)
        self._boxes: tuple[WriteBox, ...] = ()
        self._layout: list[tuple[object, ...]] = []

    def copy(self, content: WritePlan) -> WritePlan:
        """Return the same content with copied values, valid until the next call."""
        # The layout rarely changes: with thousands of tensors, allocating takes longer than copying.
        layout = [_look(box) for box in content.boxes]
        if layout != self._layout:
            self._layout = []
            self._make_room(content)
            self._layout = layout
        elsewhere = {device for device in map(_device_of, content.boxes) if not device.is_host}
        for device in elsewhere:
            device.hold(DeviceStream.TO_HOST, device.mark(DeviceStream.COMPUTE), Wait.COMPUTED)
        for own, box in zip(self._boxes, content.boxes, strict=True):
            if box.tensor.numel():
                _device_of(box).copy(own.tensor, box.tensor, DeviceStream.TO_HOST)
        for device in elsewhere:
            device.wait(device.mark(DeviceStream.TO_HOST), Wait.COPIED)
        return dataclasses.replace(content, boxes=self._boxes)

    def _make_room(self, content: WritePlan) -> None:
        self._boxes = ()
        sizes = [-(-box.tensor.nbytes // _ALIGN) * _ALIGN for box in content.boxes]
        device = next((device for device in map(_device_of, content.boxes) if not device.is_host), None)
        if sum(sizes) > self._memory.numel() or (self._pins and device is not self._pinned_by):
            self.close()  # never hold both
            self._memory = self._pinned(sum(sizes), device) if device and self._pins else _memory(sum(sizes))
        boxes, start = [], 0
        for box, size in zip(content.boxes, sizes, strict=True):
            own = self._memory[start : start + box.tensor.nbytes].view(box.tensor.dtype).view(box.tensor.shape)
            boxes.append(dataclasses.replace(box, tensor=own))
            start += size
        self._boxes = tuple(boxes)

    def _pinned(self, size_bytes: int, device: Device) -> torch.Tensor:
        memory = torch.frombuffer(mmap.mmap(-1, max(1, size_bytes)), dtype=torch.uint8)  # whole pages can be pinned
        self._pinned_by = device
        try:
            device.pin(memory)
        except JobError:
            self._pins = False
            warnings.warn(
                f"checkpoints are copied from {device.device} more slowly, because {size_bytes} bytes of host memory cannot"
                " be page-locked: give this worker more memory",
                RuntimeWarning,
                stacklevel=2,
            )
        return memory

    def close(self) -> None:
        """Release the memory; copies of it must not be used any more."""
        if self._pinned_by is not None and self._pins:
            self._pinned_by.unpin(self._memory)
        self._pinned_by, self._boxes, self._layout, self._memory = None, (), [], _memory(0)


def in_host_memory(content: WritePlan) -> WritePlan:
    """Return the same content, copied if any of it is on a device."""
    if all(_device_of(box).is_host for box in content.boxes):
        return content
    return SnapshotBuffer(pins=False).copy(content)


def _device_of(box: WriteBox) -> Device:
    return device_of(box.tensor.device)


def _memory(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def _look(box: WriteBox) -> tuple[object, ...]:
    return box.path, box.key, box.start, box.whole, box.tensor.dtype, box.tensor.shape, box.tensor.device
