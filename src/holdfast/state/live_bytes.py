"""Bytes that are sent while training goes on: from where they lie, until they are about to change."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import torch


class LiveBytes:
    """The bytes of tensors, read by one thread with :meth:`take`, and protected by another with :meth:`settle`.

    Args:
        pieces: Contiguous tensors of bytes in host memory.
    """

    def __init__(self, pieces: Iterable[torch.Tensor]) -> None:
        self._left = deque(pieces)
        self._lock = threading.Lock()
        self._is_settled = False
        self.size_bytes = sum(map(len, self._left))

    def take(self, room: torch.Tensor) -> int:
        """Copy the next bytes into ``room``, and return how many there were; 0 at the end."""
        with self._lock:
            if not self._left:
                return 0
            piece = self._left.popleft()
            count = min(len(room), len(piece))
            room[:count].copy_(piece[:count])
            if count < len(piece):
                self._left.appendleft(piece[count:])
            return count

    def settle(self) -> None:
        """Copy what was not taken yet: from now on the original memory may change."""
        with self._lock:
            if not self._is_settled:
                self._is_settled = True
                self._left = deque(piece.clone() for piece in self._left)
