"""One contract, every store: the launcher's hub, several hubs of which one leads, and etcd by real servers of it."""

import contextlib
import itertools
import os
import random
import select
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from etcd import Cluster, encode
from rosters import Seen, check, draw_parts, play

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership import Hub, open_store
from holdfast.membership.etcd import EtcdStore, _warn_of_version
from holdfast.membership.store import MAX_VALUE_BYTES

TOKEN = "secret"  # noqa: S105
WAIT_S = 60
LEASE_S = 5.0
_jobs = itertools.count()


class Place:
    """A running store, and a job of this test's own in it."""

    def __init__(self, kind, port, addresses=""):
        self.addresses = addresses
        self.kind, self.port, self.job = kind, port, f"job-{os.getpid()}-{next(_jobs)}"
        self._stack = contextlib.ExitStack()

    def open(self, job="", *, port=None, lease_s=None):
        where = self.addresses if self.addresses and not port else f"127.0.0.1:{port or self.port}"
        if lease_s is not None and self.kind == "etcd":
            store = EtcdStore(where, TOKEN, job or self.job, lease_s=lease_s)
        else:
            store = open_store(f"{self.kind}://{where}/{job or self.job}", TOKEN)
        self._stack.callback(store.close)
        return store

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()


class Relay:
    """Hands on bytes between clients and a server, until it falls silent: connections stay, nothing goes through."""

    def __init__(self, port):
        self._target = port
        self._open, self._pipes, self._lock = True, [], threading.Lock()
        self.answers, self.ends = True, 0
        self._silent, self._woken = False, os.pipe()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._open = False
        os.write(self._woken[1], b"x")
        self._thread.join()
        for each in (self._server, *(each for pair in self._pipes for each in pair)):
            each.close()
        for number in self._woken:
            os.close(number)

    def fall_silent(self):
        self._silent = True
        os.write(self._woken[1], b"x")

    def lose_answers(self, value=True):
        """From now on what is asked arrives, and what is answered does not: the connection ends."""
        self.answers = not value

    def _run(self):
        while self._open:
            others = {each: other for pair in self._pipes for each, other in (pair, pair[::-1])}
            sources = [] if self._silent else [self._server, *others]
            for each in select.select([self._woken[0], *sources], [], [])[0]:
                if each == self._woken[0]:
                    os.read(each, 1)
                elif each is self._server:
                    client = self._server.accept()[0]
                    self._pipes.append((client, socket.create_connection(("127.0.0.1", self._target))))
                else:
                    self._hand_on(each, others[each])

    def _hand_on(self, source, target):
        pair = next(pair for pair in self._pipes if source in pair)
        try:
            data = source.recv(1 << 16)
            if data and (self.answers or source is pair[0]):
                target.sendall(data)
                return
        except OSError:
            self.ends += 1  # one of them is gone, and so the other goes
        if pair in self._pipes:
            self._pipes.remove(pair)
        for each in pair:
            each.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@contextlib.contextmanager
def cluster_of_hubs(count=3):
    """Hubs in threads of this process; the first one leads."""
    with contextlib.ExitStack() as ends:
        hubs = [ends.enter_context(Hub(TOKEN, lease_s=LEASE_S, places=None, place=place)) for place in range(count)]
        for hub in hubs:
            hub.form([each.address for each in hubs])
        yield hubs


@pytest.fixture(params=["holdfast", "hubs", "etcd"])
def place(request):
    if request.param == "hubs":
        with cluster_of_hubs() as hubs:
            addresses = ",".join(hub.address for hub in hubs)
            with Place("holdfast", hubs[0].port, addresses) as place:
                place.open()  # waits until one leads
                yield place
        return
    if request.param == "etcd":
        with Place("etcd", request.getfixturevalue("etcd").ports[0]) as place:
            yield place
        return
    with Hub(TOKEN, lease_s=LEASE_S) as hub, Place("holdfast", hub.port) as place:
        yield place


