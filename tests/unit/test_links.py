"""Small messages between members over connections that are opened when needed, and the maximum made of them."""

import contextlib
import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.comm import links as links_module
from holdfast.comm.dissemination import tree_neighbors
from holdfast.comm.links import Links
from holdfast.comm.small_reduce import maximum_over
from holdfast.errors import InternalError, PeerFailed
from holdfast.membership.keyed_hash import keyed_hash
from holdfast.membership.store import derive_key

DEADLINE_S = 30.0
TOKEN = "a token"  # noqa: S105


def key_for(purpose):
    return derive_key(TOKEN, purpose)


@pytest.fixture
def make_links():
    """Return a function that makes the links of some ranks, which all know each other."""
    made, events = [], []

    def make(*ranks, timeout_s=5.0):
        links = {}
        for rank in ranks:
            events.append(os.eventfd(0, os.EFD_NONBLOCK))
            links[rank] = Links(rank, "127.0.0.1", events[-1], timeout_s, key_for)
        made.extend(links.values())
        for each in links.values():
            each.meet({rank: other.own_address for rank, other in links.items()})
            each.begin(1, ranks)
        return links

    yield make
    for each in made:
        each.close()
    for event in events:
        os.close(event)


def until(deadline_s=DEADLINE_S):
    """A check for failures that ends a wait which should have ended long ago."""
    ends_s = time.monotonic() + deadline_s

    def check():
        if time.monotonic() > ends_s:
            raise PeerFailed("this took too long")

    return check


def in_parallel(acts):
    with ThreadPoolExecutor(len(acts)) as pool:
        return [done.result(DEADLINE_S) for done in [pool.submit(act) for act in acts]]


def take_maximum(links, members, me, values, few_messages):
    def exchange(send, sources):
        return links[me].exchange(send, sources, 0, until())

    return maximum_over(exchange, members, me, values, few_messages=few_messages)


@pytest.mark.parametrize("few_messages", [False, True])
@pytest.mark.parametrize("count", [2, 3, 9, 13])
def test_all_members_have_the_maximum(count, few_messages, make_links):
    members = tuple(range(5, 5 + 3 * count, 3))
    links = make_links(*members)

    for generation in (1, 2):
        for each in links.values():
            each.begin(generation, members)
        acts = [lambda me=me: take_maximum(links, members, me, [me, -me, 1 << 62], few_messages) for me in members]

        assert in_parallel(acts) == [[members[-1], -members[0], 1 << 62]] * count
    opened = sum(len(each._way_to) for each in links.values()) // 2
    assert opened < count or not few_messages or count <= 8, "a tree of n members has n - 1 connections"


def test_a_different_number_of_integers_is_an_error(make_links):
    links = make_links(0, 1)
    links[1].post(0, bytes(8), 0)

    with pytest.raises(InternalError, match="maximum of 8 bytes, this one of 16"):
        take_maximum(links, (0, 1), 0, [1, 2], few_messages=True)


def test_every_place_of_a_tree_is_the_child_of_its_parent():
    for count in range(1, 70):
        parents = {place: tree_neighbors(place, count)[0] for place in range(count)}
        children = {place: tree_neighbors(place, count)[1] for place in range(count)}

        assert [place for place, parent in parents.items() if parent is None] == [0]
        assert all(parents[child] == place for place, below in children.items() for child in below)
        assert sum(map(len, children.values())) == count - 1


def test_large_messages_pass_each_other(make_links):
    links = make_links(0, 1)
    sent = os.urandom(2 << 20)

    heard = in_parallel([lambda me=me: links[me].exchange([(1 - me, sent)], [1 - me], 7, until()) for me in (0, 1)])

    assert heard == [[sent], [sent]]


