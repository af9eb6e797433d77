"""A cluster of hubs, each in a process of its own: the leading one is killed, stopped, cut off; nothing is lost."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import clean_env
from rosters import Seen, check, draw_parts, play

from holdfast.errors import StoreLost
from holdfast.membership import HubStore

TOKEN = "secret"  # noqa: S105
LEASE_S = 2.0
WAIT_S = 60

HOST = """
import sys
from holdfast.membership import Hub
place, lease_s, *places = sys.argv[1:]
host, _, port = places[int(place)].rpartition(":")
with Hub("secret", host, int(port), lease_s=float(lease_s), places=places, place=int(place)) as hub:
    print(hub.address, flush=True)
    if sys.stdin.read(1):
        print(hub.leave(10), flush=True)
"""


class Hubs:
    """Hubs at some places, which are killed and started again."""

    def __init__(self, count, lease_s=LEASE_S):
        with contextlib.ExitStack() as probes:
            taken = [probes.enter_context(socket.socket()) for _ in range(count)]
            for each in taken:
                each.bind(("127.0.0.1", 0))
            self.places = [f"127.0.0.1:{each.getsockname()[1]}" for each in taken]
        self.lease_s = lease_s
        self._stores, self._started = [], []
        self.processes = {place: self.start(place) for place in range(count)}

    def start(self, place):
        process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(place), str(self.lease_s), *self.places],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_env(),
        )
        self._started.append(process)
        assert process.stdout.readline().strip() == self.places[place]
        return process

    def restart(self, place):
        self.processes[place] = self.start(place)

    def kill(self, place):
        process = self.processes[place]
        process.kill()
        assert process.wait(WAIT_S) == -signal.SIGKILL

    def stop(self, place):
        """Stop a hub, and wait until it has stopped."""
        process = self.processes[place]
        process.send_signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def open(self, job="j"):
        ends_s = time.monotonic() + WAIT_S
        while True:
            try:
                self._stores.append(HubStore(",".join(self.places), TOKEN, job))
                return self._stores[-1]
            except StoreLost:
                assert time.monotonic() < ends_s

    def leader(self, store):
        """Return the place of the hub that a store is connected to."""
        return self.places.index("{}:{}".format(*store._socket.getpeername()))

    def close(self):
        for store in self._stores:
            store.close()
        for process in self._started:
            process.kill()
            process.wait(WAIT_S)
            process.stdin.close()
            process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def hubs():
    with Hubs(3) as hubs:
        yield hubs


def until(ready):
    ends_s = time.monotonic() + WAIT_S
    while not (found := ready()):
        assert time.monotonic() < ends_s
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_the_lead_moves_as_hubs_are_killed_and_come_back_and_no_write_is_lost(hubs, times):
    store, other = hubs.open(), hubs.open()
    store.put("leased", "still here", leased=True)
    written, stop = [], threading.Event()

    def write():
        while not stop.is_set():
            key = f"key/{len(written)}"
            assert store.create(key, "mine"), "created once, and repeated if the answer was lost"
            written.append(key)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        led = []
        for _ in range(times):
            enough = len(written) + 20
            until(lambda enough=enough: len(written) > enough or writing.done())
            led.append(hubs.leader(store))
            hubs.kill(led[-1])
            until(lambda enough=enough: len(written) > enough + 20 or writing.done())
            hubs.restart(led[-1])
            time.sleep(LEASE_S / 2)
        stop.set()
        writing.result(WAIT_S)

    assert other.wait(lambda: True if len(other.under("key/")) == len(written) else None, WAIT_S)
    assert set(other.under("")) == {*written, "leased"}
    assert times == 1 or len(set(led)) > 1, "the first one is not special"


def test_a_hub_that_is_stopped_and_goes_on_serves_nothing_old(hubs):
    store, other = hubs.open(), hubs.open()
    store.put("key", "old")
    first = hubs.leader(store)
    hubs.stop(first)
    store.put("key", "new")
    assert hubs.leader(store) != first
    hubs.processes[first].send_signal(signal.SIGCONT)

    with pytest.raises(StoreLost, match="another hub leads"):
        HubStore(hubs.places[first], TOKEN, "j")
    assert other.wait(lambda: other.get("key") == "new" or None, WAIT_S)


@pytest.mark.soak
def test_a_lease_is_kept_while_the_hub_moves_and_ends_with_its_client(hubs):
    kept, leaver, watcher = hubs.open(), hubs.open(), hubs.open()
    kept.put("node/0", "kept", leased=True)
    leaver.put("node/1", "leaves", leased=True)
    hubs.kill(hubs.leader(watcher))
    leaver.close()

    assert watcher.wait(lambda: watcher.get("node/1") is None or None, WAIT_S)
    time.sleep(LEASE_S)
    assert watcher.get("node/0") == "kept"
    kept.put("key", "value")


@pytest.mark.soak
def test_without_a_quorum_nothing_is_written_and_clients_know_it(hubs):
    store = hubs.open()
    leader = hubs.leader(store)
    for place in {0, 1, 2} - {leader}:
        hubs.stop(place)

    began_s = time.monotonic()
    with pytest.raises(StoreLost):
        store.put("key", "value")
    assert time.monotonic() - began_s < 4 * LEASE_S


@pytest.mark.soak
def test_one_after_another_may_be_lost_down_to_the_one_that_leads(hubs):
    store = hubs.open()
    first = hubs.leader(store)
    hubs.kill(first)
    store.put("key/0", "value")
    time.sleep(1.5 * LEASE_S)  # until the dead one is no voter any more
    hubs.kill(({0, 1, 2} - {first, hubs.leader(store)}).pop())
    store.put("key/1", "value")

    assert store.under("key/") == {"0": "value", "1": "value"}


@pytest.mark.soak
def test_of_two_hubs_the_one_that_leads_goes_on_alone_and_the_other_does_not():
    with Hubs(2) as hubs:
        store = hubs.open()
        assert hubs.leader(store) == 0
        hubs.kill(1)
        store.put("key", "value")
        hubs.restart(1)
        time.sleep(1.5 * LEASE_S)
        hubs.kill(0)

        with pytest.raises(StoreLost):
            store.put("key", "other")


@pytest.mark.soak
def test_a_hub_that_leaves_in_order_hands_over_and_the_last_one_serves_on():
    with Hubs(2) as hubs:
        store = hubs.open()
        first = hubs.processes[0]
        first.stdin.write("x")
        first.stdin.flush()
        assert first.stdout.readline().strip() == "True"

        store.put("key", "value")
        assert hubs.leader(store) == 1


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_rosters_decide_alike_while_the_hub_is_killed(hubs, seed):
    world, parts, seen = (0, 1, 2, 3), draw_parts(seed), Seen()
    launcher = hubs.open()

    def act(part):
        if play(part, hubs.open(), world, seen) == "killed":
            launcher.put(f"dead/{part.rank}", "killed")

    with ThreadPoolExecutor(len(parts)) as pool:
        acting = [pool.submit(act, part) for part in parts]
        time.sleep(0.05 * seed)
        hubs.kill(hubs.leader(launcher))
        for each in acting:
            each.result(WAIT_S)
    check(seen, parts, world)
