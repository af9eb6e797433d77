"""The driver's side of one run: keeps an actor in each place that Ray has for a node, and collects how they ended.

A node whose actor ends is lost. Its seat is taken away, so that the others continue without it at once, and a new actor
is placed where Ray has room; it comes back as a new launcher of the same node, with new workers. A node that has ended
while others go on is started again, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from holdfast.errors import StoreLost, TrainingFailed
from holdfast.integrations.ray.configs import JobScale
from holdfast.integrations.ray.function import PackedFunction
from holdfast.integrations.ray.node import NodeActor, NodeOutcome
from holdfast.launch.job import Job
from holdfast.membership import Store

_POLL_S = 0.25
_MORE_NODES_S = 5.0
"""Time that a job waits for more nodes than it needs, once those are present."""
_SETTLE_S = 10.0
"""Time in which all nodes end once one has, besides two leases and the grace period: then that was the end of one node."""
_FIRST_S, _LONGEST_S = 1.0, 60.0
_CALM_S = 60.0
"""A node that has run for this long has not failed for want of something on its machine."""
_MOST_IN_A_ROW = 8
"""A node that is lost so often in a row is given up."""


class _Phase(Enum):
    """What a node of the job is doing."""

    WAITS = "waits until it is placed again"
    PLACED = "waits for Ray to start its actor"
    RUNS = "runs"
    ENDED = "ended"


@dataclass(slots=True)
class _Node:
    """A node of the job; ``answer`` is what Ray will return next."""

    rank: int
    place: PlacementGroupSchedulingStrategy
    phase: _Phase = _Phase.WAITS
    actor: Any = None
    answer: Any = None
    outcome: NodeOutcome | None = None
    due_s: float = 0.0
    since_s: float = 0.0
    in_a_row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTask:
    """What every node is asked to run; see :meth:`~holdfast.integrations.ray.node.NodeActor.run`."""

    job: Job
    scale: JobScale
    function: PackedFunction | None
    env: Mapping[str, str]
    folder: str
    runtime_env: Mapping[str, Any]


class Supervisor:
    """Runs a job once.

    Args:
        task: What the nodes run.
        places: Where Ray places them, by the rank of the node.
        store: The store of the launchers.
        say: Prints one line.
    """

    def __init__(
        self,
        task: NodeTask,
        places: Sequence[PlacementGroupSchedulingStrategy],
        store: Store,
        say: Callable[[str], None],
    ) -> None:
        self._task = task
        self._store = store
        self._say = say
        self._nodes = [_Node(rank, place) for rank, place in enumerate(places)]
        self._starts_by_s = time.monotonic() + task.job.rdzv_timeout_s
        self._enough_s: float | None = None
        self._ended_s: float | None = None

    def run(self) -> NodeOutcome | None:
        """Return how the job ended; None if all nodes were lost, and with them everything but checkpoints.

        Raises:
            TrainingFailed: if the job cannot begin.
        """
        while True:
            for node in self._nodes:
                if node.phase is _Phase.WAITS and time.monotonic() >= node.due_s:
                    self._place(node)
            answers = {node.answer: node for node in self._nodes if node.answer is not None}
            if not answers:
                time.sleep(_POLL_S)
            for answer in ray.wait(list(answers), timeout=_POLL_S)[0] if answers else ():
                self._take(answers[answer])
            self._begin()
            if self._is_over():
                return self._outcome()

    def stop(self) -> None:
        """Make the whole job save and stop; :meth:`run` returns how it ended."""
        with contextlib.suppress(StoreLost):  # then all stop anyway
            self._store.put("stop", "1")

    def close(self) -> None:
        """End all actors, at once."""
        for node in self._nodes:
            _end(node)

    # -- one node

    def _place(self, node: _Node) -> None:
        """Ask Ray for an actor; it waits, as long as it takes, until there is room."""
        bundle = dict(self._task.scale.bundle)
        node.actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                resources=bundle,
                scheduling_strategy=node.place,
                runtime_env=dict(self._task.runtime_env) or None,
            )
            .remote()
        )
        node.phase, node.answer = _Phase.PLACED, node.actor.place.remote()

    def _take(self, node: _Node) -> None:
        """Take Ray's answer: the actor was started, has ended in order, or is lost."""
        task = self._task
        try:
            answer = ray.get(node.answer)
        except ray.exceptions.RayTaskError as error:  # raised by our own code on the node
            answer = NodeOutcome(exit_code=1, message=f"node {node.rank}: {_line(error.cause or error)}")
        except ray.exceptions.RayError as error:
            self._lose(node, error)
            return
        if isinstance(answer, NodeOutcome):
            node.phase, node.answer, node.outcome = _Phase.ENDED, None, answer
            self._ended_s = self._ended_s or time.monotonic()
            return
        job = dataclasses.replace(task.job, node_rank=node.rank)
        node.answer = node.actor.run.remote(job, task.function, task.env, task.folder)
        node.phase, node.since_s = _Phase.RUNS, time.monotonic()

    def _lose(self, node: _Node, error: Exception) -> None:
        """Tell the other nodes that this one is lost, and have it placed again, the later the more often it was."""
        ran_s = time.monotonic() - node.since_s if node.phase is _Phase.RUNS else 0.0
        with contextlib.suppress(StoreLost):  # then all stop
            self._store.delete(f"node/{node.rank}")
        node.in_a_row = 1 if ran_s > _CALM_S else node.in_a_row + 1
        if node.in_a_row >= _MOST_IN_A_ROW:
            message = f"node {node.rank} was lost {node.in_a_row} times in a row, and is given up: {_line(error)}"
            node.phase, node.answer = _Phase.ENDED, None
            if not self._has_begun:
                node.outcome = NodeOutcome(exit_code=1, message=message)
            self._say(message)
            return
        what = "its actor has ended" if ran_s else "its actor could not be started"
        self._say(f"node {node.rank} is lost, and Ray will place it again: {what} ({type(error).__name__})")
        self._again(node, min(_LONGEST_S, _FIRST_S * 2 ** (node.in_a_row - 1)))

    def _again(self, node: _Node, wait_s: float) -> None:
        _end(node)
        node.phase, node.answer, node.outcome = _Phase.WAITS, None, None
        node.due_s = time.monotonic() + wait_s

    # -- the job

    def _begin(self) -> None:
        """Let the job begin once enough nodes are present; launchers begin by themselves once all are."""
        if self._has_begun:
            return
        seats = {int(node): json.loads(text)["seat"] for node, text in self._store.under("node/").items()}
        now_s = time.monotonic()
        if len(seats) >= self._task.scale.min_nodes:
            self._enough_s = self._enough_s or now_s
            if now_s - self._enough_s >= _MORE_NODES_S or len(seats) == len(self._nodes):
                whole = {node.rank: seats.get(node.rank, -1) for node in self._nodes}
                self._store.create("start/0", json.dumps(whole))
        elif now_s > self._starts_by_s and not self._ended:
            missing = [node.rank for node in self._nodes if node.rank not in seats]
            raise TrainingFailed(
                f"{len(seats)} of {self._task.scale.min_nodes} nodes were started within {self._task.job.rdzv_timeout_s:g} s "
                f"(rdzv_timeout_s): Ray has not started nodes {', '.join(map(str, missing))}, see `ray status`"
            )

    @property
    def _has_begun(self) -> bool:
        return self._store.get("start/0") is not None

    @property
    def _ended(self) -> list[NodeOutcome]:
        """How nodes have ended, those that know the end of the whole job first."""
        outcomes = [node.outcome for node in self._nodes if node.outcome is not None]
        return sorted(outcomes, key=lambda outcome: not outcome.is_done)

    def _is_over(self) -> bool:
        """Return whether the job has ended on all nodes; a node that ended alone is started again."""
        if not self._has_begun:
            return bool(self._ended)
        if not any(node.phase is _Phase.RUNS for node in self._nodes):
            return True
        settle_s = _SETTLE_S + 2 * self._task.job.node_timeout_s + self._task.job.grace_s
        if self._ended_s is None or time.monotonic() - self._ended_s < settle_s:
            return False
        self._ended_s = None
        if self._ended and self._ended[0].is_done:
            return True
        for node in self._nodes:
            if node.outcome is not None:
                self._say(f"node {node.rank} ended while others go on, and is started again: {node.outcome.message}")
                self._again(node, 0.0)
        return False

    def _outcome(self) -> NodeOutcome | None:
        return self._ended[0] if self._ended else None


def _end(node: _Node) -> None:
    """End the actor, if there is one; its workers leave the job within the grace period."""
    if node.actor is not None:
        ray.kill(node.actor)
    node.actor = None


def _line(error: BaseException) -> str:
    """Return the beginning and the end of an error in one line: Ray's have a traceback in between."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0][:200], lines[-1][:200])))}"
