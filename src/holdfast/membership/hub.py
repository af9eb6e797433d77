"""The built-in store: a server in a thread of the launcher.

It keeps everything in memory for the lifetime of the launcher. The hubs of several launchers form a cluster, in which
each change is on a quorum of them before it is acknowledged, and another hub takes over when the leading one is lost:
:mod:`holdfast.membership.peers`. Clients must know the token, and invalid bytes only close their own connection.
Nothing is encrypted: use a trusted network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from holdfast.errors import ConfigError
from holdfast.membership.hub_state import Applied, HubState, Operation
from holdfast.membership.peers import MAX_PEER_LINE_BYTES, HubCluster
from holdfast.membership.store import LEASE_S, MAX_KEY_BYTES, MAX_VALUE_BYTES, SilenceTimer
from holdfast.membership.wire import (
    BEAT,
    EXPIRED,
    HELLO,
    MAX_HELLO_BYTES,
    MAX_LINE_BYTES,
    NOT_LEADING,
    LineSplitter,
    dump,
    parse,
)

logger = logging.getLogger(__name__)

_HELLO_S = 10.0
_CLOSE_S = 1.0
_LEAVE_LOOK_S = 0.02
_LOOK_S = 0.5
"""The longest time between two checks of all leases."""
_RETURN_S = 2.0
"""A client that lives comes back within this time after its connection has ended."""
_MOVE_S = 5.0
"""A client that lives comes to another hub within this time after the leading one has died."""
_MAX_READ = 1 << 16
_MAX_STRANGERS = 256
"""Maximum number of connections that have not sent the token; one more replaces the oldest."""
_SAY_EVERY_S = 60.0
_MAX_BACKLOG_BYTES = 64 << 20
"""A client with a larger backlog does not read any more."""
_MAX_KEYS = 1 << 20
_LOOKS = 10
"""Number of checks of a lease within its duration."""


class RateLimitedLog:
    """Limits log lines that unknown clients can provoke to one in ``every_s``: logs the first, counts later ones."""

    def __init__(self, every_s: float = _SAY_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._again_s = clock()
        self._count = 0
        self._last = ""

    def write(self, what: str) -> None:
        """Log a line, now or later."""
        if not self._count and self._clock() >= self._again_s:
            self._log(what)
        else:
            self._count, self._last = self._count + 1, what

    def flush(self, *, last: bool = False) -> None:
        """Log pending lines, if it is time to, or for the last time."""
        if self._count and (last or self._clock() >= self._again_s):
            self._log(f"{self._count} similar messages, the last: {self._last}")
            self._count = 0

    def _log(self, what: str) -> None:
        logger.warning("hub: %s", what)
        self._again_s = self._clock() + self._every_s


class _Incoming:
    """The lines that a connection receives."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._ready: deque[bytes] = deque()
        self.lines = LineSplitter(MAX_HELLO_BYTES)

    async def next(self) -> bytes | None:
        """Return the next line, None at the end."""
        while not self._ready:
            if not (data := await self._reader.read(_MAX_READ)):
                return None
            self._ready.extend(self.lines.feed(data))
        return self._ready.popleft()


class _Client:
    """A connection of a client."""

    def __init__(self, writer: asyncio.StreamWriter, job: str, session: str, *, is_numbered: bool) -> None:
        self._writer = writer
        self.job, self.session = job, session
        self.is_numbered = is_numbered
        """Whether it numbers its requests, so that it may repeat one."""

    def send(self, line: bytes) -> None:
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(line)
        if transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            logger.warning("hub: %s does not read and was disconnected", self._writer.get_extra_info("peername"))
            transport.abort()

    def abort(self) -> None:
        """End the connection."""
        self._writer.transport.abort()


