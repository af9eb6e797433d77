"""The parsers of bytes from outside. Each takes any bytes, and raises only what its caller expects.

A parser that raises anything else, hangs or takes memory without bound is a finding.
"""

import contextlib
import functools
import io
import json
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast.checkpoint import manifest
from holdfast.checkpoint.files.safetensors import read_header
from holdfast.comm.links import Links
from holdfast.errors import CheckpointError, ConfigError, PeerFailed
from holdfast.faults.plan import Fault, FaultPlan
from holdfast.membership.authentication import ClientHandshake, HandshakeRefused, LineAuthenticator, check_greeting
from holdfast.membership.server import check_request
from holdfast.membership.store import derive_key
from holdfast.membership.wire import MAX_HELLO_BYTES, LineSplitter, dump, parse
from holdfast.monitor.feed import Feed
from holdfast.monitor.server import DashboardServer
from holdfast.monitor.token import Token
from holdfast.monitor.view import LiveState, RunInfo
from holdfast.records.encoding import record_to_dict
from holdfast.records.files import load_events, parse_record
from holdfast.records.types import StepCommitted, WorkerEnded
from holdfast.state.stream_wire import receive_header
from holdfast_lab.simulate import (
    schema,  # noqa: F401 - so that it is instrumented
    toml,
)

TOKEN = "a token"  # noqa: S105
SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"


@dataclass(frozen=True)
class Parser:
    """A parser, what is right for it, and words that it knows."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


@functools.cache
def folder() -> Path:
    """A folder of this process, in memory where there is one; removed at the end."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = tempfile.TemporaryDirectory(dir=parent, prefix="fuzz-")
    _folders.append(made)
    return Path(made.name)


_folders: list[tempfile.TemporaryDirectory[str]] = []


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


def read_stream(data: bytes) -> None:
    """What a newcomer reads of a stream of state."""
    giver, newcomer = socket.socketpair()
    with giver, newcomer:
        giver.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            giver.send(data)
        giver.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            assert type(receive_header(newcomer)) is dict


def read_manifest(data: bytes) -> bool:
    """A manifest without its last line, the digest, which is appended: without a right one nothing is looked into."""
    with contextlib.suppress(CheckpointError):
        manifest.parse(data)
    text = data + b",\n"
    with contextlib.suppress(CheckpointError):
        manifest.parse(text + b'"xxh3": "' + xxhash.xxh3_64_hexdigest(text).encode() + b'"\n}\n')
        return True
    return False


def read_safetensors(data: bytes) -> bool:
    """The header of a ``.safetensors`` file, with its length in front."""
    path = folder() / "tensors.safetensors"
    is_read = False
    for whole in (data, *(len(data).to_bytes(8, "little") + data + bytes(values) for values in (0, 2, 24))):
        path.write_bytes(whole)
        with contextlib.suppress(CheckpointError, ConfigError):
            read_header(path, io.BytesIO(whole))
            is_read = True
    return is_read


def read_fault_plan(data: bytes) -> bool:
    """A fault plan."""
    with contextlib.suppress(ConfigError):
        FaultPlan.from_json(data.decode("utf-8", "surrogateescape"))
        return True
    return False


def read_scenario(data: bytes) -> bool:
    """A scenario of the simulator."""
    path = folder() / "scenario.toml"
    path.write_bytes(data)
    if not (outages := folder() / "outages.csv").exists():
        outages.write_bytes((SCENARIOS / "outages.csv").read_bytes())
    with contextlib.suppress(ConfigError):
        toml.read_scenario(path)
        return True
    return False


def read_events(data: bytes) -> bool:
    """``events.jsonl`` of a report folder, and the records of a worker."""
    for line in data.splitlines():
        parse_record(line)
    (folder() / "events.jsonl").write_bytes(data)
    with contextlib.suppress(ConfigError):
        return bool(load_events(folder()))
    return False


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


RECORDS = (
    StepCommitted(t_s=1.5, rank=0, step=3, epoch=0, samples=16, workers=2, metrics={"loss": 0.5}),
    WorkerEnded(t_s=2.5, rank=1, step=3, exit_code=-9, pid=4711),
)
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
    "stream": Parser(
        read_stream, ((30).to_bytes(8, "big") + b'{"step": 1, "end": true}      ', (2).to_bytes(8, "big") + b"{}")
    ),
    "manifest": Parser(
        read_manifest,
        (
            b'{\n"schema": 2,\n"step": 3,\n"generation": 0,\n"format": "safetensors",\n"folder": "data-6ef27ff0",\n'
            b'"files": {"part-00000.safetensors": {"bytes": 176, "rest_xxh3": "3607741f69a0b632"}},\n"versions": '
            b'{"holdfast": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},\n"info": {},\n"tensors": {"w": {"dtype": '
            b'"float32", "shape": [4, 3], "pieces": [{"file": "part-00000.safetensors", "offset": 128, "start": [0, 0], '
            b'"shape": [4, 3], "bytes": 48, "blocks": ["8c8a0567fe99b74a"]}]}},\n"skeleton": {"dict": [["w", {"tensor": '
            b'"w"}], ["n", 5]]}',
        ),
    ),
    "safetensors": Parser(
        read_safetensors,
        (
            b'{"__metadata__":{"step":"3"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}',
            b'{"w":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}',
        ),
    ),
    "fault-plan": Parser(
        read_fault_plan,
        (
            FaultPlan((Fault("kill", 1, 20, "allreduce", 2), Fault("kill", 3, 20)), 7).to_json().encode(),
            b'{"seed": 0, "faults": [], "fired": []}',
        ),
    ),
    "scenario": Parser(
        read_scenario, tuple((SCENARIOS / name).read_bytes() for name in ("llama.toml", "spot.toml", "trace.toml"))
    ),
    "events": Parser(
        read_events,
        (b"".join(json.dumps(record_to_dict(record)).encode() + b"\n" for record in RECORDS),),
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
}
