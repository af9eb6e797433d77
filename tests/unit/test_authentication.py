"""Clients and hubs prove to each other that they know the token; what a stranger does to a connection ends it."""

import contextlib
import socket
import threading
import time

import pytest
from strangers import connect

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership import Hub, HubStore
from holdfast.membership import server as hub_server
from holdfast.membership.authentication import ClientHandshake, HandshakeRefused, LineAuthenticator
from holdfast.membership.wire import HELLO, MAX_HELLO_BYTES, dump, parse

TOKEN = "a secret of this test"  # noqa: S105
WAIT_S = 60
NONCES = ("00" * 16, "11" * 16)
PUT = dump({"id": 1, "op": "put", "key": "k", "value": "from a stranger"})


@pytest.fixture
def hub():
    with Hub(TOKEN) as hub:
        yield hub


@pytest.fixture
def store(hub):
    store = HubStore(hub.address, TOKEN, "j")
    yield store
    store.close()


class Recorder:
    """Stands between a client and a hub: records the bytes of both directions, and may change them."""

    def __init__(self, port, change=lambda to_hub, data: data):
        self._port, self._change = port, change
        self.seen = {True: b"", False: b""}
        self._sockets = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                client, hub = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, hub]
                for source, target, to_hub in ((client, hub, True), (hub, client, False)):
                    threading.Thread(target=self._copy, args=(source, target, to_hub), daemon=True).start()

    def _copy(self, source, target, to_hub):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen[to_hub] += data
                target.sendall(self._change(to_hub, data))
            target.shutdown(socket.SHUT_RDWR)

    def inject(self, data):
        """Send bytes to the hub in the middle of the last connection."""
        self._sockets[-1].sendall(data)


def test_the_token_never_crosses_the_network_and_what_crosses_it_differs_each_time(hub):
    with Recorder(hub.port) as recorder:
        for _ in range(2):
            store = HubStore(recorder.address, TOKEN, "j")
            store.put("key", "value")
            store.close()
        first, *_ = recorder.seen[True].split(b"\n")

    everything = recorder.seen[True] + recorder.seen[False]
    assert b"value" in everything
    for form in (TOKEN.encode(), TOKEN.encode().hex().encode()):
        assert form not in everything
    proofs = [line for line in recorder.seen[True].split(b"\n") if b"proof" in line]
    assert len(proofs) == len(set(proofs)) == 2
    assert recorder.seen[True].count(first) == 1


def test_a_recorded_connection_is_refused_when_it_is_played_again(hub, store):
    with Recorder(hub.port) as recorder:
        client = HubStore(recorder.address, TOKEN, "j")
        client.put("k", "recorded")
        client.close()
    store.delete("k")

    with socket.create_connection(("127.0.0.1", hub.port), timeout=WAIT_S) as again:
        again.sendall(recorder.seen[True])
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := again.recv(1 << 16):
                answer += data

    assert b"a wrong token" in answer
    store.put("end", "")
    assert store.get("k") is None


@pytest.mark.parametrize("what", ["inserted", "repeated", "changed", "left out", "moved"])
def test_a_line_that_another_program_touches_ends_the_connection(hub, store, what):
    with connect(hub, TOKEN, {"job": "j"}) as client:
        lines = [client.keys.sign(dump({"id": n, "op": "put", "key": f"n/{n}", "value": "1"})) for n in range(4)]
        sent = {
            "inserted": [lines[0], PUT, lines[1]],
            "repeated": [lines[0], lines[0]],
            "changed": [lines[0], lines[1].replace(b'"1"', b'"2"')],
            "left out": [lines[0], lines[2]],
            "moved": [lines[0], lines[2], lines[1]],
        }[what]
        client.socket.sendall(b"".join(sent))
        answer = client.read_to_end()

    assert b"a line was changed, repeated or left out on its way, or was inserted by another program" in answer
    store.put("end", "")
    assert store.under("n/").keys() == {"0"}
    assert store.get("k") is None


def test_heartbeats_of_another_program_do_not_count(hub):
    with Recorder(hub.port) as recorder:
        client = HubStore(recorder.address, TOKEN, "j")
        recorder.inject(b"\n")
        with pytest.raises(StoreLost, match="is lost: "):
            client.wait(lambda: None, WAIT_S)
        client.close()


def test_what_is_changed_on_the_way_from_the_hub_ends_the_connection_too(hub):
    def change(to_hub, data):
        return data if to_hub else data.replace(b"right", b"wrong")

    with Recorder(hub.port, change) as recorder:
        client = HubStore(recorder.address, TOKEN, "j")
        client.post("key", "right")
        with pytest.raises(StoreLost, match="a line was changed"):
            client.wait(lambda: None, WAIT_S)
        assert client.get("key") is None
        client.close()


