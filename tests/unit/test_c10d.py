"""What a communicator over a store leaves behind."""

import gc
import time
import weakref

import pytest

from holdfast.comm.c10d import C10dCommunicator
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
