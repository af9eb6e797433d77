"""The launchers of a job, one per node, as one of them sees the others.

They share a store. Each publishes the records of its workers, so that every launcher has all records, reaches the same
decisions and can write the report. Each holds a lease; when it expires, the node and its workers are lost.

A store may outlive the job (etcd): the keys of one run have its number as a prefix.

=======================  ====================================================================
=======================  ====================================================================
``about``                description of the job, JSON, written by the first launcher and compared by the others
``origin``               wall time of time zero
``seat/R/K``             identity of the K-th launcher of node R
``node/R``               leased: the current launcher of node R, and its workers
``bye/R/K``              that launcher has ended in order
``told/R/SLOT``          records of the workers of node R, JSON; a ring buffer
``number/RANK``          node that starts the newcomer RANK
``start/N``              JSON: the seats of the launchers that began (N = 0; -1: that node comes later), or the node of
                         each worker in the N-th restart
``slices``, ``order``    slices per mini-batch, and the order in which gradients are added, once training has begun
``unfit/R``              why node R stays out of the job
``gone/N/RANK``          a worker of that start has ended, or was given up; the node that reported it
``says/R/WHAT``          a condition that holds for all workers of node R
``asked/N``              JSON: the N-th change requested of the running job
``leave/RANK``           a worker is asked to leave
``stop``                 the whole job must save and stop
``secret``               JSON: without a token, what the tokens of all nodes' workers are derived from

A node that is cut off cannot continue beside the others. Its workers complete no all-reduce without them, and it kills
its workers before the others may restart the job, :data:`FENCE_LEASES` leases after they lost a node at the earliest.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import StoreLost
from holdfast.launch.fleet.base import JobStart, NodeChanges, RemoteRecord
from holdfast.launch.fleet.node_health import NodeCheck
from holdfast.launch.fleet.rendezvous import LauncherInfo, Rendezvous
from holdfast.launch.health.deaths import DeathRegister
from holdfast.launch.job import Job
from holdfast.launch.job_state import JobState
from holdfast.membership import Store
from holdfast.membership.relay import Relay
from holdfast.membership.store import derive_key
from holdfast.records.beacon import BeaconPosition
from holdfast.records.encoding import record_from_dict, record_to_dict
from holdfast.records.types import Record

FENCE_LEASES = 2.0
"""A node that is cut off detects it within one lease, and has killed its workers within two."""


@dataclass(slots=True)
class _Node:
    """Another launcher, as known here."""

    seat: int
    ranks: tuple[int, ...] = ()
    is_lost: bool = False


class NodeGroup(Rendezvous):
    """This launcher and those of the other nodes, over all starts of the job."""

    def __init__(
        self, job: Job, node_check: NodeCheck | None = None, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self._members: Store | None = None
        self._relay: Relay | None = None
        super().__init__(job, node_check, tell)
        self._requests = 0
        self._own: tuple[int, ...] = ()
        self._posted: set[str] = set()
        self._lost_s: float | None = None
        self.given_up: set[int] = set()
        try:
            self._others = {
                node: _Node(self.seats.get(node, -1), is_lost=not self._has_begun(node))
                for node in range(job.nnodes)
                if node != self._me
            }
            self.number = max(int(number) for number in self.store.under("start/")) if self.is_late else 0
            self._replication = RecordReplication(self.store, self._me)
        except BaseException:
            self.close()
            raise

    @property
    def store_lost(self) -> str:
        return self.store.lost or (self._members.lost if self._members is not None else "") or self.seat_lost

    @property
    def grace_s(self) -> float:
        """See :attr:`Fleet.grace_s`: without this launcher, the node is lost when its lease expires."""
        return self.job.grace_s if self.is_needed else min(self.job.grace_s, self.job.node_timeout_s)

    def close(self) -> None:
        """Close the workers' store, too."""
        self._close_members()
        super().close()

    def _close_members(self) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._members is not None:
            self._members.close()

    # -- starts

    def begin(self, number: int) -> JobStart:
        self._close_members()
        self._members = self._open(self._run, str(number))
        self.deaths = DeathRegister(self._members, self.store if self.job.nnodes > 1 else None, number, self._me)
        placement = self._nodes_of_workers(number)
        self.number = number
        self._own = () if self.is_late else tuple(rank for rank, node in placement.items() if node == self._me)
        for node, other in self._others.items():
            other.ranks = tuple(rank for rank, home in placement.items() if home == node)
        self.hold_seat(self._own, self.number)
        self.store.delete(f"says/{self._me}/")
        self._posted.clear()
        self.given_up.clear()
        living = set(placement)
        if self.is_late:
            living.update(rank for seated in self.there().values() for rank in self._ranks(seated))
            living.difference_update(int(rank) for rank in self.store.under(f"gone/{number}/"))
            living.difference_update(rank for rank, node in placement.items() if node == self._me)  # its predecessor's
        url, token = self._members_address(number)
        return JobStart(url, token, tuple(placement), self._own, tuple(sorted(living)))

    def _members_address(self, number: int) -> tuple[str, str]:
        """Return the URL of the workers' store and its token: with several nodes, those of a relay on this one."""
        if self.job.nnodes == 1:
            return f"{self._url}/{self._run}/{number}", self.token
        assert self._members is not None
        job, token = str(number), self._workers_token(number)
        self._relay = Relay(
            self._members, job, token, node=str(self._me), ranks=lambda: self._own, lease_s=self._lease_s
        )
        return f"holdfast://{self._relay.address}/{job}", token

    def _workers_token(self, number: int) -> str:
        """Return the token of the workers of a start, the same on all nodes: they prove to each other that they know it."""
        if not self.token:
            self.store.create("secret", json.dumps(secrets.token_hex(16)))
        token = self.token or self.read("secret")
        return derive_key(token, f"workers of run {self._run}, start {number}").hex()

    def _has_begun(self, node: int) -> bool:
        """Return whether the job began with this node: an unfit one stays out, and one that is missing may come later."""
        return self.seats.get(node, -1) >= 0

    def _nodes_of_workers(self, number: int) -> dict[int, int]:
        """Return the node of each worker that a start begins with."""
        if number == 0:
            homes = {rank: self.job.home(rank) for rank in self.job.ranks}
            return {rank: node for rank, node in homes.items() if self._has_begun(node)}
        return {int(rank): node for rank, node in self.read(f"start/{number}").items()}

    def restart_on(self, state: JobState) -> tuple[int, ...]:
        ranks = super().restart_on(state)
        may_restart = not self.store_lost and self.number < self.job.max_restarts
        return self.agree_on_restart(self.number + 1, ranks) if may_restart else ranks

    def agree_on_restart(self, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks of restart ``number``; the first proposal decides.

        Waits until nodes that were lost have certainly killed their workers.
        """
        if self._lost_s is not None:
            fence_s = self._lost_s + FENCE_LEASES * self.job.node_timeout_s - time.monotonic()
            self.store.wait(lambda: self.store.get(f"start/{number}"), max(0.0, fence_s))
        there = self.there()
        placement = {rank: node for node, info in sorted(there.items()) for rank in info.ranks if rank in ranks}
        for rank in sorted(set(ranks) - placement.keys()):  # a new worker is placed on the node with the fewest workers
            counts = {node: list(placement.values()).count(node) for node in sorted(there)}
            emptiest = min(counts, key=lambda node: counts[node])
            if self.job.is_managed and counts[emptiest] >= len(self.job.ranks) // self.job.nnodes:
                break  # the missing nodes will come with workers of their own
            placement[rank] = emptiest
        self.store.create(f"start/{number}", json.dumps(dict(sorted(placement.items()))))
        return tuple(self._nodes_of_workers(number))

    def is_restarted(self) -> bool:
        return self.store.get(f"start/{self.number + 1}") is not None

    def free_number(self, least: int) -> int:
        while not self.store.create(f"number/{least}", str(self._me)):
            least += 1
        self._own = (*self._own, least)
        self.hold_seat(self._own, self.number)
        return least

    def note_start(self, slices: int, order: str) -> None:
        if self.begun is None:
            with contextlib.suppress(StoreLost):  # then no launcher will come
                self.store.create("order", order)
                self.store.create("slices", str(slices))

    @property
    def begun(self) -> tuple[int, str] | None:
        slices = self.store.get("slices")
        return None if slices is None else (int(slices), self.store.get("order") or "")

    # -- record replication

    def exchange(self, records: Sequence[tuple[Record, BeaconPosition | None]]) -> NodeChanges:
        changes = NodeChanges()
        if self.job.nnodes > 1 and not self.store_lost:
            with contextlib.suppress(StoreLost):  # detected at the next check
                self._replication.publish(self.number, records)
                self.poll(changes)
                changes.records = self._replication.receive(self._others)
        return changes

    def poll(self, changes: NodeChanges) -> None:
        """Note the changes of the other nodes since the last call, after notifying the workers of failed ranks."""
        there = self.there()
        for node, peer in self._others.items():
            now = there.get(node)
            if not peer.is_lost and (now is None or now.seat != peer.seat):
                self._lose(node, peer, changes)
            if now is not None and now.seat >= peer.seat and not (peer.is_lost and now.seat == peer.seat):
                newcomers = tuple(rank for rank in self._ranks(now) if rank not in peer.ranks)
                peer.seat, peer.ranks, peer.is_lost = now.seat, (*peer.ranks, *newcomers), False
                changes.newcomers += newcomers

    def _ranks(self, seated: LauncherInfo) -> tuple[int, ...]:
        """Return the workers of a node in this start; a launcher that has not begun it still names those of the last."""
        return seated.ranks if seated.start == self.number else ()

    def _lose(self, node: int, peer: _Node, changes: NodeChanges) -> None:
        peer.is_lost = True
        # Workers that another launcher has just given up are lost here, too; workers whose launcher saw them end are not.
        left = tuple(rank for rank in peer.ranks if self.deaths.noted_by(rank) != str(node))
        for rank in left:
            self.deaths.note_end(rank, f"node {node} is lost")
        peer.ranks = ()
        if self.store.get(f"bye/{node}/{peer.seat}") is not None:
            changes.parted += left
        else:
            self.given_up.update(left)
            self._lost_s = time.monotonic()
            changes.lost[node] = left

    # -- conditions of all nodes

    def post(self, what: str, *, true: bool) -> None:
        if self.job.nnodes == 1 or true == (what in self._posted) or self.store_lost:
            return
        key = f"says/{self._me}/{what}"
        with contextlib.suppress(StoreLost):  # detected at the next check
            if true:
                self._posted.add(what)
                self.store.put(key, str(self.number))
            else:
                self._posted.discard(what)
                self.store.delete(key)

    def all_posted(self, what: str, nodes: Sequence[int] | None = None) -> bool:
        wanted = [node for node, peer in self._others.items() if not peer.is_lost] if nodes is None else nodes
        return all(self.store.get(f"says/{node}/{what}") == str(self.number) for node in wanted)

    def is_first(self) -> bool:
        return all(peer.is_lost or node > self._me for node, peer in self._others.items())

    def any_posted(self, what: str) -> bool:
        return any(self.all_posted(what, [node]) for node, peer in self._others.items() if not peer.is_lost)

    def ranks_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(node for node, peer in self._others.items() if not set(ranks).isdisjoint(peer.ranks))

    def stop_all(self) -> bool:
        """See :meth:`Fleet.stop_all`: it cannot continue without this launcher, or once all of them are to stop."""
        if self.job.nnodes == 1 or self.store_lost:
            return self.is_needed
        self.post("stops", true=True)
        if not self.is_stopping() and (self.is_needed or self.all_posted("stops")):
            with contextlib.suppress(StoreLost):  # then all stop anyway
                self.store.put("stop", "1")
        return self.is_stopping()

    def is_stopping(self) -> bool:
        return self.store.get("stop") is not None

    # -- changes to the running job

    def request(self, changes: Mapping[str, Any]) -> None:
        number, text = self._requests, json.dumps(changes)
        while not self.store.create(f"asked/{number}", text):
            number += 1

    def requests(self) -> list[dict[str, Any]]:
        new = []
        while (text := self.store.get(f"asked/{self._requests}")) is not None:
            self._requests += 1
            new.append(json.loads(text))
        return new

    def ask_to_leave(self, rank: int) -> None:
        self.store.put(f"leave/{rank}", str(self._me))

    def is_leaving(self) -> tuple[int, ...]:
        leavers = tuple(rank for rank in self._own if self.store.get(f"leave/{rank}") is not None)
        for rank in leavers:
            self.store.delete(f"leave/{rank}")
        return leavers


_SLOTS = 4096
"""Number of record batches that a launcher may lag behind another; at most fifty are published per second."""
_BATCH_BYTES = 1 << 18
_LONG = 1 << 12


class RecordReplication:
    """Replicates records between launchers; begins with those of this node's earlier launchers."""

    def __init__(self, store: Store, node: int) -> None:
        self._store = store
        self._node = node
        self._next: dict[int, int] = {}
        for key, text in store.under("told/").items():
            teller, number = int(key.partition("/")[0]), json.loads(_unpack(text))["number"]
            self._next[teller] = min(self._next.get(teller, number), number)
        self._old = list(self._receive_from(node))
        self._published = self._next[node] - 1

    def publish(self, start: int, records: Sequence[tuple[Record, BeaconPosition | None]]) -> None:
        """Publish the records of this node's workers, with the last positions of workers that have ended."""
        for batch in _batches(records):
            self._published += 1
            text = _pack(json.dumps({"number": self._published, "start": start, "records": batch}))
            self._store.put(f"told/{self._node}/{self._published % _SLOTS}", text)

    def receive(self, nodes: Iterable[int]) -> list[RemoteRecord]:
        """Return the records that these nodes published since the last call, ordered by time."""
        entries, self._old = self._old, []
        entries += [entry for node in nodes for entry in self._receive_from(node)]
        return sorted(entries, key=lambda entry: (entry.start, entry.record.t_s))

    def _receive_from(self, node: int) -> Iterator[RemoteRecord]:
        self._next.setdefault(node, 1)
        while (text := self._store.get(f"told/{node}/{self._next[node] % _SLOTS}")) is not None:
            batch = json.loads(_unpack(text))
            if batch["number"] < self._next[node]:
                return  # the slot still has an old batch
            self._next[node] = batch["number"] + 1
            for line, position in batch["records"]:
                where = (
                    None if position is None else BeaconPosition(**{**position, "samples": tuple(position["samples"])})
                )
                yield RemoteRecord(batch["start"], record_from_dict(line), where)


def _pack(text: str) -> str:
    """Compress a long text: after a failure all workers of a node report the same survivors to every launcher."""
    return text if len(text) < _LONG else f"z{base64.b85encode(zlib.compress(text.encode(), 1)).decode()}"


def _unpack(text: str) -> str:
    return zlib.decompress(base64.b85decode(text[1:])).decode() if text.startswith("z") else text


def _batches(records: Sequence[tuple[Record, BeaconPosition | None]]) -> Iterator[list[Any]]:
    """Yield the records in batches that fit into a value of the store."""
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
