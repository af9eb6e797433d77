"""Rendezvous of the launchers of a job: a shared store, and a seat in it for each node.

:mod:`holdfast.launch.fleet.nodes` lists the keys of the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from holdfast.base.formatting import count
from holdfast.config import Settings
from holdfast.errors import ConfigError, JobError, StoreLost, refuse
from holdfast.launch.command_line import OPTIONS
from holdfast.launch.fleet.base import Fleet
from holdfast.launch.fleet.node_health import NodeCheck
from holdfast.launch.job import Job
from holdfast.membership import Hub, Store, open_store
from holdfast.membership.store import address_towards, is_port

_ITSELF = "127.0.0.1"
_RETRY_S = 0.5
_TOGETHER_S = 1.0
"""Launchers that end within this time end together: no hub needs to take over."""
_MAY_DIFFER = ("mtbf_s", "hang_timeout_s", "start_timeout_s", "debug_handlers", "stop_after")
"""Settings that each launcher may choose for its own workers. Workers with other differences would send each other
messages of different forms, or compute different bits."""


@dataclass(frozen=True, slots=True)
class LauncherInfo:
    """A present launcher: number of earlier ones of its node, its workers, and their start (-1 before the first)."""

    seat: int
    ranks: tuple[int, ...]
    start: int


class Rendezvous(Fleet):
    """This launcher among those that share a store. The constructor waits until all are present, or the job has begun.

    Args:
        job: The job.
        node_check: The check of this node, if it must be fit.
        tell: Called again and again with what this launcher waits for, while it waits.

    Raises:
        ConfigError: if the launchers' settings differ, or this node has a launcher already.
        JobError: if the store cannot be reached, or another launcher does not arrive, in time.
    """

    def __init__(
        self, job: Job, node_check: NodeCheck | None = None, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(job)
        self._tell = tell
        self._me = job.node_rank
        self._lease_s = job.node_timeout_s
        self._hub: Hub | None = None
        self._places = () if job.is_managed else hub_places(job.rdzv)
        self._store: Store | None = None
        self._seat: int | None = None
        self.token = job.settings.token or ("" if job.rdzv else secrets.token_hex(16))
        """Token of the store."""
        try:
            self._url = job.rdzv if self._joins else self._host()
            self._run = self._find_run()
            self._store = self._open(self._run, "launchers")
            self._check_alike()
            if node_check is not None:
                node_check.admit(self._store, self._me)
            self._take_seat()
            self.seats = self._await_nodes()
            """Seats of all nodes when the job began."""
            self.is_late = self.seats.get(self._me) != self._seat
        except StoreLost as error:
            self.close()
            raise JobError(
                f"{error}, before node {self._me} could join: the job has ended, or lost its store"
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def store(self) -> Store:
        """The store that the launchers share."""
        assert self._store is not None
        return self._store

    @property
    def is_needed(self) -> bool:
        """Whether this launcher hosts the store, which no other launcher can do without, or is the only one."""
        return self.job.nnodes == 1 or (self._hub is not None and len(self._places) < 2)

    @property
    def seat_lost(self) -> str:
        """Why the other launchers have given this one up, or ""."""
        own_entry = self.there().get(self._me)
        if own_entry is None or own_entry.seat != self._seat:
            return f"node {self._me} was given up: no heartbeat for {self._lease_s:g} s (--node-timeout)"
        return ""

    def there(self) -> dict[int, LauncherInfo]:
        """Return the launchers that are present, by node."""
        return {
            int(node): LauncherInfo(entry["seat"], tuple(entry["ranks"]), entry["start"])
            for node, text in self.store.under("node/").items()
            for entry in [json.loads(text)]
        }

    def hold_seat(self, ranks: Sequence[int], start: int) -> None:
        """Publish that this launcher is present, with these workers of a start, for as long as it renews its lease."""
        value = json.dumps({"seat": self._seat, "ranks": ranks, "start": start})
        self.store.put(f"node/{self._me}", value, leased=True)

    def read(self, key: str) -> Any:
        """Return the value of a key that is certain to be written."""
        return json.loads(self.store.wait(lambda: self.store.get(key)) or "null")

    def origin_s(self) -> float:
        """See :meth:`Fleet.origin_s`."""
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
        own_entry = self.there().get(self._me)
        if own_entry is not None and own_entry.seat == self._seat:
            self.store.put(f"bye/{self._me}/{own_entry.seat}", "1")
            self.store.delete(f"node/{self._me}")
        if self._hub is None:
            return
        patience_s = self._lease_s if self.is_needed else min(_TOGETHER_S, self._lease_s / 4)
        if not self.store.wait(lambda: None if self.there() else True, patience_s) and not self.is_needed:
            self._hub.leave(self._lease_s, lambda: not self.there())

    # -- the store

    @property
    def _joins(self) -> bool:
        """Whether another process hosts the store."""
        return bool(self.job.rdzv) and self._me >= len(self._places)

    def _host(self) -> str:
        if not self._places:
            _check_loopback()
        host, port = split_place(self._places[self._me]) if self._places else (_ITSELF, 0)
        if len(self._places) > 1:
            self._hub = Hub(self.token, host, port, lease_s=self._lease_s, places=self._places, place=self._me)
            return self.job.rdzv
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
            batches = launchers.under("told/")
            launchers.wait(
                lambda: not launchers.under("node/") or launchers.under("told/") != batches or None,
                2 * self._lease_s,
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
        ends_s = time.monotonic() + self.job.rdzv_timeout_s
        while True:
            try:
                return open_store(f"{self._url}/runs", self.token, lease_s=self._lease_s)
            except StoreLost as error:
                if time.monotonic() > ends_s:
                    last = len(self._places) - 1
                    hosts = f"nodes 0 to {last}, whose launchers host" if last > 0 else "node 0, whose launcher hosts"
                    what = f"{hosts} it" if self._places else "it"
                    raise JobError(
                        f"{error}; node {self._me} waited {self.job.rdzv_timeout_s:g} s (--rdzv-timeout) for {what}"
                    ) from error
            host = "node 0, which hosts " if len(self._places) == 1 else ""
            self._tell(f"waiting for {host}the membership store at {self._url.partition('://')[2]}")
            time.sleep(_RETRY_S)

    # -- waiting for the others

    def _alike(self) -> dict[str, Any]:
        """Return the settings that must be equal on all launchers."""
        job, settings, usual = self.job, self.job.settings, Settings()
        return {
            "--nnodes": job.nnodes,
            "-n": settings.workers,
            **{
                option: (value != getattr(usual, field)) if is_switch else value
                for option, field, is_switch in OPTIONS
                if field not in _MAY_DIFFER
                for value in [getattr(settings, field)]
            },
            "--slices": settings.auto_text or settings.slices,
            "--checkpoint-every": "auto" if settings.checkpoint_auto else settings.checkpoint_every,
            "--no-certificate": not settings.certificate,
            "--max-restarts": job.max_restarts,
            "--max-no-progress": job.max_no_progress,
            "a number of addresses in --rdzv holdfast://": len(self._places),
            "--node-timeout": job.node_timeout_s,
            "SCRIPT": job.script.name,
            "ARGS": list(job.args),
            "a script with the digest": xxhash.xxh3_64_hexdigest(job.script.read_bytes()),
        }

    def _check_alike(self) -> None:
        alike = self._alike()
        self.store.create("about", json.dumps(alike))
        reference = self.read("about")
        for name, value in alike.items():
            if reference.get(name) != value:
                refuse(
                    f"node {self._me} was started {_difference(name, value, reference.get(name))}: give all nodes the same"
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
            there, unfit = self.there(), self._unfit()
            whole = json.dumps({node: seated.seat for node, seated in there.items()})
            workers = sum(self.job.home(rank) in there for rank in self.job.ranks)
            is_enough = not unfit or workers >= self.job.settings.min_workers
            all_known = bool(there) and len(there.keys() | unfit.keys()) == self.job.nnodes
            return self.store.get("start/0") or (whole if all_known and is_enough else None)

        seats, ends_s = None, time.monotonic() + self.job.rdzv_timeout_s
        while seats is None and (left_s := ends_s - time.monotonic()) > 0:
            self._tell(self._missing_nodes())
            seats = self.store.wait(ready, min(left_s, _RETRY_S))
        if seats is None:
            unfit = self._unfit()
            missing = ", ".join(str(node) for node in range(self.job.nnodes) if node not in self.there())
            why = "".join(f"; node {node} is unfit: {reason}" for node, reason in sorted(unfit.items()))
            raise JobError(f"node {missing} did not join within {self.job.rdzv_timeout_s:g} s (--rdzv-timeout){why}")
        self.store.create("start/0", seats)
        return {int(node): seat for node, seat in self.read("start/0").items()}

    def _missing_nodes(self) -> str:
        """Return which nodes the rendezvous waits for, in words; "" for none."""
        nnodes, there, unfit = self.job.nnodes, self.there(), self._unfit()
        missing = [node for node in range(nnodes) if node not in there and node not in unfit]
        if not missing:
            return ""
        which = f"node{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
        stay_out = f"; {count(len(unfit), 'node')} unfit" if unfit else ""
        return f"waiting for {which}: rendezvous, {len(there)} of {nnodes} nodes{stay_out}"

    def _unfit(self) -> dict[int, str]:
        """Return the nodes that stay out, and why."""
        return {int(node): why for node, why in self.store.under("unfit/").items()}


def _difference(name: str, mine: Any, theirs: Any) -> str:
    """Say how an option of this node differs from that of the others; a switch is True where it was given."""
    if isinstance(mine, bool):
        return f"{'with' if mine else 'without'} {name}, the other nodes {'without' if mine else 'with'} it"
    return f"with {name} {mine!r}, the other nodes with {theirs!r}"


def hub_places(url: str) -> tuple[str, ...]:
    """Return the addresses ``HOST:PORT`` in ``holdfast://HOST:PORT[,HOST:PORT...]``; none if etcd is the store."""
    return tuple(url.removeprefix("holdfast://").split(",")) if url.startswith("holdfast://") else ()


def is_place(text: str) -> bool:
    """Return whether a text is an address ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    return bool(host) and is_port(port)


def split_place(place: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; raise a ConfigError if it has another form."""
    if not is_place(place):
        raise ConfigError(forms_of_urls(place))
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def forms_of_urls(given: str | None) -> str:
    """Return which forms ``--rdzv`` may have, for an error message about another one."""
    return (
        "--rdzv must be holdfast://HOST:PORT[,HOST:PORT...], the addresses of the first nodes, or"
        f" etcd://HOST:PORT[,HOST:PORT...]/JOB, got {given!r}"
    )


def _check_loopback() -> None:
    """Raise ``JobError`` if this machine cannot connect to itself: its launcher would wait for its own store."""
    try:
        address_towards(_ITSELF, 1)
    except OSError as error:
        why = f"this machine cannot connect to itself at {_ITSELF}: {error.strerror}"
        raise JobError(f"{why}; bring its loopback interface up (ip link set lo up)") from error
