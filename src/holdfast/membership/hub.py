"""The built-in store: a server in the launcher, in a thread of its own.

It keeps everything in memory, for as long as the launcher lives: whoever needs the store to outlive any process takes etcd.
Nobody is served who does not know the token, and no bytes that somebody sends can do more than end their own connection.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from typing import Any, Self

from holdfast.errors import ConfigError
from holdfast.membership.store import MAX_KEY_BYTES, MAX_VALUE_BYTES
from holdfast.membership.wire import HELLO, LEASE_S, MAX_LINE_BYTES, dump, parse

logger = logging.getLogger(__name__)

_HELLO_S = 10.0
_CLOSE_S = 1.0
_MAX_BACKLOG_BYTES = 64 << 20
"""A client that lets so much pile up does not read any more."""
_MAX_KEYS = 1 << 20


class _Client:
    """One connection."""

    def __init__(self, writer: asyncio.StreamWriter, job: str) -> None:
        self.writer = writer
        self.job = job
        self.heard_s = time.monotonic()

    def send(self, message: dict[str, Any]) -> None:
        self.writer.write(dump(message))
        if self.writer.transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            self.writer.transport.abort()


class Hub:
    """A store that this process hosts, as a context.

    Args:
        token: What clients must know.
        host: Where to listen.
        port: 0 takes any that is free.
        lease_s: A client that has not been heard of for so long loses what it leased.

    Raises:
        ConfigError: if it cannot listen there.
    """

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0, *, lease_s: float = LEASE_S) -> None:
        self._token = token
        self._lease_s = lease_s
        self._items: dict[str, str] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._clients: set[_Client] = set()
        self._loop = asyncio.new_event_loop()
        self._leases: dict[str, _Client] = {}
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, host, port, limit=MAX_LINE_BYTES)
            )
        except OSError as error:
            self._loop.close()
            msg = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port, or an address of this machine"
            raise ConfigError(msg) from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._run, name="holdfast-hub", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; clients find that the store is lost."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.run_until_complete(self._cut_off_all())
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        leases = self._loop.create_task(self._end_leases())
        self._loop.run_forever()
        leases.cancel()

    async def _cut_off_all(self) -> None:
        for connection in list(self._connections):
            connection.transport.abort()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        if serving:
            await asyncio.wait(serving, timeout=_CLOSE_S)

    # -- one client

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        client: _Client | None = None
        self._connections.add(writer)
        try:
            hello = parse(await asyncio.wait_for(reader.readline(), _HELLO_S))
            client = self._welcome(hello, writer, peer)
            while client is not None and (line := await reader.readline()):
                client.heard_s = time.monotonic()
                request = parse(line)
                client.send({"id": int(request["id"]), "done": self._answer(client, request)})
                await writer.drain()
        except (ValueError, KeyError, TypeError, RecursionError, asyncio.LimitOverrunError) as error:
            logger.warning("hub: %s sent nonsense and was cut off: %s", peer, str(error)[:200])
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # it is gone, or never said who it is; that is the client's affair
        finally:
            self._connections.discard(writer)
            if client is not None:
                self._clients.discard(client)
            writer.close()

    def _welcome(self, hello: dict[str, Any], writer: asyncio.StreamWriter, peer: object) -> _Client | None:
        token, job = hello.get("token"), hello.get("job")
        known = type(token) is str and hmac.compare_digest(token.encode(), self._token.encode())
        if not known or hello.get("hello") != HELLO or type(job) is not str:
            why = "a wrong token" if hello.get("hello") == HELLO else "an unknown greeting"
            logger.warning("hub: refused %s: %s", peer, why)
            writer.write(dump({"id": 0, "refused": why}))
            return None
        client = _Client(writer, f"{job}/")
        self._clients.add(client)
        for key, value in self._items.items():
            if key.startswith(client.job):
                client.send({"key": key[len(client.job) :], "value": value})
        client.send({"id": 0, "done": True})
        return client

    # -- requests

    def _answer(self, client: _Client, request: dict[str, Any]) -> bool:
        op, key = request["op"], request.get("key", "")
        if op == "ping":
            return True
        if type(key) is not str or len(key.encode()) > MAX_KEY_BYTES:
            msg = f"a key must be a string of at most {MAX_KEY_BYTES} bytes"
            raise ValueError(msg)
        path = client.job + key
        if op == "delete":
            for gone in [name for name in self._items if name.startswith(path)]:
                self._change(gone, None)
            return True
        value = request["value"]
        if op not in ("put", "create") or type(value) is not str or len(value.encode()) > MAX_VALUE_BYTES:
            msg = f"{op!r:.20} is no request, or its value is no string of at most {MAX_VALUE_BYTES} bytes"
            raise ValueError(msg)
        if op == "create" and path in self._items:
            return False
        if len(self._items) >= _MAX_KEYS and path not in self._items:
            msg = f"the store is full: it holds {_MAX_KEYS} keys"
            raise ValueError(msg)
        self._leases.pop(path, None)
        if request.get("leased") is True:
            self._leases[path] = client
        self._change(path, value)
        return True

    def _change(self, path: str, value: str | None) -> None:
        if value is None:
            self._items.pop(path, None)
            self._leases.pop(path, None)
        else:
            self._items[path] = value
        for client in self._clients:
            if path.startswith(client.job):
                client.send({"key": path[len(client.job) :], "value": value})

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 5)
            now_s = time.monotonic()
            for path, client in list(self._leases.items()):
                if now_s - client.heard_s > self._lease_s:
                    logger.warning("hub: nothing was heard of the owner of %s for %g s", path, self._lease_s)
                    self._change(path, None)
