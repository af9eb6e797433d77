"""Rotating fingerprints of the training state: each step hashes another part, so that over time all of it is compared.

Weights, optimizer state and buffers are cut into *windows*, and each step hashes one window of each kind. A rotation is complete
once all windows have been hashed. The window of a step depends only on the step and on the set of tensors: not on
when a worker joined, nor on where its tensors are in memory.

Bytes in the memory of the CPU are hashed by xxh3, those on a device by :mod:`~holdfast.integrity.device_digest`, whose eight
bytes enter the hash at the end.

One pass over the bytes gives two digests. The certificate's covers the step's window of each kind. The guard's covers weights
and optimizer state only, and extends over further windows where the length of a rotation is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from holdfast.integrity import device_digest

WINDOW_BYTES = 64 << 10
"""Size of a window in bytes. Hashing one takes about 5 us."""
LONGEST_ROTATION = 64
"""Maximum number of steps of a rotation if the guard's policy is ``warn`` or ``heal``."""
EVERYTHING = -1
"""Pseudo step in which all windows are hashed."""
HALVES = ("weights", "optimizer")
"""The two kinds of windows that the guard compares."""
_LIKE_NUMPYS = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32})
"""Data types that NumPy views without a conversion."""
_MOST_PIECES = 64
"""Maximum number of tensors in a window: each costs a few us, however small it is."""


