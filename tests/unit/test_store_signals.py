"""What a store tells a thread that waits for something else, too."""

import os
import select
import socket
import threading

import pytest

from holdfast.errors import StoreLost
from holdfast.membership import Hub, HubStore
from holdfast.membership.authentication import LineAuthenticator
from holdfast.membership.client import _read_items
from holdfast.membership.scope import store_scope
from holdfast.membership.wire import MAX_LINE_BYTES, LineSplitter, dump

DEADLINE_S = 30.0


@pytest.fixture
def store():
    with Hub("secret") as hub:
        client = HubStore(hub.address, "secret", "job")
        yield client
        client.close()


def test_its_signal_becomes_readable_when_something_changes(store):
    signal = store.signal_fd
    assert not select.select([signal], [], [], 0)[0]

    store.put("a", "1")

    assert select.select([signal], [], [], DEADLINE_S)[0]
    assert os.eventfd_read(signal) >= 1
    assert store.signal_fd == signal
    store.close()
    assert select.select([signal], [], [], DEADLINE_S)[0], "so does it when the store is lost"


def test_a_signal_that_a_script_has_closed_is_why_the_store_is_lost_and_no_traceback(store, monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    signal = store.signal_fd
    store._close_signal.detach()
    os.close(signal)

    with pytest.raises(StoreLost, match="Bad file descriptor"):
        store.put("a", "1")  # its answer would be waited for without end

    store._thread.join(DEADLINE_S)
    assert printed == []


@pytest.mark.parametrize("scope", ["", "again/1/"])
def test_an_act_waits_for_its_key_and_happens_once(scope, store):
    of_scope = store_scope(store, scope) if scope else store
    has_happened, taken_back = threading.Semaphore(0), threading.Semaphore(0)
    of_scope.on_key("wanted", has_happened.release)
    of_scope.on_key("other", taken_back.release)
    of_scope.on_key("other", None)

    for key in ("unwanted", "other", "wanted", "wanted"):
        of_scope.put(key, "")

    assert has_happened.acquire(timeout=DEADLINE_S)
    assert not has_happened.acquire(blocking=False)
    assert not taken_back.acquire(blocking=False)
    of_scope.on_key("wanted", has_happened.release)
    assert has_happened.acquire(blocking=False), "at once if the key exists"


def test_what_is_posted_as_new_leaves_the_first_value(store):
    store.post_new("key", "first")
    store.post_new("key", "second")

    assert not store.create("key", "third")
    assert store.get("key") == "first"


def test_keys_that_are_removed_while_a_client_reads_the_first_ones_are_gone():
    hub, client = socket.socketpair()
    theirs, ours = (LineAuthenticator("secret", ("00" * 16, "11" * 16), is_client=end) for end in (False, True))
    with hub, client:
        client.settimeout(DEADLINE_S)
        for key, value in (("says/2/a", "1"), ("says/3/a", "1"), ("b", "1"), ("says/2/", None), ("b", None)):
            hub.sendall(theirs.sign(dump({"key": key, "value": value})))
        hub.sendall(theirs.sign(dump({"id": 0, "done": True})))

        items, _ = _read_items(client, ours, LineSplitter(MAX_LINE_BYTES), [], lambda greeting: None)

    assert items == {"says/3/a": "1"}