def played_by(*lines):
    """Return a listener that answers each line of a client with the next of these, and the thread that does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def play():
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            for line in lines:
                if not connection.recv(MAX_HELLO_BYTES):
                    return
                connection.sendall(line)
            while connection.recv(1 << 16):
                pass

    threading.Thread(target=play, daemon=True).start()
    return listener


@pytest.mark.parametrize(
    ("lines", "error", "why"),
    [
        ([dump({"refused": "an unknown greeting"})], ConfigError, "another version of Holdfast than this one, whose"),
        ([dump({"refused": "a wrong token"})], ConfigError, "for a wrong token: --rdzv-token"),
        ([dump({"id": 0, "done": True})], ConfigError, "does not answer like a launcher of Holdfast"),
        ([dump({"nonce": "00" * 16}), dump({"proof": "00" * 32})], ConfigError, "has not proved that it knows the tok"),
        ([dump({"nonce": "00" * 16}), dump({"id": 0})], ConfigError, "has not proved that it knows the token"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], StoreLost, "it sent an invalid message"),
        ([b"x" * MAX_HELLO_BYTES + b"y" * 10], StoreLost, "has more than 4096 bytes"),
    ],
)
def test_a_program_that_only_pretends_to_be_the_hub_is_found_out_in_one_line(lines, error, why):
    with played_by(*lines) as listener, pytest.raises(error, match=why) as found:
        HubStore(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, "j")
    assert "\n" not in str(found.value)
    assert TOKEN not in str(found.value)


def test_a_client_of_an_earlier_version_is_told_and_named_in_the_log(hub, caplog):
    with socket.create_connection(("127.0.0.1", hub.port), timeout=WAIT_S) as old:
        old.sendall(dump({"hello": 3, "token": TOKEN, "job": "j"}))
        answer = parse(old.makefile("rb").readline())

    assert answer == {"refused": f"an unknown greeting (protocol 3, here {HELLO}: another version of Holdfast)"}
    assert "another version of Holdfast" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("says", [b"", dump({"hello": HELLO, "nonce": "00" * 16}), b'{"hello": 4'])
def test_a_client_that_falls_silent_in_the_handshake_is_disconnected(monkeypatch, says):
    monkeypatch.setattr(hub_server, "_HELLO_S", 0.2)
    with Hub(TOKEN) as hub, socket.create_connection(("127.0.0.1", hub.port), timeout=WAIT_S) as silent:
        silent.sendall(says)
        began_s = time.monotonic()
        while silent.recv(1 << 16):
            pass
    assert time.monotonic() - began_s >= 0.1


def test_a_flood_from_one_address_leaves_the_handshake_of_another_alone(hub, store):
    with socket.create_connection(("127.0.0.1", hub.port), timeout=WAIT_S) as slow:
        handshake = ClientHandshake(TOKEN, {"job": "j"})
        slow.sendall(handshake.greeting)
        lines = slow.makefile("rb")
        answer = lines.readline()
        flood = [socket.create_connection(("127.0.0.1", hub.port), source_address=("127.0.0.2", 0)) for _ in range(400)]
        store.put("key", "value")  # by its answer the hub has accepted all of them
        assert len(hub._strangers) <= 256
        slow.sendall(handshake.take(answer[:-1]))
        handshake.take(lines.readline()[:-1])
        for each in flood:
            each.close()
    assert handshake.done is not None


def test_keys_depend_on_token_nonces_and_direction():
    client, hub = (LineAuthenticator(TOKEN, NONCES, is_client=end) for end in (True, False))
    other_token = LineAuthenticator("another", NONCES, is_client=False)
    other_nonce = LineAuthenticator(TOKEN, NONCES[::-1], is_client=False)

    assert hub.is_proof(client.proof)
    assert client.is_proof(hub.proof)
    for wrong in (client, other_token, other_nonce):
        assert not wrong.is_proof(client.proof)
    line = client.sign(b"text\n")[:-1]
    for wrong in (client, other_token, other_nonce):
        with pytest.raises(ValueError, match="a line was changed"):
            wrong.verify(line)
    assert hub.verify(line) == b"text"


def test_a_token_need_not_be_text():
    surrogate = "\udc80"  # what the environment gives for a byte that is no UTF-8
    assert LineAuthenticator(surrogate, NONCES, is_client=True).proof


@pytest.mark.parametrize("nonce", [None, "", "00", "zz" * 16, "00" * 17, ["00" * 16]])
def test_a_hub_cannot_choose_a_weak_nonce(nonce):
    with pytest.raises(HandshakeRefused):
        ClientHandshake(TOKEN, {}).take(dump({"nonce": nonce}))
