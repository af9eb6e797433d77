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
``gone/N/RANK``          a worker of that start has ended
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
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from holdfast.errors import ConfigError, StoreLost
from holdfast.events import Record, record_from_dict, record_to_dict
from holdfast.launch.job import Job
from holdfast.membership import Hub, Store, open_store
from holdfast.records import Position

FENCE_LEASES = 2.0
"""A node that is cut off knows it within one lease, and has ended its workers within two."""
_RETRY_S = 0.5
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SLOTS = 4096
"""Batches of records that a launcher may be behind another; at most fifty are told in a second."""
_BATCH_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Told:
    """A record of another node's worker.

    Args:
        start: In which start of the job it was written.
        record: What was written.
        position: Where the worker was, if the record tells its end.
    """

    start: int
    record: Record
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the job, as this launcher has a part in it.

    Args:
        store: For the workers.
        ranks: All whom the job is started with.
        own: Those of this node.
        living: Whom to expect something of: all but those who have ended, if this launcher comes late.
    """

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
    """What has happened to the other nodes since one last looked.

    Args:
        lost: Nodes, with their workers.
        parted: Workers of nodes whose launchers have ended in order.
        newcomers: Workers that other nodes have started.
    """

    lost: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parted: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()


class Nodes:
    """This launcher among those of the other nodes.

    Args:
        job: The same for all, but for the number of the node.

    Raises:
        ConfigError: if the store cannot be opened, the launchers were not started alike, or this node has one already.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._me = job.node_rank
        self._token = job.settings.token or ("" if job.rdzv else secrets.token_hex(16))
        self._hub: Hub | None = None
        self._store: Store | None = None
        self._members: Store | None = None
        self._others: dict[int, _Node] = {}
        self._next: dict[int, int] = {}
        self._told = 0
        self._asked = 0
        self._own: tuple[int, ...] = ()
        self._said: set[str] = set()
        self._lost_s: float | None = None
        self._old: list[Told] = []
        self.given_up: set[int] = set()
        self.number = 0
        self.is_late = False
        try:
            self._url = job.rdzv if self._joins else self._host()
            self._run = self._find_run()
            self._store = self._open("launchers")
            self._check_alike()
            self._seat = self._take_seat()
            self._meet()
        except BaseException:
            self.close()
            raise

    @property
    def token(self) -> str:
        """What the store asks for."""
        return self._token

    @property
    def is_host(self) -> bool:
        """Whether this launcher hosts the store, so that nobody can do without it."""
        return self._hub is not None

    @property
    def store_lost(self) -> str:
        """Why this node can take no part any more, "" if it can."""
        if self.launchers.lost:
            return self.launchers.lost
        if self._members is not None and self._members.lost:
            return self._members.lost
        mine = self._there().get(self._me)
        if mine is None or mine.seat != self._seat:
            return f"the others have heard nothing of node {self._me} for {self._lease_s:g} s (--node-timeout) and gave it up"
        return ""

    @property
    def launchers(self) -> Store:
        """The store that the launchers share."""
        assert self._store is not None
        return self._store

    @property
    def _joins(self) -> bool:
        """Whether the store is another process's."""
        return bool(self._job.rdzv) and not (self._job.rdzv.startswith("holdfast://") and self._me == 0)

    @property
    def _lease_s(self) -> float:
        return self._job.node_timeout_s

    # -- coming together

    def _host(self) -> str:
        host, port = split_address(self._job.rdzv) if self._job.rdzv else ("127.0.0.1", 0)
        self._hub = Hub(self._token, host, port, lease_s=self._lease_s)
        return f"holdfast://{self._hub.address}"

    def _open(self, part: str, run: int | None = None) -> Store:
        run = self._run if run is None else run
        return open_store(f"{self._url}/{run}/{part}", self._token, lease_s=self._lease_s)

    def _find_run(self) -> int:
        """Return the number of the run that goes on, or begins; it is over when it had begun and nobody is there."""
        runs = self._enter()
        try:
            while True:
                runs.create("0", "")
                newest = runs.wait(lambda: max((int(number) for number in runs.under("")), default=None))
                assert newest is not None
                with contextlib.closing(self._open("launchers", newest)) as old:
                    if old.get("start/0") is None or old.under("node/"):
                        return newest
                    if runs.create(str(newest + 1), ""):
                        for part in {key.partition("/")[0] for key in old.under("")}:
                            old.delete(f"{part}/")
        finally:
            runs.close()

    def _enter(self) -> Store:
        """Open the store; a launcher may be there before the one that hosts it."""
        ends_s = time.monotonic() + self._job.rdzv_timeout_s
        while True:
            try:
                return open_store(f"{self._url}/runs", self._token, lease_s=self._lease_s)
            except StoreLost as error:
                if time.monotonic() > ends_s:
                    msg = f"{error}; node {self._me} waited {self._job.rdzv_timeout_s:g} s (--rdzv-timeout) for the first launcher"
                    raise ConfigError(msg) from error
            time.sleep(_RETRY_S)

    def _read(self, key: str) -> Any:
        """Return what a key holds that somebody has written for sure."""
        return json.loads(self.launchers.wait(lambda: self.launchers.get(key)) or "null")

    def _check_alike(self) -> None:
        job, settings = self._job, self._job.settings
        alike = {
            "--nnodes": job.nnodes,
            "-n": settings.workers,
            "--spares": settings.spares,
            "--strategy": settings.strategy,
            "--slices": settings.slices,
            "--order": settings.order,
            "--split": settings.split,
            "--batch": settings.batch,
            "--seed": settings.seed,
            "--min-workers": settings.min_workers,
            "--max-restarts": job.max_restarts,
            "--checkpoint-dir": settings.checkpoint_dir,
            "--node-timeout": job.node_timeout_s,
            "SCRIPT": job.script.name,
            "ARGS": list(job.args),
            "a script with the digest": xxhash.xxh3_64_hexdigest(job.script.read_bytes()),
        }
        self.launchers.create("about", json.dumps(alike))
        theirs = self._read("about")
        for name, value in alike.items():
            if theirs.get(name) != value:
                msg = f"node {self._me} was started with {name} {value!r}, the others with {theirs.get(name)!r}: give all nodes the same"
                raise ConfigError(msg)

    def _take_seat(self) -> int:
        """Become the launcher of this node; one that was here before must be gone, or its lease run out."""
        who = f"process {os.getpid()} on {socket.gethostname()}"
        patience_s = 2 * self._lease_s
        while True:
            self.launchers.wait(lambda: None if self._me in self._there() else True, patience_s)
            seat = len(self.launchers.under(f"seat/{self._me}/"))
            if self._me not in self._there() and self.launchers.create(f"seat/{self._me}/{seat}", json.dumps(who)):
                self._seat = seat
                self._hold_seat()
                return seat
            # Somebody is there, or was quicker, and will be seen to be there in a moment.
            self.launchers.wait(lambda: self._there().get(self._me), patience_s)
            if there := self._there().get(self._me):
                holder = self._read(f"seat/{self._me}/{there.seat}")
                msg = f"node {self._me} has a launcher already, {holder}: give each node a --node-rank of its own"
                raise ConfigError(msg)

    def _hold_seat(self) -> None:
        value = json.dumps({"seat": self._seat, "ranks": self._own})
        self.launchers.put(f"node/{self._me}", value, leased=True)

    def _there(self) -> dict[int, _Node]:
        return {
            int(node): _Node(said["seat"], tuple(said["ranks"]))
            for node, text in self.launchers.under("node/").items()
            for said in [json.loads(text)]
        }

    def _meet(self) -> None:
        """Wait until all launchers are there, unless the job has begun.

        Raises:
            ConfigError: if they do not come in time.
        """

        def ready() -> str | None:
            there = self._there()
            whole = json.dumps({node: known.seat for node, known in there.items()})
            return self.launchers.get("start/0") or (whole if len(there) == self._job.nnodes else None)

        seats = self.launchers.wait(ready, self._job.rdzv_timeout_s)
        if seats is None:
            missing = ", ".join(str(node) for node in range(self._job.nnodes) if node not in self._there())
            msg = f"node {missing} did not come within {self._job.rdzv_timeout_s:g} s (--rdzv-timeout)"
            raise ConfigError(msg)
        self.launchers.create("start/0", seats)
        begun = {int(node): seat for node, seat in self._read("start/0").items()}
        self._others = {node: _Node(seat) for node, seat in begun.items() if node != self._me}
        self.is_late = begun[self._me] != self._seat
        self.number = max(int(number) for number in self.launchers.under("start/")) if self.is_late else 0
        self._catch_up()

    def _catch_up(self) -> None:
        """Find out where the others are with their records, and what those told that were here before."""
        for key, text in self.launchers.under("told/").items():
            node, number = int(key.partition("/")[0]), json.loads(text)["number"]
            self._next[node] = min(self._next.get(node, number), number)
        self._old = list(self._hear_of(self._me))
        self._told = self._next[self._me] - 1

    def origin_s(self) -> float:
        """Return what ``time.monotonic()`` was here when the first launcher began."""
        self.launchers.create("origin", json.dumps(time.time()))
        origin: float = self._read("origin")
        return time.monotonic() - max(0.0, time.time() - origin)

    # -- starts

    def begin(self, number: int) -> Start:
        """Take part in the start of the job with this number."""
        if self._members is not None:
            self._members.close()
        url = f"{self._url}/{self._run}/{number}"
        self._members = self._open(str(number))
        homes = self._homes(number)
        self.number = number
        self._own = () if self.is_late else tuple(rank for rank, node in homes.items() if node == self._me)
        for node, other in self._others.items():
            other.ranks = tuple(rank for rank, home in homes.items() if home == node)
        self._hold_seat()
        self.launchers.delete(f"says/{self._me}/")
        self._said.clear()
        self.given_up.clear()
        living = set(homes)
        if self.is_late:
            living.update(rank for known in self._there().values() for rank in known.ranks)
            living.difference_update(int(rank) for rank in self.launchers.under(f"gone/{number}/"))
        return Start(url, tuple(homes), self._own, tuple(sorted(living)))

    def _homes(self, number: int) -> dict[int, int]:
        """Return the node of each worker that a start begins with."""
        if number == 0:
            return {rank: self._job.home(rank) for rank in self._job.ranks}
        return {int(rank): node for rank, node in self._read(f"start/{number}").items()}

    def agree_on_restart(self, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return whom the job is started with for the ``number``-th time again; the first who proposes decides.

        Not before nodes that were lost have surely ended their workers.
        """
        if self._lost_s is not None:
            fence_s = self._lost_s + FENCE_LEASES * self._lease_s - time.monotonic()
            self.launchers.wait(lambda: self.launchers.get(f"start/{number}"), max(0.0, fence_s))
        there = self._there()
        homes = {rank: node for node, known in sorted(there.items()) for rank in known.ranks if rank in ranks}
        for rank in sorted(set(ranks) - homes.keys()):  # a new worker goes where there are fewest
            counts = {node: list(homes.values()).count(node) for node in sorted(there)}
            homes[rank] = min(counts, key=lambda node: counts[node])
        self.launchers.create(f"start/{number}", json.dumps(dict(sorted(homes.items()))))
        return tuple(self._homes_of_restart(number))

    def _homes_of_restart(self, number: int) -> dict[int, int]:
        self._read(f"start/{number}")
        return self._homes(number)

    def is_restarted(self) -> bool:
        """Return whether somebody has decided to start the job again."""
        return self.launchers.get(f"start/{self.number + 1}") is not None

    def free_number(self, least: int) -> int:
        """Return a number for a newcomer of this node, at least ``least``, that nobody else gives."""
        while not self.launchers.create(f"number/{least}", str(self._me)):
            least += 1
        self._own = (*self._own, least)
        self._hold_seat()
        return least

    def note_slices(self, count: int) -> None:
        """Remember the slices of the job, for launchers that come late."""
        if self.slices == 0:
            with contextlib.suppress(StoreLost):  # then none will come
                self.launchers.create("slices", str(count))

    @property
    def slices(self) -> int:
        """Slices of the job, 0 before training has begun."""
        return int(self.launchers.get("slices") or 0)

    # -- telling and hearing

    def tell(self, records: Sequence[tuple[Record, Position | None]]) -> None:
        """Let the other launchers know what the workers of this node wrote, and where those were that have ended."""
        if self._job.nnodes == 1:
            return
        for batch in _batches(records):
            self._told += 1
            text = json.dumps({"number": self._told, "start": self.number, "records": batch})
            self.launchers.put(f"told/{self._me}/{self._told % _SLOTS}", text)

    def hear(self) -> list[Told]:
        """Return what the other launchers told since the last call."""
        heard, self._old = self._old, []
        heard += [told for node in self._others for told in self._hear_of(node)]
        return sorted(heard, key=lambda told: (told.start, told.record.t_s))

    def _hear_of(self, node: int) -> Iterator[Told]:
        self._next.setdefault(node, 1)
        while (text := self.launchers.get(f"told/{node}/{self._next[node] % _SLOTS}")) is not None:
            said = json.loads(text)
            if said["number"] < self._next[node]:
                return  # that slot's turn has not come again
            self._next[node] = said["number"] + 1
            for line, position in said["records"]:
                where = None if position is None else Position(**{**position, "samples": tuple(position["samples"])})
                yield Told(said["start"], record_from_dict(line), where)

    def look(self) -> Changes:
        """Return what has happened to the other nodes since the last call, after telling the workers of deaths."""
        there, changes = self._there(), Changes()
        for node, known in self._others.items():
            now = there.get(node)
            if not known.is_lost and (now is None or now.seat != known.seat):
                self._lose(node, known, changes)
            if now is not None and now.seat >= known.seat and not (known.is_lost and now.seat == known.seat):
                changes.newcomers += tuple(rank for rank in now.ranks if rank not in known.ranks)
                known.seat, known.ranks, known.is_lost = now.seat, (*known.ranks, *changes.newcomers), False
        return changes

    def _lose(self, node: int, known: _Node, changes: Changes) -> None:
        known.is_lost = True
        left = tuple(rank for rank in known.ranks if self.launchers.get(f"gone/{self.number}/{rank}") is None)
        for rank in left:
            self.died(rank, f"node {node} is lost")
            self.ended(rank)
        known.ranks = ()
        if self.launchers.get(f"bye/{node}/{known.seat}") is not None:
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
            self.launchers.put(f"gone/{self.number}/{rank}", str(self._me))

    # -- what is true everywhere

    def say(self, what: str, *, true: bool) -> None:
        """Let the other launchers know that something is true of this node, or is no longer."""
        if self._job.nnodes == 1 or true == (what in self._said):
            return
        key = f"says/{self._me}/{what}"
        if true:
            self._said.add(what)
            self.launchers.put(key, str(self.number))
        else:
            self._said.discard(what)
            self.launchers.delete(key)

    def all_say(self, what: str, nodes: Sequence[int] | None = None) -> bool:
        """Return whether something is true of all other nodes that are there, or of those."""
        wanted = [node for node, known in self._others.items() if not known.is_lost] if nodes is None else nodes
        return all(self.launchers.get(f"says/{node}/{what}") == str(self.number) for node in wanted)

    def any_says(self, what: str) -> bool:
        """Return whether something is true of another node that is there."""
        return any(self.all_say(what, [node]) for node, known in self._others.items() if not known.is_lost)

    def homes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the other nodes that these workers are on."""
        return tuple(node for node, known in self._others.items() if not set(ranks).isdisjoint(known.ranks))

    def ask_all_to_stop(self) -> None:
        """Have the whole job save and stop."""
        with contextlib.suppress(StoreLost):  # then all stop anyway
            self.launchers.put("stop", "1")

    def is_stopping(self) -> bool:
        """Return whether the whole job is to save and stop."""
        return self.launchers.get("stop") is not None

    # -- changes to the running job

    def ask(self, changes: Mapping[str, Any]) -> None:
        """Ask for changes; all launchers hear of them in the same order."""
        number, text = self._asked, json.dumps(changes)
        while not self.launchers.create(f"asked/{number}", text):
            number += 1

    def asked(self) -> list[dict[str, Any]]:
        """Return the changes that were asked for since the last call, on any node."""
        new = []
        while (text := self.launchers.get(f"asked/{self._asked}")) is not None:
            self._asked += 1
            new.append(json.loads(text))
        return new

    def ask_to_leave(self, rank: int) -> None:
        """Have the launcher of a worker tell it to leave."""
        self.launchers.put(f"leave/{rank}", str(self._me))

    def told_to_leave(self) -> tuple[int, ...]:
        """Return the workers of this node that are to leave; each is named once."""
        told = tuple(rank for rank in self._own if self.launchers.get(f"leave/{rank}") is not None)
        for rank in told:
            self.launchers.delete(f"leave/{rank}")
        return told

    # -- the end

    def close(self) -> None:
        """Say good-bye, and let go of the store; whoever hosts it waits until the others have done so too."""
        if self._store is not None and not self._store.lost:
            with contextlib.suppress(StoreLost):  # the host was quicker
                self._part(self._store)
        for store in (self._members, self._store):
            if store is not None:
                store.close()
        if self._hub is not None:
            self._hub.close()

    def _part(self, store: Store) -> None:
        mine = self._there().get(self._me)
        if mine is not None and mine.seat == getattr(self, "_seat", None):
            store.put(f"bye/{self._me}/{mine.seat}", "1")
            store.delete(f"node/{self._me}")
        if self._hub is not None:
            store.wait(lambda: None if self._there() else True, self._lease_s)


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


def split_address(url: str) -> tuple[str, int]:
    """Return host and port of ``holdfast://HOST:PORT``.

    Raises:
        ConfigError: if it is not that.
    """
    host, _, port = url.removeprefix("holdfast://").rpartition(":")
    if not url.startswith("holdfast://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        msg = f"--rdzv must be holdfast://HOST:PORT, the address of the first node, or etcd://HOST:PORT[,HOST:PORT...]/JOB, got {url!r}"
        raise ConfigError(msg)
    return host.strip("[]"), int(port)


def check_nodes(job: Job) -> None:
    """Find out whether the options about nodes go together.

    Raises:
        ConfigError: if not.
    """
    if job.nnodes < 1:
        msg = f"--nnodes must be at least 1, got {job.nnodes}"
        raise ConfigError(msg)
    if not 0.5 <= job.node_timeout_s <= 3600:
        msg = f"--node-timeout must be between 0.5 and 3600 seconds, got {job.node_timeout_s:g}"
        raise ConfigError(msg)
    if job.nnodes == 1 and not job.rdzv:
        if job.node_rank:
            msg = f"--node-rank must be 0 with one node, got {job.node_rank}"
            raise ConfigError(msg)
        return
    if job.settings.fabric != "gloo":
        msg = f"--nnodes and --rdzv need --fabric gloo, got {job.settings.fabric}; with ulfm mpirun reaches the nodes, see docs/nodes.md"
        raise ConfigError(msg)
    if job.nnodes > 1 and job.stragglers == "rebalance":
        msg = "--stragglers rebalance works on one node: each launcher knows only how fast its own workers are; take warn or replace"
        raise ConfigError(msg)
    if not 0 <= job.node_rank < job.nnodes:
        msg = f"--node-rank must be from 0 to {job.nnodes - 1} (--nnodes {job.nnodes}), got {job.node_rank}"
        raise ConfigError(msg)
    if not job.rdzv:
        msg = "--nnodes needs --rdzv: where do the nodes meet? For instance holdfast://HOST:29400, the address of the first node"
        raise ConfigError(msg)
    if not job.rdzv.startswith("etcd://"):
        host, _ = split_address(job.rdzv)
        if host not in _LOOPBACK and not job.settings.token:
            msg = "--rdzv beyond this machine needs a secret that all nodes share: --rdzv-token, or HOLDFAST_TOKEN"
            raise ConfigError(msg)