class Hub:
    """A store hosted by this process, as a context.

    Args:
        token: Token that clients must send.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        lease_s: A client without a heartbeat for this long loses its leased keys.
        ends_with_connection: Whether a client also loses them as soon as its connection ends; in a cluster, unless it
            comes back at once.
        places: ``HOST:PORT`` of all hubs of a cluster; empty for a hub that is alone; None until :meth:`form`.
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
        self._token = token
        self._lease_s = lease_s
        self._ends_with_connection = ends_with_connection
        self._clients: dict[str, set[_Client]] = {}
        self._silences: dict[str, SilenceTimer] = {}
        self._cluster = HubCluster(place, token, lease_s, self._executed, self._take_over, self._step_down)
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._seldom = RateLimitedLog()
        self._serving: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_error)
        try:
            self._server = self._loop.run_until_complete(asyncio.start_server(self._await_same_job, host, port))
        except OSError as error:
            self._loop.close()
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port, or an address of this machine"
            ) from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._run, name="holdfast-hub", daemon=True)
        if places is not None:
            self.form(places)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; clients detect the loss of the store."""
        with contextlib.suppress(RuntimeError):  # the thread and its loop have already ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

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

    def forget(self) -> None:
        """After a fork, in the child: close the parent's sockets, or clients would not notice that the parent has died."""
        writers = [*self._connections, *self._cluster.writers]
        sockets = [*self._server.sockets, *(each.get_extra_info("socket") for each in writers)]
        for number in {each.fileno() for each in sockets if each is not None} - {-1}:
            os.close(number)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._end_leases()
            self._loop.run_forever()
        finally:  # in any case: a hub that accepts connections but does not answer would be worse
            ending = self._loop.create_task(self._cut_off_all())
            while not ending.done():
                with contextlib.suppress(RuntimeError):  # close() has stopped the loop again
                    self._loop.run_until_complete(ending)
            self._loop.close()
            self._seldom.flush(last=True)

    async def _cut_off_all(self) -> None:
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(
            0
        )  # accepted connections must be registered before they are closed; asyncio fails otherwise
        self._server.close()
        for connection in self._connections:
            connection.transport.abort()
        ending = {*self._serving, *self._cluster.end()}
        if ending:
            await asyncio.wait(ending, timeout=_CLOSE_S)
        for task in self._serving:
            task.cancel()
        await asyncio.sleep(0)

    # -- one client

    def _await_same_job(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving.add(task)
        self._connections.add(writer)

        def part(_: object) -> None:
            self._serving.discard(task)
            self._connections.discard(writer)

        task.add_done_callback(part)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        incoming = _Incoming(reader)
        client: _Client | None = None
        try:
            if (line := await self._first(incoming, writer)) is None:
                return
            hello = parse(line)
            if why := self._why_refused(hello):
                self._seldom.write(f"{peer} was refused: {why}")
                writer.write(dump({"refused": why}))
            elif "peer" in hello:
                await self._serve_peer(str(hello["peer"]), incoming, writer)
            elif (client := await self._admit(hello, writer)) is not None:
                await self._serve_client(client, incoming, writer)
        except (OSError, TimeoutError) as error:  # the client is gone, or never sent the token
            logger.debug("hub: %s is gone: %r", peer, error)
        except Exception as error:  # the hub must survive whatever a client sends
            self._seldom.write(f"{peer} sent an invalid message and was disconnected: {str(error)[:200]!r}")
            if client is not None:
                client.send(dump({"refused": f"an invalid message: {str(error)[:200]}"}))
        finally:
            if client is not None:
                self._part(client)
            writer.close()

    async def _serve_peer(self, hub: str, incoming: _Incoming, writer: asyncio.StreamWriter) -> None:
        """Answer another hub of the cluster."""
        consensus = self._cluster.consensus
        incoming.lines.limit_bytes = MAX_PEER_LINE_BYTES
        writer.write(dump({"peer": consensus.me, "is_new": consensus.is_new}))
        try:
            while (line := await incoming.next()) is not None:
                writer.write(dump(self._cluster.receive(hub, parse(line))))
                await writer.drain()
        finally:
            self._cluster.disconnected(hub)

    async def _serve_client(self, client: _Client, incoming: _Incoming, writer: asyncio.StreamWriter) -> None:
        incoming.lines.limit_bytes = MAX_LINE_BYTES
        await self._tell_all(client, writer)
        while (line := await incoming.next()) is not None:
            if (silence := self._silences.get(client.session)) is not None:
                silence.broken(time.monotonic())
            self._answer(client, line)
            await writer.drain()

    def _part(self, client: _Client) -> None:
        clients = self._clients.setdefault(client.job, set())
        clients.discard(client)
        if not self._ends_with_connection or any(each.session == client.session for each in clients):
            return  # the latter: it has come back already
        if self._cluster.places:
            self._silences[client.session] = self._new_silence(_RETURN_S)
        else:
            self._end_session(client.session, forget=True)

    async def _first(self, incoming: _Incoming, writer: asyncio.StreamWriter) -> bytes | None:
        """Return the first line of a connection, None if there is none."""
        if len(self._strangers) >= _MAX_STRANGERS:  # a client that knows the token sends it immediately
            oldest = next(iter(self._strangers))
            self._seldom.write(
                f"{oldest.get_extra_info('peername')} was disconnected: {_MAX_STRANGERS} newer connections have not sent the token either"
            )
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(_HELLO_S):
                return await incoming.next()
        finally:
            self._strangers.pop(writer, None)

    def _why_refused(self, hello: dict[str, Any]) -> str:
        """Return why a connection is refused at once, or ""."""
        token = hello.get("token")
        if hello.get("hello") != HELLO:
            return "an unknown greeting"
        known = type(token) is str and hmac.compare_digest(token.encode(), self._token.encode())
        if not known or ("peer" not in hello and type(hello.get("job")) is not str):
            return "a wrong token"
        return ""

    async def _admit(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> _Client | None:
        """Return a client once a quorum knows its session; None if another hub leads, or the session has expired."""
        consensus, session, job = self._cluster.consensus, hello.get("session"), hello["job"]
        is_known = session in consensus.state.sessions
        if not consensus.has_contact():
            writer.write(dump({"refused": NOT_LEADING, "leader": self._cluster.leader_address}))
            return None
        if hello.get("again") and not is_known:
            writer.write(dump({"refused": EXPIRED}))
            return None
        client = _Client(writer, job, str(session or secrets.token_hex(8)), is_numbered=session is not None)
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

    async def _tell_all(self, client: _Client, writer: asyncio.StreamWriter) -> None:
        """Send all keys to a new client, which also receives changes in the meantime."""
        items = self._cluster.consensus.state.jobs[client.job]
        self._clients.setdefault(client.job, set()).add(client)
        for key in list(items):
            if key in items:
                client.send(dump({"key": key, "value": items[key]}))
                await writer.drain()
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
        """Notify all clients of changes."""
        for job, key, value in applied.changes:
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
        number = int(request["id"])
        operation = _checked(request, client, consensus.state)
        if consensus.serves:
            consensus.append(operation, lambda done: client.send(dump({"id": number, "done": done})))

    def _end_leases(self) -> None:
        self._loop.call_later(min(self._lease_s / _LOOKS, _LOOK_S), self._end_leases)
        self._seldom.flush()
        silent = [session for session, silence in self._silences.items() if silence.is_too_long()]
        if not self._cluster.consensus.has_contact():
            return
        connected = {client.session for clients in self._clients.values() for client in clients}
        for session in silent:
            for _, key in self._cluster.consensus.state.leased(session):
                logger.warning("hub: no heartbeat from the owner of %s for %g s", key, self._lease_s)
            self._end_session(session, forget=session not in connected)

    def _end_session(self, session: str, *, forget: bool) -> None:
        """Remove the leased keys of a client, and forget it unless it is still connected."""
        consensus = self._cluster.consensus
        if forget:
            self._silences.pop(session, None)
        if consensus.serves and (forget or consensus.state.leased(session)):
            consensus.append({"op": "expire", "session": session, "forget": forget})

    def _note_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log in one line what asyncio would print with a traceback."""
        self._seldom.write(f"{context.get('message')}: {context.get('exception')!r}")


def _checked(request: dict[str, Any], client: _Client, state: HubState) -> Operation:
    """Return the operation that a client requests; raise ``ValueError`` if it is invalid."""
    op, key, value = request["op"], request["key"], request.get("value", "")
    if type(key) is not str or len(key.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"a key must be a string of at most {MAX_KEY_BYTES} bytes")
    if op not in ("put", "create", "delete") or type(value) is not str or len(value.encode()) > MAX_VALUE_BYTES:
        raise ValueError(
            f"{op!r:.20} is not a request, or its value is not a string of at most {MAX_VALUE_BYTES} bytes"
        )
    items = state.jobs[client.job]
    if op != "delete" and len(items) >= _MAX_KEYS and key not in items:
        raise ValueError(f"the store is full: it has {_MAX_KEYS} keys")
    operation = {"op": op, "job": client.job, "key": key, "value": value, "session": client.session}
    operation["leased"] = request.get("leased") is True
    return operation | ({"number": int(request["id"])} if client.is_numbered else {})
