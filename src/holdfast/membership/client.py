"""Client of the built-in store, for workers and for launchers."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership.authentication import ClientHandshake, HandshakeRefused, LineAuthenticator
from holdfast.membership.store import (
    LEASE_S,
    SilenceTimer,
    Store,
    beat_s,
    best_address,
    check_size,
    is_port,
    patience_s,
    remove,
    search_s,
)
from holdfast.membership.wire import BEAT, MAX_HELLO_BYTES, MAX_LINE_BYTES, NOT_LEADING, LineSplitter, dump, parse

_MAX_READ = 1 << 16
_LOOK_S = 0.05
"""Pause between two rounds of asking all hubs which one leads."""


_TRY_BEATS = 0.9
"""How long one of several hubs may take to accept a connection: less than the search takes for a suspension."""


class HubStore(Store):
    """A connection to a :class:`~holdfast.membership.hub.Hub`, or to the one that leads a cluster of them.

    The store is lost when the hub has been silent for :func:`~holdfast.membership.store.patience_s` of its lease. In a
    cluster the client then looks for the next hub, and repeats its last request there; the store is lost if none answers
    within :func:`~holdfast.membership.store.search_s`, or if the lease of this client has expired meanwhile.

    Args:
        address: ``HOST:PORT``, or ``HOST:PORT,HOST:PORT,...`` of a cluster.
        token: Token of the hub.
        job: Name of the job; keys of other jobs are not visible.

    Raises:
        ConfigError: if the address is invalid, or the hub refuses the connection.
        StoreLost: if no hub answers there.
    """

    def __init__(self, address: str, token: str, job: str = "") -> None:
        self._address = address
        self._places = [_split(each) for each in address.split(",")]
        self._place = 0
        self._refusals: dict[int, StoreLost] = {}
        """Why there was no store at a place when it was last tried."""
        self._token = token
        self._hello: dict[str, Any] = {"job": job, "session": secrets.token_hex(8)}
        self._rest = b""
        """What the connection has not taken of a heartbeat."""
        self._asking, self._sending = threading.Lock(), threading.Lock()
        self._request_number = 0
        self._unanswered: tuple[int, bytes] | None = None
        self._answers: dict[int, bool] = {}
        self._keep_time(LEASE_S)
        self._beaten_s = time.monotonic()
        self._beat_is_answered = True
        self._begin()
        own_end: str = self._socket.getsockname()[0]
        self._own_address = self._route or (own_end if len(self._places) == 1 else best_address(self._places))
        self._thread = threading.Thread(target=self._listen, name="holdfast-store", daemon=True)
        self._thread.start()

    @property
    def own_address(self) -> str:
        return self._own_address

    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        check_size(key, value)
        self._request("put", key=key, value=value, leased=leased)

    def create(self, key: str, value: str) -> bool:
        check_size(key, value)
        return self._request("create", key=key, value=value)

    @property
    def posts_at_once(self) -> bool:
        """See :attr:`Store.posts_at_once`; only a request that awaits its answer is repeated at the next hub."""
        return len(self._places) == 1

    def post(self, key: str, value: str) -> None:
        self._post("put", key, value)

    def post_new(self, key: str, value: str) -> None:
        self._post("create", key, value)

    def delete(self, key: str) -> None:
        check_size(key, "")
        self._request("delete", key=key)

    def close(self) -> None:
        self._lose("the connection was closed here")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._sending:  # otherwise another thread could send to a reused file descriptor
            self._socket.close()

    # -- requests

    def _post(self, op: str, key: str, value: str) -> None:
        check_size(key, value)
        if not self.posts_at_once:
            self._request(op, key=key, value=value)
            return
        with self._sending:
            self._send(dump({"op": op, "key": key, "value": value}))

    def _request(self, op: str, **fields: Any) -> bool:
        with self._asking:  # one at a time: only the last request is repeated at the next hub
            with self._sending:
                self._request_number += 1
                number = self._request_number
                line = dump({"id": number, "op": op, **fields})
                self._unanswered = number, line  # before it is sent: the listening thread may have to repeat it
                self._send(line)
            return self._await(number)

    def _send(self, line: bytes) -> None:
        if self._lost:
            raise StoreLost(self._lost)
        try:
            rest, self._rest = self._rest, b""
            self._socket.sendall(rest + self._keys.sign(line))
        except OSError as error:
            if len(self._places) == 1:
                self._lose(error.strerror or error)
                raise StoreLost(self._lost) from error
            # The listening thread notices it, too, and repeats the request at the next hub.

    def _await(self, number: int) -> bool:
        """Return the answer; the listening thread ends the wait if there will be none."""
        answer = self.wait(lambda: self._answers.get(number))
        assert answer is not None
        del self._answers[number]
        return answer

    def _lose(self, why: object) -> None:
        self._note_lost(f"the connection to the store at {self._address} is lost: {why}")
        with contextlib.suppress(OSError):  # may be closed already; wakes threads that send or listen
            self._socket.shutdown(socket.SHUT_RDWR)

    def _keep_time(self, lease_s: float) -> None:
        self._beat_s = beat_s(lease_s)
        self._silence = SilenceTimer(patience_s(lease_s), self._beat_s / 2)
        self._search = SilenceTimer(search_s(lease_s), self._beat_s / 2)

    # -- connecting

    def _begin(self) -> None:
        """Connect for the first time; the hubs of a cluster may be looking for a leader."""
        ends_s = time.monotonic() + search_s(LEASE_S)
        try:
            while not self._try_all(lambda: time.monotonic() > ends_s):
                time.sleep(_LOOK_S)
        except HandshakeRefused as error:
            raise ConfigError(f"the store at {self._address} {error}") from error

    def _try_all(self, is_late: Callable[[], bool]) -> bool:
        """Connect to the hub that leads; return whether there is one. Raise ``StoreLost`` if it is too late to try again."""
        for _ in self._places:
            try:
                self._connect(self._places[self._place])
            except StoreLost as error:
                self._refusals[self._place] = error
                self._place = (self._place + 1) % len(self._places)
                if len(self._places) == 1 or is_late():
                    raise self._worst_refusal() from error
            else:
                self._refusals.clear()
                return True
        return False

    def _worst_refusal(self) -> StoreLost:
        """Return why there is no store: hubs that are there wait for the one that is not."""
        return min(self._refusals.values(), key=lambda error: str(error) == NOT_LEADING)

    def _connect(self, place: tuple[str, int]) -> None:
        """Connect to a hub and replace the local copy; raise ``StoreLost`` if there is none, or another one leads."""
        began_s, where = time.monotonic(), f"{place[0]}:{place[1]}"
        timeout_s = self._silence.limit_s if len(self._places) == 1 else _TRY_BEATS * self._beat_s
        try:
            connection = socket.create_connection(place, timeout=timeout_s)
        except OSError as error:
            raise StoreLost(f"there is no store at {where}: {error.strerror or error}") from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = ClientHandshake(self._token, self._hello)
            keys, lines, read = _shake_hands(connection, handshake, timeout_s)
            items, self._read = _read_items(connection, keys, lines, read, self._take_greeting)
            self._lines = lines
            connection.settimeout(None)
        except BaseException as error:
            connection.close()
            if isinstance(error, (HandshakeRefused, StoreLost)):
                raise
            if isinstance(error, (OSError, ValueError, KeyError)):
                raise StoreLost(f"the connection to the store at {where} is lost: {_why(error)}") from error
            raise
        self._adopt(connection, keys, items)
        self._silence.broken(began_s)
        self._search.broken(began_s)
        self._beat_is_answered = True

    def _adopt(self, connection: socket.socket, keys: LineAuthenticator, items: dict[str, str]) -> None:
        """Take a new connection: replace the local copy, and repeat the request that was not answered."""
        is_first = "again" not in self._hello
        self._hello["again"] = True
        if is_first:
            self._socket, self._keys = connection, keys
            super().__init__()  # from here on, a fork closes open sockets
        with self._changed:
            for gone in self._items.keys() - items.keys():
                self._note(gone, None)
            for key, value in items.items():
                if self._items.get(key) != value:
                    self._note(key, value)
        if is_first:
            return
        with self._sending:
            self._socket.close()
            self._socket, self._keys, self._rest = connection, keys, b""
            if self._unanswered is not None:
                connection.sendall(keys.sign(self._unanswered[1]))

    def _take_greeting(self, message: dict[str, Any]) -> None:
        self._route = message.get("address", "")
        if beat_s(message["lease_s"]) != self._beat_s:
            self._keep_time(message["lease_s"])

    # -- listening, in a thread

    def _listen(self) -> None:
        while not self._lost:
            try:
                why = self._read_all()
            except OSError as error:
                why = error.strerror or str(error)
            except Exception as error:  # any error: otherwise the waiting threads would never wake
                why = _why(error)
            with contextlib.suppress(OSError):  # wakes a thread that sends to a hub that does not read
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._lost and not (len(self._places) > 1 and self._find_next()):
                self._lose(why)

    def _find_next(self) -> bool:
        """Connect to the hub that leads now; return whether there was one in time, and this client's lease was kept."""
        while not self._lost:
            try:
                if self._try_all(self._search.is_too_long):
                    return True
            except (HandshakeRefused, StoreLost, OSError):
                return False
            time.sleep(_LOOK_S)
        return False

    def _read_all(self) -> str:
        """Read until the connection ends or the hub is silent; return why."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        for line in self._read:
            self._receive(line)
        while not self._lost:
            self._beat()
            something = poll.poll(self._beat_s * 1000 / 2)
            too_long = self._silence.is_too_long()
            self._search.is_too_long()
            if not something:
                if too_long:
                    return f"no heartbeat for {self._silence.limit_s:g} s"
                continue
            if not (data := self._socket.recv(_MAX_READ)):
                return "it closed the connection"
            for line in self._lines.feed(data):
                self._receive(line)
        return self._lost

    def _beat(self) -> None:
        """Send a heartbeat; the answer is that of the hub."""
        now_s = time.monotonic()
        if not self._beat_is_answered or now_s - self._beaten_s < self._beat_s:
            return
        if self._sending.acquire(blocking=False):  # otherwise another thread is sending
            try:
                self._rest = self._rest or self._keys.sign(BEAT)
                self._rest = self._rest[self._socket.send(self._rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                return  # the hub does not read; the rest is sent first next time
            finally:
                self._sending.release()
            self._beaten_s, self._beat_is_answered = now_s, False

    def _receive(self, line: bytes) -> None:
        line = self._keys.verify(line)
        if not line:
            self._silence.broken(self._beaten_s)  # not the current time: the hub counts from when it got the heartbeat
            self._search.broken(self._beaten_s)
            self._beat_is_answered = True
            return
        message = parse(line)
        if "key" in message:
            self._note(message["key"], message["value"])
        elif "refused" in message:
            self._lose(f"it refused the connection for {message['refused']}")
        else:
            self._take_answer(message["id"], message["done"])

    def _take_answer(self, number: int, done: bool) -> None:
        if self._unanswered is None or number != self._unanswered[0]:
            return  # it was sent twice, and answered twice
        self._unanswered = None
        with self._changed:
            self._answers[number] = done
            self._wake()

    def _sockets(self) -> list[socket.socket]:
        return [self._socket]

    def _forget(self) -> None:
        super()._forget()
        self._asking, self._sending = threading.Lock(), threading.Lock()


def _shake_hands(
    connection: socket.socket, handshake: ClientHandshake, timeout_s: float
) -> tuple[LineAuthenticator, LineSplitter, list[bytes]]:
    """Prove the knowledge of the token to a hub, and let it prove its own; also return what it has sent after that."""
    ends_s = time.monotonic() + timeout_s
    connection.sendall(handshake.greeting)
    lines = LineSplitter(MAX_HELLO_BYTES)
    while data := connection.recv(MAX_HELLO_BYTES):
        read = lines.feed(data)
        for number, line in enumerate(read):
            connection.sendall(handshake.take(line))
            if handshake.done is not None:
                lines.limit_bytes = 2 * MAX_LINE_BYTES
                return handshake.done, lines, read[number + 1 :]
        if time.monotonic() > ends_s:
            raise TimeoutError("the handshake took too long")
    raise ConnectionResetError("it closed the connection")


def _read_items(
    connection: socket.socket,
    keys: LineAuthenticator,
    lines: LineSplitter,
    read: list[bytes],
    take_greeting: Callable[[dict[str, Any]], None],
) -> tuple[dict[str, str], list[bytes]]:
    """Return all keys that a hub sends at the beginning, and what it has sent after them, beginning with ``read``."""
    items = dict[str, str]()
    while True:
        for number, line in enumerate(read):
            message = parse(keys.verify(line))
            if "refused" in message:
                raise (
                    StoreLost(NOT_LEADING) if message["refused"] == NOT_LEADING else HandshakeRefused(_refusal(message))
                )
            if "key" not in message:
                take_greeting(message)
                return items, read[number + 1 :]
            if message["value"] is None:
                remove(items, message["key"])
            else:
                items[message["key"]] = message["value"]
        if not (data := connection.recv(_MAX_READ)):
            raise ConnectionResetError("it closed the connection")
        read = lines.feed(data)


def _refusal(message: dict[str, Any]) -> str:
    return f"refused the connection: {message['refused']}"


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"it sent an invalid message: {error!r:.200}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not is_port(port):
        raise ConfigError(f"the address of the store must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)
