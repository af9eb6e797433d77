"""The launcher's hub against everything that may connect to it, and its clients against everything that may answer."""

import asyncio
import gc
import json
import logging
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from clusters import until
from jobs import clean_env
from strangers import connect

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership import Hub, HubStore
from holdfast.membership.server import RateLimitedLog
from holdfast.membership.store import LEASE_S, SilenceTimer, beat_s, patience_s
from holdfast.membership.wire import HELLO as HELLO_VERSION
from holdfast.membership.wire import MAX_HELLO_BYTES, MAX_LINE_BYTES, LineSplitter, dump, parse

TOKEN = "secret"  # noqa: S105
WAIT_S = 60
HELLO = dump({"hello": HELLO_VERSION, "nonce": "0" * 32})


@pytest.fixture
def hub():
    with Hub(TOKEN) as hub:
        yield hub


@pytest.fixture
def store(hub):
    store = HubStore(hub.address, TOKEN, "j")
    yield store
    store.close()


def send(hub, *pieces):
    """Connect, send, and return what comes back until the hub ends it."""
    with socket.create_connection(("127.0.0.1", hub.port), timeout=WAIT_S) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while data := connection.recv(1 << 16):
                answer += data
        except OSError:  # it was cut off while it still sent
            return None
        return answer


def test_a_connection_that_is_reset_leaves_nothing_that_only_the_collector_finds(hub, monkeypatch):
    readers = weakref.WeakSet()

    class Reader(asyncio.StreamReader):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            readers.add(self)

    monkeypatch.setattr(asyncio.streams, "StreamReader", Reader)
    gc.disable()
    try:
        for number in range(5):
            with socket.create_connection(("127.0.0.1", hub.port), timeout=WAIT_S) as connection:
                connection.sendall(HELLO)
                assert connection.recv(1 << 16), "the hub has accepted it"
                assert len(readers) == 1
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            until(lambda: not readers, f"that nothing is left of connection {number}")
    finally:
        gc.enable()


def test_a_folder_is_removed_with_one_message(hub, store):
    for key in ("a/b/1", "a/b/2", "a/bc", "a", "b/a/b/1", "g/0/act/1/decision", "g/0/act/2/7"):
        store.put(key, '{"act": "agree"}')
    heard = []
    other = HubStore(hub.address, TOKEN, "j")
    other.listen(lambda key, value: heard.append(key))
    heard.clear()

    store.delete("a/b/")
    store.delete("a/none/")
    store.delete("g/0/act/")
    store.put("end", "")

    assert other.wait(lambda: other.get("end"), WAIT_S) is not None
    assert heard == ["a/b/", "g/0/act/", "end"]
    for copy in (store, other):
        assert set(copy.under("")) == {"a/bc", "a", "b/a/b/1", "end"}
        assert set(copy.under("a/")) == {"bc"}
    other.close()


def test_a_thread_that_waits_is_woken_only_by_a_change_that_lets_it_continue(hub, store):
    callers = []

    def ready():
        callers.append(threading.current_thread())
        return store.get("key")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ready, WAIT_S)
        while not store._waiting:
            time.sleep(0.001)
        other = HubStore(hub.address, TOKEN, "j")  # an answer to a request wakes the threads of its own store
        for number in range(20):
            other.put(f"other/{number}", "")
        other.put("key", "value")
        assert waiting.result(WAIT_S) == "value"
        other.close()

    waiter = callers[0]
    assert callers.count(waiter) == 2  # before it waits, and when it was woken
    assert len(callers) >= 22


def test_what_fails_while_a_thread_waits_fails_in_that_thread(store):
    def ready():
        if store.get("key"):
            raise RuntimeError("seen")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ready, WAIT_S)
        store.put("key", "value")
        with pytest.raises(RuntimeError, match="seen"):
            waiting.result(WAIT_S)
    store.put("key", "the store is still heard")
    assert store.get("key") == "the store is still heard"


def test_a_wrong_token_is_refused_and_logged(hub, caplog):
    line = r"refused the connection for a wrong token: --rdzv-token \(HOLDFAST_TOKEN\) must be"
    with pytest.raises(ConfigError, match=line):
        HubStore(hub.address, "guess", "j")

    assert "hub: ('127.0.0.1'" in caplog.text
    assert "a wrong token" in caplog.text
    assert TOKEN not in caplog.text
    assert "guess" not in caplog.text


