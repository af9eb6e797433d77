"""The hubs of a job among each other: connections, elections in time, and the choice of voters.

Each hub of a cluster listens at a place, ``HOST:PORT``, which all clients know, and connects to all other places. A hub
that was started again at its place has another name. The leader finds it there, gives it its state and makes it a voter
instead of the earlier one; and it removes voters that do not answer any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from holdfast.membership.authentication import ClientHandshake, LineAuthenticator
from holdfast.membership.consensus import Consensus, PeerMessage
from holdfast.membership.hub_state import Applied, Operation
from holdfast.membership.store import SilenceTimer
from holdfast.membership.wire import MAX_HELLO_BYTES, LineSplitter, dump, parse

_FRESH = 0.3
"""Share of a lease: a leader is alive that was heard within this time."""
_ELECTION = (0.35, 0.5)
"""Shares of a lease: another hub stands for election when it has not heard a leader for a random time between these."""
_AGAIN = (0.02, 0.1)
"""Shares of a lease: pause before a hub stands for election when the leader's connection has ended, or again."""
_UNLINKED = 0.2
"""Share of a lease: a voter without a connection for this long is no voter any more."""
_AGAIN_AT_MOST_S = 10.0
"""The lease from which on that pause grows no more."""
_TICKS = 20
"""Steps within a lease."""
_MAX_READ = 1 << 16
MAX_PEER_LINE_BYTES = 1 << 30
"""Maximum length of a line of another hub; it may be the whole state."""
_MAX_BACKLOG_BYTES = 256 << 20


