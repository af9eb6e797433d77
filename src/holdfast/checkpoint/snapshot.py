"""A copy of what is to be written, so that training may go on while it is."""

from __future__ import annotations

import dataclasses

import torch

from holdfast.checkpoint.save import Content

_ALIGN = 64


class Snapshot:
    """Memory that is used again for every checkpoint: at most one more copy of what this worker writes."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, content: Content) -> Content:
        """Return the same content with values of its own; it stays as it is until the next call."""
        sizes = [-(-box.tensor.nbytes // _ALIGN) * _ALIGN for box in content.boxes]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # never both at a time
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        boxes, start = [], 0
        for box, size in zip(content.boxes, sizes, strict=True):
            own = self._memory[start : start + box.tensor.nbytes].view(box.tensor.dtype).view(box.tensor.shape)
            own.copy_(box.tensor)
            boxes.append(dataclasses.replace(box, tensor=own))
            start += size
        return dataclasses.replace(content, boxes=tuple(boxes))