@pytest.mark.parametrize(
    "hello",
    [
        {"hello": 3, "token": TOKEN, "job": "j"},
        {"hello": [4], "nonce": "0" * 32},
        {"hello": 4, "nonce": None},
        {"hello": 4, "nonce": ["0" * 32]},
        {"hello": 4, "nonce": "0" * 31},
        {"hello": 4, "nonce": "0" * 34},
        {"hello": 4, "nonce": "\ud800" * 32},
        {"hello": 4},
        {"nonce": "0" * 32},
        {},
    ],
)
def test_who_does_not_greet_as_agreed_gets_nothing(hub, store, hello):
    store.put("key", "value")

    proofs = ({"proof": proof} for proof in ("", "\ud800", "0" * 64, None))
    for proof in (*proofs, {"token": TOKEN}, {"job": "j"}):
        assert b"value" not in (send(hub, dump(hello), dump(proof)) or b"")


REFUSAL = dump({"refused": "an unknown greeting (no client)"})
NONSENSE = {
    "nothing": b"",
    "a line end": b"\n",
    "binary": bytes(range(256)) * 20,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no line end": b"x" * (10 << 20),
    "half a hello": HELLO[:20],
    "deep": b"[" * 3000 + b"\n",
    "deep objects": b'{"a":' * 600 + b"\n",
    "no object": b"17\n",
    "not a number": b'{"hello": NaN}\n',
    "utf-16": '{"hello": 3}\n'.encode("utf-16"),
    "nulls": b"\0" * 4000 + b"\n",
}
REQUESTS = {
    "binary": bytes(range(256)) + b"\n",
    "no line end": b"x" * (10 << 20),
    "deep": b"[" * 100_000 + b"\n",
    "a long number": b'{"id": ' + b"9" * 10_000 + b"}\n",
    "endless": b'{"id": 1e999, "op": "put", "key": "k", "value": "v"}\n',
    "not a number": b'{"id": NaN, "op": "put", "key": "k", "value": "v"}\n',
    "no id": b'{"op": "put", "key": "k", "value": "v"}\n',
    "no op": b'{"id": 1}\n',
    "unknown op": b'{"id": 1, "op": "drop", "key": "k", "value": "v"}\n',
    "op is a list": b'{"id": 1, "op": [], "key": "k", "value": "v"}\n',
    "key is an object": b'{"id": 1, "op": "put", "key": {}, "value": "v"}\n',
    "no value": b'{"id": 1, "op": "put", "key": "k", "value": null}\n',
    "half a letter": b'{"id": 1, "op": "put", "key": "\\ud800", "value": "v"}\n',
    "half a letter as value": b'{"id": 1, "op": "put", "key": "k", "value": "\\udfff"}\n',
    "too large": dump({"id": 1, "op": "put", "key": "k", "value": "x" * (2 << 20)}),
    "long key": dump({"id": 1, "op": "create", "key": "k" * 5000, "value": ""}),
    "half a request": b'{"id": 1, "op": "pu',
    "another hello": HELLO,
}


@pytest.mark.parametrize("name", [*NONSENSE, *(f"after hello: {name}" for name in REQUESTS)])
def test_nonsense_ends_its_own_connection_only(hub, store, name):
    if name.startswith("after hello: "):
        with connect(hub, TOKEN, {"job": "j"}) as stranger:
            stranger.send(REQUESTS[name.removeprefix("after hello: ")])
            stranger.read_to_end()
    else:
        assert send(hub, NONSENSE[name]) in (None, b"", REFUSAL)

    store.put("key", "value")
    assert store.get("key") == "value"
    assert store.get("k") in (None, "v")


def test_strangers_that_say_nothing_make_room_for_those_that_come_later_the_oldest_first(hub, store):
    strangers = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(300)]
    for stranger in strangers[:44]:
        stranger.settimeout(WAIT_S)
        assert stranger.recv(1) == b""
    before = len(os.listdir("/proc/self/fd"))

    for number in range(600):  # and they go on coming
        strangers[number % 300].close()
        strangers[number % 300] = socket.create_connection(("127.0.0.1", hub.port))
        if number % 100 == 0:
            HubStore(hub.address, TOKEN, "j").close()
    store.put("key", "value")

    assert store.get("key") == "value"
    assert len(os.listdir("/proc/self/fd")) <= before + 100
    for stranger in strangers:
        stranger.close()


def test_of_strangers_that_come_again_and_again_the_first_is_named_and_the_rest_counted(hub, store, caplog):
    wrong, nonsense = HELLO + dump({"proof": "guess"}), b"GET / HTTP/1.1\r\n\r\n"
    for turn in range(60):
        send(hub, wrong if turn % 2 else nonsense)
    store.put("key", "value")

    (line,) = caplog.messages
    assert line.startswith("hub: ('127.0.0.1', ")
    assert "sent an invalid message and was disconnected" in line
    hub.close()
    _, line = caplog.messages
    assert line.startswith("hub: 59 similar messages, the last: ('127.0.0.1', ")
    assert line.endswith(" was refused: a wrong token")


