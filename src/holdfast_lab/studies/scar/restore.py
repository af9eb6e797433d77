"""Restore methods after nodes have failed: the state with which the run continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.checkpoint.priority import RunningCheckpoint
from holdfast_lab.workloads.iterative.base import Program, State, copy_of

Rows = tuple[Tensor, ...]
_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreScene:
    """The situation when nodes fail.

    Args:
        program: The program.
        state: The state at the failure, including the lost blocks; read-only.
        iteration: Number of finished iterations.
        lost: Indices of the blocks of the failed nodes; int64.
        start: The rows of x(0).
        running: The priority checkpoint; None if nothing was saved.
        history: Steps at which a policy of the smallest fraction saves, each with all rows at that step; x(0) first.
        room_bytes: Maximum bytes of one of these saves.
        reseeded: Creates the same program with other randomness.
    """

    program: Program
    state: State
    iteration: int
    lost: Tensor
    start: Rows
    running: RunningCheckpoint | None
    history: Sequence[tuple[int, Rows]]
    room_bytes: float
    reseeded: Callable[[], Program]

    @property
    def saved(self) -> RunningCheckpoint:
        """Return the priority checkpoint."""
        assert self.running is not None, "this restore method needs a checkpoint"
        return self.running


@dataclass(frozen=True, slots=True)
class RestoredRun:
    """The state with which the run continues.

    Args:
        state: The restored state.
        program: The program that continues.
        work: Cost of the restore itself in iterations.
    """

    state: State
    program: Program
    work: float = 0.0


def lose(scene: RestoreScene) -> RestoredRun:
    """Restore the lost blocks from the checkpoint; all other blocks stay."""
    return _written(scene, scene.lost, scene.saved.recover(scene.lost, scene.iteration))


def _roll_back(scene: RestoreScene) -> RestoredRun:
    blocks = torch.arange(scene.program.blocks)
    return _written(scene, blocks, scene.saved.recover(blocks, scene.iteration))


def _reset(scene: RestoreScene) -> RestoredRun:
    return _written(scene, scene.lost, tuple(row[scene.lost] for row in scene.start))


def _without_rest(scene: RestoreScene) -> RestoredRun:
    parameters = scene.saved.recover(scene.lost, scene.iteration)[0]
    return _written(scene, scene.lost, (parameters, *(row[scene.lost] for row in scene.start[1:])))


def _with_rest(scene: RestoreScene) -> RestoredRun:
    parameters = scene.saved.recover(scene.lost, scene.iteration)[0]
    return _written(scene, scene.lost, (parameters,))


def _live(scene: RestoreScene) -> RestoredRun:
    """Restore the lost live blocks; reset the other lost blocks to x(0), so that an error shows if they are read."""
    assert scene.program.live is not None
    live = scene.program.live
    place = live.cumsum(0) - 1
    lost = scene.lost[live[scene.lost]]
    others = scene.lost[~live[scene.lost]]
    restored = _written(scene, lost, scene.saved.recover(place[lost], scene.iteration))
    _write(scene.program, restored.state, others, tuple(row[others] for row in scene.start))
    return restored


def _calibrated(scene: RestoreScene) -> RestoredRun:
    """Move lost blocks along their prediction by the share that surviving blocks have really moved along theirs."""
    blocks = torch.arange(scene.program.blocks)
    expected, *others = scene.saved.recover(blocks, scene.iteration)
    last = scene.saved.state_dict()["saved"][0]
    alive = torch.ones(len(blocks), dtype=torch.bool)
    alive[scene.lost] = False
    ahead = (expected - last).to(torch.float64)
    gone = (scene.program.rows(scene.state)[0] - last).to(torch.float64)
    length = float((ahead[alive] ** 2).sum())
    share = float((gone[alive] * ahead[alive]).sum()) / length if length else 0.0
    moved = (last + min(max(share, 0.0), 1.0) * ahead).to(last.dtype)
    return _written(scene, scene.lost, tuple(row[scene.lost] for row in (moved, *others)))


def _reseed(scene: RestoreScene) -> RestoredRun:
    return RestoredRun(copy_of(scene.state), scene.reseeded())


def _survivors(scene: RestoreScene) -> RestoredRun:
    state = copy_of(scene.state)
    lost = torch.zeros(scene.program.blocks, dtype=torch.bool)
    lost[scene.lost] = True
    scene.program.resolve(state, lost)  # type: ignore[attr-defined]  # only used for programs that have it
    return RestoredRun(state, scene.program)


def _sweep(scene: RestoreScene) -> RestoredRun:
    restored = lose(scene)
    scene.program.resample(restored.state, scene.lost, scene.iteration)  # type: ignore[attr-defined]  # likewise
    return RestoredRun(restored.state, restored.program, len(scene.lost) / scene.program.blocks)


def _hindsight(scene: RestoreScene) -> RestoredRun:
    return _from_history(scene, torch.arange(scene.program.blocks))


def _hindsight_who(scene: RestoreScene) -> RestoredRun:
    return _from_history(scene, scene.lost)


def _from_history(scene: RestoreScene, wanted: Tensor) -> RestoredRun:
    now = scene.program.rows(scene.state)[0]
    distances = torch.stack([scene.program.distance(now, rows[0]) for _, rows in scene.history], dim=1)
    costs = (distances[wanted].double() ** 2).numpy()
    chosen = torch.zeros(scene.program.blocks, dtype=torch.int64)
    chosen[wanted] = torch.from_numpy(
        least_sum(costs, scene.program.block_bytes[wanted].double().numpy(), scene.room_bytes)
    )
    values = []
    for number in range(len(scene.start)):
        kept = torch.stack([rows[number][scene.lost] for _, rows in scene.history])
        values.append(kept[chosen[scene.lost], torch.arange(len(scene.lost))])
    return _written(scene, scene.lost, tuple(values))


def least_sum(costs: NDArray[np.float64], sizes: NDArray[np.float64], room: float) -> NDArray[np.int64]:
    """Return for each block one of the possible save times, such that the total cost is approximately minimal.

    An auction: iteratively, each time gets the price at which demand equals its room, given the prices of all other
    times. Then blocks are assigned greedily, in order of their gain above the price.

    Args:
        costs: Cost of each block if it was last saved at each time; of shape (blocks, times). The first time is free.
        sizes: Size of each block; of shape (blocks,).
        room: Capacity of each time except the first.
    """
    prices = np.zeros(costs.shape[1])
    for _ in range(_ROUNDS):
        before = prices.copy()
        for time in range(costs.shape[1] - 1, 0, -1):
            priced = costs + sizes[:, None] * prices
            priced[:, time] = np.inf
            worth = (priced.min(1) - costs[:, time]) / sizes
            order = np.argsort(-worth, kind="stable")
            fits = int(np.searchsorted(np.cumsum(sizes[order]), room, side="right"))
            left_out = worth[order[fits]] if fits < len(order) else 0.0
            prices[time] = max(0.0, (left_out + worth[order[fits - 1]]) / 2 if 0 < fits < len(order) else left_out)
        if np.allclose(prices, before, rtol=1e-3, atol=0.0):
            break
    gains = costs[:, :1] - costs - sizes[:, None] * prices
    gains[:, 0] = -np.inf
    chosen, free = np.zeros(len(costs), dtype=np.int64), np.full(costs.shape[1], room)
    for place in np.argsort(-gains, axis=None, kind="stable"):
        block, time = divmod(int(place), costs.shape[1])
        if not chosen[block] and time and costs[block, time] < costs[block, 0] and free[time] >= sizes[block]:
            chosen[block] = time
            free[time] -= sizes[block]
    return chosen


def _written(scene: RestoreScene, blocks: Tensor, values: Rows) -> RestoredRun:
    state = copy_of(scene.state)
    _write(scene.program, state, blocks, values)
    return RestoredRun(state, scene.program)


def _write(program: Program, state: State, blocks: Tensor, values: Rows) -> None:
    for view, value in zip(program.rows(state), values, strict=False):  # rows without a value stay
        view[blocks] = value
    program.mend(state, blocks)


WAYS: dict[str, Callable[[RestoreScene], RestoredRun]] = {
    "lost": lose,
    "all": _roll_back,
    "start": _reset,
    "lost, rest reset": _without_rest,
    "lost, rest kept": _with_rest,
    "live": _live,
    "calibrated": _calibrated,
    "reseed": _reseed,
    "survivors": _survivors,
    "sweep": _sweep,
    "hindsight": _hindsight,
    "hindsight who": _hindsight_who,
}
"""All restore methods, by their name in a policy."""
