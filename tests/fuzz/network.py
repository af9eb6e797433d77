"""Parsers of what arrives over the network."""

import contextlib
import functools
import http.client
import io
import json
import os
import socket

from fuzz.base import Parser, folder
from holdfast.comm.links import Links
from holdfast.errors import PeerFailed
from holdfast.membership.acts import Tally, check_vote
from holdfast.membership.authentication import ClientHandshake, HandshakeRefused, LineAuthenticator, check_greeting
from holdfast.membership.gateway import EtcdCluster, EtcdConnection, EtcdRefused, EtcdUnavailable
from holdfast.membership.server import check_request
from holdfast.membership.store import derive_key
from holdfast.membership.wire import MAX_HELLO_BYTES, LineSplitter, dump, parse
from holdfast.observe.monitor.feed import Feed
from holdfast.observe.monitor.server import DashboardServer
from holdfast.observe.monitor.token import Token
from holdfast.observe.monitor.view import LiveState, RunInfo

TOKEN = "a token"  # noqa: S105


def read_hub_lines(data: bytes) -> None:
    """What a client sends to a hub before, in and after the handshake."""
    lines = LineSplitter(MAX_HELLO_BYTES)
    with contextlib.suppress(ValueError):
        for line in lines.feed(data[: len(data) // 2]) + lines.feed(data[len(data) // 2 :]):
            with contextlib.suppress(ValueError, HandshakeRefused):
                check_greeting(parse(line))
            with contextlib.suppress(ValueError, KeyError):
                check_request(parse(line))
            keys = LineAuthenticator(TOKEN, ("00" * 16, "11" * 16), is_client=False)
            with contextlib.suppress(ValueError):
                assert not keys.is_proof(parse(line).get("proof"))
            with contextlib.suppress(ValueError):
                keys.verify(line)
                raise AssertionError("a line with a right MAC was guessed")


def read_handshake(data: bytes) -> None:
    """What a program that pretends to be a hub answers to a client."""
    handshake = ClientHandshake(TOKEN, {"job": ""})
    with contextlib.suppress(ValueError, HandshakeRefused):
        for line in data.split(b"\n"):
            handshake.take(line)
    assert handshake.done is None


def read_link(data: bytes) -> None:
    """What a peer sends on a link: with the first byte odd, after a right introduction."""
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    links = Links(0, "127.0.0.1", wake, 1.0, lambda purpose: derive_key("", purpose))
    try:
        links.begin(1, (0, 1))
        host, port, name = links.own_address.split(" ")
        with socket.create_connection((host, int(port))) as peer:
            if data[:1] and data[0] % 2:
                peer.sendall(_introduction(name))
            peer.sendall(data[1:])
            peer.shutdown(socket.SHUT_WR)
            for _ in range(3):
                links._handle_all(0.001)
                with contextlib.suppress(PeerFailed):
                    links._have_arrived([1], 0)
    except OSError:  # it was cut off
        pass
    finally:
        links.close()
        os.close(wake)


def _introduction(name: str) -> bytes:
    from holdfast.comm.links import _HELLO, _proof

    once = bytes(16)
    return _HELLO.pack(once, 1, _proof(derive_key("", f"link to {name}"), once, 1))


class _Run:
    """A run with one action, which does nothing."""

    actions = ("kill",)

    def __init__(self) -> None:
        self.live = LiveState(RunInfo(id="run", script="train.py", started=range(2), is_live=False))

    def now_s(self) -> float:
        return 5.0

    def log(self, rank: int, lines: int) -> list[str]:
        return ["a line"] * min(rank, lines, 5)

    def act(self, action: str, values: object) -> str:
        return "done"


@functools.cache
def dashboard() -> DashboardServer:
    """A dashboard, to whose handler requests are given without its port."""
    server = DashboardServer("127.0.0.1", 0, Token("a token", folder() / "token"))
    server.feeds["run"] = Feed(_Run())
    server.close()  # its streams end at once
    return server


class _Request:
    """A connection that has received everything."""

    def __init__(self, data: bytes) -> None:
        self._data, self.sent = data, b""

    def settimeout(self, seconds: float | None) -> None:
        pass

    def makefile(self, mode: str, size: int = -1) -> io.BytesIO:
        return io.BytesIO(self._data)

    def sendall(self, data: bytes) -> None:
        self.sent += data


def read_http(data: bytes) -> None:
    """A request to the dashboard."""
    server = dashboard()._server
    request = _Request(data)
    with contextlib.suppress(OSError):
        server.RequestHandlerClass(request, ("127.0.0.1", 1), server)
    assert b"Traceback" not in request.sent


def read_vote(data: bytes) -> None:
    """A key and a value that a member writes: votes of an act, and members of a generation."""
    key, _, value = data.decode("utf-8", "replace").partition("\n")
    tally = Tally()
    with contextlib.suppress(ValueError):
        check_vote(key, value)
        tally.note("g/0/members", "[[0, 1]]")
        tally.note(key, value)


class _Answered:
    """A connection on which an answer waits."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)

    def sendall(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def read_etcd(data: bytes) -> None:
    """What the gateway of an etcd cluster, or a program in its place, answers to a request."""
    cluster = EtcdCluster("user@127.0.0.1:1", "password", 1.0)
    connection = http.client.HTTPConnection("127.0.0.1", 1)
    connection.sock = _Answered(data)
    asked = EtcdConnection(cluster)
    asked._connection = connection
    with contextlib.suppress(EtcdRefused, EtcdUnavailable):
        assert type(asked.request("auth/authenticate", {})) is dict


def _http(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


HOST = b"Host: localhost\r\n"
PARSERS = {
    "hub": Parser(
        read_hub_lines,
        (
            dump({"hello": 4, "nonce": "00" * 16}) + dump({"proof": "00" * 32}),
            dump({"id": 1, "op": "put", "key": "g/0/act/1/2", "value": '{"act": "agree"}', "leased": True}),
            b"0" * 32 + dump({"id": 2, "op": "create", "key": "k", "value": "v"}) + b"\n",
        ),
    ),
    "handshake": Parser(
        read_handshake, (dump({"nonce": "11" * 16}) + dump({"proof": "00" * 32}), dump({"refused": "a wrong token"}))
    ),
    "link": Parser(
        read_link,
        (
            b"\1" + (1).to_bytes(4, "big") + bytes(4) + bytes(8) + (3).to_bytes(8, "big") + b"abc",
            b"\0" + bytes(52),
        ),
    ),
    "http": Parser(
        read_http,
        (
            b"GET /api/runs HTTP/1.1\r\n" + HOST + b"\r\n",
            b"GET /api/runs/run/log?rank=1&lines=20 HTTP/1.1\r\n" + HOST + b"\r\n",
            b"GET /api/runs/run/stream HTTP/1.0\r\n" + HOST + b"\r\n",
            b"POST /api/runs/run/actions HTTP/1.1\r\n"
            + HOST
            + b"Authorization: Bearer a token\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n"
            + json.dumps({"action": "kill"}).encode(),
        ),
    ),
    "vote": Parser(
        read_vote,
        (
            b'g/0/act/1/0\n{"act": "shrink", "flag": true, "leaves": false, "admits": 0}',
            b"g/1/members\n[0, [2, 5]]",
            b"dead/1\nits process has ended",
        ),
    ),
    "etcd": Parser(
        read_etcd,
        (
            _http("200 OK", b'{"header": {"revision": "7"}, "kvs": [{"key": "YQ==", "value": "Yg=="}]}'),
            _http("400 Bad Request", b'{"error": "no such lease", "code": 5, "message": "no such lease"}'),
        ),
    ),
}