def winners(stores, key, create):
    """Have all try to be the first at the same time; return who was, and what they read."""
    together = threading.Barrier(len(stores))

    def try_it(number):
        together.wait(WAIT_S)
        return create(stores[number], key, str(number)), stores[number].get(key)

    with ThreadPoolExecutor(len(stores)) as pool:
        done = list(pool.map(try_it, range(len(stores))))
    return [number for number, (won, _) in enumerate(done) if won], {read for _, read in done}


def test_of_many_who_create_a_key_one_wins_and_all_read_what_it_wrote(place):
    stores = [place.open() for _ in range(8)]

    for turn in range(20):
        won, read = winners(stores, f"key/{turn}", lambda store, key, value: store.create(key, value))

        assert len(won) == 1
        assert read == {str(won[0])}


def test_a_creation_that_looks_first_and_writes_then_is_found_out(place):
    def careless(store, key, value):
        if store.get(key) is not None:
            return False
        store.put(key, value)
        return True

    stores = [place.open() for _ in range(8)]

    assert any(len(winners(stores, f"key/{turn}", careless)[0]) > 1 for turn in range(50))


def test_everybody_sees_all_changes_in_the_same_order(place):
    stores = [place.open() for _ in range(3)]

    def write(number):
        for turn in range(60):
            stores[number].put(f"n/{number}.{turn}", "")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))

    orders = [
        store.wait(lambda s=store: o if len(o := list(s.under("n/"))) == 180 else None, WAIT_S) for store in stores
    ]
    assert orders[0] is not None
    assert orders == [orders[0]] * 3


def test_who_comes_later_finds_everything_as_it_was_written(place):
    first = place.open()
    items = {
        "empty": "",
        "a key/with spaces, 'quotes' and \"more\"": "line\nline\r\n\ttab",
        "Schlüssel/鍵/🔑": "Wert/値/💎\0",
        "": "the key is empty",
        "json": '{"a": [1, "\\u2028"]}',
        "big": "x" * MAX_VALUE_BYTES,
        **{f"many/{number}": str(number) for number in range(600)},
    }
    for key, value in items.items():
        first.put(key, value)

    second = place.open()

    assert second.under("") == first.under("") == items


def test_what_was_written_is_in_the_local_copy_at_once(place):
    store, other = place.open(), place.open()

    for turn in range(30):
        store.put("key", str(turn))
        assert store.get("key") == str(turn)
        assert other.create(f"first/{turn}", "other")
        assert not store.create(f"first/{turn}", "mine")
        assert store.get(f"first/{turn}") == "other"
        store.delete("key")
        assert store.get("key") is None


def test_a_key_goes_alone_and_a_folder_with_all_that_is_in_it(place):
    store, other = place.open(), place.open()
    for key in ("join/1", "join/11", "join/1/x", "joint", "rest"):
        store.put(key, "here")

    store.delete("join/1")
    store.delete("not there")
    assert store.under("").keys() == {"join/11", "join/1/x", "joint", "rest"}

    store.delete("join/")
    store.delete("nothing here/")
    assert store.under("").keys() == {"joint", "rest"}
    assert other.wait(lambda: True if other.under("").keys() == {"joint", "rest"} else None, WAIT_S)


def test_jobs_do_not_see_each_other(place):
    mine, other = place.open(f"{place.job}/a"), place.open(f"{place.job}/ab")
    mine.put("key", "mine")
    other.put("key", "others")
    other.delete("key")

    assert mine.get("key") == "mine"
    assert other.create("key", "anew")
    assert place.open(f"{place.job}/a").under("") == {"key": "mine"}


def test_waiting_ends_with_the_change_that_was_waited_for_or_in_time(place):
    store, other = place.open(), place.open()
    version = store.version
    assert store.wait(lambda: store.get("key"), 0.01) is None

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, lambda: store.get("key"), WAIT_S)
        other.put("another", "value")
        other.put("key", "value")

        assert waiting.result(WAIT_S) == "value"
    assert store.version >= version + 2


