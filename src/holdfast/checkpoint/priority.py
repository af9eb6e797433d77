"""The priority checkpoint: the newest saved value of every block of parameters, each as of its own step.

It starts as a full copy. Every ``round(r C)`` steps some of the blocks are saved, so that over ``C`` steps
as many bytes are written as by one full save, whatever the fraction ``r``. Lost blocks are restored to their
last saved values; all other blocks keep their current values.

::

    running = Running([weights, momentum], Saving(every=16, fraction=1 / 8))
    for step in range(steps):
        if running.is_due(step):
            saved = running.take([weights, momentum], step)     # only this delays the loop
            running.put(saved)                                  # here, and in the identical copy at a peer
        ...
    weights[lost], momentum[lost] = running.recover(lost, step)

Source: Qiao, Aragam, Zhang, Xing, "Fault tolerance in iterative-convergent machine learning", ICML 2019; there a block is
restored to its last saved value, written exactly, and the farthest blocks are chosen by their distance from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.checkpoint.priority_choice import CHOICES, drawn, euclidean, highest, unit
from holdfast.checkpoint.priority_codec import CODECS, chunk_rows, coded_bytes, decode, encode, finite, is_stepped, wide
from holdfast.errors import ConfigError

PREDICTORS = ("last", "line", "calibrated")
DISTANCES = ("euclidean", "scaled")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityPolicy:
    """How blocks are chosen and saved.

    Raises:
        ConfigError: if a value is not allowed.
    """

    every: int = 16
    """C: number of steps in which the bytes of one full save, without a codec, are written."""
    fraction: float = 1.0
    """r: the fraction of a full save's bytes that one save writes; above 0, at most 1, and ``round(r C)`` at least 1."""
    choice: str = "priority"
    """``priority``: the blocks farthest from the value they would be restored to; ``round-robin``: those saved longest ago;
    ``random``: any."""
    distance: str = "euclidean"
    """The distance of a block from the value it would be restored to: ``euclidean`` over the first tensor; or over all
    saved tensors, each ``scaled`` by the root mean square of its saved numbers."""
    predictor: str = "last"
    """The value that a lost block is restored to: its ``last`` saved value; the extrapolated ``line`` through the last two; or
    ``calibrated``: as far along the line as all blocks together had moved along theirs at the last save."""
    codec: str = "exact"
    """How blocks are written: ``exact``, or as ``int8`` steps from the value they would be restored to. About four times as
    many blocks of float32 then fit into the same bytes; if that is more than all blocks, fewer bytes are written."""
    seed: int = 0
    """Seed of the random choice."""

    def __post_init__(self) -> None:
        if self.every < 1:
            _refuse("every", self.every, "at least 1 step", "give the steps in which a full save's bytes are written")
        if not 0 < self.fraction <= 1:
            _refuse("fraction", self.fraction, "above 0 and at most 1", "give 1, 0.5, 0.25 or 0.125")
        if self.period < 1:
            rule = f"so large that fraction * every ({self.every}) rounds to at least 1 step"
            _refuse("fraction", self.fraction, rule, "give a larger one, or a larger every")
        named = (("choice", CHOICES), ("distance", DISTANCES), ("predictor", PREDICTORS), ("codec", CODECS))
        for name, allowed in named:
            if getattr(self, name) not in allowed:
                _refuse(name, repr(getattr(self, name)), f"one of {', '.join(allowed)}", "choose one of them")

    @property
    def period(self) -> int:
        """Return the number of steps from one save to the next."""
        return round(self.fraction * self.every)


def _refuse(name: str, value: object, allowed: str, advice: str) -> None:
    raise ConfigError(f"{name} must be {allowed}, got {value}; {advice}")


@dataclass(frozen=True, slots=True)
class PartialSave:
    """One partial save: the message from the owner to a peer."""

    step: int
    """The state before this step was saved."""
    blocks: Tensor
    """Block numbers in ascending order; int64, shape (k,)."""
    payload: tuple[Tensor, ...]
    """The written data: for each tensor its rows, or int8 steps and their lengths. It shares no memory."""
    share: float = 1.0
    """How far along their lines blocks are expected to be, from 0 to 1; see :attr:`PriorityPolicy.predictor`."""

    def size_bytes(self) -> int:
        """Return the size of the payload in bytes; the block numbers come on top of it."""
        return sum(tensor.nbytes for tensor in self.payload)


