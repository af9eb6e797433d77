"""A server of stores: accepts connections that know the token, and keeps those that do not from harming others.

Clients send lines, see :mod:`holdfast.membership.wire`, and prove that they know the token, see
:mod:`holdfast.membership.authentication`. Invalid bytes only close their own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Self

from holdfast.base.side_work import run_aside
from holdfast.errors import ConfigError
from holdfast.membership.acts import check_vote
from holdfast.membership.authentication import (
    WRONG_TOKEN,
    HandshakeRefused,
    LineAuthenticator,
    check_greeting,
    new_nonce,
)
from holdfast.membership.store import MAX_KEY_BYTES, MAX_VALUE_BYTES
from holdfast.membership.wire import MAX_HELLO_BYTES, LineSplitter, dump, parse

logger = logging.getLogger("holdfast.membership.hub")

_HELLO_S = 10.0
_CLOSE_S = 1.0
_MAX_READ = 1 << 16
_MAX_STRANGERS = 256
"""Maximum number of connections in the handshake; one more replaces the oldest of the address that has the most."""
_SAY_EVERY_S = 60.0
_MAX_BACKLOG_BYTES = 64 << 20
"""A client with a larger backlog does not read any more."""


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
        run_aside("logging of the hub", lambda: logger.warning("hub: %s", what), None)
        self._again_s = self._clock() + self._every_s


class Incoming:
    """The lines that a connection receives; those after the handshake without their MACs."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._ready: deque[bytes] = deque()
        self.lines = LineSplitter(MAX_HELLO_BYTES)
        self.keys: LineAuthenticator | None = None

    async def next(self) -> bytes | None:
        """Return the next line, None at the end; raise ``ValueError`` if its MAC is wrong."""
        while not self._ready:
            if not (data := await self._reader.read(_MAX_READ)):
                return None
            self._ready.extend(self.lines.feed(data))
        line = self._ready.popleft()
        return line if self.keys is None else self.keys.verify(line)


