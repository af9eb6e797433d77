"""What the campaign does to the operating system: each has the effect that it promises, and is undone."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from netns import make_hosts

from campaign.attacks.mechanisms import cgroups, two_nodes
from campaign.attacks.mechanisms.bad_server import BadServer, Mode
from campaign.attacks.mechanisms.cables import Cable
from campaign.attacks.mechanisms.frame_relay import Conditions, Direction
from campaign.attacks.mechanisms.preload import COMPILER, BadDisks, WallClock, preload
from campaign.runner import KEPT, ended_afterwards
from campaign.victims import MARK, Processes

PYTHON = [sys.executable, "-IS", "-c"]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

# ------------------------------------------------------------------------------------------------------------ frames


def arrivals(conditions, frames=2000, every_s=0.001, size=1000):
    direction = Direction(random.Random(1), conditions)
    return [direction.arrivals(size, number * every_s) for number in range(frames)]


def test_frames_are_late_and_keep_their_order():
    found = [at_s for (at_s,) in arrivals(Conditions(delay_s=0.1, jitter_s=0.05))]
    late_s = [at_s - number * 0.001 for number, at_s in enumerate(found)]

    assert found == sorted(found)
    assert 0.1 <= min(late_s) < max(late_s) <= 0.15


def test_the_given_share_of_frames_is_lost_or_doubled_or_overtakes():
    lost = sum(not each for each in arrivals(Conditions(loss=0.3)))
    doubled = sum(len(each) == 2 for each in arrivals(Conditions(duplicate=0.3)))
    early = sum(at_s < number * 0.001 + 0.05 for number, (at_s,) in enumerate(arrivals(Conditions(0.1, reorder=0.3))))

    for count in (lost, doubled, early):
        assert 500 < count < 700
    assert all(not each for each in arrivals(Conditions(loss=1.0)))


def test_a_rate_is_kept_and_what_it_would_delay_too_long_is_lost():
    found = arrivals(Conditions(rate=100_000), frames=3000)
    arrived = [each[0] for each in found if each]

    assert arrived[:2] == pytest.approx([0.01, 0.02])
    assert len(arrived) == pytest.approx(100 * (3 + 1), rel=0.02)
    assert max(each[0] - number * 0.001 for number, each in enumerate(found) if each) <= 1.0


ECHO = """
import socket, sys
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind((sys.argv[1], 7))
print("up", flush=True)
while True:
    own.sendto(*own.recvfrom(100))
"""
ASK = """
import socket, sys, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.connect((sys.argv[1], 7))
own.settimeout(0.3)
for number in range(int(sys.argv[2])):
    began_s = time.monotonic()
    own.send(b"%d" % number)
    try:
        while own.recv(100) != b"%d" % number:
            pass
    except TimeoutError:
        print("lost")
    else:
        print(time.monotonic() - began_s)
