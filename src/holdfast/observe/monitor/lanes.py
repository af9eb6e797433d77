"""The workers of a run as a live view shows them: what each does, and a lane with what it did."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_SPANS = 200
"""Spans of a lane; of a job with many workers fewer, see :data:`ALL_SPANS`."""
ALL_SPANS = 20_000
"""Spans of all lanes together."""
_LEAST_SPANS = 10
MOST_GONE = 500
"""Workers that are lost or have left keep their lanes: as many as are alive, and so many."""

SPAN_OF = {
    "starting": "start",
    "training": "train",
    "recovering": "recover",
    "joining": "catch-up",
    "lost": "lost",
    "left": "left",
    "spare": "spare",
    "done": "done",
}
"""The states of a worker, each with the span that its lane shows meanwhile."""
GONE = ("lost", "left", "done")
"""States of a worker that no longer takes part."""


@dataclass(slots=True)
class Lane:
    """One worker.

    Args:
        rank: Its rank.
        spans: What it did: from, to (None: until now), and a value of :data:`SPAN_OF`.
        marks: What happened to it: when, which kind of event, and a line about it.
    """

    rank: int
    node: int
    state: str = ""
    since_s: float = 0.0
    pid: int | None = None
    joined: bool = False
    cause: str = ""
    step: int | None = None
    """The step that it had reached when it was lost or left."""
    slices: Sequence[int] = ()
    spans: list[list[Any]] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    version: int = 0


class Lanes:
    """All workers of a run.

    Args:
        stamp: Returns the version of the state; a lane that changes has the version of its last change.
        node_of: Returns the node of a rank.
    """

    def __init__(self, stamp: Callable[[], int], node_of: Callable[[int], int]) -> None:
        self._stamp, self._node_of = stamp, node_of
        self.by_rank: dict[int, Lane] = {}
        self.dropped: deque[tuple[int, int]] = deque(maxlen=2 * MOST_GONE)
        """Workers whose lanes were dropped, each with the version of that."""
        self.version = 0
        """Version of the last change of any lane."""
        self._in_state: dict[str, set[int]] = {state: set() for state in SPAN_OF}

    def _change(self, lane: Lane) -> None:
        self.version = lane.version = self._stamp()

    def lane(self, rank: int, state: str, t_s: float) -> Lane:
        """Return the lane of a worker; if it is new, it begins in ``state``."""
        if rank not in self.by_rank:
            self.by_rank[rank] = Lane(rank, self._node_of(rank))
            self.enter(rank, state, t_s)
        return self.by_rank[rank]

    def enter(self, rank: int, state: str, t_s: float) -> bool:
        """Change the state of a worker; return whether it changed.

        What is older than its state changes nothing: records of several workers arrive in any order, and some twice.
        """
        lane = self.by_rank.get(rank)
        if lane is None:
            lane = self.lane(rank, state, t_s)
            return True
        if lane.state == state or (t_s < lane.since_s and state not in GONE):
            return False
        t_s = max(t_s, lane.since_s)
        if lane.spans:
            lane.spans[-1][1] = t_s
        self._in_state.get(lane.state, set()).discard(rank)
        self._in_state[state].add(rank)
        lane.state, lane.since_s = state, t_s
        lane.spans.append([t_s, None, SPAN_OF[state]])
        self._shorten(lane)
        self._change(lane)
        if state in GONE:
            self._drop(rank)
        return True

    def _drop(self, newest: int) -> None:
        """Drop the lane that has been gone for longest, if there are too many, but not the newest."""
        gone = self.count(*GONE)
        if gone <= MOST_GONE + len(self.by_rank) - gone:
            return
        ranks = [rank for rank in self.ranks(*GONE) if rank != newest]
        oldest = min(ranks, key=lambda rank: self.by_rank[rank].since_s)
        self._in_state[self.by_rank.pop(oldest).state].discard(oldest)
        self.dropped.append((self._stamp(), oldest))

    def note(self, rank: int, **fields: Any) -> None:
        """Change what is known of a worker: ``pid``, ``cause``, ``joined``, ``step`` or ``slices``."""
        lane = self.by_rank.get(rank)
        if lane is None:
            return
        for name, value in fields.items():
            if getattr(lane, name) != value:
                setattr(lane, name, value)
                self._change(lane)

    def mark(self, rank: int, t_s: float, kind: str, text: str) -> None:
        """Mark a moment in the lane of a worker; the same mark counts once."""
        lane = self.by_rank.get(rank)
        mark = [t_s, kind, text]
        if lane is not None and mark not in lane.marks:
            lane.marks = [*lane.marks, mark][-self._most :]
            self._change(lane)

    def close(self, end_s: float) -> None:
        """End the open spans."""
        for lane in self.by_rank.values():
            if lane.spans and lane.spans[-1][1] is None:
                lane.spans[-1][1] = max(end_s, lane.since_s)
                self._change(lane)

    def ranks(self, *states: str) -> list[int]:
        """Return the workers in these states, in order."""
        return sorted(set().union(*(self._in_state[state] for state in states)))

    def count(self, *states: str) -> int:
        """Return how many workers are in these states."""
        return sum(len(self._in_state[state]) for state in states)

    def alive(self) -> list[int]:
        """Return the workers that take part or wait, in order."""
        return self.ranks(*(state for state in SPAN_OF if state not in GONE))

    @property
    def _most(self) -> int:
        return max(_LEAST_SPANS, min(MOST_SPANS, ALL_SPANS // max(1, len(self.by_rank))))

    def _shorten(self, lane: Lane) -> None:
        """Join the shortest interruption with the spans around it, or drop the oldest span, if there are too many."""
        while len(lane.spans) > self._most:
            spans = lane.spans
            inner = [i for i in range(1, len(spans) - 1) if spans[i - 1][2] == spans[i + 1][2]]
            if not inner:
                del spans[0]
                continue
            shortest = min(inner, key=lambda i: spans[i][1] - spans[i][0])
            spans[shortest - 1 : shortest + 2] = [[spans[shortest - 1][0], *spans[shortest + 1][1:]]]

    # -- as JSON

    def workers(self, lanes: Iterable[Lane], step: int) -> list[dict[str, Any]]:
        """Return rows of workers; ``step`` is the step that all workers have reached that train."""
        return [
            {
                "id": lane.rank,
                "node": lane.node,
                "pid": lane.pid,
                "state": lane.state,
                "step": step if lane.state in ("training", "recovering", "spare") else lane.step,
                "slices": list(lane.slices) if lane.state in ("training", "recovering") else [],
                "since_s": round(lane.since_s, 3),
                "joined": lane.joined,
                "cause": lane.cause,
            }
            for lane in lanes
        ]

    def lanes(self, lanes: Iterable[Lane]) -> list[dict[str, Any]]:
        """Return rows of lanes."""
        return [
            {
                "id": lane.rank,
                "spans": [
                    [round(start_s, 4), None if end_s is None else round(end_s, 4), kind]
                    for start_s, end_s, kind in lane.spans
                ],
                "marks": [[round(t_s, 4), kind, text] for t_s, kind, text in lane.marks],
            }
            for lane in lanes
        ]
