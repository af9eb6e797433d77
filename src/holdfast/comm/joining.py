"""Joins the processes that another launcher started, such as torchrun, srun or mpirun: fail-stop.

Rank 0 hosts the membership store, a :class:`~holdfast.membership.hub.Hub`. The others learn its address and token from a
TCPStore of torch at the meeting place of the launcher, which is not needed afterwards. A token that all processes have
in ``HOLDFAST_TOKEN`` is used, and not sent. Each process holds a leased key for as long as it lives; it ends with the
process's connection.

No launcher of Holdfast is there to report a dead worker to the others, or to replace it. So when one fails, every other
ends, too, with a non-zero exit code and a line that says why. A launcher that restarts all processes (torchrun) does so,
and they resume from the newest checkpoint. Where the launcher leaves the others alone, they continue instead:
:mod:`holdfast.comm.surviving`.

=======================  ============================================================
=======================  ============================================================
``seat/RANK``            this process has joined
``roll``                 the processes that begin; agreed on once, when all have joined or the time is over
``alive/RANK``           leased: this process lives
``done/RANK``            it has ended in order, and needs no other any more
=======================  ============================================================
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

from holdfast.base.side_work import say
from holdfast.comm.launchers import ON_DEATH, LaunchedGroup
from holdfast.comm.start_wait import LIMIT_S, LONGEST_NAP_S, USUAL, StartLimit, StartWait, named
from holdfast.errors import ConfigError, ScriptError, StoreLost
from holdfast.membership import Hub, Store, open_store
from holdfast.membership.authentication import WRONG_TOKEN
from holdfast.membership.store import address_towards

LEASE_S = 30.0
"""A process that is silent for this long has failed: its machine is lost, or it is stopped."""
_ANY_PORT = 9
_RETRY_S = 0.1
_CONNECT_S = 30.0
"""Once all are there, they have at least so long to connect to the membership store."""
_GIVEN = "HOLDFAST_TOKEN"
_LET_OTHERS_HEAR_S = 0.3
"""Time for the hub to tell the others which process failed first, before it ends with rank 0."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """What rank 0 tells the others.

    Args:
        address: ``HOST:PORT`` of its hub, or of several, separated by commas.
        token: Token of the hub.
        has_begun: Whether an earlier start of this job has begun to train.
    """

    address: str
    token: str
    has_begun: bool


class JoinedGroup:
    """This process among those that another launcher started. The constructor waits until all have joined.

    Args:
        group: What the environment says of them.
        limit: How long they wait for each other.

    Raises:
        StoreLost: if not all of them arrive in time, or one fails meanwhile.
    """

    def __init__(self, group: LaunchedGroup, limit: StartLimit = USUAL) -> None:
        self.group = group
        self._wait = StartWait(group, limit)
        self._hub: Hub | None = None
        self._pid = os.getpid()
        self._failed = self._is_leaving = False
        self.hosts = [0]
        """Processes that host the membership store."""
        self._rendezvous = _open_rendezvous(group, self._wait)
        self._check_alike()
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_hub)
            self.ranks = self._call_roll()
            """Processes that take part."""
            self._wait.restart(_CONNECT_S)
            self._hub_address = self._host()
            self._store = self._enter()
            undo.callback(self._store.close)
            self._await_all()
            undo.pop_all()
        if not group.has_store:
            self._rendezvous = None  # the script may open a process group of its own there
        threading.Thread(target=self._watch, name="holdfast-liveness", daemon=True).start()

    _on_death = "end"
    """What the other processes do when one dies."""

    _part = "liveness"
    """Part of the store in which processes show that they live."""

    @property
    def url(self) -> str:
        """URL of the membership store."""
        assert self._hub_address is not None
        return f"holdfast://{self._hub_address.address}/group"

    @property
    def token(self) -> str:
        """Token of the membership store."""
        assert self._hub_address is not None
        return self._hub_address.token

    @property
    def has_begun(self) -> bool:
        """Whether an earlier start of this job has begun to train, as far as the launcher's store knows."""
        assert self._hub_address is not None
        return self._hub_address.has_begun

    def note_begun(self) -> None:
        """Note for later starts of this job that training has begun."""
        if self.group.rank == 0 and self._rendezvous is not None:
            _note_begun(self.group, self._rendezvous)

    def end_in_order(self, check: Callable[[], None]) -> None:
        """From this call on, tell the others at the end of the script that this process has ended in order.

        Without that, after an exception or if training is not complete, they end, too.

        Args:
            check: Raises :class:`ScriptError` if training is not complete.
        """
        show = sys.excepthook

        def on_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self._failed = True
            show(kind, error, traceback)

        def on_exit() -> None:
            if os.getpid() != self._pid:
                return  # a process that the script has forked
            try:
                if self._failed:
                    self._tell_failed()
                else:
                    check()
                    self._leave()
            except ScriptError as error:
                self._tell_failed()
                self._end(str(error))

        sys.excepthook = on_exception
        atexit.register(on_exit)

    # -- joining

    def _check_alike(self) -> None:
        """Raise ``ConfigError`` if rank 0 was told to do something else when a process dies."""
        rank, own_action, key = self.group.rank, self._on_death, "on-death"
        if rank == 0:
            self._rendezvous.set(self._key(key), own_action)
        elif (lead_action := self._read(key).decode()) != own_action:
            raise ConfigError(
                f"when a process dies, rank 0 would {lead_action}, but rank {rank} would {own_action}: set {ON_DEATH} to the same in all"
            )

    def _prepare_host(self) -> None:
        """Do what a host must have done before this process says that it is there: nothing, as rank 0 is the host."""

    def _host(self) -> HubAddress | None:
        """In the host of the membership store: open it, and publish where it is."""
        if self.group.rank:
            return None
        host, shared_token = self._own_address(), self._token_to_tell()
        token = self._token_of(shared_token)
        self._hub = hub = Hub(token, host, lease_s=LEASE_S, ends_with_connection=True)
        os.register_at_fork(after_in_child=hub.forget)
        has_begun = self.group.has_store and _has_begun(self.group, self._rendezvous)
        published = HubAddress(hub.address, token, has_begun)
        self._rendezvous.set(self._key("hub"), json.dumps([hub.address, shared_token, has_begun]))
        return published

    def _own_address(self) -> str:
        """Return the address at which the others reach this process."""
        if self.group.is_local:
            return "127.0.0.1"
        if self.group.rank:
            return address_towards(self.group.host, _ANY_PORT)
        if len(self.ranks) == 1:
            return "127.0.0.1"
        last = self._rendezvous.get(self._key(f"here/{self.ranks[-1]}")).decode()
        return address_towards(last, _ANY_PORT)  # this machine's own name may mean a loopback address

    def _call_roll(self) -> list[int]:
        """Return the processes that are there: all, or those that rank 0 begins with once the time is over.

        Raises:
            NotStarted: if processes are missing, and the job does not begin without them.
        """
        group, place, wait = self.group, self._rendezvous, self._wait
        if not group.has_store and place.add(self._key(f"seat/{group.rank}"), 1) > 1:
            raise self._taken()
        self._prepare_host()
        if group.rank:
            place.set(
                self._key(f"here/{group.rank}"), "-" if group.is_local else address_towards(group.host, _ANY_PORT)
            )
            wait.restart(wait.limit.limit_s + _CONNECT_S)  # rank 0, which names the missing ranks, may have begun later
            published = self._read("present", says=False)
        else:
            published = self._present().encode()
            place.set(self._key("present"), published.decode())
        present: list[int]
        present, missing = json.loads(published)
        if not present:
            self._let_others_hear()
            raise wait.not_started(missing)
        if group.rank not in present:
            raise wait.not_started([group.rank], "the others have begun without it")
        return present

    def _present(self) -> str:
        """In rank 0: wait for the others; return the processes that begin, and those that are missing."""
        size, place = self.group.size, self._rendezvous
        keys = {rank: self._key(f"here/{rank}") for rank in range(1, size)}

        def absent() -> list[int]:
            return [rank for rank, key in keys.items() if not place.check([key])]

        is_complete = self._wait.until(lambda: place.check(list(keys.values())), lambda: named(absent()))
        missing = [] if is_complete else absent()
        present = sorted(set(range(size)).difference(missing))
        return json.dumps([present if self._may_begin(present) else [], missing])

    def _let_others_hear(self) -> None:
        """Give the others the time to read what this process has published, before it ends with what it hosts."""
        if self.group.rank == 0 or self._hub is not None:
            time.sleep(2 * LONGEST_NAP_S)

    def _taken(self) -> StoreLost:
        group = self.group
        return StoreLost(
            f"another rank {group.rank} has joined: does another job meet at {group.host}:{group.port}, too?"
        )

    def _may_begin(self, present: Sequence[int]) -> bool:
        """Return whether the job begins with these processes, once the time is over."""
        return len(present) == self.group.size or (
            self.group.leaves_survivors and 0 < self._wait.limit.least <= len(present)
        )

    def _enter(self) -> Store:
        """Connect to the hub; the published one may be that of an earlier start, which rank 0 is about to replace."""
        group = self.group
        while True:
            if group.rank or self._hub_address is None:
                self._hub_address = self._find()
            try:
                return open_store(f"holdfast://{self._hub_address.address}/{self._part}", self._hub_address.token)
            except (StoreLost, ConfigError) as error:
                if WRONG_TOKEN in str(error) and self._hub_address.token == os.environ.get(_GIVEN):
                    raise ConfigError(
                        f"the {_GIVEN} in the environment of rank {group.rank} is not that of all ranks: set it to the same in all"
                    ) from error
                if not self._wait.is_left():
                    raise StoreLost(f"rank 0 cannot be reached: {error}") from error
                time.sleep(_RETRY_S)

    def _find(self) -> HubAddress:
        """Return where the membership store is."""
        address, shared_token, has_begun = json.loads(self._read("hub"))
        return HubAddress(address, self._token_of(shared_token), has_begun)

    @staticmethod
    def _token_to_tell() -> str:
        """Return a new token, for the store where all can read it; "" if all have one."""
        return "" if os.environ.get(_GIVEN) else secrets.token_hex(16)

    @staticmethod
    def _token_of(shared_token: str) -> str:
        """Return the token that rank 0 uses; raise ``ConfigError`` if one of them has one in its environment alone."""
        own = os.environ.get(_GIVEN, "")
        if shared_token and own:
            raise ConfigError(
                f"this process has {_GIVEN} in its environment, and rank 0 has not: set it to the same in all, or in none"
            )
        if token := shared_token or own:
            return token
        raise ConfigError(
            f"rank 0 has {_GIVEN} in its environment, and this process has not: set it to the same in all"
        )

    def _read(self, name: str, rank: int = 0, *, says: bool = True) -> bytes:
        """Return what a rank publishes."""
        place, key = self._rendezvous, self._key(name)
        try:
            if not self._wait.until(lambda: place.check([key]), lambda: named([rank]), says=says):
                raise self._wait.not_started([rank])
            return bytes(place.get(key))
        except RuntimeError as error:
            raise self._wait.ended(f"rank 0, where all meet, has ended: {str(error).splitlines()[0]}") from error

    def _key(self, name: str) -> str:
        return f"holdfast/{self.group.job}/{self.group.size}/{self.group.attempt}/{name}"

    def _await_all(self) -> None:
        group, store = self.group, self._store
        if not store.create(f"seat/{group.rank}", ""):
            raise self._taken()
        store.put(f"alive/{group.rank}", "", leased=True)
        awaited = list(self.ranks)

        def have_joined() -> bool:
            if store.lost:
                raise self._wait.ended(f"rank 0 has failed: {store.lost}")
            while awaited and store.get(f"alive/{awaited[-1]}") is not None:  # not all ranks at each of as many changes
                awaited.pop()
            return not awaited or store.get("roll") is not None

        def missing() -> list[int]:
            return [rank for rank in awaited if store.get(f"alive/{rank}") is None]

        is_complete = self._wait.until(have_joined, lambda: named(missing()), says=group.rank == self.ranks[0])
        present = self.ranks if is_complete else [rank for rank in self.ranks if rank not in missing()]
        if store.get("roll") is None:
            store.create("roll", json.dumps(present if self._may_begin(present) else []))
        begins = json.loads(store.get("roll") or "[]")
        if group.rank not in begins:
            self._let_others_hear()
            raise (
                self._wait.not_started([group.rank], "the others have begun without it")
                if begins
                else self._wait.not_started(missing())
            )
        self.ranks = begins
        if len(begins) < group.size and group.rank == begins[0]:
            absentees = sorted(set(range(group.size)).difference(begins))
            then = f"training begins with {named(begins)} (HOLDFAST_MIN_WORKERS={self._wait.limit.least})"
            say(f"{named(absentees)} did not join in time; {then}")

    # -- fail-stop

    def _watch(self) -> None:
        """End this process as soon as another has failed."""
        try:
            why = f"rank {self._store.wait(self._failed_rank)} has failed"
        except StoreLost as error:
            if self._store.get("done/0") is not None:
                return  # rank 0 has ended in order, and with it the store, which is not needed at the end
            first = self._failed_rank()  # rank 0 may have ended because of it
            why = f"rank 0 has failed: {error}" if first is None else f"rank {first} has failed"
        if not self._is_leaving:
            self._end(why)

    def _tell_failed(self) -> None:
        """Do nothing: the others end with this process in any case."""

    def _failed_rank(self) -> int | None:
        for rank in range(self.group.size):
            if self._store.get(f"alive/{rank}") is None and self._store.get(f"done/{rank}") is None:
                return rank
        return None

    def _end(self, why: str) -> None:
        after = f", for {self.group.launcher} to restart all" if self.group.restarts_all else ""
        say(f"rank {self.group.rank} ends: {why}{after}")
        if self._hub is not None:
            time.sleep(_LET_OTHERS_HEAR_S)
        os._exit(1)

    def _leave(self) -> None:
        """Tell the others that this process ends in order. Rank 0 waits until all have, because it hosts the store."""
        self._is_leaving = True
        with contextlib.suppress(StoreLost):
            self._store.put(f"done/{self.group.rank}", "")
            if self.group.rank == 0:
                self._store.wait(self._have_ended)
        self._store.close()
        self._close_hub()

    def _close_hub(self) -> None:
        if self._hub is not None:
            self._hub.close()
            self._hub = None

    def _have_ended(self) -> bool | None:
        peers = range(1, self.group.size)
        return all(self._store.get(f"alive/{rank}") is None for rank in peers) or None


