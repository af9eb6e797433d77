"""The store as a worker or a launcher sees it that is not the one which hosts it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from typing import Any

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership.store import Mirror, check_size
from holdfast.membership.wire import HELLO, LEASE_S, dump, parse

_ANSWER_S = 30.0
"""A hub that does not answer for so long is lost."""
_MAX_READ = 1 << 16

_clients: weakref.WeakSet[HubStore] = weakref.WeakSet()


class HubStore(Mirror):
    """A connection to a :class:`~holdfast.membership.hub.Hub`.

    Args:
        address: ``HOST:PORT``.
        token: What the hub asks for.
        job: Keys of other jobs are not seen.
        lease_s: How long the hub waits before it gives a silent client up.

    Raises:
        ConfigError: if the address is none, or the hub refuses us.
        StoreLost: if nobody answers there.
    """

    def __init__(self, address: str, token: str, job: str = "", *, lease_s: float = LEASE_S) -> None:
        super().__init__()
        self._address = address
        self._beat_s = lease_s / 4
        self._sending = threading.Lock()
        self._asked = 0
        self._answers: dict[int, bool] = {}
        self._socket = _connect(address)
        self._refused = ""
        self._send({"hello": HELLO, "token": token, "job": job})
        self._thread = threading.Thread(target=self._listen, name="holdfast-store", daemon=True)
        self._thread.start()
        _clients.add(self)
        try:
            self._await(0)
        except StoreLost as error:
            if self._refused:
                msg = f"the store at {address} refused us for {self._refused}: --rdzv-token (HOLDFAST_TOKEN) must be what its launcher was given"
                raise ConfigError(msg) from error
            raise

    @property
    def own_address(self) -> str:
        """See :attr:`~holdfast.membership.store.Store.own_address`."""
        address: str = self._socket.getsockname()[0]
        return address

    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        """See :meth:`~holdfast.membership.store.Store.put`."""
        check_size(key, value)
        self._ask("put", key=key, value=value, leased=leased)

    def create(self, key: str, value: str) -> bool:
        """See :meth:`~holdfast.membership.store.Store.create`."""
        check_size(key, value)
        return self._ask("create", key=key, value=value)

    def delete(self, prefix: str) -> None:
        """See :meth:`~holdfast.membership.store.Store.delete`."""
        self._ask("delete", key=prefix)

    def close(self) -> None:
        """See :meth:`~holdfast.membership.store.Store.close`."""
        self._note_lost(f"the connection to the store at {self._address} was closed here")
        with contextlib.suppress(OSError):  # the hub may have been first
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()

    # -- questions and answers

    def _ask(self, op: str, **fields: Any) -> bool:
        with self._sending:
            self._asked += 1
            number = self._asked
            self._send({"id": number, "op": op, **fields})
        return self._await(number)

    def _send(self, message: dict[str, Any]) -> None:
        if self._lost:
            raise StoreLost(self._lost)
        try:
            self._socket.sendall(dump(message))
        except OSError as error:
            self._lose(error)
            raise StoreLost(self._lost) from error

    def _await(self, number: int) -> bool:
        answer = self.wait(lambda: self._answers.pop(number, None), _ANSWER_S)
        if answer is None:
            self._lose(f"no answer for {_ANSWER_S:g} s")
            raise StoreLost(self._lost)
        return answer

    def _lose(self, why: object) -> None:
        self._note_lost(f"the store at {self._address} cannot be reached any more: {why}")

    # -- listening, in a thread

    def _listen(self) -> None:
        rest, heard_s, beaten_s = b"", time.monotonic(), time.monotonic()
        self._socket.settimeout(self._beat_s / 2)
        while not self._lost:
            if time.monotonic() - beaten_s > self._beat_s:
                self._beat()
                beaten_s = time.monotonic()
            try:
                data = self._socket.recv(_MAX_READ)
            except TimeoutError:
                if time.monotonic() - heard_s > _ANSWER_S:
                    self._lose(f"nothing was heard of it for {_ANSWER_S:g} s")
                continue
            except OSError as error:
                self._lose(error.strerror or error)
                return
            if not data:
                self._lose("it closed the connection")
                return
            heard_s = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(line)

    def _beat(self) -> None:
        """Show that we are alive; the answer shows that the hub is."""
        if self._sending.acquire(blocking=False):  # else somebody is sending just now
            try:
                self._send({"id": -1, "op": "ping"})
            except StoreLost:
                return
            finally:
                self._sending.release()

    def _hear(self, line: bytes) -> None:
        message = parse(line)
        if "key" in message:
            self._note(message["key"], message["value"])
        elif "refused" in message:
            self._refused = message["refused"]
            self._lose(f"it refused us for {self._refused}")
        elif message["id"] >= 0:
            with self._changed:
                self._answers[message["id"]] = message["done"]
                self._changed.notify_all()

    def _forget(self) -> None:
        """After a fork, in the child: the connection is the parent's."""
        os.close(self._socket.detach())
        self._lost = "the connection to the store belongs to the process that was forked from"


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        msg = f"the address of the store must be HOST:PORT, got {address!r}"
        raise ConfigError(msg)
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S)
    except OSError as error:
        msg = f"there is no store at {address}: {error.strerror or error}"
        raise StoreLost(msg) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _after_fork() -> None:
    for client in list(_clients):
        client._forget()


os.register_at_fork(after_in_child=_after_fork)
