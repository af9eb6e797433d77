"""The launchers of a job, one a node, as one of them sees the others.

They share a store: each tells what its workers wrote, so that every launcher hears everything, judges alike, and can
write the report. Each keeps a lease: when it runs out, the node is lost, and its workers count as dead.

=======================  ====================================================================
``about``                what the job is, JSON; the first launcher says it, the others compare
``origin``               wall time of zero
``node/R``               leased: the workers of node R
``told/R/N``             records of the workers of node R, JSON lines
``number/RANK``          who starts the newcomer RANK
``restart/N``            JSON: whom the job is started with for the N-th time again
``stop``                 the whole job is to save and stop
=======================  ====================================================================
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from holdfast.errors import ConfigError, StoreLost
from holdfast.events import Record, record_from_dict, record_to_dict
from holdfast.launch.job import Job
from holdfast.membership import Hub, Store, open_store

_RETRY_S = 0.5
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Nodes:
    """This launcher among those of the other nodes.

    Args:
        job: The same for all, but for the number of the node.

    Raises:
        ConfigError: if the store cannot be opened, or the launchers were not started alike.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._token = job.settings.token or secrets.token_hex(16)
        self._hub: Hub | None = None
        self._url = job.rdzv or self._host()
        if job.rdzv and self._is_built_in and job.node_rank == 0:
            self._host(*split_address(job.rdzv))
        self._store = self._enter()
        self._members: Store | None = None
        self._heard: set[str] = set()
        self._told = 0
        self._homes: dict[int, tuple[int, ...]] = {}
        self._lost: set[int] = set()
        self._check_alike()

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
        """Why the store is lost, "" if it is there."""
        return self._store.lost or (self._members.lost if self._members is not None else "")

    @property
    def _is_built_in(self) -> bool:
        return self._job.rdzv.startswith("holdfast://")

    def close(self) -> None:
        """Let go of the store, and end it if it is ours."""
        for store in (self._members, self._store):
            if store is not None:
                store.close()
        if self._hub is not None:
            self._hub.close()

    # -- coming together

    def _host(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._hub = Hub(self._token, host, port)
        return f"holdfast://{self._hub.address}"

    def _enter(self) -> Store:
        """Open the store; a launcher may be there before the one that hosts it."""
        ends_s = time.monotonic() + self._job.rdzv_timeout_s
        while True:
            try:
                return open_store(f"{self._url}/launchers", self._token)
            except StoreLost as error:
                if time.monotonic() > ends_s:
                    msg = f"{error}; node {self._job.node_rank} waited {self._job.rdzv_timeout_s:g} s (--rdzv-timeout)"
                    raise ConfigError(msg) from error
            time.sleep(_RETRY_S)

    def _check_alike(self) -> None:
        settings = self._job.settings
        alike = {
            "--nnodes": self._job.nnodes,
            "-n": settings.workers,
            "--spares": settings.spares,
            "--strategy": settings.strategy,
            "--slices": settings.slices,
            "--order": settings.order,
            "--seed": settings.seed,
            "--checkpoint-dir": settings.checkpoint_dir,
            "SCRIPT": self._job.script.name,
            "ARGS": list(self._job.args),
        }
        self._store.create("about", json.dumps(alike))
        theirs = json.loads(self._store.wait(lambda: self._store.get("about")) or "{}")
        for name, value in alike.items():
            if theirs.get(name) != value:
                msg = f"node {self._job.node_rank} was started with {name} {value!r}, the others with {theirs.get(name)!r}: give all nodes the same"
                raise ConfigError(msg)

    def origin_s(self) -> float:
        """Return what ``time.monotonic()`` was here when the first launcher began."""
        self._store.create("origin", repr(time.time()))
        origin = float(self._store.wait(lambda: self._store.get("origin")) or 0.0)
        return time.monotonic() - max(0.0, time.time() - origin)

    def begin(self, number: int, own: Sequence[int]) -> str:
        """Take part in a start of the job with the workers ``own``; return the store for the workers."""
        if self._members is not None:
            self._members.close()
        url = f"{self._url}/{number}"
        self._members = open_store(url, self._token)
        self._store.put(f"node/{self._job.node_rank}", json.dumps(list(own)), leased=True)
        self._lost.clear()
        return url

    def free_number(self, least: int) -> int:
        """Return a number for a newcomer, at least ``least``, that nobody else gives."""
        while not self._store.create(f"number/{least}", str(self._job.node_rank)):
            least += 1
        return least

    def agree_on_restart(self, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return whom the job is started with for the ``number``-th time again; the first who proposes decides."""
        self._store.create(f"restart/{number}", json.dumps(list(ranks)))
        return tuple(json.loads(self._store.wait(lambda: self._store.get(f"restart/{number}")) or "[]"))

    def is_restarted(self, number: int) -> bool:
        """Return whether somebody has decided on the ``number``-th restart."""
        return self._store.get(f"restart/{number}") is not None

    # -- telling and hearing

    def tell(self, records: Sequence[Record]) -> None:
        """Let the other launchers know what the workers of this node wrote."""
        if self._job.nnodes > 1 and records:
            self._told += 1
            lines = json.dumps([record_to_dict(record) for record in records])
            self._store.put(f"told/{self._job.node_rank}/{self._told:09d}", lines)

    def hear(self) -> list[Record]:
        """Return what the other launchers told since the last call."""
        if self._job.nnodes == 1:
            return []
        mine = f"{self._job.node_rank}/"
        new = {key: text for key, text in self._store.under("told/").items() if key not in self._heard}
        self._heard |= new.keys()
        return [
            record_from_dict(line) for key in sorted(new) if not key.startswith(mine) for line in json.loads(new[key])
        ]

    def died(self, rank: int, why: str) -> None:
        """Tell the workers that ``rank`` is dead."""
        if self._members is not None:
            with contextlib.suppress(StoreLost):  # then nobody goes on
                self._members.put(f"dead/{rank}", why)

    def look(self) -> dict[int, tuple[int, ...]]:
        """Return the nodes that were lost since the last call, with their workers, after telling the workers."""
        if self._job.nnodes == 1:
            return {}
        there = {int(node): tuple(json.loads(ranks)) for node, ranks in self._store.under("node/").items()}
        gone = {node: ranks for node, ranks in self._homes.items() if node not in there and node not in self._lost}
        self._homes = self._homes | there
        for node, ranks in gone.items():
            self._lost.add(node)
            for rank in ranks:
                self.died(rank, f"node {node} is lost")
        return gone

    def ask_all_to_stop(self) -> None:
        """Have the whole job save and stop."""
        with contextlib.suppress(StoreLost):
            self._store.put("stop", "1")

    def is_stopping(self) -> bool:
        """Return whether the whole job is to save and stop."""
        return self._store.get("stop") is not None


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
    given: dict[str, Any] = {"--node-rank": job.node_rank, "--rdzv": job.rdzv}
    if job.nnodes < 1:
        msg = f"--nnodes must be at least 1, got {job.nnodes}"
        raise ConfigError(msg)
    if job.nnodes == 1 and not job.rdzv:
        if job.node_rank:
            msg = f"--node-rank must be 0 with one node, got {given['--node-rank']}"
            raise ConfigError(msg)
        return
    if job.settings.fabric != "gloo":
        msg = f"--nnodes and --rdzv need --fabric gloo, got {job.settings.fabric}; with ulfm mpirun reaches the nodes, see docs/nodes.md"
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