def test_strangers_are_counted_once_a_minute(caplog):
    clock = Time()
    seldom = RateLimitedLog(60.0, clock)
    for second in range(150):
        clock.now_s = 100.0 + second
        seldom.write(f"stranger {second}")
        seldom.flush()
    for second in (150, 200, 1000):
        clock.now_s = 100.0 + second
        seldom.flush()
    seldom.write("much later")

    assert caplog.messages == [
        "hub: stranger 0",
        "hub: 60 similar messages, the last: stranger 60",
        "hub: 60 similar messages, the last: stranger 120",
        "hub: 29 similar messages, the last: stranger 149",
        "hub: much later",
    ]


def test_a_client_that_does_not_read_is_cut_off_and_others_go_on(hub, store, caplog, monkeypatch):
    monkeypatch.setattr("holdfast.membership.server._MAX_BACKLOG_BYTES", 4 << 20)
    with connect(hub, TOKEN, {"job": "j"}) as deaf:
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for turn in range(20):
            store.put("key", str(turn) * (1 << 19))

    assert store.get("key").startswith("19")
    assert "does not read and was disconnected" in caplog.text


def test_who_comes_to_a_store_with_more_than_the_backlog_gets_all_of_it(hub, store, monkeypatch):
    monkeypatch.setattr("holdfast.membership.server._MAX_BACKLOG_BYTES", 4 << 20)
    for turn in range(12):
        store.put(f"key/{turn}", "x" * (1 << 20))

    second = HubStore(hub.address, TOKEN, "j")

    assert len(second.under("key/")) == 12
    second.close()


def test_a_store_that_is_full_says_so(hub, store, monkeypatch):
    monkeypatch.setattr("holdfast.membership.hub._MAX_KEYS", 2)
    store.put("a", "")
    store.put("b", "")
    store.put("b", "again")

    with pytest.raises(StoreLost, match="the store is full: it has 2 keys"):
        store.put("c", "")


def test_many_clients_at_once_each_hear_everything(hub):
    stores = [HubStore(hub.address, TOKEN, "j") for _ in range(32)]

    def work(number):
        for turn in range(5):
            stores[number].put(f"{number}/{turn}", "x" * 100)
        return stores[number].wait(lambda: True if len(stores[number].under("")) == 160 else None, WAIT_S)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))
    assert len({tuple(store.under("")) for store in stores}) == 1
    for store in stores:
        store.close()


def test_closing_the_hub_is_known_to_its_clients_and_leaves_no_thread():
    before = threading.active_count()
    hub = Hub(TOKEN)
    stores = [HubStore(hub.address, TOKEN, "j") for _ in range(8)]

    hub.close()
    hub.close()

    for store in stores:
        with pytest.raises(StoreLost, match="is lost: "):
            store.wait(lambda: None, WAIT_S)
        store.close()
    assert threading.active_count() == before
    with pytest.raises(StoreLost, match="there is no store at"):
        HubStore(hub.address, TOKEN)


def test_a_hub_whose_thread_ends_by_itself_cuts_its_clients_off(hub, store):
    hub._loop.call_soon_threadsafe(hub._loop.stop)

    with pytest.raises(StoreLost, match="is lost: "):
        store.wait(lambda: None, WAIT_S)


def test_an_address_that_is_taken_is_said():
    with Hub(TOKEN) as hub, pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{hub.port}: "):
        Hub(TOKEN, port=hub.port)


def test_nothing_is_printed_but_what_is_logged():
    script = """
import socket
from holdfast.membership import Hub, HubStore
with Hub("t") as hub:
    stores = [HubStore(hub.address, "t") for _ in range(4)]
    for n in range(30):
        stores[n % 4].put(str(n), "x" * 100_000)
    stores.pop().close()
    stores[0]._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0")
    stores.pop(0).close()
    for n in range(30):
        stores[n % 2].put(str(n), "y" * 100_000)
    half = socket.create_connection(("127.0.0.1", hub.port))
    half.sendall(b'{"hello"')
for store in stores:
    store.close()
half.close()
print("done")
"""
    words = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, env=clean_env(), check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


HOST = """
import sys
from holdfast.membership import Hub
with Hub("secret", lease_s=float(sys.argv[1])) as hub:
    print(hub.address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("ends", [True, False])
def test_leased_keys_go_with_the_connection_only_on_request(ends):
    with Hub(TOKEN, ends_with_connection=ends) as hub:
        leaver, store = HubStore(hub.address, TOKEN, "j"), HubStore(hub.address, TOKEN, "j")
        leaver.put("kept", "1")
        leaver.put("leased", "1", leased=True)
        assert store.wait(lambda: store.get("leased"), WAIT_S) == "1"
        leaver.close()

        gone = store.wait(lambda: True if store.get("leased") is None else None, WAIT_S if ends else 0.3)

        assert bool(gone) is ends
        assert store.get("kept") == "1"
        store.close()


@pytest.fixture
def host():
    """A hub in a process of its own: its address and the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_env()
    )
    yield process.stdout.readline().strip(), process
    process.kill()
    process.wait(WAIT_S)
    process.stdin.close()
    process.stdout.close()