def test_the_end_of_a_peer_ends_the_wait_for_it_but_not_what_it_has_sent(make_links):
    links = make_links(0, 1)
    links[1].post(0, b"last", 0)
    links[0].exchange([(1, b"first")], [], 0, until())
    links[1].close()

    assert links[0].exchange([], [1], 0, until()) == [b"last"]
    with pytest.raises(PeerFailed, match="connection with worker 1 has ended"):
        links[0].exchange([], [1], 0, until())
    with pytest.raises(PeerFailed, match="connection with worker 1 has ended"):
        links[0].exchange([(1, b"more")], [], 0, until())


def test_a_peer_may_end_as_soon_as_it_has_answered(make_links):
    links = make_links(0, 1)
    links[0].post(1, b"introduction", 0)
    links[1].exchange([], [0], 0, until())  # so that both use one connection

    def answer():
        links[1].exchange([(0, b"answer")], [0], 0, until())
        links[1].close()

    peer = threading.Thread(target=answer)
    post = links[0].post

    def post_and_wait(*message):
        post(*message)
        peer.start()
        peer.join(DEADLINE_S)

    links[0].post = post_and_wait

    assert links[0].exchange([(1, b"question")], [1], 0, until()) == [b"answer"]


def test_a_peer_that_does_not_listen_has_failed(make_links):
    links = make_links(0, 1)
    links[1].close()

    with pytest.raises(PeerFailed, match="connection with worker 1 has ended"):
        links[0].exchange([(1, b"hello")], [1], 0, until())


def test_a_change_of_the_store_ends_a_wait(make_links):
    links = make_links(0, 1)
    has_changed = threading.Event()

    def check():
        if has_changed.is_set():
            raise PeerFailed("worker 2 is dead")

    def change():
        has_changed.set()
        os.eventfd_write(links[0]._wake_fd, 1)

    threading.Timer(0.05, change).start()
    with pytest.raises(PeerFailed, match="worker 2 is dead"):
        links[0].exchange([], [1], 0, check)


def test_messages_of_an_earlier_generation_are_dropped_and_those_of_a_later_one_wait_for_it(make_links):
    links = make_links(0, 1)
    links[1].post(0, b"abandoned", 0)
    links[1].begin(2, (0, 1))
    links[1].post(0, b"new", 0)
    links[0].exchange([(1, b"x")], [1], 0, until())  # which reads both

    links[0].begin(2, (0, 1))

    assert links[0].exchange([], [1], 0, until()) == [b"new"]


def test_a_rank_that_is_no_longer_a_member_is_disconnected(make_links):
    links = make_links(0, 1, 2)
    links[2].post(0, b"", 0)
    links[0].exchange([], [2], 0, until())

    links[0].begin(2, (0, 1))

    assert not links[0].know((0, 1, 2))
    assert links[0].know((0, 1))
    with pytest.raises(PeerFailed, match="connection with worker 0 has ended"):
        links[2].exchange([], [0], 0, until())


def hello_of(links, token, rank):
    """Return what begins a connection to ``links``, of a process with this token."""
    once, name = os.urandom(16), links.own_address.split(" ")[2]
    key = derive_key(token, f"link to {name}")
    return once + rank.to_bytes(4, "big") + keyed_hash(key, once + rank.to_bytes(4, "big"))


