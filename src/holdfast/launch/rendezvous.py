"""Rendezvous of the launchers of a job: a shared store, and a seat in it for each node.

:mod:`holdfast.launch.nodes` lists the keys of the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from holdfast.errors import ConfigError, StoreLost
from holdfast.launch.job import OPTIONS, Job, refuse
from holdfast.membership import Hub, Store, open_store

_RETRY_S = 0.5
_ALIKE = (
    "spares",
    "strategy",
    "reinit_from",
    "empty_seats",
    "order",
    "split",
    "batch",
    "kinds",
    "mirror",
    "seed",
    "min_workers",
    "checkpoint_dir",
)
"""Settings that must be equal on all launchers: those whose names begin with these words."""


@dataclass(frozen=True, slots=True)
class LauncherInfo:
    """A present launcher: number of earlier ones of its node, its workers, and their start (-1 before the first)."""

    seat: int
    ranks: tuple[int, ...]
    start: int


class Rendezvous:
    """This launcher among those that share a store. The constructor waits until all are present, or the job has begun.

    Raises:
        ConfigError: if the store cannot be opened, the launchers' settings differ, this node has a launcher already, or
            another launcher does not arrive in time.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._me = job.node_rank
        self._lease_s = job.node_timeout_s
        self._hub: Hub | None = None
        self._store: Store | None = None
        self._seat: int | None = None
        self.token = job.settings.token or ("" if job.rdzv else secrets.token_hex(16))
        """Token of the store."""
        try:
            self._url = job.rdzv if self._joins else self._host()
            self._run = self._find_run()
            self._store = self._open(self._run, "launchers")
            self._check_alike()
            self._take_seat()
            self.seats = self._await_nodes()
            """Seats of all nodes when the job began."""
            self.is_late = self.seats[self._me] != self._seat
            """Whether the job had begun before this launcher arrived."""
        except BaseException:
            self.close()
            raise

    @property
    def store(self) -> Store:
        """The store that the launchers share."""
        assert self._store is not None
        return self._store

    @property
    def is_host(self) -> bool:
        """Whether this launcher hosts the store, which no other launcher can do without."""
        return self._hub is not None

    @property
    def seat_lost(self) -> str:
        """Why the other launchers have given this one up, or ""."""
        mine = self.there().get(self._me)
        if mine is None or mine.seat != self._seat:
            return f"node {self._me} was given up: no heartbeat for {self._lease_s:g} s (--node-timeout)"
        return ""

    def there(self) -> dict[int, LauncherInfo]:
        """Return the launchers that are present, by node."""
        return {
            int(node): LauncherInfo(said["seat"], tuple(said["ranks"]), said["start"])
            for node, text in self.store.under("node/").items()
            for said in [json.loads(text)]
        }

    def hold_seat(self, ranks: Sequence[int], start: int) -> None:
        """Publish that this launcher is present, with these workers of a start, for as long as it renews its lease."""
        value = json.dumps({"seat": self._seat, "ranks": ranks, "start": start})
        self.store.put(f"node/{self._me}", value, leased=True)

    def url(self, start: int) -> str:
        """Return the URL of the store of the workers of one start of the job."""
        return f"{self._url}/{self._run}/{start}"

    def open_members(self, start: int) -> Store:
        """Open the store of the workers of one start of the job."""
        return self._open(self._run, str(start))

    def read(self, key: str) -> Any:
        """Return the value of a key that is certain to be written."""
        return json.loads(self.store.wait(lambda: self.store.get(key)) or "null")

    def origin_s(self) -> float:
        """Return the value of ``time.monotonic()`` on this machine at which the first launcher began."""
        self.store.create("origin", json.dumps(time.time()))
        ran_s: float = time.time() - self.read("origin")
        return time.monotonic() - max(0.0, ran_s)

    def close(self) -> None:
        """Record an orderly end, and close the store; the launcher that hosts it waits until the others have left."""
        if self._store is not None:
            if not self._store.lost:
                with contextlib.suppress(StoreLost):  # the host closed it first
                    self._part()
            self._store.close()
        if self._hub is not None:
            self._hub.close()

    def _part(self) -> None:
        mine = self.there().get(self._me)
        if mine is not None and mine.seat == self._seat:
            self.store.put(f"bye/{self._me}/{mine.seat}", "1")
            self.store.delete(f"node/{self._me}")
        if self._hub is not None:
            self.store.wait(lambda: None if self.there() else True, self._lease_s)

    # -- the store

    @property
    def _joins(self) -> bool:
        """Whether another process hosts the store."""
        is_first = self._job.rdzv.startswith("holdfast://") and self._me == 0
        return bool(self._job.rdzv) and (self._job.is_managed or not is_first)

    def _host(self) -> str:
        host, port = split_address(self._job.rdzv) if self._job.rdzv else ("127.0.0.1", 0)
        self._hub = Hub(self.token, host, port, lease_s=self._lease_s)
        return f"holdfast://{self._hub.address}"

    def _open(self, run: int, part: str) -> Store:
        return open_store(f"{self._url}/{run}/{part}", self.token, lease_s=self._lease_s)

    def _find_run(self) -> int:
        """Return the number of the run that is in progress, or begins."""
        runs = self._enter()
        try:
            while True:
                runs.create("0", "")
                newest = runs.wait(lambda: max((int(number) for number in runs.under("")), default=None))
                assert newest is not None
                with contextlib.closing(self._open(newest, "launchers")) as launchers:
                    if not self._is_over(launchers):
                        return newest
                if runs.create(str(newest + 1), ""):
                    self._clear(newest)
        finally:
            runs.close()

    def _is_over(self, launchers: Store) -> bool:
        """Return whether no launcher is left in a run that had begun, or whose settings differ from this job's."""
        if not self._url.startswith("etcd://"):
            return False  # a hub ends with its run
        if launchers.get("start/0") is not None:  # leases of a run that has just died remain for a while
            told = launchers.under("told/")
            launchers.wait(
                lambda: not launchers.under("node/") or launchers.under("told/") != told or None, 2 * self._lease_s
            )
        elif launchers.get("about") not in (
            None,
            json.dumps(self._alike()),
        ):  # the launcher that wrote it will be present in a moment
            launchers.wait(lambda: launchers.under("node/") or None, _RETRY_S)
        else:
            return False
        return not launchers.under("node/")

    def _clear(self, run: int) -> None:
        """Remove the keys of a run that is over."""
        with contextlib.closing(open_store(self._url, self.token, lease_s=self._lease_s)) as runs:
            runs.delete(f"{run}/")

    def _enter(self) -> Store:
        """Open the store; a launcher may start before the one that hosts it."""
        ends_s = time.monotonic() + self._job.rdzv_timeout_s
        while True:
            try:
                return open_store(f"{self._url}/runs", self.token, lease_s=self._lease_s)
            except StoreLost as error:
                if time.monotonic() > ends_s:
                    what = "it" if self._job.rdzv.startswith("etcd://") else "node 0, whose launcher hosts it"
                    raise ConfigError(
                        f"{error}; node {self._me} waited {self._job.rdzv_timeout_s:g} s (--rdzv-timeout) for {what}"
                    ) from error
            time.sleep(_RETRY_S)

    # -- waiting for the others

    def _alike(self) -> dict[str, Any]:
        """Return the settings that must be equal on all launchers."""
        job, settings = self._job, self._job.settings
        return {
            "--nnodes": job.nnodes,
            "-n": settings.workers,
            **{option: getattr(settings, field) for option, field, _ in OPTIONS if field.startswith(_ALIKE)},
            "--slices": settings.auto_text or settings.slices,
            "--max-restarts": job.max_restarts,
            "--node-timeout": job.node_timeout_s,
            "SCRIPT": job.script.name,
            "ARGS": list(job.args),
            "a script with the digest": xxhash.xxh3_64_hexdigest(job.script.read_bytes()),
        }

    def _check_alike(self) -> None:
        alike = self._alike()
        self.store.create("about", json.dumps(alike))
        theirs = self.read("about")
        for name, value in alike.items():
            if theirs.get(name) != value:
                refuse(
                    f"node {self._me} was started with {name} {value!r}, the other nodes with {theirs.get(name)!r}: give all nodes the same"
                )

    def _take_seat(self) -> None:
        """Become the launcher of this node; an earlier launcher must have ended, or its lease expired."""
        identity = f"process {os.getpid()} on {socket.gethostname()}"
        patience_s = 2 * self._lease_s
        while True:
            self.store.wait(lambda: None if self._me in self.there() else True, patience_s)
            seat = len(self.store.under(f"seat/{self._me}/"))
            if self._me not in self.there() and self.store.create(f"seat/{self._me}/{seat}", json.dumps(identity)):
                self._seat = seat
                self.hold_seat((), -1)
                return
            # A launcher is present, or was faster, and will be visible in a moment.
            self.store.wait(lambda: self.there().get(self._me), patience_s)
            if there := self.there().get(self._me):
                holder = self.read(f"seat/{self._me}/{there.seat}")
                refuse(f"node {self._me} has a launcher already, {holder}: give each node its own --node-rank")

    def _await_nodes(self) -> dict[int, int]:
        """Wait until all launchers are present, or the job has begun; return the seats that it began with."""

        def ready() -> str | None:
            there = self.there()
            whole = json.dumps({node: seated.seat for node, seated in there.items()})
            return self.store.get("start/0") or (whole if len(there) == self._job.nnodes else None)

        seats = self.store.wait(ready, self._job.rdzv_timeout_s)
        if seats is None:
            missing = ", ".join(str(node) for node in range(self._job.nnodes) if node not in self.there())
            refuse(f"node {missing} did not join within {self._job.rdzv_timeout_s:g} s (--rdzv-timeout)")
        self.store.create("start/0", seats)
        return {int(node): seat for node, seat in self.read("start/0").items()}


