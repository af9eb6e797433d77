"""Fingerprints of the state of training, another part of it in every step, so that all of it is compared in time.

Weights, the optimizer's state and the buffers are cut into *windows*, and each step hashes one of each kind. A rotation is over
when all have been hashed. Which window is that of which step depends on the step and on what there is, on nothing else: not on
when a worker came, nor on where its tensors lie.

One pass over the bytes gives two digests: the certificate's, of the step's window of each kind, and the guard's, of the weights
and the optimizer's state alone. Where a rotation must not take long, the guard's pass goes on with further windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

WINDOW_BYTES = 64 << 10
"""Size of a window. Hashing it takes some 5 us."""
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
    """Some rows of a tensor, which is looked up when it is needed: loading a state may put another into its place."""

    parameter: torch.Tensor
    name: str  # of the parameter
    key: str  # of the tensor in the optimizer's state of the parameter; "" is the parameter itself
    start: int  # first row
    stop: int  # row after the last

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


class Digests(NamedTuple):
    """What the windows of a step are, each a number from 0 to 2**62 - 1; 0 where there is nothing to hash."""

    replicas: int  # what replicas compare: weights and the optimizer's state
    certified: int  # what the certificate has: these and the buffers, one window of each


class RotatingDigest:
    """Hashes another small part of the state at every step.

    Args:
        model: Whose parameters.
        optimizer: Whose state, which may get more tensors as training goes on; None leaves it out.
        longest: Steps of a rotation, at most: so many windows are compared in a step. 0: one of each kind is.
        buffers: Tensors that are certified and not compared, with their names, as they are when a step begins: when it closes,
            buffers still hold what the worker's own slices made of them.
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
        """Steps after which all windows that there are now have been compared."""
        self._refresh()
        return max(1, self._stride(self._weights), self._stride(self._state))

    @property
    def version(self) -> int:
        """Grows when there is something else to hash than before."""
        self._refresh()
        return self._version

    def take(self, step: int) -> Digests:
        """Hash the windows of a step, each byte once."""
        first, further = self._halves(step)
        digest = _Digest(self._optimizer)
        digest.add(first)
        certified = digest.copy()
        if self._buffers:
            certified.add(self._buffers[step % len(self._buffers)])
        digest.add(further)
        return Digests(digest.number, certified.number)

    def of_step(self, step: int, halves: Sequence[str] = HALVES) -> int:
        """Return the digest of what is compared in a step, of some kinds only, or of :data:`EVERYTHING`; see :attr:`Digests.replicas`."""
        digest = _Digest(self._optimizer)
        digest.add(self.pieces(step, halves))
        return digest.number

    def pieces(self, step: int, halves: Sequence[str] = HALVES) -> list[Piece]:
        """Return what is compared in a step, in the order in which it is hashed."""
        first, further = self._halves(step, halves)
        return [*first, *further]

    def values(self, step: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield what is compared in a step, with its values, not copied."""
        for piece in self.pieces(step):
            yield piece, piece.rows(self._optimizer)

    def where(self, step: int) -> str:
        """Return which windows are certified in a step, for people: the first and the last of the rows in each."""
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

    def _halves(self, step: int, halves: Sequence[str] = HALVES) -> tuple[list[Piece], list[Piece]]:
        """Return what is compared in a step: of the window of each kind, and of those that a rotation would take too long without."""
        self._refresh()
        first: list[Piece] = []
        further: list[Piece] = []
        for half, windows in zip(HALVES, (self._weights, self._state), strict=True):
            if windows and half in halves:
                stride = 1 if step == EVERYTHING else self._stride(windows)
                one, *more = (windows[(step + i) % len(windows)] for i in range(0, len(windows), stride))
                first += one
                further += [piece for window in more for piece in window]
        return first, further

    def _stride(self, windows: Sequence[Window]) -> int:
        """Return the steps after which all windows of one kind have been compared: how far apart those of one step are."""
        at_a_time = -(-len(windows) // self._longest) if self._longest else 1
        return -(-len(windows) // max(1, at_a_time))

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
        return [tuple(piece for piece, _ in window) for window in _packed(_pieces(tensors))]


class _Digest:
    """A hash of pieces in their order, which can be read, copied and gone on with."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._hash = xxhash.xxh3_64()
        self._any = False

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._any = True
            self._hash.update(raw(piece.rows(self._optimizer)))

    def copy(self) -> _Digest:
        other = _Digest(self._optimizer)
        other._hash, other._any = self._hash.copy(), self._any
        return other

    @property
    def number(self) -> int:
        return self._hash.intdigest() >> 2 if self._any else 0


def _pieces(tensors: Sequence[tuple[torch.Tensor, str, str, torch.Tensor]]) -> Iterator[tuple[Piece, int]]:
    """Yield pieces of at most a window, or of one row, and how large they are."""
    for parameter, name, key, tensor in tensors:
        rows = tensor.shape[0] if tensor.dim() else 1
        row_bytes = tensor.nbytes // rows
        step = max(1, WINDOW_BYTES // row_bytes)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            yield Piece(parameter, name, key, start, stop), (stop - start) * row_bytes


def _packed(pieces: Iterable[tuple[Piece, int]]) -> Iterator[list[tuple[Piece, int]]]:
    window: list[tuple[Piece, int]] = []
    size = 0
    for piece, size_bytes in pieces:
        if window and (size + size_bytes > WINDOW_BYTES or len(window) == _MOST_PIECES):
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