"""


class Asked:
    """Asks the second host from the first, and returns the seconds to each answer, None where there is none."""

    def __init__(self, hosts):
        self._hosts = hosts
        words = [*hosts.inside(2), *PYTHON, ECHO, hosts.address(2)]
        self.server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.server.stdout.readline() == "up\n"

    def __call__(self, count):
        said = self._hosts.run(1, *PYTHON, ASK, self._hosts.address(2), str(count)).stdout.split()
        assert len(said) == count
        return [None if word == "lost" else float(word) for word in said]


@pytest.mark.chaos
@pytest.mark.parametrize("uses_netem", [False, True])
def test_what_is_told_to_a_cable_happens_to_frames(uses_netem):
    hosts = make_hosts(2, net="10.214.0")
    try:
        inserted = Cable(hosts, 2, uses_netem=uses_netem)
        if uses_netem and not inserted.has_netem:
            pytest.skip("the kernel has no netem")
        asked = Asked(hosts)
        with inserted as cable:
            free_s = asked(10)
            untouched = cable.struck()
            cable.set(Conditions(delay_s=0.05), Conditions(delay_s=0.05))
            late_s = asked(3)
            struck = cable.struck()
            cable.silence(away=False)
            silent = asked(2)
            cable.silence(toward=False)
            half_open = asked(2)
            cable.set()
            again_s = asked(3)
        after_s = asked(3)
        asked.server.kill()
        asked.server.wait()
        asked.server.stdout.close()
    finally:
        hosts.remove()

    assert None not in (*free_s, *late_s, *again_s, *after_s)
    assert min(free_s) < 0.05
    assert min(late_s) >= 0.1
    assert untouched == 0
    assert struck >= 6, "three questions and their answers"
    assert silent == half_open == [None, None]


def test_each_node_has_its_own_command_and_report():
    command = ["python", "-m", "holdfast", "run", "-n", "2", "--report", "there", "script.py"]
    first, second = (two_nodes.words_of_node(node, ["on", str(node)], ["--rdzv", "url"], command) for node in range(2))

    same = ["python", "-m", "holdfast", "run", "--nnodes", "2", "--node-rank"]
    assert first == ["on", "0", *same, "0", "--rdzv", "url", "-n", "2", "--report", "there", "script.py"]
    assert second == ["on", "1", *same, "1", "--rdzv", "url", "-n", "2", "--report", "there-of-node-1", "script.py"]


def test_the_second_launcher_is_known_by_its_pid_and_exit_code(tmp_path):
    told = {"prefixes": [[], []], "options": [], "folder": str(tmp_path)}
    code = 'import os, sys; print(os.getpid(), flush=True); sys.exit(3 if sys.argv[5] == "1" else 0)'
    words = [sys.executable, "-IS", two_nodes.__file__, json.dumps(told), *PYTHON, code, "run"]
    assert two_nodes.read_second(tmp_path) is None

    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.split()

    deadline_s = time.monotonic() + 10
    while (second := two_nodes.read_second(tmp_path)) is None or second.code is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert second.code == 3
    assert str(second.pid) in said
    (tmp_path / two_nodes.SECOND).write_text("47")
    assert two_nodes.read_second(tmp_path) is None, "it could not be written completely"


# ------------------------------------------------------------------------------------------------- clocks and disks


@needs_compiler
def test_the_wall_clock_jumps_while_a_process_runs_and_the_monotonic_one_does_not(tmp_path):
    code = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    clock = WallClock(tmp_path / "clock")
    env = dict(os.environ) | clock.env
    preload(env, "clock_jump")

    with subprocess.Popen([*PYTHON, code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asked:
        for offset_s in (0, 3600, -86400, 0):
            clock.jump(offset_s)
            asked.stdin.write("\n")
            asked.stdin.flush()
            wall_s, monotonic_s = map(float, asked.stdout.readline().split())
            assert wall_s - time.time() == pytest.approx(offset_s, abs=5)
            assert monotonic_s == pytest.approx(time.monotonic(), abs=5)


WAIT = """
import ctypes, sys, time
library = ctypes.CDLL(None, use_errno=True)
semaphore, until = ctypes.create_string_buffer(32), (ctypes.c_long * 2)(int(time.time()) + 3600, 0)
library.sem_init(semaphore, 0, 0)
print("waits", flush=True)
print(library.sem_timedwait(semaphore, until))
"""


@needs_compiler
def test_a_wait_for_a_moment_of_the_wall_clock_ends_when_it_jumps_past_it(tmp_path):
    clock = WallClock(tmp_path / "clock")
    env = dict(os.environ) | clock.env
    preload(env, "clock_jump")

    with subprocess.Popen([*PYTHON, WAIT], env=env, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout.readline() == "waits\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.3)
        clock.jump(7200)
        said, _ = waiting.communicate(timeout=20)

    assert said == "-1\n"


WRITE = """
import os, sys, time
for path in sys.argv[1:]:
    began_s = time.monotonic()
    try:
        with open(path, "wb") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        print(error.errno)
    else:
        print(time.monotonic() - began_s > 0.3)