def test_a_hub_that_is_killed_is_known_to_be_lost(host):
    address, process = host
    store = HubStore(address, TOKEN)
    process.kill()

    with pytest.raises(StoreLost, match="is lost: "):
        store.wait(lambda: None, WAIT_S)
    assert process.wait(WAIT_S) == -9
    store.close()


def test_a_hub_that_falls_silent_is_lost_for_those_who_wait_and_those_who_write(host):
    address, process = host
    store, writer = HubStore(address, TOKEN), HubStore(address, TOKEN)
    os.kill(process.pid, 19)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [writer.put("key", "x" * (1 << 20)) for _ in range(100)])  # fills every buffer
        with pytest.raises(StoreLost, match=r"no heartbeat for 2\.1 s"):
            store.wait(lambda: None, WAIT_S)
        with pytest.raises(StoreLost, match="is lost: "):
            writing.result(WAIT_S)
    store.close()
    writer.close()


@pytest.mark.parametrize(
    "answer", [b"nonsense\n", b"[]\n", b'{"done": true}\n', b'{"key": 1}\n', b"\xff\xfe\n", b"[" * 5000 + b"\n", b""]
)
def test_a_client_that_is_answered_with_nonsense_takes_the_store_for_lost(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(serve)
            lines = "invalid message|closed the connection|reset|does not answer"
            with pytest.raises((StoreLost, ConfigError), match=lines):
                HubStore(f"127.0.0.1:{server.getsockname()[1]}", TOKEN)


def test_a_client_learns_the_lease_from_the_hub_and_its_patience_is_shorter(hub, store):
    assert (store._beat_s, store._silence.limit_s) == (beat_s(LEASE_S), patience_s(LEASE_S))
    assert patience_s(LEASE_S) + beat_s(LEASE_S) < LEASE_S

    with Hub(TOKEN, lease_s=40.0) as slow:
        other = HubStore(slow.address, TOKEN)
        assert (other._beat_s, other._silence.limit_s) == (beat_s(40.0), patience_s(40.0))
        other.close()


class Time:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_silence_is_too_long_when_its_limit_has_passed_since_the_last_sign():
    clock = Time()
    silence = SilenceTimer(7.0, 1.0, clock)
    found = []
    for second in range(1, 16):
        clock.now_s = 100.0 + second
        if second == 5:
            silence.broken(clock.now_s - 2)  # a sign that shows it lived at 3
        found.append(silence.is_too_long())

    assert found == [False] * 10 + [True] * 5


def test_time_in_which_nobody_could_listen_does_not_count_as_silence():
    clock = Time()
    silence = SilenceTimer(7.0, 1.0, clock)
    silence.is_too_long()

    clock.now_s += 3600  # the machine slept
    assert not silence.is_too_long()
    for _ in range(4):
        clock.now_s += 1
        assert not silence.is_too_long()
    clock.now_s += 2
    assert silence.is_too_long()


def test_lines_come_whole_however_they_were_cut():
    rng, text = random.Random(1), [rng_line(n) for n in range(200)]
    data, lines, got = b"".join(text), LineSplitter(2000), []
    while data:
        size = rng.randrange(1, 500)
        got += lines.feed(data[:size])
        data = data[size:]

    assert got == [line[:-1] for line in text]


def rng_line(number):
    return dump({"id": number, "value": "x" * (number * 7)})


def test_a_line_that_is_too_long_is_refused_before_it_is_whole():
    lines = LineSplitter(MAX_HELLO_BYTES)
    assert lines.feed(b"x" * 4000) == []

    with pytest.raises(ValueError, match="a line has more than 4096 bytes"):
        lines.feed(b"x" * 97)
    assert MAX_LINE_BYTES > MAX_HELLO_BYTES


@pytest.mark.parametrize("line", [b"", b"[]", b"nul", b"\xff", b'"text"', b"[" * 100_000])
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError, match=r".+"):
        parse(line)


def test_a_message_comes_back_as_it_went():
    message = {"key": "a\nb", "value": "\ud800 💎", "n": 3}

    assert parse(dump(message)[:-1]) == message
    assert json.loads(dump(message)) == message
    assert dump(message).count(b"\n") == 1


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.WARNING, logger="holdfast")