class RunningCheckpoint:
    """A priority checkpoint of blocks.

    A block that contains a number that is not finite, or whose distance is not finite, is not saved: its older saved value stays,
    and the next block takes its place.

    Args:
        start: The tensors to save, with their values before ``step``; shape (blocks, any width). They are copied. The
            distance is that of the first tensor, unless it is scaled, and a line predictor applies to the first; the others
            accompany it, as optimizer state does.
        saving: How blocks are chosen and saved.
        step: Number of the step.
        block_bytes: Bytes that saving each block exactly takes, int64 of shape (blocks,); by default, the size of its rows.
        distance: A custom distance instead of that of ``saving``. It receives all rows of the first tensor and the rows that
            they would be restored to, and returns the distance of each row, numbers ``>= 0`` of shape (blocks,).

    Raises:
        ConfigError: if shapes or sizes do not match.
    """

    saved_at: Tensor
    """For each block, the step before which its newest saved value was current; int64, shape (blocks,)."""

    def __init__(
        self,
        start: Sequence[Tensor],
        saving: PriorityPolicy,
        *,
        step: int = 0,
        block_bytes: Tensor | None = None,
        distance: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        _check_start(start, block_bytes)
        self._saving = saving
        self._distance = distance
        # If the Euclidean distance of a block is finite, so are all its numbers.
        self._distance_tells = saving.choice == "priority" and distance is None
        self._step = step
        self._saved = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in start]
        self.saved_at = torch.full((len(start[0]),), step)
        self._slope: Tensor | None = None
        if saving.predictor != "last" and start[0].is_floating_point():
            self._slope = torch.zeros_like(self._saved[0], dtype=wide(start[0].dtype))
        self._share = 0.0 if saving.predictor == "calibrated" else 1.0
        plain = sum(coded_bytes(tensor, "exact") for tensor in start)
        coded = sum(coded_bytes(tensor, saving.codec) for tensor in start)
        sizes = torch.tensor([plain]) if block_bytes is None else block_bytes.to(torch.int64)
        self._sizes = sizes[:1] if (sizes == sizes[0]).all() else sizes
        # Credit is counted in whole units: a block of b bytes costs b * _price, a save adds _income.
        shared = math.gcd(plain, coded)
        self._price = coded // shared * saving.every
        self._income = self._bytes_of(torch.arange(len(start[0]))) * saving.period * (plain // shared)
        self._credit = 0

    def is_due(self, step: int) -> bool:
        """Return whether the state before ``step`` must be saved: every ``round(r C)`` steps, and not twice."""
        return step % self._saving.period == 0 and step > self._step

    def save(self, rows: Sequence[Tensor], step: int) -> PartialSave:
        """Choose blocks, save them here, and return the written data: :meth:`take`, then :meth:`put`."""
        saved = self.take(rows, step)
        self.put(saved)
        return saved

    @torch.no_grad()
    def take(self, rows: Sequence[Tensor], step: int) -> PartialSave:
        """Choose blocks and return their data; nothing changes before :meth:`put`.

        Args:
            rows: Values before ``step``; same shapes and dtypes as ``start``.
            step: Must be after the last save's step.

        Raises:
            ConfigError: if the step is not after the last save's, or the rows do not match.
        """
        self._check_step(step)
        self._check_rows(rows)
        share = self._distance_covered(rows[0], step)
        scores = self._scores(rows, step, share)
        room = (self._credit + self._income) // self._price
        while True:
            blocks = highest(scores, self._sizes, room)
            payload, checks = self._encode(rows, blocks, step, share)
            unfit = [blocks[~good] for good in checks if not good.all()]
            if not unfit:
                return PartialSave(step, blocks, payload, share)
            scores = scores.index_fill(0, torch.cat(unfit), -1)  # other blocks take their place

    @torch.no_grad()
    def put(self, saved: PartialSave) -> None:
        """Save blocks taken here or at an identical copy; identical copies stay identical, bit for bit.

        Raises:
            ConfigError: if its step is not after the last save's.
        """
        self._check_step(saved.step)
        size = chunk_rows(max(rows.shape[1] for rows in self._saved))
        for some, *payload in zip(*(tensor.split(size) for tensor in (saved.blocks, *saved.payload)), strict=True):
            self._put_some(some, iter(payload), saved.step, saved.share)
        self.saved_at[saved.blocks] = saved.step
        self._step, self._share = saved.step, saved.share
        self._credit += self._income - self._bytes_of(saved.blocks) * self._price
        # More credit than for the one block that did not fit is left over only if everything else was saved.
        self._credit = min(self._credit, int(self._sizes.max()) * self._price)

    @torch.no_grad()
    def recover(self, blocks: Tensor, step: int) -> tuple[Tensor, ...]:
        """Return the values that lost blocks, int64 of shape (k,), are restored to before ``step``.

        One tensor of rows for each tensor of ``start``, of shape (k, its width).
        """
        return tuple(
            self._expected(number, blocks, step, self._share).to(rows.dtype) for number, rows in enumerate(self._saved)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state as tensors, numbers and strings; the tensors are not copied."""
        return {
            "saving": dataclasses.asdict(self._saving),
            "step": self._step,
            "credit": self._credit,
            "saved_at": self.saved_at,
            "saved": list(self._saved),
            "slope": self._slope,
            "share": self._share,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become identical to the checkpoint that ``state`` comes from; its tensors are copied.

        Raises:
            ConfigError: if it has another ``PriorityPolicy``, or other blocks.
        """
        if state["saving"] != dataclasses.asdict(self._saving):
            raise ConfigError(
                f"this priority checkpoint was kept with {state['saving']}, not with {self._saving}; use the same values"
            )
        self._check_rows(state["saved"])
        for own_rows, rows in zip(self._saved, state["saved"], strict=True):
            own_rows.copy_(rows)
        if self._slope is not None:
            self._slope.copy_(state["slope"])
        self.saved_at.copy_(state["saved_at"])
        self._step, self._credit, self._share = state["step"], state["credit"], state["share"]

    # -- choosing blocks

    def _scores(self, rows: Sequence[Tensor], step: int, share: float) -> Tensor:
        if self._saving.choice == "round-robin":
            return step - self.saved_at
        if self._saving.choice == "random":
            return drawn(len(self.saved_at), self._saving.seed, step)
        if self._distance is not None:
            if self._slope is None:
                return self._distance(rows[0], self._saved[0])
            everything = torch.arange(len(self.saved_at))
            return self._distance(rows[0], self._expected(0, everything, step, share).to(rows[0].dtype))
        if self._saving.distance == "scaled":
            scaled = [self._distances(n, row, step, share) / unit(self._saved[n]) for n, row in enumerate(rows)]
            return torch.stack(scaled).square_().sum(0).sqrt_()
        return self._distances(0, rows[0], step, share)

    def _distances(self, number: int, rows: Tensor, step: int, share: float) -> Tensor:
        """Return the Euclidean distances to the result of :meth:`_expected`, which is never materialised as a whole.

        The sum may be fused here, since no other process needs the same bits.
        """
        if number or self._slope is None:
            return euclidean(rows, self._saved[number])
        scratch = torch.empty_like(self._slope[: chunk_rows(rows.shape[1])])
        distances = []
        for row, saved, way, steps in self._along_lines(rows, self._slope, step):
            expected = torch.addcmul(saved, way, steps.mul_(share), out=scratch[: len(row)])
            distances.append(euclidean(row, expected))
        return torch.cat(distances)

    def _distance_covered(self, rows: Tensor, step: int) -> float:
        """Return the least-squares fraction of their lines along which the blocks have moved, from 0 to 1.

        It is 0 if all lines have length 0, and the same with any number of threads. Blocks with NaN are left out.
        """
        if self._saving.predictor != "calibrated" or self._slope is None:
            return self._share
        gone, all_of_it = [], []
        for row, saved, way, steps in self._along_lines(rows, self._slope, step):
            ahead = way * steps
            gone.append((row.to(ahead.dtype) - saved).mul_(ahead).sum(1))
            all_of_it.append(ahead.square_().sum(1))
        products, squares = torch.cat(gone).double().numpy(), torch.cat(all_of_it).double().numpy()
        fit = np.isfinite(products)
        length = float(squares[fit].sum())
        return min(1.0, max(0.0, float(products[fit].sum()) / length)) if length else 0.0

    def _along_lines(self, rows: Tensor, slope: Tensor, step: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield chunks of rows, their saved values, slopes, and the number of steps since they were saved."""
        ahead = (step - self.saved_at).to(slope.dtype).unsqueeze(1)
        size = chunk_rows(rows.shape[1])
        yield from zip(*(t.split(size) for t in (rows, self._saved[0], slope, ahead)), strict=True)

    def _bytes_of(self, blocks: Tensor) -> int:
        return int(self._sizes) * len(blocks) if len(self._sizes) == 1 else int(self._sizes[blocks].sum())

    # -- encoding

    def _expected(self, number: int, blocks: Tensor, step: int, share: float) -> Tensor:
        """Return the values that blocks of a tensor are restored to, in the dtype of the computation."""
        rows = self._saved[number].index_select(0, blocks)
        if number or self._slope is None:
            return rows
        ahead = (step - self.saved_at[blocks]).to(self._slope.dtype).mul_(share)
        return self._slope.index_select(0, blocks).mul_(ahead.unsqueeze(1)).add_(rows)

    def _encode(
        self, rows: Sequence[Tensor], blocks: Tensor, step: int, share: float
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the payload, and for each block whether it may be saved."""
        payload: list[Tensor] = []
        checks: list[Tensor] = []
        for number, row in enumerate(rows):
            if is_stepped(row, self._saving.codec):
                payload += encode(row, blocks, partial(self._expected_wide, number, step=step, share=share))
                checks.append(finite(payload[-1]))
            else:
                payload.append(row.index_select(0, blocks))
                if number or not self._distance_tells:
                    checks.append(finite(payload[-1]))
        return tuple(payload), checks

    def _put_some(self, blocks: Tensor, payload: Iterator[Tensor], step: int, share: float) -> None:
        """Save blocks from their payload."""
        for number, own_rows in enumerate(self._saved):
            rows = next(payload)
            if is_stepped(own_rows, self._saving.codec):
                rows = decode(rows, next(payload), self._expected_wide(number, blocks, step, share), own_rows.dtype)
            if not number and self._slope is not None:
                since = (step - self.saved_at[blocks]).to(self._slope.dtype)
                way = rows.to(self._slope.dtype) - own_rows.index_select(0, blocks).to(self._slope.dtype)
                self._slope.index_copy_(0, blocks, way.div_(since.unsqueeze(1)))
            own_rows.index_copy_(0, blocks, rows)

    def _expected_wide(self, number: int, blocks: Tensor, step: int, share: float) -> Tensor:
        return self._expected(number, blocks, step, share).to(wide(self._saved[number].dtype))

    # -- checks

    def _check_step(self, step: int) -> None:
        if step <= self._step:
            raise ConfigError(
                f"a save of step {step} must come after the last one, which is of step {self._step}; "
                "to roll back, load the state of another priority checkpoint or begin a new one"
            )

    def _check_rows(self, rows: Sequence[Tensor]) -> None:
        layout, own_layout = ([(tuple(t.shape), t.dtype) for t in tensors] for tensors in (rows, self._saved))
        if layout != own_layout:
            raise ConfigError(
                f"rows must have the shapes and dtypes that it started with, {own_layout}, got {layout}; give the same tensors"
            )


def _check_start(start: Sequence[Tensor], block_bytes: Tensor | None) -> None:
    shapes = [tuple(tensor.shape) for tensor in start]
    if not shapes or any(len(shape) != 2 or shape[0] != shapes[0][0] or 0 in shape for shape in shapes):
        raise ConfigError(
            f"start must be tensors of shape (blocks, width) with the same number of blocks, got {shapes}; reshape them to blocks"
        )
    if block_bytes is not None and (block_bytes.shape != shapes[0][:1] or bool((block_bytes < 0).any())):
        raise ConfigError(
            f"block_bytes must be {shapes[0][0]} numbers of 0 or more, one per block, got {len(block_bytes)} from "
            f"{block_bytes.min()} up; give the bytes that saving each block takes"
        )