class Outgoing:
    """The lines that a connection sends; those after the handshake with their MACs."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.keys: LineAuthenticator | None = None
        self.transport = writer.transport
        self.peer: Any = writer.get_extra_info("peername")
        """Address of the other end; None if it has ended already."""

    def write(self, line: bytes) -> None:
        """Send a line."""
        self._writer.write(line if self.keys is None else self.keys.sign(line))

    async def drain(self) -> None:
        """Wait until the other end has read enough."""
        await self._writer.drain()


class Client:
    """A connection of a client, and the job whose keys it sees."""

    def __init__(self, outgoing: Outgoing, job: str) -> None:
        self._outgoing = outgoing
        self.job = job

    def send(self, line: bytes) -> None:
        """Send a line, none if it is empty; a client that does not read is disconnected."""
        transport = self._outgoing.transport
        if not line or transport.is_closing():
            return
        self._outgoing.write(line)
        if transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            transport.abort()
            logger.warning("hub: %s does not read and was disconnected", self._outgoing.peer)

    def abort(self) -> None:
        """End the connection."""
        self._outgoing.transport.abort()


class LineServer(ABC):
    """A thread that serves clients until it is closed, as a context.

    Args:
        token: Token that clients must know.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.

    Raises:
        ConfigError: if it cannot listen there.
    """

    def __init__(self, token: str, host: str, port: int) -> None:
        self._token = token
        self._strangers: dict[Outgoing, None] = {}
        self._seldom = RateLimitedLog()
        self._serving: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_error)
        try:
            self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, host, port))
        except OSError as error:
            self._loop.close()
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port, or an address of this machine"
            ) from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._run, name="holdfast-hub", daemon=True)

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
        writers = [*self._connections, *self._other_writers()]
        sockets = [*self._server.sockets, *(each.get_extra_info("socket") for each in writers)]
        for number in {each.fileno() for each in sockets if each is not None} - {-1}:
            os.close(number)

    # -- what the servers differ in

    @abstractmethod
    async def _serve_line(self, hello: dict[str, Any], incoming: Incoming, outgoing: Outgoing) -> None:
        """Serve a connection whose first line after the handshake is ``hello``, until it ends."""

    def _other_writers(self) -> Iterable[asyncio.StreamWriter]:
        """Return the connections that this server has made to others."""
        return ()

    def _end(self) -> list[asyncio.Task[None]]:
        """End all else that runs in the thread, and return the tasks to wait for."""
        return []

    # -- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
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
        ending = {*self._serving, *self._end()}
        if ending:
            await asyncio.wait(ending, timeout=_CLOSE_S)
        for task in self._serving:
            task.cancel()
        await asyncio.sleep(0)

    # -- one connection

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving.add(task)
        self._connections.add(writer)

        def part(_: object) -> None:
            self._serving.discard(task)
            self._connections.discard(writer)

        task.add_done_callback(part)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming, outgoing = Incoming(reader), Outgoing(writer)
        peer = outgoing.peer
        try:
            if (hello := await self._admit_stranger(incoming, outgoing)) is not None:
                await self._serve_line(hello, incoming, outgoing)
        except HandshakeRefused as refused:
            self._seldom.write(f"{peer} was refused: {refused}")
            outgoing.write(dump({"refused": str(refused)}))
        except (OSError, TimeoutError) as error:  # the client is gone, or never proved that it knows the token
            logger.debug("hub: %s is gone: %r", peer, error)
            # The reader keeps the error, the error its frames, and they the reader, until the next full collection: in
            # a process that makes few objects there is none for hours.
            error.__traceback__ = None
        except Exception as error:  # the hub must survive whatever a client sends
            self._seldom.write(f"{peer} sent an invalid message and was disconnected: {str(error)[:200]!r}")
            if outgoing.keys is not None:
                outgoing.write(dump({"refused": f"an invalid message: {str(error)[:200]}"}))
        finally:
            writer.close()

    async def _admit_stranger(self, incoming: Incoming, outgoing: Outgoing) -> dict[str, Any] | None:
        """Return what a client that knows the token says first, None if the connection ends before."""
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop_stranger()
        self._strangers[outgoing] = None
        try:
            async with asyncio.timeout(_HELLO_S):
                if not await self._shake_hands(incoming, outgoing) or (line := await incoming.next()) is None:
                    return None
        finally:
            self._strangers.pop(outgoing, None)
        hello = parse(line)
        if "peer" not in hello and type(hello.get("job")) is not str:
            raise ValueError("a client must name its job")
        return hello

    def _drop_stranger(self) -> None:
        """End one handshake, of the address that has begun the most: a flood from there harms no other address."""
        hosts = {each: each.peer[0] if each.peer else "" for each in self._strangers}
        ((most, _),) = Counter(hosts.values()).most_common(1)
        oldest = next(each for each, host in hosts.items() if host == most)
        self._seldom.write(
            f"{oldest.peer} was disconnected: {_MAX_STRANGERS} connections have not proved that they know the token either"
        )
        del self._strangers[oldest]
        oldest.transport.abort()

    async def _shake_hands(self, incoming: Incoming, outgoing: Outgoing) -> bool:
        """Let both ends prove that they know the token; return False if the connection ends before."""
        if (line := await incoming.next()) is None:
            return False
        greeting = parse(line)
        check_greeting(greeting)
        nonce = new_nonce()
        keys = LineAuthenticator(self._token, (greeting["nonce"], nonce), is_client=False)
        outgoing.write(dump({"nonce": nonce}))
        if (line := await incoming.next()) is None:
            return False
        if not keys.is_proof(parse(line).get("proof")):
            raise HandshakeRefused(WRONG_TOKEN)
        outgoing.write(dump({"proof": keys.proof}))
        incoming.keys = outgoing.keys = keys
        return True

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
    if op != "delete":
        check_vote(key, value)


def answer_to(request: dict[str, Any], *, done: bool) -> bytes:
    """Return the answer to a request, nothing if it wants none."""
    return dump({"id": int(request["id"]), "done": done}) if "id" in request else b""
