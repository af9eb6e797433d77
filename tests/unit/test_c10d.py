"""A communicator over a store: what it leaves behind, and how it tells others that it has lost the store."""

import gc
import threading
import time
import weakref

import pytest

from holdfast.comm.c10d import C10dCommunicator
from holdfast.errors import StoreLost
from holdfast.membership import Hub, HubStore

DEADLINE_S = 30.0


@pytest.fixture
def stores():
    with Hub("secret") as hub:
        clients = [HubStore(hub.address, "secret", "job") for _ in range(2)]
        yield clients
        for client in clients:
            client.close()


def eventually(holds):
    ends_s = time.monotonic() + DEADLINE_S
    while not holds() and time.monotonic() < ends_s:
        time.sleep(0.01)
    return holds()


def test_a_communicator_that_is_dropped_leaves_no_descriptors_while_its_store_is_open(stores):
    comm = C10dCommunicator(stores[0], 0, (0, 1))
    comm._tell_address(0)
    listener = comm._links._listener
    gone = weakref.ref(comm)
    del comm
    gc.collect()

    assert gone() is None
    assert listener.fileno() == -1
    stores[1].put("g/0/links", "1")
    stores[1].put("g/0/group", "1")
    assert eventually(lambda: stores[0].get("g/0/group") == "1"), "its acts do nothing"
    assert not stores[0].lost


@pytest.mark.parametrize("act", ["revoke", "shrink"])
def test_to_lose_the_store_in_a_recovery_ends_all_connections(act, stores):
    comm = C10dCommunicator(stores[0], 0, (0, 1))
    comm._tell_address(0)
    listener = comm._links._listener
    stores[0].close()

    with pytest.raises(StoreLost):
        getattr(comm, act)()

    assert comm._links is None
    assert listener.fileno() == -1


@pytest.mark.parametrize("key", ["links", "group"])
def test_the_address_of_this_machine_is_looked_up_without_the_lock_of_the_store(key, stores, monkeypatch):
    comm = C10dCommunicator(stores[0], 0, (0, 1))
    looked_up = threading.Event()
    is_free = []

    def own_address(store):
        def look():
            if store._changed.acquire(timeout=5):
                store._changed.release()
                is_free.append(True)

        looker = threading.Thread(target=look)  # another one: the lock can be taken again in the thread that holds it
        looker.start()
        looker.join()
        looked_up.set()
        return "127.0.0.1"

    monkeypatch.setattr(HubStore, "own_address", property(own_address))
    stores[1].put(f"g/0/{key}", "1")

    assert looked_up.wait(DEADLINE_S)
    assert is_free
    comm._drop_group()


def test_a_process_that_is_no_member_any_more_waits_for_no_keys(stores):
    comm = C10dCommunicator(stores[0], 0, (0, 1))
    comm._roster.members = (1,)

    comm._begin_generation()

    assert not comm._asked
    assert not stores[0]._acts
