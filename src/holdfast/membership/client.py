"""Client of the built-in store, for workers and for launchers that do not host it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership.store import LEASE_S, SilenceTimer, Store, beat_s, check_size, patience_s
from holdfast.membership.wire import BEAT, HELLO, MAX_LINE_BYTES, LineSplitter, dump, parse

_MAX_READ = 1 << 16


class HubStore(Store):
    """A connection to a :class:`~holdfast.membership.hub.Hub`.

    The store is lost when the hub has been silent for :func:`~holdfast.membership.store.patience_s` of its lease.

    Args:
        address: ``HOST:PORT``.
        token: Token of the hub.
        job: Name of the job; keys of other jobs are not visible.

    Raises:
        ConfigError: if the address is invalid, or the hub refuses the connection.
        StoreLost: if no hub answers there.
    """

    def __init__(self, address: str, token: str, job: str = "") -> None:
        self._address = address
        self._sending = threading.Lock()
        self._request_number = 0
        self._answers: dict[int, bool] = {}
        self._refused = ""
        self._keep_time(LEASE_S)
        self._beaten_s = time.monotonic()
        self._beat_is_answered = True
        self._socket = _connect(address)
        self._own_address: str = self._socket.getsockname()[0]
        super().__init__()  # from here on, a fork closes open sockets
        self._thread = threading.Thread(target=self._listen, name="holdfast-store", daemon=True)
        self._thread.start()
        try:
            self._send({"hello": HELLO, "token": token, "job": job})
            self._await(0)
        except StoreLost as error:
            self.close()
            if self._refused:
                raise ConfigError(
                    f"the store at {address} refused the connection for {self._refused}: --rdzv-token (HOLDFAST_TOKEN) must be the token of its launcher"
                ) from error
            raise

    @property
    def counts_votes(self) -> bool:
        """See :attr:`Store.counts_votes`."""
        return True

    @property
    def own_address(self) -> str:
        """See :attr:`Store.own_address`."""
        return self._own_address

    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        """See :meth:`Store.put`."""
        check_size(key, value)
        self._request("put", key=key, value=value, leased=leased)

    def create(self, key: str, value: str) -> bool:
        """See :meth:`Store.create`."""
        check_size(key, value)
        return self._request("create", key=key, value=value)

    def post(self, key: str, value: str) -> None:
        """See :meth:`Store.post`."""
        check_size(key, value)
        with self._sending:
            self._send({"op": "put", "key": key, "value": value})

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        check_size(key, "")
        self._request("delete", key=key)

    def close(self) -> None:
        """See :meth:`Store.close`."""
        self._lose("the connection was closed here")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._sending:  # otherwise another thread could send to a reused file descriptor
            self._socket.close()

    # -- requests

    def _request(self, op: str, **fields: Any) -> bool:
        with self._sending:
            self._request_number += 1
            number = self._request_number
            self._send({"id": number, "op": op, **fields})
        return self._await(number)

    def _send(self, message: dict[str, Any]) -> None:
        if self._lost:
            raise StoreLost(self._lost)
        try:
            self._socket.sendall(dump(message))
        except OSError as error:
            self._lose(error.strerror or error)
            raise StoreLost(self._lost) from error

    def _await(self, number: int) -> bool:
        """Return the answer; the listening thread ends the wait if there will be none."""
        answer = self.wait(lambda: self._answers.pop(number, None))
        assert answer is not None
        return answer

    def _lose(self, why: object) -> None:
        self._note_lost(f"the connection to the store at {self._address} is lost: {why}")
        with contextlib.suppress(OSError):  # may be closed already; wakes threads that send or listen
            self._socket.shutdown(socket.SHUT_RDWR)

    def _keep_time(self, lease_s: float) -> None:
        self._beat_s = beat_s(lease_s)
        self._silence = SilenceTimer(patience_s(lease_s), self._beat_s / 2)

    # -- listening, in a thread

    def _listen(self) -> None:
        try:
            self._read_all()
        except OSError as error:
            self._lose(error.strerror or error)
        except Exception as error:  # any error: otherwise the waiting threads would never wake
            self._lose(f"it sent an invalid message: {error!r:.200}")

    def _read_all(self) -> None:
        lines = LineSplitter(2 * MAX_LINE_BYTES)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._lost:
            self._beat()
            something = poll.poll(self._beat_s * 1000 / 2)
            too_long = self._silence.is_too_long()
            if not something:
                if too_long:
                    self._lose(f"no heartbeat for {self._silence.limit_s:g} s")
                continue
            if not (data := self._socket.recv(_MAX_READ)):
                self._lose("it closed the connection")
            for line in lines.feed(data):
                self._receive(line)

    def _beat(self) -> None:
        """Send a heartbeat; the answer is that of the hub."""
        now_s = time.monotonic()
        if not self._beat_is_answered or now_s - self._beaten_s < self._beat_s:
            return
        if self._sending.acquire(blocking=False):  # otherwise another thread is sending
            try:
                self._socket.send(BEAT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return  # the hub does not read
            finally:
                self._sending.release()
            self._beaten_s, self._beat_is_answered = now_s, False

    def _receive(self, line: bytes) -> None:
        if not line:
            self._silence.broken(self._beaten_s)  # not the current time: the hub counts from when it got the heartbeat
            self._beat_is_answered = True
            return
        message = parse(line)
        if "key" in message:
            self._note(message["key"], message["value"])
        elif "refused" in message:
            self._refused = message["refused"]
            self._lose(f"it refused the connection for {self._refused}")
        else:
            self._take_answer(message)

    def _take_answer(self, message: dict[str, Any]) -> None:
        if "lease_s" in message:
            self._keep_time(message["lease_s"])
            self._own_address = message.get("address", self._own_address)
        with self._changed:
            self._answers[message["id"]] = message["done"]
            self._changed.notify_all()

    def _sockets(self) -> list[socket.socket]:
        return [self._socket]

    def _forget(self) -> None:
        super()._forget()
        self._sending = threading.Lock()


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"the address of the store must be HOST:PORT, got {address!r}")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=patience_s(LEASE_S))
    except OSError as error:
        raise StoreLost(f"there is no store at {address}: {error.strerror or error}") from error
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
