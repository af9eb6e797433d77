"""The ports of a process are shut to all but those that are connected, and open until then; both are real processes."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from holdfast.launch.ports import shut_ports

SERVER = """
import socket, threading
def echo(one):
    while data := one.recv(64):
        one.sendall(data)
    one.close()
def serve(listening):
    while True:
        threading.Thread(target=echo, args=listening.accept()[:1]).start()
for host in ("0.0.0.0", "127.0.0.1"):
    listening = socket.create_server((host, 0))
    print(listening.getsockname()[1], flush=True)
    threading.Thread(target=serve, args=(listening,)).start()
"""
SLOW_SERVER = """
import socket, sys
listening, accepted = socket.create_server(("127.0.0.1", 0)), []
print(listening.getsockname()[1], flush=True)
for _ in sys.stdin:
    accepted.append(listening.accept()[0])
    print("accepted", flush=True)
"""
CLIENT = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
for word in sys.stdin:
    one.sendall(word.encode())
    print(one.recv(64).decode(), end="", flush=True)
"""


class Program:
    """A program of its own."""

    def __init__(self, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-c", *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def says(self):
        return self.process.stdout.readline().strip()

    def answers(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.says()


@pytest.fixture
def start():
    programs = []

    def one(*words):
        programs.append(Program(*words))
        return programs[-1]

    yield one
    for program in programs:
        program.process.kill()
        program.process.communicate()


def is_open(port):
    with contextlib.suppress(TimeoutError), socket.create_connection(("127.0.0.1", port), timeout=0.3):
        return True
    return False


def test_ports_are_open_to_this_machine_until_all_workers_are_connected(start):
    server = start(SERVER)
    far, near = int(server.says()), int(server.says())
    client, late = start(CLIENT, near), start("input()")
    assert client.answers("hello") == "hello"
    assert is_open(far), "or its being shut would say nothing"

    assert shut_ports(server.pid, None) is None, "some have not started"
    assert shut_ports(server.pid, [client.pid, late.pid]) is None, "one is not connected"

    assert not is_open(far)
    assert is_open(near)


def test_what_is_no_worker_is_cut_off_and_cannot_come_back(start):
    server = start(SERVER)
    near = (server.says(), int(server.says()))[1]
    client = start(CLIENT, near)
    with socket.create_connection(("127.0.0.1", near), timeout=10) as stranger:
        stranger.sendall(b"here")
        assert stranger.recv(64) == b"here"
        assert client.answers("hello") == "hello"

        assert shut_ports(server.pid, [client.pid]) == 1

        assert stranger.recv(64) == b""
    assert not is_open(near)
    assert client.answers("and still here") == "and still here"


def test_what_waited_to_be_accepted_when_the_ports_were_shut_is_cut_off_by_later_looks(start):
    server = start(SLOW_SERVER)
    near = int(server.says())
    client = start(CLIENT, near)
    server.answers("accept the worker")
    strangers = [socket.create_connection(("127.0.0.1", near), timeout=10) for _ in range(3)]

    assert shut_ports(server.pid, [client.pid]) == 0, "they are not accepted yet"
    for _ in strangers:
        server.answers("accept the next one")
    assert shut_ports(server.pid, [client.pid]) == 3

    assert [stranger.recv(64) for stranger in strangers] == [b""] * 3
    for stranger in strangers:
        stranger.close()
    assert shut_ports(server.pid, [client.pid]) == 0


def test_a_process_that_has_ended_has_no_ports_to_shut(start):
    server = start("")
    server.process.wait()
    assert shut_ports(server.pid, []) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_where_the_system_does_not_let_us_nothing_is_done(start):
    server = start(SERVER)
    far = int(server.says())
    script = f"""
import os
from holdfast.launch.ports import shut_ports
os.setgid(65534)
os.setuid(65534)
print(shut_ports({server.pid}, None))
"""
    assert start(script).says() == "0"
    assert is_open(far)
