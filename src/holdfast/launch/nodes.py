"""The launchers of a job, one a node, as one of them sees the others.

They share a store: each tells what its workers wrote, so that every launcher hears everything, judges alike, and can
write the report. Each keeps a lease: when it runs out, the node is lost, and its workers count as dead.

A store may outlive the job (etcd): what belongs to one run of it stands under a number of its own.

=======================  ====================================================================
``about``                what the job is, JSON; the first launcher says it, the others compare
``origin``               wall time of zero
``seat/R/K``             who the K-th launcher of node R is
``node/R``               leased: which of them is there, and its workers
``bye/R/K``              it has ended in order
``told/R/SLOT``          records of the workers of node R, JSON; a ring
``number/RANK``          who starts the newcomer RANK
``start/N``              JSON: which launchers began (0), or on which node each worker is started for the N-th time again
``slices``               of a mini-batch, once training has begun
``gone/N/RANK``          a worker of that start has ended, or was given up; the node that says so
``says/R/WHAT``          something that is true of all workers of node R
``asked/N``              JSON: the N-th change that the running job is asked for
``leave/RANK``           a worker is to leave
``stop``                 the whole job is to save and stop
=======================  ====================================================================

Who is cut off cannot go on beside the others. Its workers sum nothing without theirs; and it ends them before the others
may start the job again, which they do only :data:`FENCE_LEASES` leases after they lost a node.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.errors import StoreLost
from holdfast.launch.job import Job
from holdfast.launch.rendezvous import Meeting, Seated
from holdfast.membership import Store
from holdfast.records.beacon import Position
from holdfast.records.encoding import record_from_dict, record_to_dict
from holdfast.records.types import Record

FENCE_LEASES = 2.0
"""A node that is cut off knows it within one lease, and has ended its workers within two."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the job: the workers' store, all ranks, those of this node, and those that have not ended if it comes late."""

    store: str
    ranks: tuple[int, ...]
    own: tuple[int, ...]
    living: tuple[int, ...]


@dataclass(slots=True)
class _Node:
    """Another launcher, as far as it is known here."""

    seat: int
    ranks: tuple[int, ...] = ()
    is_lost: bool = False


@dataclass(slots=True)
class Changes:
    """Since one last looked: nodes that were lost, with their workers; workers whose launchers ended in order; newcomers."""

    lost: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parted: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()


