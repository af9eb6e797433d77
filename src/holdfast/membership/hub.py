"""The built-in store: a server in a thread of the launcher.

It keeps everything in memory for the lifetime of the launcher; a store that must outlive any process is etcd. It counts
the votes of acts (:mod:`~holdfast.membership.acts`), and notifies clients of decisions only. Clients must know the token,
and invalid bytes only close their own connection. Nothing is encrypted: use a trusted network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from holdfast.errors import ConfigError
from holdfast.membership.acts import Tally, vote_key
from holdfast.membership.store import LEASE_S, MAX_KEY_BYTES, MAX_VALUE_BYTES, SilenceTimer
from holdfast.membership.wire import BEAT, HELLO, MAX_HELLO_BYTES, MAX_LINE_BYTES, LineSplitter, dump, parse

logger = logging.getLogger(__name__)

_HELLO_S = 10.0
_CLOSE_S = 1.0
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


class HubClient:
    """A connection."""

    def __init__(self, writer: asyncio.StreamWriter, job: HubJob, lease_s: float) -> None:
        self._writer = writer
        self.job = job
        self.silence = SilenceTimer(lease_s, lease_s / _LOOKS)

    def send(self, line: bytes) -> None:
        """Send a line, none if it is empty; a client that does not read is disconnected."""
        transport = self._writer.transport
        if not line or transport.is_closing():
            return
        self._writer.write(line)
        if transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            logger.warning("hub: %s does not read and was disconnected", self._writer.get_extra_info("peername"))
            transport.abort()


class HubJob:
    """The keys and clients of one job; ``tally`` counts the votes of its acts, if this process decides them."""

    def __init__(self, tally: Tally | None) -> None:
        self.items: dict[str, str] = {}
        self.leases: dict[str, HubClient] = {}
        self.clients: set[HubClient] = set()
        self._tally = tally

    def under(self, key: str) -> list[str]:
        """Return the keys that deleting ``key`` removes."""
        return [name for name in self.items if name == key or (key.endswith("/") and name.startswith(key))]

    def change(self, key: str, value: str | None, owner: HubClient | None = None) -> None:
        """Write a key, or remove it if the value is None, and notify all clients: of decisions, not of votes."""
        decided = [] if self._tally is None else self._tally.note(key, value)
        self.leases.pop(key, None)
        if value is None:
            del self.items[key]
        else:
            self.items[key] = value
            if owner is not None:
                self.leases[key] = owner
        if vote_key(key) is None:
            line = dump({"key": key, "value": value})
            for client in self.clients:
                client.send(line)
        for name, decision in decided:
            if name not in self.items:
                self.change(name, decision)


class Hub:
    """A store hosted by this process, as a context.

    Args:
        token: Token that clients must send.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        lease_s: A client without a heartbeat for this long loses its leased keys.
        ends_with_connection: Whether a client also loses them as soon as its connection ends.

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
    ) -> None:
        self._token = token
        self._lease_s = lease_s
        self._ends_with_connection = ends_with_connection
        self._jobs: dict[str, HubJob] = {}
        self._greeting: dict[str, str] = {}
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

    def forget(self) -> None:
        """After a fork, in the child: close the parent's sockets, or clients would not notice that the parent has died."""
        sockets = [*self._server.sockets, *(each.get_extra_info("socket") for each in self._connections)]
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
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSE_S)
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
        client: HubClient | None = None
        try:
            if (hello := await self._first(incoming, writer)) is None:
                return
            if (client := self._admit(parse(hello), writer, peer)) is None:
                return
            incoming.lines.limit_bytes = MAX_LINE_BYTES
            await self._tell_all(client, writer)
            while (line := await incoming.next()) is not None:
                client.silence.broken(time.monotonic())
                client.send(self._answer(client, line))
                await writer.drain()
        except (OSError, TimeoutError) as error:  # the client is gone, or never sent the token
            logger.debug("hub: %s is gone: %r", peer, error)
        except Exception as error:  # the hub must survive whatever a client sends
            self._seldom.write(f"{peer} sent an invalid message and was disconnected: {str(error)[:200]!r}")
            if client is not None:
                client.send(dump({"refused": f"an invalid message: {str(error)[:200]}"}))
        finally:
            if client is not None:
                client.job.clients.discard(client)
                if self._ends_with_connection:
                    self._end_leases_of(client.job, {client})
            writer.close()

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

    def _admit(self, hello: dict[str, Any], writer: asyncio.StreamWriter, peer: object) -> HubClient | None:
        token, job = hello.get("token"), hello.get("job")
        known = type(token) is str and hmac.compare_digest(token.encode(), self._token.encode())
        if not known or hello.get("hello") != HELLO or type(job) is not str:
            why = "a wrong token" if hello.get("hello") == HELLO else "an unknown greeting"
            self._seldom.write(f"{peer} was refused: {why}")
            writer.write(dump({"refused": why}))
            return None
        return HubClient(writer, self._job(job), self._lease_s)

    def _job(self, name: str) -> HubJob:
        return self._jobs.setdefault(name, HubJob(Tally()))

    async def _tell_all(self, client: HubClient, writer: asyncio.StreamWriter) -> None:
        """Send all keys to a new client, which also receives changes in the meantime."""
        items = client.job.items
        client.job.clients.add(client)
        for key in list(items):
            if key in items and vote_key(key) is None:
                client.send(dump({"key": key, "value": items[key]}))
                await writer.drain()
        client.send(dump({"id": 0, "done": True, "lease_s": self._lease_s, **self._greeting}))

    # -- requests

    def _answer(self, client: HubClient, line: bytes) -> bytes:
        if not line:
            return BEAT
        request = parse(line)
        check_request(request)
        return answer_to(request, done=self._act(client, request))

    def _act(self, client: HubClient, request: dict[str, Any]) -> bool:
        op, key, value, job = request["op"], request["key"], request.get("value", ""), client.job
        if op == "delete":
            for gone in job.under(key):
                job.change(gone, None)
            return True
        if op == "create" and key in job.items:
            return False
        if len(job.items) >= _MAX_KEYS and key not in job.items:
            raise ValueError(f"the store is full: it has {_MAX_KEYS} keys")
        job.change(key, value, client if request.get("leased") is True else None)
        return True

    def _end_leases(self) -> None:
        self._loop.call_later(self._lease_s / _LOOKS, self._end_leases)
        self._seldom.flush()
        for job in self._jobs.values():
            silent = {owner for owner in set(job.leases.values()) if owner.silence.is_too_long()}
            for key in self._end_leases_of(job, silent):
                logger.warning("hub: no heartbeat from the owner of %s for %g s", key, self._lease_s)

    @staticmethod
    def _end_leases_of(job: HubJob, owners: set[HubClient]) -> list[str]:
        """Remove the leased keys of these clients, and return them."""
        ended = [key for key, owner in job.leases.items() if owner in owners]
        for key in ended:
            job.change(key, None)
        return ended

    def _note_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log in one line what asyncio would print with a traceback."""
        self._seldom.write(f"{context.get('message')}: {context.get('exception')!r}")


def check_request(request: dict[str, Any]) -> None:
    """Raise ``ValueError`` or ``KeyError`` if a client's message is not a request."""
    op, key, value = request["op"], request["key"], request.get("value", "")
    if type(key) is not str or len(key.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"a key must be a string of at most {MAX_KEY_BYTES} bytes")
    if op not in ("put", "create", "delete") or type(value) is not str or len(value.encode()) > MAX_VALUE_BYTES:
        raise ValueError(
            f"{op!r:.20} is not a request, or its value is not a string of at most {MAX_VALUE_BYTES} bytes"
        )


def answer_to(request: dict[str, Any], *, done: bool) -> bytes:
    """Return the answer to a request, nothing if it wants none."""
    return dump({"id": int(request["id"]), "done": done}) if "id" in request else b""
