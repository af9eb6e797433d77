"""A snapshot of the data to write, so that training continues during the write."""

from __future__ import annotations

import dataclasses

import torch

from holdfast.checkpoint.write_plan import WriteBox, WritePlan

_ALIGN = 64


class SnapshotBuffer:
    """Memory that is reused for every checkpoint: at most one extra copy of this worker's part."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._boxes: tuple[WriteBox, ...] = ()

    def copy(self, content: WritePlan) -> WritePlan:
        """Return the same content with copied values, valid until the next call."""
        # The layout rarely changes: with thousands of tensors, allocating takes longer than copying.
        if [_look(box) for box in content.boxes] != [_look(box) for box in self._boxes]:
            self._make_room(content)
        for own, box in zip(self._boxes, content.boxes, strict=True):
            own.tensor.copy_(box.tensor)
        return dataclasses.replace(content, boxes=self._boxes)

    def _make_room(self, content: WritePlan) -> None:
        self._boxes = ()
        sizes = [-(-box.tensor.nbytes // _ALIGN) * _ALIGN for box in content.boxes]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # never hold both
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        boxes, start = [], 0
        for box, size in zip(content.boxes, sizes, strict=True):
            own = self._memory[start : start + box.tensor.nbytes].view(box.tensor.dtype).view(box.tensor.shape)
            boxes.append(dataclasses.replace(box, tensor=own))
            start += size
        self._boxes = tuple(boxes)


def _look(box: WriteBox) -> tuple[object, ...]:
    return box.path, box.key, box.start, box.whole, box.tensor.dtype, box.tensor.shape
