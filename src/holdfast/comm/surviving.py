"""Processes of another launcher that continue when some of them die, if the launcher leaves them alone.

The first three that are there host hubs of a cluster, so that the membership store survives any of them; of two
processes, only the first one does. They find each other at a TCPStore of torch, which is not needed afterwards. Each process holds a leased
key. When the lease ends, as it does soon after the process has died, the others report the death in the store, as the
launchers of ``holdfast run`` do, and :class:`~holdfast.membership.roster.Roster` continues without it. A process that
reaches no majority of the hubs, or whose lease has ended, ends itself. So no part of a divided job trains beside another.

=======================  ============================================================
=======================  ============================================================
``alive/RANK``           leased: this process lives
``done/RANK``            it has ended in order
``failed/RANK``          the script has raised an exception there: all end
``dead/RANK``            the process has died: the others continue
=======================  ============================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

from holdfast.base.side_work import say
from holdfast.comm.joining import LEASE_S, HubAddress, JoinedGroup
from holdfast.comm.launchers import LaunchedGroup
from holdfast.comm.start_wait import USUAL, StartLimit
from holdfast.errors import StoreLost
from holdfast.membership import Hub

_HUBS = 3
_END_S = 10.0
"""How long a process that hosts a hub waits at the end for the others."""
_HEAR_S = 0.3
"""Time for the others to receive what the hub has sent, before it ends."""


_PROBE_S = 5.0
"""How long the hub of a process that was there may take to answer: its machine may be lost."""


def _answers(address: str) -> bool:
    """Return whether a process listens at ``HOST:PORT``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _PROBE_S).close()
    except OSError:
        return False
    return True


def num_hubs(size: int) -> int:
    """Return how many of ``size`` processes host a hub: of two hubs, the loss of one might leave no majority."""
    return _HUBS if size >= _HUBS else 1


class SurvivingGroup(JoinedGroup):
    """This process among those that continue when some of them die. The constructor waits until all have joined.

    Args:
        group: What the environment says of them.
        limit: How long they wait for each other, and whether they begin without those that are missing then.

    Raises:
        StoreLost: if not all of them arrive in time, or one fails meanwhile.
    """

    _on_death = "continue"
    _part = "group"

    def __init__(self, group: LaunchedGroup, limit: StartLimit = USUAL) -> None:
        self._dead: set[int] = set()
        super().__init__(group, limit)

    # -- joining

    def _prepare_host(self) -> None:
        """Open the hub that this process may host: if it dies before all are there, nothing listens there.

        If processes may be missing, each of the others may be among the first three.
        """
        rank = self.group.rank
        if rank == 0:
            self._rendezvous.set(self._key("token"), self._token_to_tell())
        elif self._wait.limit.least or rank < num_hubs(self.group.size):
            self._open_hub()

    def _open_hub(self) -> None:
        rank, token = self.group.rank, self._token_of(self._read("token").decode())
        self._hub = hub = Hub(
            token, self._own_address(), lease_s=LEASE_S, ends_with_connection=True, places=None, place=rank
        )
        os.register_at_fork(after_in_child=hub.forget)
        self._rendezvous.set(self._key(f"hub/{rank}"), hub.address)

    def _host(self) -> HubAddress | None:
        """Form the cluster with the other hubs, if this process hosts one."""
        if self.group.rank == 0:
            self._open_hub()
            self._rendezvous.set(self._key("hubs"), json.dumps(self._choose_hubs()))
        places = self._places()
        self.hosts = [rank for rank, address in enumerate(places) if address]
        if self._hub is not None and self._hub.address in places:
            self._hub.form(places if len(self.hosts) > 1 else ())
        else:
            self._close_hub()
        return None

    def _choose_hubs(self) -> list[str]:
        """In rank 0: return the address of each rank's hub, "" if it hosts none, up to the last that does."""
        place = self._rendezvous
        assert self._hub is not None
        addresses = {0: self._hub.address}
        for rank in self.ranks[1:]:
            if len(addresses) < _HUBS and place.check([key := self._key(f"hub/{rank}")]):
                address = place.get(key).decode()
                if _answers(address):
                    addresses[rank] = address
        hosts = sorted(addresses)[: num_hubs(len(addresses))]
        return [addresses[rank] if rank in hosts else "" for rank in range(hosts[-1] + 1)]

    def _places(self) -> list[str]:
        places: list[str] = json.loads(self._read("hubs"))
        return places

    def _find(self) -> HubAddress:
        """Return where the hubs are."""
        address = ",".join(filter(None, self._places()))
        return HubAddress(address, self._token_of(self._read("token").decode()), has_begun=False)

    # -- liveness, in a thread

    def _watch(self) -> None:
        """Report processes that have died; end this one if it is cut off, or the script has failed."""
        try:
            while True:
                what = self._store.wait(self._news)
                assert what is not None
                if what[0] == "failed":
                    self._end(f"the script failed on rank {what[1]}")
                if what[1] == self.group.rank:
                    self._end(f"the others have given it up: no heartbeat for {LEASE_S:g} s")
                self._report(what[1])
        except StoreLost as error:
            if not self._is_leaving and not self._have_ended():
                self._end(f"it is cut off from the others: {error}")

    def _news(self) -> tuple[str, int] | None:
        """Return the next process that has failed or died."""
        store = self._store
        for rank in self.ranks:
            if self._is_leaving or rank in self._dead or store.get(f"done/{rank}") is not None:
                continue
            if store.get(f"failed/{rank}") is not None:
                return "failed", rank
            if store.get(f"alive/{rank}") is None:
                return "dead", rank
        return None

    def _report(self, rank: int) -> None:
        self._dead.add(rank)
        self._store.create(f"dead/{rank}", "its connection to the membership store has ended")
        left = [other for other in self.ranks if other not in self._dead]
        if left[0] == self.group.rank:
            ranks = ", ".join(map(str, left))
            say(f"rank {rank} has died; the others continue: {ranks}")

    # -- the end

    def _tell_failed(self) -> None:
        """Make the others end: they would fail in the same way, or wait."""
        with contextlib.suppress(StoreLost):
            self._store.put(f"failed/{self.group.rank}", "")

    def _leave(self) -> None:
        """Tell the others that this process ends in order. One that hosts a hub waits for them."""
        self._is_leaving = True
        with contextlib.suppress(StoreLost):
            self._store.put(f"done/{self.group.rank}", "")
            if self._hub is not None:
                self._store.wait(self._have_ended, _END_S)
                time.sleep(_HEAR_S)
        self._store.close()
        self._close_hub()

    def _have_ended(self) -> bool | None:
        ranks, store = self.ranks, self._store
        return (
            all(store.get(f"done/{rank}") is not None or store.get(f"alive/{rank}") is None for rank in ranks) or None
        )