class Nodes(Meeting):
    """This launcher among those of the other nodes, for whatever starts of the job there are."""

    def __init__(self, job: Job) -> None:
        self._members: Store | None = None
        super().__init__(job)
        self._asked = 0
        self._own: tuple[int, ...] = ()
        self._said: set[str] = set()
        self._lost_s: float | None = None
        self.given_up: set[int] = set()
        try:
            self._others = {node: _Node(seat) for node, seat in self.seats.items() if node != self._me}
            self.number = max(int(number) for number in self.store.under("start/")) if self.is_late else 0
            self._telling = Telling(self.store, self._me)
        except BaseException:
            self.close()
            raise

    @property
    def store_lost(self) -> str:
        """Why this node can take no part any more, "" if it can."""
        return self.store.lost or (self._members.lost if self._members is not None else "") or self.seat_lost

    def close(self) -> None:
        """Let go of what the workers share, too."""
        if self._members is not None:
            self._members.close()
        super().close()

    # -- starts

    def begin(self, number: int) -> Start:
        """Take part in the start of the job with this number."""
        if self._members is not None:
            self._members.close()
        self._members = self.open_members(number)
        homes = self._homes(number)
        self.number = number
        self._own = () if self.is_late else tuple(rank for rank, node in homes.items() if node == self._me)
        for node, other in self._others.items():
            other.ranks = tuple(rank for rank, home in homes.items() if home == node)
        self.hold_seat(self._own, self.number)
        self.store.delete(f"says/{self._me}/")
        self._said.clear()
        self.given_up.clear()
        living = set(homes)
        if self.is_late:
            living.update(rank for seated in self.there().values() for rank in self._ranks(seated))
            living.difference_update(int(rank) for rank in self.store.under(f"gone/{number}/"))
        return Start(self.url(number), tuple(homes), self._own, tuple(sorted(living)))

    def _homes(self, number: int) -> dict[int, int]:
        """Return the node of each worker that a start begins with."""
        if number == 0:
            return {rank: self._job.home(rank) for rank in self._job.ranks}
        return {int(rank): node for rank, node in self.read(f"start/{number}").items()}

    def agree_on_restart(self, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return whom the job is started with for the ``number``-th time again; the first who proposes decides.

        Not before nodes that were lost have surely ended their workers.
        """
        if self._lost_s is not None:
            fence_s = self._lost_s + FENCE_LEASES * self._job.node_timeout_s - time.monotonic()
            self.store.wait(lambda: self.store.get(f"start/{number}"), max(0.0, fence_s))
        there = self.there()
        homes = {rank: node for node, known in sorted(there.items()) for rank in known.ranks if rank in ranks}
        for rank in sorted(set(ranks) - homes.keys()):  # a new worker goes where there are fewest
            counts = {node: list(homes.values()).count(node) for node in sorted(there)}
            homes[rank] = min(counts, key=lambda node: counts[node])
        self.store.create(f"start/{number}", json.dumps(dict(sorted(homes.items()))))
        return tuple(self._homes(number))

    def is_restarted(self) -> bool:
        """Return whether somebody has decided to start the job again."""
        return self.store.get(f"start/{self.number + 1}") is not None

    def free_number(self, least: int) -> int:
        """Return a number for a newcomer of this node, at least ``least``, that nobody else gives."""
        while not self.store.create(f"number/{least}", str(self._me)):
            least += 1
        self._own = (*self._own, least)
        self.hold_seat(self._own, self.number)
        return least

    def note_slices(self, count: int) -> None:
        """Remember the slices of the job, for launchers that come late."""
        if self.slices == 0:
            with contextlib.suppress(StoreLost):  # then none will come
                self.store.create("slices", str(count))

    @property
    def slices(self) -> int:
        """Slices of the job, 0 before training has begun."""
        return int(self.store.get("slices") or 0)

    # -- telling and hearing

    def tell(self, records: Sequence[tuple[Record, Position | None]]) -> None:
        """Let the other launchers know what the workers of this node wrote, and where those were that have ended."""
        if self._job.nnodes > 1:
            self._telling.tell(self.number, records)

    def hear(self) -> list[Told]:
        """Return what the other launchers told since the last call."""
        return self._telling.hear(self._others)

    def look(self) -> Changes:
        """Return what has happened to the other nodes since the last call, after telling the workers of deaths."""
        there, changes = self.there(), Changes()
        for node, known in self._others.items():
            now = there.get(node)
            if not known.is_lost and (now is None or now.seat != known.seat):
                self._lose(node, known, changes)
            if now is not None and now.seat >= known.seat and not (known.is_lost and now.seat == known.seat):
                newcomers = tuple(rank for rank in self._ranks(now) if rank not in known.ranks)
                known.seat, known.ranks, known.is_lost = now.seat, (*known.ranks, *newcomers), False
                changes.newcomers += newcomers
        return changes

    def _ranks(self, seated: Seated) -> tuple[int, ...]:
        """Return the workers of a node in this start of the job: who was slower to begin it still names those of the last."""
        return seated.ranks if seated.start == self.number else ()

    def _lose(self, node: int, known: _Node, changes: Changes) -> None:
        known.is_lost = True
        # Whom another launcher has given up a moment ago is lost here, too; whom its own has seen end is not.
        left = tuple(rank for rank in known.ranks if self.store.get(f"gone/{self.number}/{rank}") != str(node))
        for rank in left:
            self.died(rank, f"node {node} is lost")
            self.ended(rank)
        known.ranks = ()
        if self.store.get(f"bye/{node}/{known.seat}") is not None:
            changes.parted += left
        else:
            self.given_up.update(left)
            self._lost_s = time.monotonic()
            changes.lost[node] = left

    def died(self, rank: int, why: str) -> None:
        """Tell the workers that ``rank`` is dead."""
        if self._members is not None:
            with contextlib.suppress(StoreLost):  # then nobody goes on
                self._members.put(f"dead/{rank}", why)

    def ended(self, rank: int) -> None:
        """Tell launchers that come late that nothing is to be expected of a worker any more."""
        if self._job.nnodes > 1:
            self.store.put(f"gone/{self.number}/{rank}", str(self._me))

    # -- what is true everywhere

    def say(self, what: str, *, true: bool) -> None:
        """Let the other launchers know that something is true of this node, or is no longer."""
        if self._job.nnodes == 1 or true == (what in self._said):
            return
        key = f"says/{self._me}/{what}"
        if true:
            self._said.add(what)
            self.store.put(key, str(self.number))
        else:
            self._said.discard(what)
            self.store.delete(key)

    def all_say(self, what: str, nodes: Sequence[int] | None = None) -> bool:
        """Return whether something is true of all other nodes that are there, or of those."""
        wanted = [node for node, known in self._others.items() if not known.is_lost] if nodes is None else nodes
        return all(self.store.get(f"says/{node}/{what}") == str(self.number) for node in wanted)

    def any_says(self, what: str) -> bool:
        """Return whether something is true of another node that is there."""
        return any(self.all_say(what, [node]) for node, known in self._others.items() if not known.is_lost)

    def homes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the other nodes that these workers are on."""
        return tuple(node for node, known in self._others.items() if not set(ranks).isdisjoint(known.ranks))

    def ask_all_to_stop(self) -> None:
        """Have the whole job save and stop."""
        with contextlib.suppress(StoreLost):  # then all stop anyway
            self.store.put("stop", "1")

    def is_stopping(self) -> bool:
        """Return whether the whole job is to save and stop."""
        return self.store.get("stop") is not None

    # -- changes to the running job

    def ask(self, changes: Mapping[str, Any]) -> None:
        """Ask for changes; all launchers hear of them in the same order."""
        number, text = self._asked, json.dumps(changes)
        while not self.store.create(f"asked/{number}", text):
            number += 1

    def asked(self) -> list[dict[str, Any]]:
        """Return the changes that were asked for since the last call, on any node."""
        new = []
        while (text := self.store.get(f"asked/{self._asked}")) is not None:
            self._asked += 1
            new.append(json.loads(text))
        return new

    def ask_to_leave(self, rank: int) -> None:
        """Have the launcher of a worker tell it to leave."""
        self.store.put(f"leave/{rank}", str(self._me))

    def told_to_leave(self) -> tuple[int, ...]:
        """Return the workers of this node that are to leave; each is named once."""
        told = tuple(rank for rank in self._own if self.store.get(f"leave/{rank}") is not None)
        for rank in told:
            self.store.delete(f"leave/{rank}")
        return told


_SLOTS = 4096
"""Batches of records that a launcher may be behind another; at most fifty are told in a second."""
_BATCH_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Told:
    """A record of another node's worker, from which start of the job, and where the worker was if it tells its end."""

    start: int
    record: Record
    position: Position | None = None


class Telling:
    """Tells the others, and hears them, from where this node's launchers and theirs have got to; those of this node first."""

    def __init__(self, store: Store, node: int) -> None:
        self._store = store
        self._node = node
        self._next: dict[int, int] = {}
        for key, text in store.under("told/").items():
            teller, number = int(key.partition("/")[0]), json.loads(text)["number"]
            self._next[teller] = min(self._next.get(teller, number), number)
        self._old = list(self._hear_of(node))
        self._told = self._next[node] - 1

    def tell(self, start: int, records: Sequence[tuple[Record, Position | None]]) -> None:
        """Let the others know what the workers of this node wrote, and where those were that have ended."""
        for batch in _batches(records):
            self._told += 1
            text = json.dumps({"number": self._told, "start": start, "records": batch})
            self._store.put(f"told/{self._node}/{self._told % _SLOTS}", text)

    def hear(self, nodes: Iterable[int]) -> list[Told]:
        """Return what these nodes told since the last call, in the order of time."""
        heard, self._old = self._old, []
        heard += [told for node in nodes for told in self._hear_of(node)]
        return sorted(heard, key=lambda told: (told.start, told.record.t_s))

    def _hear_of(self, node: int) -> Iterator[Told]:
        self._next.setdefault(node, 1)
        while (text := self._store.get(f"told/{node}/{self._next[node] % _SLOTS}")) is not None:
            said = json.loads(text)
            if said["number"] < self._next[node]:
                return  # that slot's turn has not come again
            self._next[node] = said["number"] + 1
            for line, position in said["records"]:
                where = None if position is None else Position(**{**position, "samples": tuple(position["samples"])})
                yield Told(said["start"], record_from_dict(line), where)


def _batches(records: Sequence[tuple[Record, Position | None]]) -> Iterator[list[Any]]:
    """Yield what to tell, in pieces that a store takes."""
    batch: list[Any] = []
    size = 0
    for record, position in records:
        line = [record_to_dict(record), None if position is None else asdict(position)]
        length = len(json.dumps(line))
        if batch and size + length > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += length
    if batch:
        yield batch
