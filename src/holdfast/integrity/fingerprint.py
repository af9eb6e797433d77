"""Fingerprints of the state of training, another part of it in every step, so that all of it is compared in time.

Weights and the optimizer's state are cut into *windows*, and each step hashes one of either. A rotation is over when all
have been hashed. Which window is that of which step depends on the step and on what there is, on nothing else: not on when
a worker came, nor on where its tensors lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

WINDOW_BYTES = 64 << 10
"""Size of a window, as far as a rotation does not get too long with it. Hashing it takes some 5 us."""
LONGEST_ROTATION = 64
"""Steps of a rotation where the guard is to warn or to heal, at most."""
EVERYTHING = -1
"""Takes the place of a step where all windows are hashed."""
HALVES = ("weights", "optimizer")
"""The two kinds of windows that the guard compares."""
EVERY_KIND = (*HALVES, "buffers")
"""With those that only a certificate is of."""
_LIKE_NUMPYS = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32})
"""Types of number of which NumPy shows the same bytes."""
_MOST_PIECES = 64
"""Tensors in a window, at most: each costs a few us, however small it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor, which is looked up when it is needed: loading a state may put another into its place.

    Args:
        parameter: Which.
        name: Of the parameter, in the model.
        key: Of the tensor in the optimizer's state of the parameter; "" is the parameter itself.
        start: First row.
        stop: Row after the last.
    """

    parameter: torch.Tensor
    name: str
    key: str
    start: int
    stop: int

    @property
    def path(self) -> str:
        """Where it is, for people."""
        return f"{self.name}/{self.key}" if self.key else self.name

    @property
    def place(self) -> str:
        """Where it is, and which rows."""
        return f"{self.path}[{self.start}:{self.stop}]"

    def whole(self, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
        """Return the tensor of which it is some rows, not copied."""
        if not self.key:
            return self.parameter.detach()
        assert optimizer is not None
        tensor: torch.Tensor = optimizer.state[self.parameter][self.key]
        return tensor.detach()

    def rows(self, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
        """Return the rows, shape ``(rows, ...)``, not copied."""
        tensor = self.whole(optimizer)
        if tensor.dim() == 0:
            return tensor.reshape(1)
        return tensor if self.stop - self.start == len(tensor) else tensor[self.start : self.stop]


Window = tuple[Piece, ...]


class RotatingDigest:
    """Hashes another small part of the state at every step.

    Of parameters and the optimizer's tensors: when a step closes, buffers still hold what the worker's own slices made of
    them. Who hashes when a step begins can give copies of them as they are then.

    Args:
        model: Whose parameters.
        optimizer: Whose state, which may get more tensors as training goes on; None leaves it out.
        longest: Steps of a rotation, at most; windows get larger for it. 0: windows stay as small as they are.
        buffers: Tensors that are hashed where a kind of windows is asked for that is none of :data:`HALVES`, with their names.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        longest: int = 0,
        buffers: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        self._named = sorted(model.named_parameters())
        self._optimizer = optimizer
        self._longest = longest
        self._weights = self._cut((parameter, name, "", parameter) for name, parameter in self._named)
        self._buffers = self._cut((buffer, name, "", buffer) for name, buffer in sorted(buffers, key=lambda b: b[0]))
        self._state: list[Window] = []
        self._num_state = 0
        self._version = 0

    @property
    def rotation(self) -> int:
        """Steps after which all windows that there are now have been hashed."""
        self._refresh()
        return max(1, len(self._weights), len(self._state))

    @property
    def version(self) -> int:
        """Grows when there is something else to hash than before."""
        self._refresh()
        return self._version

    def of_step(self, step: int, halves: Sequence[str] = HALVES) -> int:
        """Return a number from 0 to 2**62 - 1 that is the same wherever the windows of this step are.

        Args:
            step: Which; :data:`EVERYTHING` hashes all windows.
            halves: Of these kinds only.
        """
        return self._hash(self.pieces(step, halves))

    def pieces(self, step: int, halves: Sequence[str] = HALVES) -> list[Piece]:
        """Return what the windows of a step hold, as :meth:`of_step` takes it."""
        self._refresh()
        found: list[Piece] = []
        for half, windows in zip(EVERY_KIND, self._kinds(), strict=True):
            if windows and half in halves:
                chosen = windows if step == EVERYTHING else [windows[step % len(windows)]]
                found += [piece for window in chosen for piece in window]
        return found

    def values(self, step: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield what the windows of a step hold, with its values, not copied."""
        for piece in self.pieces(step):
            yield piece, piece.rows(self._optimizer)

    def where(self, step: int) -> str:
        """Return which windows of every kind are those of a step, for people: the first and the last of the rows in each."""
        self._refresh()
        chosen = [windows[step % len(windows)] for windows in self._kinds() if windows]
        ends = [(window[0].place, window[-1].place) for window in chosen]
        return ", ".join(first if first == last else f"{first} .. {last}" for first, last in ends)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield everything that there is in windows of every kind: path and whole tensor, not copied."""
        self._refresh()
        for windows in self._kinds():
            for piece in (piece for window in windows for piece in window):
                if piece.start == 0:
                    yield piece.path, piece.whole(self._optimizer)

    def _kinds(self) -> tuple[list[Window], list[Window], list[Window]]:
        return self._weights, self._state, self._buffers

    def _hash(self, pieces: Iterable[Piece]) -> int:
        digest, any_piece = xxhash.xxh3_64(), False
        for piece in pieces:
            any_piece = True
            digest.update(raw(piece.rows(self._optimizer)))
        return digest.intdigest() >> 2 if any_piece else 0

    # -- cutting

    def _refresh(self) -> None:
        """Cut the optimizer's state anew if there is more of it than before; every worker must see that in the same step."""
        if self._optimizer is None:
            return
        count = sum(len(state) for state in self._optimizer.state.values() if isinstance(state, dict))
        if count != self._num_state:
            self._num_state, self._version = count, self._version + 1
            self._state = self._cut(self._state_tensors())

    def _state_tensors(self) -> Iterator[tuple[torch.Tensor, str, str, torch.Tensor]]:
        assert self._optimizer is not None
        for name, parameter in self._named:
            state = self._optimizer.state.get(parameter, {})
            names = [key for key in state if type(state[key]) is torch.Tensor] if isinstance(state, dict) else []
            for key in sorted(names):
                yield parameter, name, key, state[key]

    def _cut(self, found: Iterable[tuple[torch.Tensor, str, str, torch.Tensor]]) -> list[Window]:
        tensors = [each for each in found if each[3].numel() and not each[3].is_sparse]
        total = sum(tensor.nbytes for *_, tensor in tensors)
        room = max(WINDOW_BYTES, -(-total // self._longest) if self._longest else 0)
        while True:  # what is left empty at the end of windows may make them too many
            windows = list(_packed(_pieces(tensors, room), room))
            if not self._longest or len(windows) <= self._longest:
                return [tuple(piece for piece, _ in window) for window in windows]
            room += room // 4


def _pieces(tensors: Sequence[tuple[torch.Tensor, str, str, torch.Tensor]], room: int) -> Iterator[tuple[Piece, int]]:
    """Yield pieces of at most ``room`` bytes, or of one row, and how large they are."""
    for parameter, name, key, tensor in tensors:
        rows = tensor.shape[0] if tensor.dim() else 1
        row_bytes = tensor.nbytes // rows
        step = max(1, room // row_bytes)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            yield Piece(parameter, name, key, start, stop), (stop - start) * row_bytes


def _packed(pieces: Iterable[tuple[Piece, int]], room: int) -> Iterator[list[tuple[Piece, int]]]:
    window: list[tuple[Piece, int]] = []
    size = 0
    for piece, size_bytes in pieces:
        if window and (size + size_bytes > room or len(window) == max(_MOST_PIECES, room // WINDOW_BYTES)):
            yield window
            window, size = [], 0
        window.append((piece, size_bytes))
        size += size_bytes
    if window:
        yield window


def raw(rows: torch.Tensor) -> Any:
    """Return the bytes of a tensor, in the order of its elements, as what a hash takes."""
    rows = rows.detach()
    if rows.dtype in _LIKE_NUMPYS and rows.is_contiguous() and rows.is_cpu:  # few calls, as each costs a microsecond
        return rows.numpy()
    return rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