def test_closing_wakes_who_waits_and_what_is_known_stays_known(place):
    store = place.open()
    store.put("key", "value")
    began = threading.Event()

    def ready():
        began.set()
        return store.get("never")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ready)
        assert began.wait(WAIT_S)
        store.close()
        store.close()

        with pytest.raises(StoreLost, match="closed here"):
            waiting.result(WAIT_S)
    with pytest.raises(StoreLost, match="closed here"):
        store.put("key", "other")
    assert store.wait(lambda: store.get("key")) == "value"


def test_closing_while_others_ask_ends_their_questions(place):
    for _ in range(5):
        store = place.open()
        began = threading.Barrier(5)

        def ask(number, store=store, began=began):
            began.wait(WAIT_S)
            with contextlib.suppress(StoreLost):
                for turn in itertools.count():
                    store.put(f"{number}/{turn % 5}", "x" * 5000)
            return store.lost

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask, number) for number in range(4)]
            began.wait(WAIT_S)
            store.close()
            assert all("closed here" in each.result(WAIT_S) for each in asking)


def test_who_is_cut_off_knows_it_before_others_see_its_lease_run_out_and_leases_of_others_are_kept(place):
    watcher, kept = place.open(lease_s=LEASE_S), place.open(lease_s=LEASE_S)
    kept.put("node/1", "kept", leased=True)
    order = []
    with Relay(place.port) as relay:
        cut_off = place.open(port=relay.port, lease_s=LEASE_S)
        cut_off.put("node/0", "cut off", leased=True)
        cut_off.put("stays", "not leased")
        assert watcher.wait(lambda: watcher.get("node/0"), WAIT_S) == "cut off"

        def watch():
            watcher.wait(lambda: True if watcher.get("node/0") is None else None, WAIT_S)
            order.append("lease")

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            relay.fall_silent()
            with pytest.raises(StoreLost):
                cut_off.wait(lambda: None, WAIT_S)
            order.append("known")
            watching.result(WAIT_S)
        with pytest.raises(StoreLost):
            cut_off.put("key", "value")
    assert order == ["known", "lease"]
    assert watcher.get("node/1") == "kept"
    assert watcher.get("stays") == "not leased"


def test_what_is_too_large_or_no_text_is_refused_and_the_store_goes_on(place):
    store = place.open()

    with pytest.raises(ConfigError, match="too large for the store"):
        store.put("key", "x" * (MAX_VALUE_BYTES + 1))
    with pytest.raises(ConfigError, match="too large for the store"):
        store.create("k" * 513, "value")
    with pytest.raises(ConfigError, match="not encodable text"):
        store.put("half a \ud83d", "value")

    store.put("key", "value")
    assert store.get("key") == "value"