_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def split_address(url: str) -> tuple[str, int]:
    """Return host and port of ``holdfast://HOST:PORT``; raise a ConfigError if the URL has another form."""
    host, _, port = url.removeprefix("holdfast://").rpartition(":")
    if not url.startswith("holdfast://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        refuse(
            f"--rdzv must be holdfast://HOST:PORT, the address of the first node, or etcd://HOST:PORT[,HOST:PORT...]/JOB, got {url!r}"
        )
    return host.strip("[]"), int(port)


def check_nodes(job: Job) -> None:
    """Raise a ConfigError if the options about nodes are inconsistent."""
    if job.nnodes < 1:
        refuse(f"--nnodes must be at least 1, got {job.nnodes}")
    if not 0.5 <= job.node_timeout_s <= 3600:
        refuse(f"--node-timeout must be between 0.5 and 3600 seconds, got {job.node_timeout_s:g}")
    if job.nnodes == 1 and not job.rdzv:
        if job.node_rank:
            refuse(f"--node-rank must be 0 with one node, got {job.node_rank}")
        return
    if not job.fabric.survives_node_loss:
        refuse(
            f"--nnodes and --rdzv need --fabric gloo, got {job.settings.fabric}; with ulfm, use --hosts, see docs/how-to/several-nodes.md"
        )
    if job.nnodes > 1 and job.stragglers == "rebalance":
        refuse(
            "--stragglers rebalance works on one node only: a launcher knows the speed of its own workers; use warn or replace"
        )
    if not 0 <= job.node_rank < job.nnodes:
        refuse(f"--node-rank must be from 0 to {job.nnodes - 1} (--nnodes {job.nnodes}), got {job.node_rank}")
    if not job.rdzv:
        refuse("--nnodes needs --rdzv, for instance holdfast://HOST:29400, the address of the first node")
    if not job.rdzv.startswith("etcd://"):
        host, _ = split_address(job.rdzv)
        if host not in _LOOPBACK and not job.settings.token:
            refuse("--rdzv on another machine needs a secret that all nodes share: --rdzv-token, or HOLDFAST_TOKEN")
