"""Waiting for what cannot be interrupted, and giving it up."""

import threading
from datetime import timedelta

import pytest
import torch

from holdfast.comm.groups import AddressExchange, ThreadedWork, as_peer_failure, bury_made, wait
from holdfast.comm.memory import as_bytes
from holdfast.distributed.tensors import bytes_of
from holdfast.errors import InternalError, PeerFailed
from holdfast.membership import Hub, HubStore

PREFIX = "g/0/act/addresses/"


@pytest.fixture
def store():
    with Hub("secret") as hub:
        client = HubStore(hub.address, "secret", "job")
        yield client
        client.close()


def test_what_is_done_aside_returns_its_result_or_raises_its_error():
    def fail():
        raise RuntimeError("connection reset")

    assert wait(ThreadedWork(lambda: 7), lambda: None) == 7
    with pytest.raises(PeerFailed, match="connection reset"), as_peer_failure():
        wait(ThreadedWork(fail), lambda: None)


@pytest.mark.parametrize(
    "text", ["CUDA error: uncorrectable ECC error encountered", "CUDA out of memory. Tried to allocate 2 GiB"]
)
def test_an_error_of_the_own_device_is_not_the_failure_of_a_peer(text):
    with pytest.raises(RuntimeError, match=text), as_peer_failure():
        raise RuntimeError(text)


def test_who_hears_of_a_death_waits_no_longer_and_the_work_goes_on_by_itself():
    may_end, has_ended = threading.Event(), threading.Event()

    def check():
        raise PeerFailed("worker 1 is dead")

    with pytest.raises(PeerFailed, match="worker 1"):
        wait(ThreadedWork(lambda: may_end.wait(30) and has_ended.set()), check)

    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(30)


def test_addresses_come_to_those_who_wait_for_them(store):
    store.put("g/0/members", "[3, 5]")
    meeting, other = (AddressExchange(store, PREFIX, rank, 30.0) for rank in (3, 5))
    found = ThreadedWork(lambda: meeting.get("0/1"))

    meeting.set("0/0", b"mine")
    assert not meeting.check(["0/0"])
    other.set("0/1", b"\x00\xff")

    assert found.wait(timedelta(seconds=30)) == b"\x00\xff"
    assert meeting.check(["0/0", "0/1"])
    assert not meeting.check(["0/1", "0/2"])


def test_a_second_value_is_refused(store):
    meeting = AddressExchange(store, PREFIX, 0, 30.0)
    meeting.set("0/0", b"")

    with pytest.raises(InternalError, match="second value, 0/1"):
        meeting.set("0/1", b"")


def test_a_meeting_to_which_not_everybody_comes_ends(store):
    with pytest.raises(PeerFailed, match=r"within 0\.01 s"):
        AddressExchange(store, PREFIX, 0, 0.01).get("1")


def test_a_meeting_that_was_given_up_ends_at_the_next_change_of_the_store(store):
    meeting = AddressExchange(store, PREFIX, 0, 3600.0)
    waits = ThreadedWork(lambda: meeting.get("1"))

    meeting.give_up()
    store.put("g/1/members", "[0]")

    with pytest.raises(PeerFailed):
        waits.wait(timedelta(seconds=30))


def test_the_bytes_of_a_tensor_are_its_memory_whatever_it_holds():
    for tensor in (
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(0),
        torch.ones(4, 4)[:, :1][:1],
    ):
        seen = as_bytes(tensor)

        assert seen.numel() == tensor.numel() * tensor.element_size()
        assert seen.data_ptr() == tensor.data_ptr()


def test_the_bytes_of_a_vector_with_gaps_are_those_of_its_numbers():
    numbers = torch.arange(8.0)
    assert bytes_of(numbers[::2]).view(torch.float32).tolist() == [0, 2, 4, 6]
    assert bytes_of(numbers.view(2, 4)[:, 1]).view(torch.float32).tolist() == [1, 5]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_group_that_was_made_but_not_used_is_destroyed_in_the_background(is_late):
    may_be_made, destroyed, calls = threading.Event(), threading.Event(), []

    class Group:
        def size(self):
            return 1

        def rank(self):
            return 0

        def abort(self):
            calls.append(("abort", threading.current_thread().name))

        def shutdown(self):
            calls.append(("shutdown", threading.current_thread().name))

        def __del__(self):
            calls.append(("end", threading.current_thread().name))
            destroyed.set()

    making = ThreadedWork(lambda: may_be_made.wait(30) and Group())
    if not is_late:
        may_be_made.set()
        making.wait()

    bury_made(making)
    del making
    may_be_made.set()

    assert destroyed.wait(30)
    assert calls == [(call, "holdfast-bury") for call in ("abort", "shutdown", "end")]


def test_where_no_group_was_made_there_is_nothing_to_destroy(capfd):
    def fail():
        raise PeerFailed("given up")

    before = threading.active_count()
    bury_made(ThreadedWork(fail))

    for thread in threading.enumerate():
        if thread.name == "holdfast-bury":
            thread.join(30)
    assert threading.active_count() <= before
    assert capfd.readouterr().err == ""
