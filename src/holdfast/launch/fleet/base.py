"""The machines of a job as its launcher sees them: the workers on them, their deaths, and how they are reached.

A fleet is one machine (:class:`Fleet`), hosts on which mpirun starts workers (:class:`~holdfast.launch.fleet.mpi_hosts.MpiHosts`),
or nodes that share a store, each with a launcher of its own (:class:`~holdfast.launch.fleet.nodes.NodeGroup`).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.launch.health.deaths import DeathRegister
from holdfast.launch.job import Job
from holdfast.launch.job_state import JobState, Verdict
from holdfast.launch.supervise.processes import WatchedWorker, end
from holdfast.records.beacon import BeaconPosition
from holdfast.records.types import Record


@dataclass(frozen=True, slots=True)
class JobStart:
    """One start of the job: the workers' store, all ranks, those of this node, and those alive when it joins."""

    store: str
    token: str
    ranks: tuple[int, ...]
    own: tuple[int, ...]
    alive: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RemoteRecord:
    """A record of another node's worker, its start of the job, and the last position of a worker that ended."""

    start: int
    record: Record
    position: BeaconPosition | None = None


@dataclass(slots=True)
class NodeChanges:
    """Changes since the last call.

    Lost nodes with their workers; workers whose launchers ended in order; newcomers; records of the other nodes' workers.
    """

    lost: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parted: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()
    records: Sequence[RemoteRecord] = ()


class Fleet:
    """One machine, whose workers need no store, over all starts of the job."""

    poll_s = 0.02
    """Interval between two reads of what the workers have written."""
    given_up: Collection[int] = ()
    """Workers of this start that were lost with their nodes: what they still report does not count."""

    def __init__(self, job: Job) -> None:
        self.job = job
        """The job, on the machines that are left."""
        self.deaths = DeathRegister()
        """The deaths of this start."""
        self.number = 0
        """Number of the start: restarts so far."""
        self.is_late = False
        """Whether the job had begun before this launcher arrived."""
        self._next_ranks = job.ranks
        self._begun: tuple[int, str] | None = None
        self._requested: list[dict[str, Any]] = []

    @property
    def is_needed(self) -> bool:
        """Whether the job cannot continue without this launcher."""
        return True

    @property
    def store_lost(self) -> str:
        """Why this node can no longer take part, or ""."""
        return ""

    @property
    def grace_s(self) -> float:
        """How long workers may take to save and exit when this launcher has died."""
        return self.job.grace_s

    def connect(self, tell: Callable[[str], None]) -> None:
        """Raise a ConfigError that names each machine that cannot take part; ``tell`` is called with what is waited for."""

    def close(self) -> None:
        """Release the machines."""

    # -- starts

    def origin_s(self) -> float:
        """Return the value of ``time.monotonic()`` on this machine at which the first launcher began."""
        return time.monotonic()

    def begin(self, number: int) -> JobStart:
        """Take part in the start of the job with this number."""
        self.number = number
        return JobStart("", "", self._next_ranks, self._next_ranks, self._next_ranks)

    def restart_on(self, state: JobState) -> tuple[int, ...]:
        """Return the ranks of the next start, the same on all launchers."""
        self._next_ranks = state.ranks_left(len(self.job.ranks) if self.job.max_respawns else 1)
        return self._next_ranks

    def is_restarted(self) -> bool:
        """Return whether another launcher has decided to restart the job."""
        return False

    def free_number(self, least: int) -> int:
        """Return an unused rank for a newcomer of this node, at least ``least``."""
        return least

    def note_start(self, slices: int, order: str) -> None:
        """Record the job's number of slices and its order of additions, for launchers that come late and for restarts."""
        self._begun = self._begun or (slices, order)

    @property
    def begun(self) -> tuple[int, str] | None:
        """The first that :meth:`note_start` has recorded; None before training has begun."""
        return self._begun

    # -- ends

    def examine(
        self, verdict: Verdict, pairs: Mapping[int, WatchedWorker], mpiruns: Sequence[int]
    ) -> tuple[Verdict, list[int]]:
        """Return how a start of the job ended, once it is known which machines are left, and the workers out of reach.

        Args:
            verdict: How it ended, as far as the records say.
            pairs: Its workers.
            mpiruns: PIDs of the processes that started them.
        """
        return verdict, []

    # -- reaching the workers

    def variables(self, origin_s: float) -> dict[str, str]:
        """Return the variables that workers on other machines need; ``origin_s`` is when the run began."""
        return {}

    def mpirun_words(self, env: Mapping[str, str]) -> list[str] | None:
        """Return the options of mpirun that name the hosts, and the variables of ``env`` to pass on; None for this machine."""
        return None

    def reach(self, pair: WatchedWorker) -> WatchedWorker:
        """Return a pair that can be sent signals, wherever it is."""
        return pair

    def end(
        self, processes: Sequence[subprocess.Popen[bytes]], pairs: Sequence[WatchedWorker], forked_by: int | None
    ) -> None:
        """Kill what was started for the job, and all processes below it; see :func:`~holdfast.launch.supervise.processes.end`."""
        end(processes, pairs, forked_by)

    # -- the other launchers

    def exchange(self, records: Sequence[tuple[Record, BeaconPosition | None]]) -> NodeChanges:
        """Publish the records of this node's workers, with the last positions of those that ended; return the changes."""
        return NodeChanges()

    def is_first(self) -> bool:
        """Return whether this node is the first of those that are not lost."""
        return True

    def ranks_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the other nodes that have these workers."""
        return ()

    def post(self, what: str, *, true: bool) -> None:
        """Publish whether a condition holds for all workers of this node."""

    def all_posted(self, what: str, nodes: Sequence[int] | None = None) -> bool:
        """Return whether a condition holds for ``nodes``, or for all other nodes that are not lost."""
        return True

    def any_posted(self, what: str) -> bool:
        """Return whether a condition holds for any other node that is not lost."""
        return False

    def stop_all(self) -> bool:
        """Return whether the whole job stops with this node, as far as is known; make it stop if it cannot continue."""
        return self.is_needed

    def is_stopping(self) -> bool:
        """Return whether another launcher makes the whole job save and stop."""
        return False

    def request(self, changes: Mapping[str, Any]) -> None:
        """Request changes; all launchers see them in the same order."""
        self._requested.append(dict(changes))

    def requests(self) -> list[dict[str, Any]]:
        """Return the changes requested since the last call, on any node."""
        new, self._requested = self._requested, []
        return new

    def ask_to_leave(self, rank: int) -> None:
        """Make the launcher of a worker ask it to leave."""

    def is_leaving(self) -> tuple[int, ...]:
        """Return the workers of this node that are asked to leave; each is returned once."""
        return ()