@pytest.mark.parametrize("stranger_says", ["nothing", "a wrong token", "another rank"])
def test_a_stranger_is_not_heard(stranger_says, make_links):
    links = make_links(0, 1)
    hello = {
        "nothing": bytes(52),
        "a wrong token": hello_of(links[0], "guess", 1),
        "another rank": hello_of(links[0], TOKEN, 3)[:16] + (1).to_bytes(4, "big") + hello_of(links[0], TOKEN, 3)[20:],
    }[stranger_says]
    host, port, _ = links[0].own_address.split(" ")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(hello + bytes(16))
        links[1].post(0, b"a member", 0)

        assert links[0].exchange([], [1], 0, until()) == [b"a member"]
        stranger.settimeout(DEADLINE_S)
        with pytest.raises(PeerFailed, match="too long"):
            links[0].exchange([], [1], 0, until(0.1))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_recorded_beginning_of_a_connection_counts_once(make_links):
    links = make_links(0, 1)
    host, port, _ = links[0].own_address.split(" ")
    hello = hello_of(links[0], TOKEN, 1)
    message = (1).to_bytes(4, "big") + (0).to_bytes(4, "big") + (0).to_bytes(8, "big") + (1).to_bytes(8, "big") + b"x"
    with socket.create_connection((host, int(port))) as first, socket.create_connection((host, int(port))) as again:
        first.sendall(hello + message)
        assert links[0].exchange([], [1], 0, until()) == [b"x"]
        again.sendall(hello + message)
        with pytest.raises(PeerFailed, match="too long"):
            links[0].exchange([], [1], 0, until(0.1))
        again.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):
            assert again.recv(1) == b""
        assert [each.rank for each in links[0]._connections.values()] == [1]


def test_messages_with_another_tag_wait(make_links):
    links = make_links(0, 1)
    for data, tag in ((b"a", 0), (b"b", 1), (b"c", 0)):
        links[1].post(0, data, tag)

    assert links[0].exchange([], [1], 1, until()) == [b"b"]
    assert [links[0].exchange([], [1], 0, until()) for _ in range(2)] == [[b"a"], [b"c"]]


def test_the_interface_in_the_environment_takes_precedence(make_links, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    with_interface = Links(0, "192.0.2.1", os.eventfd(0), 5.0, key_for)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    without = Links(0, "127.0.0.2", os.eventfd(0), 5.0, key_for)

    assert with_interface.own_address.startswith("127.0.0.1 ")
    assert without.own_address.startswith("127.0.0.2 ")


def test_a_forked_child_neither_ends_the_connections_of_its_parent_nor_keeps_them(make_links):
    links = make_links(0, 1)
    links[1].post(0, b"before", 0)
    assert links[0].exchange([], [1], 0, until()) == [b"before"]
    fds = [*links[1]._connections, links[1]._listener.fileno(), links[1]._poll.fileno()]
    child = os.fork()
    if child == 0:
        kept = 0
        for fd in fds:
            with contextlib.suppress(OSError):
                os.fstat(fd)
                kept += 1
        links[1].close()
        os._exit(kept)

    assert os.waitpid(child, 0)[1] == 0
    links[1].post(0, b"after", 0)
    assert links[0].exchange([], [1], 0, until()) == [b"after"]


def test_a_connection_ends_at_once_although_another_process_has_its_socket(make_links):
    links = make_links(0, 1)
    links[1].post(0, b"last", 0)
    links[0].exchange([], [1], 0, until())
    copies = [os.dup(fd) for each in links.values() for fd in each._connections]  # as a child has them
    try:
        links[1].close()
        with pytest.raises(PeerFailed, match="connection with worker 1 has ended"):
            links[0].exchange([], [1], 0, until())
        assert links[0]._poll.poll(0) == []
    finally:
        for fd in copies:
            os.close(fd)


def strangers_of(links, count):
    """Open connections to links that say nothing."""
    host, port, _ = links.own_address.split(" ")
    return [socket.create_connection((host, int(port))) for _ in range(count)]


def test_a_silent_stranger_is_disconnected_and_does_not_hide_the_end_of_a_peer(make_links):
    links = make_links(0, 1, timeout_s=0.2)
    (stranger,) = strangers_of(links[0], 1)
    with stranger:
        stranger.settimeout(DEADLINE_S)
        links[1].post(0, b"last", 0)
        assert links[0].exchange([], [1], 0, until()) == [b"last"]
        links[1].close()

        with pytest.raises(PeerFailed, match="connection with worker 1 has ended"):
            links[0].exchange([], [1], 0, until())
        assert stranger.recv(1) == b""
        assert not links[0]._connections


def test_only_so_many_strangers_stay_connected(make_links, monkeypatch):
    monkeypatch.setattr(links_module, "_MAX_STRANGERS", 2)
    links = make_links(0, 1)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(each) for each in strangers_of(links[0], 4)]
        links[1].post(0, b"a member", 0)

        assert links[0].exchange([], [1], 0, until()) == [b"a member"]
        assert len(links[0]._connections) <= 3
        for each in strangers[:2]:
            each.settimeout(DEADLINE_S)
            assert each.recv(1) == b""