@dataclass(frozen=True, slots=True)
class HashPiece:
    """A range of rows of a tensor. The tensor is looked up on use, because loading a state may replace it."""

    parameter: torch.Tensor
    name: str  # of the parameter
    key: str  # of the tensor in the optimizer's state of the parameter; "" is the parameter itself
    start: int  # first row
    stop: int  # row after the last

    @property
    def path(self) -> str:
        """The tensor's path, for display."""
        return f"{self.name}/{self.key}" if self.key else self.name

    @property
    def place(self) -> str:
        """The tensor's path and the range of rows, for display."""
        return f"{self.path}[{self.start}:{self.stop}]"

    def whole(self, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
        """Return the tensor that the rows belong to, not copied."""
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


Window = tuple[HashPiece, ...]


class StateDigests(NamedTuple):
    """Digests of the windows of a step, each an integer from 0 to 2**62 - 1; 0 if there is nothing to hash."""

    replicas: int  # compared between replicas: weights and optimizer state
    certified: int  # in the certificate: one window each of weights, optimizer state and buffers


class RotatingDigest:
    """Hashes another small part of the state in each step.

    Args:
        model: The model whose parameters are hashed.
        optimizer: The optimizer whose state is hashed, which may gain tensors during training; None leaves it out.
        longest: Maximum number of steps of a rotation, which sets the windows compared per step. 0: one of each kind per step.
        buffers: Named tensors that are certified and not compared, as they are at the start of a step: at its end,
            each worker's buffers still reflect only its own slices.
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
        """The number of steps in which all current windows are compared."""
        self._refresh()
        return max(1, self._stride(self._weights), self._stride(self._state))

    @property
    def version(self) -> int:
        """Increases when the set of tensors to hash changes."""
        self._refresh()
        return self._version

    def take(self, step: int) -> StateDigests:
        """Hash the windows of a step, each byte once."""
        first, further = self._halves(step)
        digest = _Digest(self._optimizer)
        digest.add(first)
        certified = digest.copy()
        if self._buffers:
            certified.add(self._buffers[step % len(self._buffers)])
        digest.add(further)
        return StateDigests(*_numbers(digest, certified))

    def of_step(self, step: int, halves: Sequence[str] = HALVES) -> int:
        """Return the digest compared in a step, or of :data:`EVERYTHING`, restricted to some kinds; see :attr:`StateDigests.replicas`."""
        digest = _Digest(self._optimizer)
        digest.add(self.pieces(step, halves))
        return _numbers(digest)[0]

    def pieces(self, step: int, halves: Sequence[str] = HALVES) -> list[HashPiece]:
        """Return the pieces compared in a step, in hashing order."""
        first, further = self._halves(step, halves)
        return [*first, *further]

    def values(self, step: int) -> Iterator[tuple[HashPiece, torch.Tensor]]:
        """Yield the pieces compared in a step with their values, not copied."""
        for piece in self.pieces(step):
            yield piece, piece.rows(self._optimizer)

    def where(self, step: int) -> str:
        """Return the windows certified in a step, for display: the first and last piece of each."""
        self._refresh()
        chosen = [windows[step % len(windows)] for windows in self._kinds() if windows]
        ends = [(window[0].place, window[-1].place) for window in chosen]
        return ", ".join(first if first == last else f"{first} .. {last}" for first, last in ends)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield path and whole tensor, not copied, of everything that the windows cover."""
        self._refresh()
        for windows in self._kinds():
            for piece in (piece for window in windows for piece in window):
                if piece.start == 0:
                    yield piece.path, piece.whole(self._optimizer)

    def _kinds(self) -> tuple[list[Window], list[Window], list[Window]]:
        return self._weights, self._state, self._buffers

    def _halves(self, step: int, halves: Sequence[str] = HALVES) -> tuple[list[HashPiece], list[HashPiece]]:
        """Return the pieces compared in a step: those of the first window of each kind, and those that shorten the rotation."""
        self._refresh()
        first: list[HashPiece] = []
        further: list[HashPiece] = []
        for half, windows in zip(HALVES, (self._weights, self._state), strict=True):
            if windows and half in halves:
                stride = 1 if step == EVERYTHING else self._stride(windows)
                one, *more = (windows[(step + i) % len(windows)] for i in range(0, len(windows), stride))
                first += one
                further += [piece for window in more for piece in window]
        return first, further

    def _stride(self, windows: Sequence[Window]) -> int:
        """Return the steps in which all windows of one kind are compared, which is the distance between the windows of one step."""
        at_a_time = -(-len(windows) // self._longest) if self._longest else 1
        return -(-len(windows) // max(1, at_a_time))

    # -- cutting

    def _refresh(self) -> None:
        """Cut the optimizer state again if it has grown; every worker must detect that in the same step."""
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

    def _cut(self, entries: Iterable[tuple[torch.Tensor, str, str, torch.Tensor]]) -> list[Window]:
        tensors = [each for each in entries if each[3].numel() and not each[3].is_sparse]
        return [tuple(piece for piece, _ in window) for window in _packed(_pieces(tensors))]


class _Digest:
    """An incremental hash of pieces, which can be read and copied at any point."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._hash = xxhash.xxh3_64()
        self._any = False
        self._words = 0
        self.on_devices: dict[torch.device, torch.Tensor] = {}
        """Digests of what is on devices, and stays there until they are read."""

    def add(self, pieces: Iterable[HashPiece]) -> None:
        for piece in pieces:
            self._any = True
            rows = piece.rows(self._optimizer)
            if is_on_device(rows):
                self._add_on_device(rows)
            else:
                self._hash.update(raw(rows))

    def _add_on_device(self, rows: torch.Tensor) -> None:
        total = device_digest.mixed_sum(rows, self._words)
        self._words += device_digest.num_words(rows)
        before = self.on_devices.get(rows.device)
        self.on_devices[rows.device] = total if before is None else before + total

    def copy(self) -> _Digest:
        other = _Digest(self._optimizer)
        other._hash, other._any = self._hash.copy(), self._any
        other._words, other.on_devices = self._words, dict(self.on_devices)
        return other

    def number(self, on_devices: Iterable[int]) -> int:
        """Return the digest, given the values of :attr:`on_devices`."""
        for value in on_devices:
            self._hash.update(value.to_bytes(8, "little"))
        return self._hash.intdigest() >> 2 if self._any else 0


def _numbers(*digests: _Digest) -> list[int]:
    """Return the numbers of digests, which are complete; the host waits for devices once."""
    values = iter(device_digest.read([total for digest in digests for total in digest.on_devices.values()]))
    return [digest.number([next(values) for _ in digest.on_devices]) for digest in digests]


def _pieces(tensors: Sequence[tuple[torch.Tensor, str, str, torch.Tensor]]) -> Iterator[tuple[HashPiece, int]]:
    """Yield pieces of at most one window, or of one row, with their sizes in bytes."""
    for parameter, name, key, tensor in tensors:
        rows = tensor.shape[0] if tensor.dim() else 1
        row_bytes = tensor.nbytes // rows
        step = max(1, WINDOW_BYTES // row_bytes)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            yield HashPiece(parameter, name, key, start, stop), (stop - start) * row_bytes


def _packed(pieces: Iterable[tuple[HashPiece, int]]) -> Iterator[list[tuple[HashPiece, int]]]:
    window: list[tuple[HashPiece, int]] = []
    size = 0
    for piece, size_bytes in pieces:
        if window and (size + size_bytes > WINDOW_BYTES or len(window) == _MOST_PIECES):
            yield window
            window, size = [], 0
        window.append((piece, size_bytes))
        size += size_bytes
    if window:
        yield window


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is hashed where it is, because its bytes are not in the memory of the CPU."""
    return not tensor.is_cpu


def digests_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the digest of each tensor, by its name; the host waits for devices once, at the end."""
    digests: dict[str, str] = {}
    on_devices: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if is_on_device(tensor):
            digests[name], on_devices[name] = "", device_digest.mixed_sum(tensor)
        else:
            digests[name] = xxhash.xxh3_64_hexdigest(raw(tensor))
    read = device_digest.read(list(on_devices.values()))
    return digests | {name: f"{value:016x}" for name, value in zip(on_devices, read, strict=True)}


def raw(rows: torch.Tensor) -> Any:
    """Return the bytes of a tensor in element order, as a buffer to hash."""
    rows = rows.detach()
    if rows.dtype in _LIKE_NUMPYS and rows.is_contiguous() and rows.is_cpu:  # few calls, since each costs a microsecond
        return rows.numpy()
    return rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