class SoleProcess:
    """This process, which the launcher started alone: it has nothing to join, but may have to resume.

    Args:
        group: What the environment says of it.
    """

    def __init__(self, group: LaunchedGroup) -> None:
        self.group = group
        self._store = _open_rendezvous(group)
        self.has_begun = _has_begun(group, self._store)
        """Whether an earlier start of this job, perhaps of several processes, has begun to train."""

    def note_begun(self) -> None:
        """Note for later starts of this job that training has begun."""
        _note_begun(self.group, self._store)

    def end_in_order(self, check: Callable[[], None]) -> None:
        """Do nothing: no other process waits for this one."""


def _has_begun(group: LaunchedGroup, store: Any) -> bool:
    return bool(store.check([_begun_key(group)]))


def _note_begun(group: LaunchedGroup, store: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the launcher has gone: there will be no later start
        store.set(_begun_key(group), "1")


def _begun_key(group: LaunchedGroup) -> str:
    """Return a key of the launcher's store, kept over restarts: training has begun, so checkpoints are this job's own."""
    return f"holdfast/{group.job}/begun"


def _open_rendezvous(group: LaunchedGroup, wait: StartWait | None = None) -> Any:
    """Return the TCPStore where the processes meet; rank 0 hosts it if the launcher does not."""
    import torch.distributed as dist

    def opened(*, hosts: bool) -> Any:
        if not hosts and wait is not None:
            wait.reach(group.host, group.port)
        timeout = timedelta(seconds=LIMIT_S)
        return dist.TCPStore(  # type: ignore[attr-defined]
            group.host, group.port, is_master=hosts, timeout=timeout, wait_for_workers=False
        )

    try:
        if group.rank or group.has_store:
            return opened(hosts=False)
        return opened(hosts=not dist.is_initialized())  # the script's own process group hosts one there
    except RuntimeError as error:
        where = f"{group.host}:{group.port}"
        raise StoreLost(
            f"the processes of {group.launcher} cannot meet at {where}: {str(error).splitlines()[0]}"
        ) from error