def test_of_a_stranger_no_more_than_an_introduction_is_read(make_links):
    links = make_links(0, 1)
    (stranger,) = strangers_of(links[0], 1)
    with stranger:
        stranger.sendall(bytes(19))
        links[1].post(0, b"a member", 0)
        assert links[0].exchange([], [1], 0, until()) == [b"a member"]
        (unknown,) = [each for each in links[0]._connections.values() if each.rank < 0]
        assert len(unknown.incoming) == 19

        stranger.setblocking(False)
        assert stranger.send(bytes(1 << 20)) > 20
        links[1].post(0, b"more", 0)
        assert links[0].exchange([], [1], 0, until()) == [b"more"]
        assert len(unknown.incoming) <= 52
        assert unknown not in links[0]._connections.values()


def test_a_process_without_descriptors_left_goes_on(make_links, monkeypatch):
    links = make_links(0, 1)
    links[1].post(0, b"first", 0)
    assert links[0].exchange([], [1], 0, until()) == [b"first"]

    class Full:
        def __init__(self, listener):
            self._listener, self.refused = listener, 0

        def __getattr__(self, name):
            return getattr(self._listener, name)

        def accept(self):
            self.refused += 1
            raise OSError(errno.EMFILE, "too many open files")

    links[0]._listener = full = Full(links[0]._listener)
    (stranger,) = strangers_of(links[0], 1)
    with stranger, pytest.raises(PeerFailed, match="too long"):
        links[0].exchange([], [1], 0, until(0.1))
    assert full.refused


def both_open_a_connection(links):
    """Let two members each open a connection to the other one, and use it."""
    for me in (0, 1):
        links[me].post(1 - me, b"hello", 0)
    for me in (0, 1):
        assert links[me].exchange([], [1 - me], 0, until()) == [b"hello"]
        assert len(links[me]._connections) == 2


def test_after_a_message_is_lost_the_next_one_is_not_taken_for_it(make_links):
    links = make_links(0, 1)
    both_open_a_connection(links)
    links[1]._posted[1, 0] += 1  # as if the connection had lost one that was sent
    links[1].post(0, b"the next one", 0)

    with pytest.raises(PeerFailed, match="worker 1 has ended: a message is lost"):
        links[0].exchange([], [1], 0, until())


def test_nothing_follows_on_another_connection_what_a_broken_one_may_have_lost(make_links):
    links = make_links(0, 1)
    both_open_a_connection(links)
    (its_own,) = [each for each in links[1]._connections.values() if each is links[1]._way_to[0]]
    links[1]._end(its_own, "Connection reset by peer")
    (other,) = links[1]._connections.values()
    links[1]._way_to[0] = other

    with pytest.raises(PeerFailed, match="worker 0 has ended: Connection reset by peer"):
        links[1].post(0, b"the next one", 0)

    for each in links.values():
        each.begin(2, (0, 1))
    links[1].post(0, b"of the next generation", 0)
    assert links[0].exchange([], [1], 0, until()) == [b"of the next generation"]


def test_a_connection_that_ended_in_the_last_generation_is_opened_again_in_the_next_one(make_links):
    links = make_links(0, 1)
    links[1].post(0, b"", 0)
    links[0].exchange([], [1], 0, until())
    (connection,) = links[1]._connections.values()
    links[1]._end(connection, "Connection reset by peer")

    for each in links.values():
        each.begin(2, (0, 1))
    links[0].post(1, b"of the next generation", 0)

    assert links[1].exchange([], [0], 0, until()) == [b"of the next generation"]
