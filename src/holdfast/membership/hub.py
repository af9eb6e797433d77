"""The built-in store: a server in a thread of the launcher.

It keeps everything in memory for the lifetime of the launcher. The hubs of several launchers form a cluster, in which
each change is on a quorum of them before it is acknowledged, and another hub takes over when the leading one is lost:
:mod:`holdfast.membership.peers`. Clients must prove that they know the token, each line has a MAC, and invalid bytes only close their own connection.
Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.membership.acts import vote_key
from holdfast.membership.hub_state import Applied, HubState, Operation
from holdfast.membership.peers import MAX_PEER_LINE_BYTES, HubCluster
from holdfast.membership.server import Client, Incoming, LineServer, Outgoing, answer_to, check_request
from holdfast.membership.store import LEASE_S, SilenceTimer
from holdfast.membership.wire import BEAT, EXPIRED, MAX_LINE_BYTES, NOT_LEADING, dump, parse

logger = logging.getLogger(__name__)

_LEAVE_LOOK_S = 0.02
_LOOK_S = 0.5
"""The longest time between two checks of all leases."""
_RETURN_S = 2.0
"""A client that lives comes back within this time after its connection has ended."""
_MOVE_S = 5.0
"""A client that lives comes to another hub within this time after the leading one has died."""
_MAX_KEYS = 1 << 20
_LOOKS = 10
"""Number of checks of a lease within its duration."""


class _Client(Client):
    """A connection of a client, and its session, which outlives a hub."""

    def __init__(self, outgoing: Outgoing, job: str, session: str, *, is_numbered: bool) -> None:
        super().__init__(outgoing, job)
        self.session = session
        self.is_numbered = is_numbered
        """Whether it numbers its requests, so that it may repeat one."""


class Hub(LineServer):
    """A store hosted by this process, as a context.

    Args:
        token: Token that clients must know.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        lease_s: A client without a heartbeat for this long loses its leased keys.
        ends_with_connection: Whether a client also loses them as soon as its connection ends; in a cluster, unless it
            comes back at once.
        places: ``HOST:PORT`` of all hubs of a cluster, "" where there is none; empty for a hub that is alone; None until
            :meth:`form`.
        place: Index of this one among them.

    Raises:
        ConfigError: if it cannot listen there.
    """

    def __init__(
        self,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        lease_s: float = LEASE_S,
        ends_with_connection: bool = False,
        places: Sequence[str] | None = (),
        place: int = 0,
    ) -> None:
        super().__init__(token, host, port)
        self._lease_s = lease_s
        self._ends_with_connection = ends_with_connection
        self._clients: dict[str, set[_Client]] = {}
        self._silences: dict[str, SilenceTimer] = {}
        self._cluster = HubCluster(place, token, lease_s, self._executed, self._take_over, self._step_down)
        if places is not None:
            self.form(places)
        self._loop.call_soon(self._end_leases)
        self._thread.start()

    def form(self, places: Sequence[str]) -> None:
        """Form a cluster with the hubs at these places."""
        self._loop.call_soon_threadsafe(self._cluster.begin, places)

    def leave(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Let the other hubs of the cluster do without this one; return whether they do.

        Args:
            timeout_s: When to give up.
            is_over: Returns whether no client needs any hub more; then this returns at once.
        """
        self._cluster.wants_to_leave = True
        ends_s = time.monotonic() + timeout_s
        while not (self._cluster.has_left or is_over()) and time.monotonic() < ends_s:
            time.sleep(_LEAVE_LOOK_S)
        return self._cluster.has_left

    def _other_writers(self) -> Iterable[asyncio.StreamWriter]:
        return self._cluster.writers

    def _end(self) -> list[asyncio.Task[None]]:
        return list(self._cluster.end())

    # -- connections

    async def _serve_line(self, hello: dict[str, Any], incoming: Incoming, outgoing: Outgoing) -> None:
        if "peer" in hello:
            await self._serve_peer(str(hello["peer"]), incoming, outgoing)
        elif (client := await self._admit(hello, outgoing)) is not None:
            try:
                await self._serve_client(client, incoming, outgoing)
            finally:
                self._part(client)

    async def _serve_peer(self, hub: str, incoming: Incoming, outgoing: Outgoing) -> None:
        """Answer another hub of the cluster."""
        consensus = self._cluster.consensus
        incoming.lines.limit_bytes = MAX_PEER_LINE_BYTES
        outgoing.write(dump({"peer": consensus.me, "is_new": consensus.is_new}))
        try:
            while (line := await incoming.next()) is not None:
                outgoing.write(dump(self._cluster.receive(hub, parse(line))))
                await outgoing.drain()
        finally:
            self._cluster.disconnected(hub)

    async def _serve_client(self, client: _Client, incoming: Incoming, outgoing: Outgoing) -> None:
        incoming.lines.limit_bytes = MAX_LINE_BYTES
        await self._tell_all(client, outgoing)
        while (line := await incoming.next()) is not None:
            if (silence := self._silences.get(client.session)) is not None:
                silence.broken(time.monotonic())
            self._answer(client, line)
            await outgoing.drain()

    def _part(self, client: _Client) -> None:
        clients = self._clients.setdefault(client.job, set())
        clients.discard(client)
        if not self._ends_with_connection or any(each.session == client.session for each in clients):
            return  # the latter: it has come back already
        if self._cluster.places:
            self._silences[client.session] = self._new_silence(_RETURN_S)
        else:
            self._end_session(client.session, forget=True)

    async def _admit(self, hello: dict[str, Any], outgoing: Outgoing) -> _Client | None:
        """Return a client once a quorum knows its session; None if another hub leads, or the session has expired."""
        consensus, session, job = self._cluster.consensus, hello.get("session"), hello["job"]
        is_known = session in consensus.state.sessions
        if not consensus.has_contact():
            outgoing.write(dump({"refused": NOT_LEADING, "leader": self._cluster.leader_address}))
            return None
        if hello.get("again") and not is_known:
            outgoing.write(dump({"refused": EXPIRED}))
            return None
        client = _Client(outgoing, job, str(session or secrets.token_hex(8)), is_numbered=session is not None)
        if not is_known:
            opened = self._loop.create_future()
            consensus.append(
                {"op": "open", "session": client.session, "job": job},
                lambda done: None if opened.done() else opened.set_result(done),
            )
            await asyncio.wait_for(opened, self._lease_s)
        self._silences[client.session] = self._new_silence()
        return client

    def _new_silence(self, at_most_s: float = math.inf) -> SilenceTimer:
        return SilenceTimer(min(self._lease_s, at_most_s), self._lease_s / _LOOKS)

    async def _tell_all(self, client: _Client, outgoing: Outgoing) -> None:
        """Send all keys to a new client, which also receives changes in the meantime."""
        items = self._cluster.consensus.state.jobs[client.job]
        self._clients.setdefault(client.job, set()).add(client)
        for key in list(items):
            if key in items and vote_key(key) is None:
                client.send(dump({"key": key, "value": items[key]}))
                await outgoing.drain()
        client.send(dump({"id": 0, "done": True, "lease_s": self._lease_s}))

    # -- the cluster

    def _take_over(self) -> None:
        """Give all clients the time of a lease to come here; less if they have all seen that the last leader has died."""
        at_most_s = _MOVE_S if self._ends_with_connection and self._cluster.leader_ended else math.inf
        sessions = self._cluster.consensus.state.sessions
        self._silences = {session: self._new_silence(at_most_s) for session in sessions}
        if self._cluster.places:
            logger.info("hub: %s leads in epoch %d", self.address, self._cluster.consensus.epoch)

    def _step_down(self) -> None:
        for clients in self._clients.values():
            for client in clients:
                client.abort()

    def _executed(self, operation: Operation, applied: Applied) -> None:
        """Notify all clients of changes: of decisions, not of votes; and of a folder that was deleted, not of each key."""
        folder = operation["key"] if operation["op"] == "delete" and operation["key"].endswith("/") else None
        visible = ((job, key, value) for job, key, value in applied.changes if vote_key(key) is None)
        if folder is not None:
            visible = ((job, folder if value is None else key, value) for job, key, value in visible)
        for job, key, value in dict.fromkeys(visible):
            line = dump({"key": key, "value": value})
            for client in self._clients.get(job, ()):
                client.send(line)

    # -- requests

    def _answer(self, client: _Client, line: bytes) -> None:
        consensus = self._cluster.consensus
        if not line:
            if consensus.has_contact():  # otherwise the client looks for another hub
                client.send(BEAT)
            return
        request = parse(line)
        operation = _checked(request, client, consensus.state)
        if consensus.serves:
            consensus.append(operation, lambda done: client.send(answer_to(request, done=done)))

    def _end_leases(self) -> None:
        self._loop.call_later(min(self._lease_s / _LOOKS, _LOOK_S), self._end_leases)
        self._seldom.flush()
        silent = [session for session, silence in self._silences.items() if silence.is_too_long()]
        if not self._cluster.consensus.has_contact():
            return
        connected = {client.session for clients in self._clients.values() for client in clients}
        for session in silent:
            for _, key in self._cluster.consensus.state.leased(session):
                why = (
                    f"no heartbeat for {self._silences[session].limit_s:g} s"
                    if session in connected
                    else "its connection ended"
                )
                logger.warning("hub: the owner of %s counts as failed: %s", key, why)
            self._end_session(session, forget=session not in connected)

    def _end_session(self, session: str, *, forget: bool) -> None:
        """Remove the leased keys of a client, and forget it unless it is still connected."""
        consensus = self._cluster.consensus
        if forget:
            self._silences.pop(session, None)
        if consensus.serves and (forget or consensus.state.leased(session)):
            consensus.append({"op": "expire", "session": session, "forget": forget})


def _checked(request: dict[str, Any], client: _Client, state: HubState) -> Operation:
    """Return the operation that a client requests; raise ``ValueError`` if it is invalid."""
    check_request(request)
    op, key, value = request["op"], request["key"], request.get("value", "")
    items = state.jobs[client.job]
    if op != "delete" and len(items) >= _MAX_KEYS and key not in items:
        raise ValueError(f"the store is full: it has {_MAX_KEYS} keys")
    operation = {"op": op, "job": client.job, "key": key, "value": value, "session": client.session}
    operation["leased"] = request.get("leased") is True
    return operation | ({"number": int(request["id"])} if client.is_numbered and "id" in request else {})