def test_a_forked_child_has_no_store_and_leaves_the_parents_alone(place):
    store = place.open()
    store.put("key", "value")

    child = os.fork()
    if child == 0:
        try:
            store.put("key", "from the child")
        except StoreLost as error:
            store.close()
            os._exit(7 if "of a fork" in str(error) else 8)
        os._exit(9)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.put("other", "value")
    assert place.open().under("") == {"key": "value", "other": "value"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rosters_decide_alike_over_a_real_store_whoever_dies(place, seed):
    act_all(place.open, seed)


def act_all(open_one, seed, meanwhile=lambda: None):
    """A play with a thread and a store for each member, and one for the launcher that tells of deaths."""
    world, parts, seen = (0, 1, 2, 3), draw_parts(seed), Seen()
    launcher = open_one()

    def act(part):
        if play(part, open_one(), world, seen) == "killed":
            launcher.put(f"dead/{part.rank}", "killed")

    with ThreadPoolExecutor(len(parts)) as pool:
        acting = [pool.submit(act, part) for part in parts]
        meanwhile()
        for each in acting:
            each.result(WAIT_S)
    check(seen, parts, world)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/job", "holdfast://127.0.0.1/job", "etcd://127.0.0.1:1x/job", "etcd://h:0/job", "etcd://:1/j"],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        open_store(url, TOKEN)


@pytest.mark.parametrize("kind", ["holdfast", "etcd"])
def test_nobody_there_is_said_at_once(kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(StoreLost, match=f"there is no .* at 127.0.0.1:{port}"):
        open_store(f"{kind}://127.0.0.1:{port}/job", TOKEN)


# -- etcd


def test_etcd_is_left_as_it_was_found_but_for_the_keys_of_the_job(etcd):
    job = f"job-{os.getpid()}-{next(_jobs)}"
    store = open_store(etcd.url(job), "")
    store.put("key", "value")
    store.close()

    assert etcd.keys(f"holdfast/{job}/") == [f"holdfast/{job}/key"]


@pytest.mark.parametrize(("supported", "warnings"), [((0,), 0), ((9, 0, 1), 1)])
def test_an_etcd_that_is_too_old_is_warned_of_once(etcd, monkeypatch, caplog, supported, warnings):
    monkeypatch.setattr("holdfast.membership.etcd.SUPPORTED", supported)
    _warn_of_version.cache_clear()

    with Place("etcd", etcd.ports[0]) as place:
        place.open()
        place.open()

    texts = [record.getMessage() for record in caplog.records if "versions before" in record.getMessage()]
    assert len(texts) == warnings
    assert all("versions before 9.0.1 may lose or corrupt data; upgrade it" in text for text in texts)


def test_a_creation_whose_answer_is_lost_is_known_to_have_won(etcd):
    with Relay(etcd.ports[0]) as relay, Place("etcd", relay.port) as place, Place("etcd", etcd.ports[0]) as other:
        store = place.open()
        store.put("key", "value")
        relay.lose_answers()
        with ThreadPoolExecutor(1) as pool:
            creating = pool.submit(store.create, "first", "mine")
            reader = other.open(place.job)
            assert reader.wait(lambda: reader.get("first"), WAIT_S) == "mine"
            assert reader.create("first", "mine") is False
            relay.lose_answers(False)

            assert creating.result(WAIT_S) is True


def test_changes_that_etcd_has_forgotten_are_made_up_for(etcd):
    with Relay(etcd.ports[0]) as relay, Place("etcd", relay.port) as place, Place("etcd", etcd.ports[0]) as other:
        store = place.open()
        for key in ("goes", "stays", "changes"):
            store.put(key, "old")
        relay.lose_answers()
        writer = other.open(place.job)
        writer.put("changes", "new")
        writer.put("comes", "new")
        writer.delete("goes")
        revision = etcd.ask("kv/range", key=encode("a"))["header"]["revision"]
        etcd.ask("kv/compaction", revision=revision, physical=True)
        relay.lose_answers(False)

        expected = {"stays": "old", "changes": "new", "comes": "new"}
        assert store.wait(lambda: True if store.under("") == expected else None, WAIT_S)
        store.put("goes on", "yes")


def test_who_has_lost_its_lease_may_lease_again(etcd):
    with Place("etcd", etcd.ports[0]) as place:
        store = place.open()
        store.put("node/0", "here", leased=True)
        found = etcd.ask("kv/range", key=encode(f"holdfast/{place.job}/node/0"))["kvs"]
        etcd.ask("lease/revoke", ID=found[0]["lease"])
        assert store.wait(lambda: True if store.get("node/0") is None else None, WAIT_S)

        store.put("node/0", "again", leased=True)

        assert store.get("node/0") == "again"


def test_membership_goes_on_when_members_of_etcd_are_killed_or_hang_and_ends_without_a_majority(tmp_path):
    rng = random.Random(6)
    with Cluster(tmp_path, 3, ["--heartbeat-interval=100", "--election-timeout=1000"]) as cluster:
        opened, where = [], cluster.url("job").removeprefix("etcd://").removesuffix("/job")

        def open_one():  # each asks and watches another member first
            opened.append(open_store(cluster.url("job", *rng.sample(range(3), 3)), ""))
            return opened[-1]

        watcher, writer = open_one(), open_one()
        opened.append(EtcdStore(where, "", "job", lease_s=4.0))
        ended = []
        act_all(open_one, 4, meanwhile=lambda: ended.append(cluster.kill(0)))
        assert ended == [-9]
        writer.put("after", "the kill")
        assert watcher.wait(lambda: watcher.get("after"), WAIT_S) == "the kill"

        cluster.start(0)
        cluster._await(0)
        cluster.pause(1)
        writer.put("after", "the pause")
        assert watcher.wait(lambda: watcher.get("after") == "the pause" or None, WAIT_S)
        assert not any(store.lost for store in opened)

        watcher, writer = (EtcdStore(where, "", "job", lease_s=LEASE_S) for _ in range(2))
        opened += [watcher, writer]
        cluster.kill(2)
        with pytest.raises(StoreLost, match="is lost: "):
            writer.put("after", "the end")
        with pytest.raises(StoreLost, match="is lost: "):
            watcher.wait(lambda: None, WAIT_S)
        for store in opened:
            store.close()


def test_etcd_with_users_wants_the_password_and_goes_on_after_it_has_forgotten_who_we_are(tmp_path):
    with Cluster(tmp_path) as cluster:
        cluster.ask("auth/user/add", name="root", password="root")  # noqa: S106
        cluster.ask("auth/role/add", name="root")
        cluster.ask("auth/user/grant", user="root", role="root")
        cluster.ask("auth/user/add", name="holdfast", password=TOKEN)
        cluster.ask("auth/role/add", name="jobs")
        span = {"key": encode("holdfast/"), "range_end": encode("holdfast0")}
        cluster.ask("auth/role/grant", name="jobs", perm={"permType": "READWRITE", **span})
        cluster.ask("auth/user/grant", user="holdfast", role="jobs")
        cluster.ask("auth/enable")
        url = f"etcd://holdfast@127.0.0.1:{cluster.ports[0]}/job"

        for wrong, token in ((url, "wrong"), (url.replace("holdfast@", ""), TOKEN)):
            with pytest.raises(ConfigError, match="refuses access"):
                open_store(wrong, token)
        store, other = open_store(url, TOKEN), open_store(url, TOKEN)
        store.put("node/0", "here", leased=True)
        assert other.wait(lambda: other.get("node/0"), WAIT_S) == "here"

        cluster.kill(0)
        cluster.start(0)
        store.put("after", "the restart")
        assert other.wait(lambda: other.get("after"), WAIT_S) == "the restart"
        cluster.ask("auth/user/add", headers=cluster.log_in("root", "root"), name="another", password=TOKEN)
        store.put("after", "users have changed")
        assert other.wait(lambda: other.get("after") == "users have changed" or None, WAIT_S)
        other.close()
        store.close()


@pytest.mark.soak
def test_an_etcd_that_comes_back_without_its_data_is_lost(tmp_path):
    with Cluster(tmp_path) as cluster, contextlib.closing(open_store(cluster.url("job"), "", lease_s=20)) as store:
        for number in range(50):
            store.put(f"key/{number}", "")

        cluster.kill(0)
        shutil.rmtree(tmp_path / "m0")
        cluster.start(0)

        with pytest.raises(StoreLost, match=r"it has lost its data: it is at revision \d+, and was at 5\d"):
            store.wait(lambda: None, WAIT_S)


def test_this_machine_is_known_by_its_address_on_the_way_to_a_member_elsewhere(etcd):
    job = f"job-{os.getpid()}-{next(_jobs)}"
    with contextlib.closing(EtcdStore(f"127.0.0.1:{etcd.ports[0]},192.0.2.1", "", job)) as store:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 2379))
                expected = probe.getsockname()[0]
            except OSError:
                expected = "127.0.0.1"  # this machine has no network

        assert store.own_address == expected