class PeerLink:
    """This hub's connection to the hub at another place, kept for as long as the loop runs."""

    def __init__(self, place: int, address: str, cluster: HubCluster) -> None:
        self.place = place
        self.peer = ""
        """Name of the hub there, "" without a connection."""
        self.is_new = False
        """Whether it had no state when the connection began."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._cluster = cluster
        self.writer: asyncio.StreamWriter | None = None
        """The connection, once the hub there has answered."""
        self._keys: LineAuthenticator | None = None
        self._since_s = 0.0

    def send(self, message: PeerMessage) -> None:
        """Send a message, unless there is no connection."""
        if self.writer is None or self._keys is None or self.writer.transport.is_closing():
            return
        self.writer.write(self._keys.sign(dump(message)))
        if self.writer.transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            self.writer.transport.abort()

    def age_s(self) -> float:
        """Return how long there has been this connection."""
        return time.monotonic() - self._since_s

    def abort(self) -> None:
        """End the connection; another is made."""
        if self.writer is not None:
            self.writer.transport.abort()

    async def run(self) -> None:
        """Connect, again and again, and take answers."""
        lease_s = self._cluster.lease_s
        while True:
            with contextlib.suppress(OSError, TimeoutError, ValueError, KeyError):  # also of a hub of another version
                async with asyncio.timeout(lease_s / 2):
                    reader, writer = await asyncio.open_connection(self._host.strip("[]"), self._port)
                try:
                    await self._talk(reader, writer)
                finally:
                    self.writer = None
                    writer.transport.abort()
                    if self.peer:
                        self._cluster.unlinked(self.peer)
                        self.peer = ""
            await asyncio.sleep(lease_s / _TICKS)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = ClientHandshake(self._cluster.token, {"peer": self._cluster.consensus.me})
        self._keys = None
        writer.write(handshake.greeting)
        lines = LineSplitter(MAX_HELLO_BYTES)
        while True:
            async with asyncio.timeout(None if self.peer else self._cluster.lease_s / 2):
                data = await reader.read(_MAX_READ)
            if not data:
                return
            for line in lines.feed(data):
                if self._keys is not None:
                    self._take(parse(self._keys.verify(line)), writer)
                    continue
                writer.write(handshake.take(line))
                if (keys := handshake.done) is not None:
                    self._keys, lines.limit_bytes = keys, MAX_PEER_LINE_BYTES

    def _take(self, message: PeerMessage, writer: asyncio.StreamWriter) -> None:
        if self.peer:
            self._cluster.take_answer(self.peer, message)
            return
        self.peer, self.is_new, self.writer = message["peer"], message["is_new"], writer
        self._since_s = time.monotonic()
        self._cluster.linked(self)


class HubCluster:
    """One hub's part in the cluster. All methods are called in the loop of the hub, unless they say otherwise.

    Args:
        place: Index of this hub among all.
        token: Token of the cluster.
        lease_s: Duration of leases, from which all other times follow.
        executed: Called on the leader after each operation.
        took_over: Called when this hub begins to serve.
        stepped_down: Called when it serves no longer.
    """

    def __init__(
        self,
        place: int,
        token: str,
        lease_s: float,
        executed: Callable[[Operation, Applied], None],
        took_over: Callable[[], None],
        stepped_down: Callable[[], None],
    ) -> None:
        self.token, self.lease_s = token, lease_s
        self.places: tuple[str, ...] = ()
        """Addresses of all hubs; empty for a hub that is alone."""
        self._took_over, self._stepped_down = took_over, stepped_down
        self.consensus = Consensus(
            f"{place}.{secrets.token_hex(6)}", self._send, executed, time.monotonic, _FRESH * lease_s
        )
        self._place = place
        self._links: list[PeerLink] = []
        self._random = random.Random(self.consensus.me)
        self._tasks: list[asyncio.Task[None]] = []
        self._served = False
        self._served_since_s = 0.0
        self._stands: asyncio.TimerHandle | None = None
        self._silence = self._new_silence()
        self._leaving: set[str] = set()
        self.wants_to_leave = False
        """Set by any thread: this hub is about to end, and the others must not count on it."""
        self.leader_ended = False
        """Whether the connection of the last leader has ended, as it does when its process dies."""
        self.has_left = False
        """Read by any thread: no other hub counts on this one."""

    def begin(self, places: Sequence[str]) -> None:
        """Start, with the hubs at these places, "" for none; a hub that is alone leads at once."""
        self.places = tuple(places)
        self._links = [PeerLink(n, address, self) for n, address in enumerate(places) if address and n != self._place]
        if not self._links:
            self.consensus.found([self.consensus.me])
            self._note_role()
            return
        self._tasks = [asyncio.ensure_future(link.run()) for link in self._links]
        self._tick()

    def end(self) -> list[asyncio.Task[None]]:
        """Stop, and return the tasks that end."""
        for task in self._tasks:
            task.cancel()
        return self._tasks

    @property
    def writers(self) -> list[asyncio.StreamWriter]:
        """Return the open connections to other hubs."""
        return [link.writer for link in self._links if link.writer is not None]

    @property
    def leader_address(self) -> str:
        """Where the leader is, as far as this hub knows, or ""."""
        place = self.consensus.leader.partition(".")[0]
        return self.places[int(place)] if place and self.places else ""

    # -- messages

    def _send(self, hub: str, message: PeerMessage) -> None:
        for link in self._links:
            if link.peer == hub:
                link.send(message)

    def linked(self, link: PeerLink) -> None:
        """Take a new connection to another hub."""
        if self.consensus.leads:
            self.consensus.give_state(link.peer)
        self._found()

    def unlinked(self, hub: str) -> None:
        """Note that the connection to a hub has ended."""
        self.consensus.lose(hub)

    def take_answer(self, hub: str, answer: PeerMessage) -> None:
        """Take the answer of another hub."""
        (self._leaving.add if answer.get("leaves") else self._leaving.discard)(hub)
        self.consensus.take_answer(hub, answer)
        self._note_role()

    def receive(self, hub: str, message: PeerMessage) -> PeerMessage:
        """Return the answer to another hub's message."""
        answer = self.consensus.receive(hub, message)
        if self.consensus.hears_leader():
            self._silence.broken(time.monotonic())
            self.leader_ended = False
        self._note_role()
        return answer | ({"leaves": True} if self.wants_to_leave else {})

    def disconnected(self, hub: str) -> None:
        """Note that another hub's connection to this one has ended. If it led, it is probably lost."""
        was_leader = hub == self.consensus.leader
        self.consensus.forget_leader(hub)
        if was_leader and not self.consensus.leads:
            self.leader_ended = True
            self._stand_soon()

    # -- time

    def _tick(self) -> None:
        asyncio.get_running_loop().call_later(self.lease_s / _TICKS, self._tick)
        consensus = self.consensus
        is_silent = self._silence.is_too_long()
        if consensus.leads:
            consensus.beat()
            self._choose_voters()
            self._drop_silent_links()
        elif is_silent and consensus.is_voter and not self.wants_to_leave:
            self._stand_soon()
        self._note_role()
        self.has_left = self.wants_to_leave and not consensus.is_voter

    def _new_silence(self) -> SilenceTimer:
        return SilenceTimer(self.lease_s * self._random.uniform(*_ELECTION), self.lease_s / _TICKS)

    def _stand_soon(self) -> None:
        if self._stands is None:
            pause_s = min(self.lease_s, _AGAIN_AT_MOST_S) * self._random.uniform(*_AGAIN)
            self._stands = asyncio.get_running_loop().call_later(pause_s, self._stand)

    def _stand(self) -> None:
        self._stands = None
        consensus = self.consensus
        if consensus.is_voter and not consensus.leads and not consensus.hears_leader():
            consensus.stand()
            self._note_role()
            if not consensus.leads:
                self._stand_soon()

    def _note_role(self) -> None:
        """Act on it if this hub has become the leader, or has ceased to be."""
        consensus = self.consensus
        if consensus.leads and not self._served:
            new = [link.peer for link in self._links if link.peer and not consensus.is_following(link.peer)]
            for hub in new:
                consensus.give_state(hub)
            if new:
                consensus.beat()  # not at the next tick: clients wait for its answer
        if consensus.serves != self._served:
            self._served = consensus.serves
            self._served_since_s = time.monotonic()
            self._silence = self._new_silence()
            (self._took_over if self._served else self._stepped_down)()

    # -- voters

    def _found(self) -> None:
        """Begin the job at the first place, once all hubs are there and none has taken part in it."""
        hubs = [link.peer for link in self._links if link.peer and link.is_new]
        if self._place == 0 and self.consensus.is_new and len(hubs) == len(self._links):
            self.consensus.found([self.consensus.me, *hubs])
            self._note_role()

    def _choose_voters(self) -> None:
        """Keep as voters the hubs that answer and stay, one at each place."""
        consensus = self.consensus
        if not consensus.may_change or not consensus.has_contact():
            return
        linked = {link.peer for link in self._links}
        stay = self._heard_within(self.lease_s) & linked  # a hub without a connection has most probably died
        stay |= self._heard_within(_UNLINKED * self.lease_s)
        stay -= {*self._leaving, consensus.me}
        if not (self.wants_to_leave and stay):
            stay.add(consensus.me)
        by_place = {int(hub.partition(".")[0]): hub for hub in sorted(stay, key=lambda hub: (hub in linked, hub))}
        members = tuple(hub for _, hub in sorted(by_place.items()))
        if members != consensus.voters.members or (consensus.me in members and consensus.voters.tie != consensus.me):
            consensus.change_voters(members)

    def _heard_within(self, within_s: float) -> set[str]:
        """Return the hubs that have answered within this time, or could not have, since this hub leads for less long."""
        is_new = time.monotonic() - self._served_since_s < within_s
        return {*self.consensus.in_touch(within_s), *(self.consensus.voters.members if is_new else ())}

    def _drop_silent_links(self) -> None:
        """End connections without an answer for a lease, as after a network was cut: a new one works sooner."""
        if time.monotonic() - self._served_since_s < self.lease_s:
            return
        in_touch = self.consensus.in_touch(self.lease_s)
        for link in self._links:
            if self.consensus.is_following(link.peer) and link.peer not in in_touch and link.age_s() > self.lease_s:
                link.abort()
