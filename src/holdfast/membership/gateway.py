"""The JSON gateway of an etcd cluster: one question at a time, of one member, and of the next when that does not answer."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
from typing import Any

from holdfast.errors import ConfigError

_PORT = 2379
CONNECT_S = 1.0
"""A member that is not reached in so long is not asked."""
ANSWER_S = 3.0
"""A member that takes longer is not asked any more; an election takes a second or two."""
NOT_FOUND = 5
"""The code for what is not there, such as a lease."""
_UNAVAILABLE = (1, 2, 4, 8, 11, 13, 14)
"""Codes of gRPC which say that another member, or another moment, may be better: among them "no leader"."""
_NOBODY = 16
_OLD = "auth store is old"
"""Words with which etcd says that users have changed since we logged in."""


class Refused(Exception):
    """etcd understood, and says no."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message") or error.get("error") or error))
        self.code = int(error.get("code") or error.get("grpc_code") or 0)


class Unavailable(Exception):
    """This member cannot answer now."""


FAILURES = (OSError, http.client.HTTPException, ValueError, KeyError, Unavailable)
"""All that may come of asking a member which cannot answer."""


class Cluster:
    """The members, ``[USER@]HOST:PORT[,HOST:PORT...]``, and which of them is asked; it may take ``answer_s`` to answer."""

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
        """The one that is asked."""
        return self.members[self._turn % len(self.members)]

    def give_up(self, member: tuple[str, int]) -> None:
        """Turn to the next, unless another thread did."""
        with self._lock:
            if member == self.member:
                self._turn += 1

    def connect(self, member: tuple[str, int]) -> http.client.HTTPConnection:
        """Return a connection."""
        connection = http.client.HTTPConnection(*member, timeout=CONNECT_S)
        connection.connect()
        connection.sock.settimeout(self.answer_s)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def request(self, connection: http.client.HTTPConnection, path: str, body: object) -> http.client.HTTPResponse:
        """Ask, and return what begins to come; raise :class:`Refused` if etcd says no."""
        headers = {"Content-Type": "application/json"}
        if self._user and path != "auth/authenticate":
            headers["Authorization"] = self._pass or self._log_in(connection)
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status == http.HTTPStatus.OK:
            return response
        refused = Refused(json.loads(response.read()))
        if self._user and (refused.code == _NOBODY or _OLD in str(refused)):  # or the member was started again
            self.log_out()
            raise Unavailable(str(refused))
        if refused.code in _UNAVAILABLE:
            raise Unavailable(str(refused))
        raise refused

    def log_out(self) -> None:
        """Have the next question log in anew."""
        self._pass = ""

    def _log_in(self, connection: http.client.HTTPConnection) -> str:
        body = {"name": self._user, "password": self._password}
        token: str = json.loads(self.request(connection, "auth/authenticate", body).read())["token"]
        self._pass = token
        return token


class Line:
    """A connection that asks one question at a time, of whichever member is asked."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._connection: http.client.HTTPConnection | None = None
        self._member = cluster.member

    def ask(self, path: str, body: object) -> dict[str, Any]:
        """Ask the member once. Without an answer (:class:`Unavailable`) the next is asked next time."""
        if self._connection is None or self._member != self._cluster.member:
            self.drop()
            self._member = self._cluster.member
        try:
            if self._connection is None:
                self._connection = self._cluster.connect(self._member)
            answer: dict[str, Any] = json.loads(self._cluster.request(self._connection, path, body).read())
        except FAILURES as error:
            self.drop()
            self._cluster.give_up(self._member)
            raise Unavailable(f"{self._member[0]}:{self._member[1]}: {error}") from error
        return answer

    def drop(self) -> None:
        """Close it; the next question opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @property
    def sockets(self) -> list[socket.socket]:
        """What is open."""
        return sockets_of(self._connection)


def _address(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if host.endswith("]") or not colon:
        name, port = host, str(_PORT)
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"the store must be etcd://[USER@]HOST:PORT[,HOST:PORT...]/JOB, got {host!r} for HOST:PORT")
    return name.strip("[]"), int(port)


def under(prefix: str) -> dict[str, Any]:
    """Return the range of the keys that begin with ``prefix``, which ends in "/"."""
    return {"key": encode(prefix), "range_end": encode(prefix[:-1] + chr(ord("/") + 1))}


def encode(text: str) -> str:
    """Return a text as etcd's JSON has it."""
    return base64.b64encode(text.encode()).decode()


def decode(data: str) -> str:
    """Return the text that etcd's JSON means."""
    return base64.b64decode(data).decode(errors="replace")


def sockets_of(connection: http.client.HTTPConnection | None) -> list[socket.socket]:
    """Return what is open."""
    each = None if connection is None else connection.sock
    return [] if each is None else [each]


def wake(each: socket.socket) -> None:
    """End whatever waits for it."""
    with contextlib.suppress(OSError):  # it has ended already
        each.shutdown(socket.SHUT_RDWR)
