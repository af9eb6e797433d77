"""The relay of a node: workers see the job's store through it as it is, and their votes travel together."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from etcd import Cluster
from rosters import Seen, check, draw_parts, play
from strangers import connect

from holdfast.errors import StoreLost
from holdfast.membership import Hub, HubStore, Roster, open_store
from holdfast.membership.relay import Relay
from holdfast.membership.wire import dump

TOKEN, JOB = "secret", "job"
WAIT_S = 60
NODES = {"a": (0, 1, 4), "b": (2, 3, 5)}


class Nodes:
    """Two nodes with a relay each."""

    def __init__(self, url):
        self.stack = contextlib.ExitStack()
        self.url = url
        self.upstream = {node: self.keep(open_store(url, TOKEN)) for node in NODES}
        self.relays = {
            node: self.stack.enter_context(Relay(store, JOB, TOKEN, node=node, ranks=lambda node=node: NODES[node]))
            for node, store in self.upstream.items()
        }

    def keep(self, store):
        self.stack.callback(store.close)
        return store

    def open(self, node, job=JOB):
        return self.keep(HubStore(self.relays[node].address, TOKEN, job))

    def open_rank(self, rank):
        return self.open("a" if rank in NODES["a"] else "b")

    def open_launcher(self):
        return self.keep(open_store(self.url, TOKEN))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def hub():
    with Hub(TOKEN, lease_s=5.0) as hub:
        yield hub


@pytest.fixture(params=["holdfast", "etcd"])
def nodes(request):
    name = "etcd" if request.param == "etcd" else "hub"
    server = request.getfixturevalue(name)
    port = server.ports[0] if name == "etcd" else server.port
    nodes = Nodes(f"{request.param}://127.0.0.1:{port}/relay-{request.node.name}")
    with nodes.stack:
        yield nodes


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rosters_decide_alike_through_relays(nodes, seed):
    world, parts, seen = (0, 1, 2, 3), draw_parts(seed), Seen()
    launcher = nodes.open_launcher()

    def act(part):
        if play(part, nodes.open_rank(part.rank), world, seen) == "killed":
            launcher.put(f"dead/{part.rank}", "killed")

    with ThreadPoolExecutor(len(parts)) as pool:
        for each in [pool.submit(act, part) for part in parts]:
            each.result(WAIT_S)
    check(seen, parts, world)


def test_one_of_many_creates_a_key_and_all_read_its_value(nodes):
    stores = [nodes.open(node) for node in ("a", "a", "b", "b")]

    def create(number):
        won = stores[number].create("key", str(number))
        return won, stores[number].get("key")

    with ThreadPoolExecutor(len(stores)) as pool:
        done = list(pool.map(create, range(len(stores))))

    (winner,) = [number for number, (won, _) in enumerate(done) if won]
    assert {value for _, value in done} == {str(winner)}


def test_what_a_worker_writes_is_in_its_copy_at_once_and_then_in_those_of_all(nodes):
    store, other, late = nodes.open("a"), nodes.open("b"), None
    store.put("key", "1")
    assert store.get("key") == "1"
    store.put("dir/x", "2")
    store.put("dir/y", "3")
    store.delete("dir/")
    assert store.under("dir/") == {}

    late = nodes.open("b")
    assert late.wait(lambda: True if late.under("") == {"key": "1"} else None, WAIT_S)
    assert other.wait(lambda: True if other.under("") == {"key": "1"} else None, WAIT_S)
    assert store.own_address == nodes.upstream["a"].own_address


def test_texts_are_gathered_from_all_nodes(nodes):
    rosters = [Roster(nodes.open_rank(rank), rank, (0, 1, 2, 3)) for rank in range(4)]

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda roster: roster.gather("names", f"name {roster.rank}"), rosters))

    assert texts == [{rank: f"name {rank}" for rank in range(4)}] * 4


@pytest.fixture
def on_hub(hub):
    nodes = Nodes(f"holdfast://{hub.address}/{JOB}")
    with nodes.stack:
        yield nodes


def test_a_node_casts_its_votes_together_and_no_client_receives_them(hub, on_hub):
    requests = []
    answer = hub._answer
    hub._answer = lambda client, line: requests.append(line) or answer(client, line)
    rosters = [Roster(on_hub.open_rank(rank), rank, (0, 1, 2, 3)) for rank in range(4)]
    client = on_hub.open_launcher()
    asked = []
    for relay in on_hub.relays.values():
        relay._answer = lambda client, line, answer=relay._answer: asked.append(line) or answer(client, line)
    requests.clear()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda roster: roster.agree(True), rosters)) == [True] * 4

    keys = sorted(json.loads(line)["key"] for line in requests if line)
    assert keys == ["g/0/act/1/node/a", "g/0/act/1/node/b"]
    assert sorted(json.loads(line)["key"] for line in asked if line) == [f"g/0/act/1/{rank}" for rank in range(4)]
    client.wait(lambda: client.under("g/0/act/") or None, WAIT_S)  # the launcher hears of it on its own connection
    assert client.under("g/0/act/") == {"1/decision": "true"}


def test_the_death_of_a_worker_completes_the_votes_of_its_node(on_hub):
    rosters = [Roster(on_hub.open_rank(rank), rank, (0, 1, 2, 3)) for rank in range(4)]
    launcher = on_hub.open_launcher()

    with ThreadPoolExecutor(3) as pool:
        agreeing = [pool.submit(roster.agree, True) for roster in rosters[1:]]
        launcher.put("dead/0", "killed")
        assert [each.result(WAIT_S) for each in agreeing] == [False] * 3


def test_workers_lose_their_store_with_the_jobs_store(hub, on_hub):
    store = on_hub.open("a")
    hub.close()

    with pytest.raises(StoreLost):
        store.wait(lambda: None, WAIT_S)


def test_workers_of_a_node_lose_the_store_with_its_relay_and_others_keep_theirs(on_hub):
    store, other = on_hub.open("a"), on_hub.open("b")
    on_hub.relays["a"].close()

    with pytest.raises(StoreLost):
        store.wait(lambda: None, WAIT_S)
    other.put("key", "value")
    assert other.get("key") == "value"


@pytest.mark.parametrize(
    ("job", "request_"),
    [
        ("other", None),
        (JOB, {"op": "put", "key": "k", "value": "v", "leased": True}),
        (JOB, {"op": "put", "key": "g/0/act/1/node/a", "value": "{}"}),
        (JOB, {"op": "put", "key": "g/0/act/1/2", "value": "no vote"}),
        (JOB, {"op": "drop", "key": "k"}),
    ],
)
def test_what_a_relay_does_not_serve_ends_the_connection(on_hub, job, request_):
    with connect(on_hub.relays["a"], TOKEN, {"job": job}) as stranger:
        if request_ is not None:
            stranger.send(dump({"id": 1, **request_}))
        answer = stranger.read_to_end()

    assert b'"id": 1' not in answer
    store = on_hub.open("a")
    store.put("key", "value")
    assert store.get("key") == "value"
