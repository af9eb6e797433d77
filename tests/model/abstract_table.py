"""The state of the abstract engine while one move changes it: what everybody looks up and writes down."""

from __future__ import annotations

from typing import Any

from model.abstract_engine import Engine
from model.abstract_memory import MemoryDraft, Violation
from model.abstract_state import State, Worker

_HEAD = 3
"""What comes first in an entry of the log: the group, settings and homes of the attempt. Buckets or parts follow."""

_FIELDS = {name: number for number, name in enumerate(Worker._fields)}


class Table:
    """A state that is being changed.

    Args:
        engine: The rules.
        state: Before the move.
    """

    def __init__(self, engine: Engine, state: State) -> None:
        self._engine = engine
        self._workers = list(state.workers)
        self._left = state.left
        self._members = state.members
        self._failed = state.failed
        self._revokers = state.revokers
        self._fenced = state.fenced
        self._sums = {s.number: s for s in state.sums}
        self._swaps = {s.order: s for s in state.swaps}
        self._log = list(state.log)
        self._published = state.published
        self._published_taken = state.published_taken
        self._deaths_left = state.deaths_left
        self._memory = engine.no_memory
        if engine.world.shared:
            self._memory = MemoryDraft(state.memory, engine.world.without, keep_input=engine.world.keep_input)
        self._wishes = state.wishes

    # -- looking things up

    def _worker(self, rank: int) -> Worker:
        worker = self._workers[rank]
        assert worker is not None
        return worker

    def _set(self, rank: int, **fields: Any) -> None:
        values = list(self._worker(rank))  # _replace of a tuple of so many fields takes three times as long
        for name, value in fields.items():
            values[_FIELDS[name]] = value
        self._workers[rank] = Worker._make(values)

    def _check_step(self, rank: int, step: int, does: str) -> None:
        steps = self._worker(rank).steps
        if steps != step:
            msg = f"wrong step: {rank} {does} step {step} with {steps} steps in its weights"
            raise Violation(msg)

    # -- writing things down

    def _write(self, rank: int, step: int, what: tuple[int, ...]) -> None:
        """Write down what ``rank`` puts into ``step``: of what attempt, and by bucket or part; 0 where it has no such part."""
        if len(self._log) == step:
            self._log.append(what)
            return
        before = self._log[step]
        if before is None or not _is_same(what, before):
            kind = "published state is not in the history" if step < self._published else "replicas differ"
            msg = f"{kind}: {rank} puts something else into step {step}"
            raise Violation(msg)
        self._log[step] = tuple(mine or theirs for mine, theirs in zip(what, before, strict=True))

    def _drop_gradients(self, rank: int) -> None:
        self._workers[rank] = self._worker(rank).without_gradients()
        self._memory.drop(rank)


def _is_same(what: tuple[int, ...], before: tuple[int, ...]) -> bool:
    """Return whether two put the same into a step: of one attempt, and alike where both put in something."""
    both = zip(what[_HEAD:], before[_HEAD:], strict=True)
    return what[:_HEAD] == before[:_HEAD] and all(mine == theirs for mine, theirs in both if mine and theirs)
