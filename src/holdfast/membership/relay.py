"""A node's own store: its workers connect to their launcher, and the launcher alone to the job's store.

What a node's workers vote crosses the network as one message, and what the job's store announces comes once to a node.
Everything else that a worker writes is forwarded; it is answered once the job's store has it, as if there were no relay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.errors import StoreLost
from holdfast.membership.acts import NodeVotes, vote_key
from holdfast.membership.server import Client, Incoming, LineServer, Outgoing, answer_to, check_request
from holdfast.membership.store import LEASE_S, Store, remove
from holdfast.membership.wire import BEAT, MAX_LINE_BYTES, dump, parse

_THREADS = 8
"""Requests that wait for the job's store at the same time."""


class Relay(LineServer):
    """Serves ``store`` to the workers of this node, on the loopback interface.

    Args:
        store: The job's store; it stays open when the relay is closed.
        job: Name of the job that workers ask for.
        token: Token that workers must know.
        node: Name of this node, unique in the job.
        ranks: Returns the workers of this node, whenever it is called.
        lease_s: From it follows how often workers send heartbeats, and when they consider the relay lost.

    Raises:
        ConfigError: if it cannot listen.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        token: str,
        *,
        node: str,
        ranks: Callable[[], Collection[int]],
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__(token, "127.0.0.1", 0)
        self._store = store
        self._job = job
        self._greeting = {
            "id": 0,
            "done": True,
            "lease_s": lease_s,
            "address": store.own_address,
        }
        self._items: dict[str, str] = {}
        self._clients: set[Client] = set()
        self._votes = NodeVotes(node, self._items.get, ranks)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-relay")
        self._forwarding: set[asyncio.Task[None]] = set()
        self._creating: dict[str, asyncio.Event] = {}
        """Set once the job's store has answered: of several workers that create a key at once, only one asks."""
        self._thread.start()
        store.listen(self._hear)

    def close(self) -> None:
        """Stop serving; workers detect the loss of the store."""
        self._store.listen(lambda key, value: None)
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _end(self) -> list[asyncio.Task[None]]:
        for task in self._forwarding:
            task.cancel()
        return list(self._forwarding)

    # -- from the job's store, in its thread

    def _hear(self, key: str, value: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # closed at this moment
            self._loop.call_soon_threadsafe(self._pass_on, key, value)

    def _pass_on(self, key: str, value: str | None) -> None:
        if not key:
            self._loop.stop()  # the store is lost, for the workers, too
            return
        if value is None:
            remove(self._items, key)
        else:
            self._items[key] = value
        line = dump({"key": key, "value": value})
        for client in self._clients:
            client.send(line)
        self._votes.note(key)
        self._cast()

    # -- from the workers

    async def _serve_line(self, hello: dict[str, Any], incoming: Incoming, outgoing: Outgoing) -> None:
        if hello.get("job") != self._job:
            raise ValueError(f"this relay serves the job {self._job!r}, not {hello.get('job')!r:.80}")
        incoming.lines.limit_bytes = MAX_LINE_BYTES
        client = Client(outgoing, self._job)
        for key, value in self._items.items():
            client.send(dump({"key": key, "value": value}))
        client.send(dump(self._greeting))
        self._clients.add(client)
        try:
            while (line := await incoming.next()) is not None:
                client.send(self._answer(client, line))
                await outgoing.drain()
        finally:
            self._clients.discard(client)

    def _answer(self, client: Client, line: bytes) -> bytes:
        """Return what is answered at once."""
        if not line:
            return BEAT
        request = parse(line)
        check_request(request)
        op, key, value = request["op"], request["key"], request.get("value", "")
        if request.get("leased") is True:
            raise ValueError("a worker's keys have no lease: its launcher reports its death")
        if op != "delete" and (vote := vote_key(key)):
            self._votes.take(vote, value)
            self._cast()
            return answer_to(request, done=True)
        if op == "create" and key in self._items:
            return answer_to(request, done=False)
        self._start(self._create(client, request) if op == "create" else self._forward(client, request))
        return b""

    def _cast(self) -> None:
        for key, votes in self._votes.complete():
            if self._store.posts_at_once:
                self._post(key, votes)
            else:
                self._start(self._write("post", key, votes))

    def _post(self, key: str, value: str) -> None:
        with contextlib.suppress(StoreLost):  # the listener ends the relay
            self._store.post(key, value)

    async def _forward(self, client: Client, request: dict[str, Any]) -> None:
        """Forward a request, and send the answer after the changes that the store made before it answered."""
        done = await self._write(request["op"], request["key"], request.get("value", ""))
        client.send(answer_to(request, done=done))

    async def _create(self, client: Client, request: dict[str, Any]) -> None:
        """Forward the creation of a key, unless another one is on its way: then wait for that, which exists."""
        key = request["key"]
        if (first := self._creating.get(key)) is not None:
            await first.wait()
            client.send(answer_to(request, done=False))
            return
        self._creating[key] = asyncio.Event()
        try:
            await self._forward(client, request)
        finally:
            self._creating.pop(key).set()

    async def _write(self, op: str, key: str, value: str) -> bool:
        """Write to the job's store in a thread; return whether it did, which only ``create`` may not."""
        write: Any = getattr(self._store, op)
        arguments = [key] if op == "delete" else [key, value]
        done = await self._loop.run_in_executor(self._pool, write, *arguments)
        return done is not False

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(self._until_lost(work))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)

    async def _until_lost(self, work: Coroutine[Any, Any, object]) -> None:
        with contextlib.suppress(StoreLost):  # the listener ends the relay
            await work
