"""Client of an etcd cluster's JSON gateway: one request at a time, to one member until it does not answer."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from holdfast.errors import ConfigError
from holdfast.membership.store import is_port

_PORT = 2379
CONNECT_S = 1.0
"""Timeout for connecting to a member, in seconds."""
ANSWER_S = 3.0
"""Timeout for an answer, in seconds; a leader election takes a second or two."""
NOT_FOUND = 5
"""Status code for a missing object, such as a lease."""
_UNAVAILABLE = (1, 2, 4, 8, 11, 13, 14)
"""gRPC status codes after which another member, or a later attempt, may succeed, such as "no leader"."""
_NOBODY = 16
_OLD = "auth store is old"
"""Text of etcd's error if users have changed since the login."""


class EtcdRefused(Exception):
    """etcd answered the request with an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message") or error.get("error") or error))
        code = error.get("code") or error.get("grpc_code")
        self.code = code if type(code) is int else 0


class EtcdUnavailable(Exception):
    """The member cannot answer now."""


_FAILURES = (OSError, http.client.HTTPException, ValueError, KeyError, OverflowError, MemoryError, EtcdUnavailable)
"""All errors that a request to an unavailable member, or to another program in its place, may raise: an answer may be said
to be longer than memory."""
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class EtcdCluster:
    """The members, ``[USER@]HOST:PORT[,HOST:PORT...]``, and the one in use; ``answer_s`` is its timeout."""

    def __init__(self, where: str, password: str, answer_s: float) -> None:
        user, _, hosts = where.rpartition("@")
        self.members = tuple(_address(host) for host in hosts.split(","))
        self.answer_s = answer_s
        self._user, self._password = user, password
        self._pass = ""
        self._turn = 0
        self._lock = threading.Lock()

    @property
    def member(self) -> tuple[str, int]:
        """The member in use."""
        return self.members[self._turn % len(self.members)]

    def give_up(self, member: tuple[str, int]) -> None:
        """Switch to the next member, unless another thread did."""
        with self._lock:
            if member == self.member:
                self._turn += 1

    def connect(self, member: tuple[str, int]) -> http.client.HTTPConnection:
        """Connect to a member."""
        connection = http.client.HTTPConnection(*member, timeout=CONNECT_S)
        connection.connect()
        connection.sock.settimeout(self.answer_s)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def request(self, connection: http.client.HTTPConnection, path: str, body: object) -> http.client.HTTPResponse:
        """Send a request, and return the response with its body unread; raise :class:`EtcdRefused` on an error of etcd."""
        headers = {"Content-Type": "application/json"}
        if self._user and path != "auth/authenticate":
            headers["Authorization"] = self._pass or self._log_in(connection)
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status == http.HTTPStatus.OK:
            return response
        refused = EtcdRefused(_parse(response.read()))
        if self._user and (refused.code == _NOBODY or _OLD in str(refused)):  # or the member was restarted
            self.log_out()
            raise EtcdUnavailable(str(refused))
        if refused.code in _UNAVAILABLE:
            raise EtcdUnavailable(str(refused))
        raise refused

    def log_out(self) -> None:
        """Log in again with the next request."""
        self._pass = ""

    def _log_in(self, connection: http.client.HTTPConnection) -> str:
        body = {"name": self._user, "password": self._password}
        self._pass = str(_parse(self.request(connection, "auth/authenticate", body).read())["token"])
        return self._pass


class EtcdConnection:
    """A connection to the member in use, for one request at a time.

    A request is sent once; if it is not answered (:class:`EtcdUnavailable`), the next goes to the next member.
    """

    def __init__(self, cluster: EtcdCluster) -> None:
        self._cluster = cluster
        self._connection: http.client.HTTPConnection | None = None
        self.member = cluster.member

    def request(self, path: str, body: object) -> dict[str, Any]:
        """Return the answer to a request."""
        with self._giving_up():
            return _parse(self._send(path, body).read())

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """Yield the results of a request whose answer has no end, until its connection ends."""
        with self._giving_up():
            response = self._send(path, body)
            for each in self.sockets:
                for level, option, value in _KEEP_ALIVE:
                    each.setsockopt(level, option, value)
                each.settimeout(None)
            while line := response.readline():
                message = _parse(line)
                if "error" in message:
                    raise EtcdUnavailable(str(message["error"]))
                yield message["result"]
            raise EtcdUnavailable("it ended the connection")

    def drop(self) -> None:
        """Close the connection; the next request opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @property
    def sockets(self) -> list[socket.socket]:
        """The open sockets."""
        connection = self._connection
        each = None if connection is None else connection.sock
        return [] if each is None else [each]

    def wake(self) -> None:
        """End the wait of a thread for an answer."""
        for each in self.sockets:
            with contextlib.suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)

    def _send(self, path: str, body: object) -> http.client.HTTPResponse:
        if self._connection is None or self.member != self._cluster.member:
            self.drop()
            self.member = self._cluster.member
            self._connection = self._cluster.connect(self.member)
        return self._cluster.request(self._connection, path, body)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            self.drop()
            self._cluster.give_up(self.member)
            raise EtcdUnavailable(f"{self.member[0]}:{self.member[1]}: {error}") from error


def _address(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if host.endswith("]") or not colon:
        name, port = host, str(_PORT)
    if not name or not is_port(port):
        raise ConfigError(f"the store must be etcd://[USER@]HOST:PORT[,HOST:PORT...]/JOB, got {host!r} for HOST:PORT")
    return name.strip("[]"), int(port)


def _parse(data: bytes) -> dict[str, Any]:
    """Return the object in an answer of etcd; raise ``ValueError`` if it is none."""
    try:
        answer = json.loads(data)
    except RecursionError as error:
        raise ValueError("an answer of etcd is nested too deeply") from error
    if type(answer) is not dict:
        raise ValueError(f"an answer of etcd must be an object, got {answer!r:.80}")
    return answer


def under(prefix: str) -> dict[str, Any]:
    """Return the range of the keys that begin with ``prefix``, which ends in "/"."""
    return {"key": encode(prefix), "range_end": encode(prefix[:-1] + chr(ord("/") + 1))}


def encode(text: str) -> str:
    """Encode a text for etcd's JSON."""
    return base64.b64encode(text.encode()).decode()


def decode(data: str) -> str:
    """Decode a text from etcd's JSON."""
    return base64.b64decode(data).decode(errors="replace")