"""


@needs_compiler
def test_only_below_their_folders_disks_are_slow_or_fail(tmp_path):
    folders = {name: tmp_path / name for name in ("slow", "failing")}
    disks = BadDisks(tmp_path / "disks", folders)
    env = dict(os.environ) | disks.env
    preload(env, "slow_disk")
    for folder in (*folders.values(), tmp_path / "slower"):
        folder.mkdir()
    paths = [str(tmp_path / name) for name in ("slow/file", "failing/file", "slower", "file")]
    paths[2] += "/file"  # its name only begins like that of a slow one

    def written():
        return subprocess.run(
            [*PYTHON, WRITE, *paths], env=env, capture_output=True, text=True, check=True
        ).stdout.split()

    first = written()
    untouched = [disks.struck(name) for name in folders]
    disks.set("slow", write_s=0.2, sync_s=0.2)
    disks.set("failing", error=errno.EIO)
    second = written()
    disks.set("slow", write_s=0, sync_s=0)
    disks.set("failing", error=0)

    assert first == written() == ["False"] * 4
    assert second == ["True", str(errno.EIO), "False", "False"]
    assert disks.struck("slow") >= 2, "the write and fsync"
    assert disks.struck("failing") >= 1
    assert untouched == [0, 0]


# --------------------------------------------------------------------------------------------------- control groups


def test_groups_are_created_where_a_version_permits_it(tmp_path):
    own = tmp_path / "user" / "session"
    own.mkdir(parents=True)
    for folder, given in ((tmp_path, "cpu memory pids"), (tmp_path / "user", "memory pids"), (own, "")):
        (folder / "cgroup.subtree_control").write_text(given)

    v1 = "9:name=systemd:/\n4:memory:/job\n8:cpu,pids:/\n0::/"
    assert cgroups.home("memory", v1, tmp_path) == (tmp_path / "memory" / "job", cgroups.V1)
    assert cgroups.home("pids", v1, tmp_path) == (tmp_path / "pids", cgroups.V1)
    assert cgroups.home("memory", "0::/user/session\n", tmp_path) == (tmp_path / "user", cgroups.V2)
    assert cgroups.home("cpu", "0::/user/session\n", tmp_path) == (tmp_path, cgroups.V2)
    assert cgroups.home("io", "0::/user/session\n", tmp_path) == (own, cgroups.V2)


@pytest.fixture(params=["memory", "pids"])
def limited(request):
    if reason := cgroups.missing(request.param):
        pytest.skip(reason)
    with cgroups.ControlGroup(request.param, f"test-{os.getpid()}") as group:
        yield request.param, group
    assert not group.path.exists()


def test_the_kernel_enforces_the_limit_of_a_group_and_counts_it(limited):
    controller, group = limited
    group.limit(64 << 20 if controller == "memory" else 2)
    code = "import os; data = bytearray(200 << 20); os.fork(); os.fork(); os.fork()"
    done = subprocess.run([*group.prefix(), *PYTHON, code], capture_output=True, check=False)

    if controller == "memory":
        assert done.returncode == -signal.SIGKILL
    else:
        assert b"Resource temporarily unavailable" in done.stderr
    assert group.struck() >= 1


def test_what_is_left_in_a_group_ends_with_it():
    if reason := cgroups.missing("pids"):
        pytest.skip(reason)
    with cgroups.ControlGroup("pids", f"test-{os.getpid()}") as group:
        left = subprocess.Popen([*group.prefix(), "sleep", "100"])
        deadline_s = time.monotonic() + 10
        while left.pid not in group.pids() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        threading.Thread(target=left.wait).start()

    assert left.wait(10) == -signal.SIGKILL
    assert not group.path.exists()


# ------------------------------------------------------------------------------------------------ what is undone


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_must_be_undone_is_undone_though_the_process_is_killed(tmp_path, number):
    code = (
        "import sys, time\nfrom campaign.attacks.mechanisms.afterwards import afterwards\n"
        'with afterwards(\'rm "$1"\', sys.argv[1]):\n    print("in", flush=True)\n    time.sleep(100)'
    )
    mark = tmp_path / "mark"
    mark.touch()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(mark)], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "in\n"
        assert mark.exists()
        process.send_signal(number)

    assert process.returncode == -number
    deadline_s = time.monotonic() + 10
    while mark.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not mark.exists()


def test_the_jobs_of_a_plan_end_with_it_and_its_folder_is_removed(tmp_path):
    for name in ("plan", "kept", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "kept" / KEPT).touch()
    env = {name: {**os.environ, MARK: str(tmp_path / name)} for name in ("plan", "kept", "other")}
    left = {name: subprocess.Popen(["sleep", "60"], env=env[name], start_new_session=True) for name in env}
    try:
        for name in ("plan", "kept"):
            with ended_afterwards(tmp_path / name):
                assert left[name].poll() is None
            assert left[name].wait(10) == -signal.SIGKILL
        assert left["other"].poll() is None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "other"]
    finally:
        for process in left.values():
            process.kill()
            process.wait()


def test_an_ended_launcher_is_never_found_again(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as launcher:
        processes = Processes([launcher.pid], tmp_path, "no-such-mark")
        assert processes.find("launcher").pid == launcher.pid
        launcher.kill()
    assert processes.find("launcher") is None


# ---------------------------------------------------------------------------------------------------- a bad server


@pytest.fixture
def ports():
    """A server that answers each chunk with the same, and a bad one before it."""
    with socket.create_server(("127.0.0.1", 0)) as works:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=echo, args=(works.accept()[0],), daemon=True).start()

        def echo(connection):
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(1000):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        bad = BadServer(works.getsockname()[1])
        yield bad, int(bad.url.rpartition(":")[2])
        bad.close()
        works.shutdown(socket.SHUT_RDWR)


def ask(connection):
    connection.sendall(b"hello")
    return connection.recv(1000)


def test_a_bad_server_works_until_it_is_told_otherwise_and_again_afterwards(ports):
    bad, port = ports
    with socket.create_connection(("127.0.0.1", port), timeout=10) as old:
        assert ask(old) == b"hello"
        assert bad.struck == 0

        bad.mode, bad.delay_s = Mode.SLOW, 0.1
        began_s = time.monotonic()
        assert ask(old) == b"hello"
        assert time.monotonic() - began_s >= 0.2
        assert bad.struck == 1

        bad.mode = Mode.HANGS
        old.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ask(old)
        old.settimeout(10)
        bad.mode = Mode.WORKS
        with pytest.raises(ConnectionResetError):
            old.recv(1000)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as new:
        assert ask(new) == b"hello"


def test_a_bad_server_resets_or_refuses(ports):
    bad, port = ports
    bad.mode = Mode.UNAVAILABLE
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        said = ask(connection)
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert f"Content-Length: {len(body)}\r\n".encode() in head

    bad.mode = Mode.RESETS
    with (
        pytest.raises(
            (ConnectionResetError, BrokenPipeError)
        ),  # the reset may come before the connection is known here
        socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
    ):
        connection.recv(1000)
    assert bad.struck == 2
