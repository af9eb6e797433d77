"""The launchers of several nodes as they see each other, over a real store, without workers."""

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from clusters import free_port, until
from usual_records import committed, recovered

from holdfast.base.rules import check_rules
from holdfast.config import Settings
from holdfast.errors import ConfigError, JobError
from holdfast.launch.fleet import nodes
from holdfast.launch.fleet.base import NodeChanges
from holdfast.launch.fleet.node_health import NodeCheck
from holdfast.launch.fleet.nodes import FENCE_LEASES, NodeGroup
from holdfast.launch.fleet.rendezvous import hub_places, split_place
from holdfast.launch.job import Job
from holdfast.launch.job_rules import NODE_RULES
from holdfast.membership import Hub, open_store
from holdfast.records.beacon import BeaconPosition
from holdfast.records.types import WorkerEnded

LEASE_S = 0.6
DEADLINE_S = 20.0


@pytest.fixture
def make_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    url = f"holdfast://127.0.0.1:{free_port()}"

    def make(node, nnodes=2, workers=2, token="", **more):
        settings = Settings(fabric="gloo", workers=workers, token=token, **more.pop("settings", {}))
        given = {"node_timeout_s": LEASE_S, "rdzv_timeout_s": DEADLINE_S, "rdzv": url} | more
        return Job(script=script, settings=settings, nnodes=nnodes, node_rank=node, **given)

    return make


@pytest.fixture
def meet(make_job):
    """Let so many launchers meet; they are closed at the end, those that join first."""
    with contextlib.ExitStack() as ends:

        def together(count=2, **more):
            made = {}
            threads = [
                threading.Thread(target=lambda n=n: made.update({n: NodeGroup(make_job(n, count, **more))}))
                for n in range(count)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
            for node in range(count):
                ends.callback(made[node].close)
            return [made[node] for node in range(count)]

        together.ends = ends
        yield together


def begun(meet, count=2, **more):
    """So many launchers that have met and begin the job."""
    launchers = meet(count, **more)
    for launcher in launchers:
        launcher.begin(0)
    return launchers


def changes_at(launcher):
    changes = NodeChanges()
    launcher.poll(changes)
    return changes


def publish(launcher, records):
    launcher._replication.publish(launcher.number, records)


def receive(launcher):
    return launcher._replication.receive(launcher._others)


def fall_silent(launcher):
    """As if the network of a node were gone: nothing is said, not even good-bye."""
    for store in (launcher._members, launcher.store):
        if store is not None:
            store.close()


def test_each_node_starts_its_own_workers_and_knows_all(meet):
    starts = [launcher.begin(0) for launcher in meet(2)]

    assert [start.own for start in starts] == [(0, 1), (2, 3)]
    assert {start.ranks for start in starts} == {start.alive for start in starts} == {(0, 1, 2, 3)}


def test_what_one_tells_all_others_hear_once_in_order_with_the_place_of_a_death(meet):
    first, second, third = meet(3)
    position = BeaconPosition(beats=1, step=4, slice=2, phase="forward", pid=7, samples=(3, 5))
    death = WorkerEnded(t_s=9.0, rank=0, step=4, exit_code=-9, pid=7)

    publish(first, [(committed(step), None) for step in range(3)])
    publish(first, [(death, position)])

    for other in (second, third):
        told = []
        until(lambda told=told, other=other: told.extend(receive(other)) or len(told) == 4)
        assert [entry.record for entry in told] == [committed(0), committed(1), committed(2), death]
        assert [entry.position for entry in told] == [None, None, None, position]
        assert receive(other) == []
    assert receive(first) == []


def test_records_do_not_pile_up_in_the_store(meet, monkeypatch):
    monkeypatch.setattr(nodes, "_SLOTS", 4)
    first, second = meet(2)
    told = []

    for step in range(30):
        publish(first, [(committed(step), None)])
        until(lambda: told.extend(receive(second)) or (told[-1:] and told[-1].record.step == step))  # noqa: B023

    assert [entry.record.step for entry in told] == list(range(30))
    assert len(first.store.under("told/")) == 4


def test_many_records_at_once_go_in_pieces_that_a_store_takes(meet, monkeypatch):
    monkeypatch.setattr(nodes, "_BATCH_BYTES", 500)
    first, second = meet(2)
    told = []

    publish(first, [(committed(step), None) for step in range(20)])
    until(lambda: told.extend(receive(second)) or len(told) == 20)

    assert [entry.record.step for entry in told] == list(range(20))
    assert len(first.store.under("told/")) > 5


def test_what_all_workers_report_after_a_failure_crosses_the_network_compressed(meet):
    here, there = meet()
    survivors = tuple(range(1, 1024))
    sent = [(recovered(rank, lost=(0,), survivors=survivors), None) for rank in range(1, 9)]
    publish(here, sent)

    told = until(lambda: receive(there))

    assert [entry.record for entry in told] == [record for record, _ in sent]
    (text,) = here.store.under("told/0/").values()
    assert len(text) < 8000 < len(json.dumps(survivors)) * 8


def test_a_silent_node_is_lost_with_its_workers_and_one_that_says_goodbye_is_not(meet):
    first, second, third = begun(meet, 3, workers=1)
    assert changes_at(first) == NodeChanges()

    fall_silent(second)
    third.deaths.note_end(2)
    third.close()

    changes = NodeChanges()
    until(lambda: first.poll(changes) or changes.lost)
    assert changes.lost == {1: (1,)}
    assert set(first.store.under("gone/0/")) == {"1", "2"}
    assert first._members.get("dead/1") == "node 1 is lost"
    assert first._members.get("dead/2") is None
    assert first.given_up == {1}


def test_whoever_finds_a_silent_node_second_loses_its_workers_like_the_first(meet):
    first, second, third = begun(meet, 3, workers=1)
    fall_silent(second)

    until(lambda: changes_at(first).lost)
    until(lambda: third.store.get("gone/0/1"))

    assert until(lambda: changes_at(third).lost) == {1: (1,)}
    assert third.given_up == {1}


def test_who_comes_back_to_a_lost_node_brings_newcomers_and_knows_who_is_there(meet, make_job):
    first, second = begun(meet)
    publish(first, [(committed(0, t_s=0.0), None)])
    publish(second, [(committed(1, t_s=0.0), None)])
    fall_silent(second)
    until(lambda: changes_at(first).lost)

    back = NodeGroup(make_job(1))
    meet.ends.callback(back.close)
    start = back.begin(back.number)

    assert back.is_late
    assert (start.own, start.ranks, start.alive) == ((), (0, 1, 2, 3), (0, 1))
    assert [told.record.step for told in receive(back)] == [1, 0], "what its predecessor told, and the others"
    assert back.free_number(4) == 4
    assert until(lambda: changes_at(first).newcomers) == (4,)
    publish(back, [(committed(2), None)])
    heard = []
    until(lambda: heard.extend(receive(first)) or len(heard) == 2)
    assert [told.record.step for told in heard] == [1, 2]


@pytest.fixture
def managed(make_job):
    """Make launchers of three nodes whose store a hub of ours hosts; they are closed at the end."""
    token = secrets.token_hex(8)
    with Hub(token, lease_s=LEASE_S) as hub, contextlib.ExitStack() as ends:

        def launcher(node):
            url = f"holdfast://{hub.address}"
            made = NodeGroup(make_job(node, 3, workers=1, token=token, rdzv=url, is_managed=True))
            ends.callback(made.close)
            return made

        def begin_with(count):
            ahead = ends.enter_context(contextlib.closing(open_store(f"holdfast://{hub.address}/0/launchers", token)))
            until(lambda: len(ahead.under("node/")) == count or None)
            ahead.create("start/0", json.dumps({node: 0 if node < count else -1 for node in range(3)}))

        launcher.begin_with = begin_with
        yield launcher


def managed_together(managed, count):
    made = {}
    threads = [threading.Thread(target=lambda n=n: made.update({n: managed(n)})) for n in range(count)]
    for thread in threads:
        thread.start()
    managed.begin_with(count)
    for thread in threads:
        thread.join(DEADLINE_S)
    return [made[node] for node in range(count)]


def test_a_managed_job_begins_without_nodes_that_come_later(managed):
    first, second = managed_together(managed, 2)

    starts = [launcher.begin(0) for launcher in (first, second)]

    assert not first.is_needed, "no launcher is special"
    assert [start.own for start in starts] == [(0,), (1,)]
    assert {start.ranks for start in starts} == {(0, 1)}
    assert not changes_at(first).lost, "a node that has never been there cannot be lost"
    third = managed(2)
    assert third.is_late
    assert third.begin(third.number).alive == (0, 1)
    assert third.free_number(2) == 2
    assert until(lambda: changes_at(first).newcomers) == (2,)


def test_a_managed_restart_leaves_room_for_nodes_that_are_missing(managed):
    first, second = managed_together(managed, 2)
    for launcher in (first, second):
        launcher.begin(0)
    until(lambda: first.there()[1].ranks)

    assert first.agree_on_restart(1, (1, 2, 3)) == (1, 2), "one worker a node: the third comes with the third node"


def test_who_comes_back_when_all_are_lost_does_not_wait_for_its_predecessors_workers(managed):
    first, second = managed_together(managed, 2)
    for launcher in (first, second):
        launcher.begin(0)
        fall_silent(launcher)

    back = until(lambda: managed(0))
    start = back.begin(back.number)

    assert 0 not in start.alive
    assert until(lambda: changes_at(back).lost) == {1: (1,)}


def test_newcomers_of_two_nodes_at_once_are_known_each_at_its_home(meet):
    first, second, third = begun(meet, 3, workers=1)
    second.free_number(10)
    third.free_number(11)
    until(lambda: {rank for seated in first.there().values() for rank in seated.ranks} >= {10, 11})

    assert sorted(changes_at(first).newcomers) == [10, 11]

    assert (first.ranks_of([10]), first.ranks_of([11])) == ((1,), (2,))


def test_a_node_has_one_launcher(meet, make_job):
    meet(2)

    line = r"node 1 has a launcher already, process \d+ on .*: give each node its own --node-r"
    with pytest.raises(ConfigError, match=line):
        NodeGroup(make_job(1))


def test_a_launcher_that_waits_while_the_job_ends_says_so(make_job):
    first = make_job(0)
    hub = Hub(first.settings.token, *split_place(first.rdzv.removeprefix("holdfast://")), lease_s=LEASE_S)
    with contextlib.closing(hub), ThreadPoolExecutor() as pool:
        waiting = pool.submit(NodeGroup, make_job(1))
        with contextlib.closing(open_store(f"{first.rdzv}/0/launchers", first.settings.token, lease_s=LEASE_S)) as seen:
            assert seen.wait(lambda: seen.under("node/") or None, DEADLINE_S)
        hub.close()
        with pytest.raises(JobError, match="before node 1 could join: the job has ended, or lost its store"):
            waiting.result(DEADLINE_S)


def test_who_was_given_up_knows_it_though_it_can_be_reached_again(meet):
    _, second = meet(2)
    assert second.store_lost == ""

    second.store.delete("node/1")  # as the store does when the lease runs out

    assert "node 1 was given up: no heartbeat for 0.6 s (--node-timeout)" in until(lambda: second.store_lost)


def test_the_first_who_proposes_decides_who_is_started_again_and_where(meet):
    first, second = begun(meet)
    assert not first.is_restarted()
    until(lambda: first.there()[1].ranks)

    assert first.agree_on_restart(1, (0, 2, 3, 4)) == (0, 2, 3, 4)
    assert second.agree_on_restart(1, (0,)) == (0, 2, 3, 4)

    assert until(second.is_restarted)
    assert first.begin(1).own == (0, 4), "the new worker goes where there are fewest"
    assert second.begin(1).own == (2, 3)


def test_workers_of_the_last_start_are_no_newcomers_of_this_one(meet):
    first, second = begun(meet)
    assert second.free_number(4) == 4
    until(lambda: changes_at(first).newcomers == (4,))

    assert first.agree_on_restart(1, (0, 1, 2)) == second.agree_on_restart(1, (0, 1, 2)) == (0, 1, 2)
    first.begin(1)
    assert changes_at(first).newcomers == (), "the second still names 3 and 4, who are no more"
    second.begin(1)
    assert second.free_number(5) == 5
    assert until(lambda: changes_at(first).newcomers) == (5,)


def test_a_death_that_is_reported_late_does_not_reach_the_workers_of_the_next_start(meet):
    (only,) = meet(1)
    only.begin(0)
    report = only.deaths.report
    report(1, "killed by SIGKILL")
    assert only._members.under("dead/") == {"1": "killed by SIGKILL"}

    only.agree_on_restart(1, (0, 1))
    only.begin(1)
    report(0, "killed by SIGKILL")

    assert only._members.under("dead/") == {}
    only.deaths.report(0, "killed by SIGSEGV")
    assert only._members.under("dead/") == {"0": "killed by SIGSEGV"}


def test_nobody_starts_again_before_a_lost_node_has_surely_ended_its_workers(meet):
    first, second = begun(meet)
    fall_silent(second)
    until(lambda: changes_at(first).lost)

    since_s = time.monotonic()
    first.agree_on_restart(1, (0, 1))

    assert time.monotonic() - since_s > 0.9 * FENCE_LEASES * LEASE_S
    assert first.begin(1).own == (0, 1)


def test_what_is_said_holds_for_this_start_only_and_can_be_taken_back(meet):
    first, second, third = begun(meet, 3)

    second.post("waits", true=True)
    until(lambda: first.any_posted("waits"))
    assert not first.all_posted("waits")
    third.post("waits", true=True)
    until(lambda: first.all_posted("waits"))
    assert first.all_posted("waits", first.ranks_of([4]))
    second.post("waits", true=False)
    until(lambda: not first.all_posted("waits"))
    first.agree_on_restart(1, range(6))
    first.begin(1)
    assert not first.any_posted("waits")


def test_all_launchers_hear_the_same_changes_in_the_same_order(meet):
    first, second = meet(2)

    first.request({"lr": 0.1})
    second.request({"lr": 0.2})
    second.request({"batch_size": 8})

    wanted = [{"lr": 0.1}, {"lr": 0.2}, {"batch_size": 8}]
    for launcher in (first, second):
        heard = []
        until(lambda heard=heard, launcher=launcher: heard.extend(launcher.requests()) or len(heard) == 3)
        assert heard == wanted


def test_a_worker_of_another_node_is_is_leaving_once(meet):
    first, second = begun(meet)

    first.ask_to_leave(3)

    assert until(second.is_leaving) == (3,)
    assert until(lambda: second.store.get("leave/3") is None)
    assert second.is_leaving() == ()


# -- what goes wrong when they meet


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"workers": 3}, "was started with -n 3, the other nodes with 2: give all nodes the same"),
        ({"args": ("--fast",)}, r"ARGS \['--fast'\], the other nodes with \[\]"),
        ({"settings": {"guard": "off"}}, "with --guard 'off', the other nodes with 'stop'"),
        ({"settings": {"overlap_optimizer": True}}, "with --overlap-optimizer, the other nodes without it"),
        ({"settings": {"certificate": False}}, "with --no-certificate, the other nodes without it"),
    ],
)
def test_launchers_that_were_started_differently_are_told_what_differs(meet, make_job, more, complaint):
    meet(2)

    with pytest.raises(ConfigError, match=complaint):
        NodeGroup(make_job(1, **({"nnodes": 2} | more)))


def test_another_list_of_addresses_and_another_script_of_the_same_name_are_found_out(meet, make_job):
    first, _ = meet(2)
    url = f"{first._url},127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match="with a number of addresses in --rdzv holdfast:// 3, the other nodes with 1"):
        NodeGroup(make_job(1, rdzv=url))
    make_job(1).script.write_text("print('newer')")

    with pytest.raises(ConfigError, match="a script with the digest"):
        NodeGroup(make_job(1))


def test_a_wrong_token_is_refused_in_one_line(meet, make_job):
    meet(2, token="right")  # noqa: S106

    with pytest.raises(ConfigError, match="refused the connection for a wrong token: --rdzv-token") as refused:
        NodeGroup(make_job(1, token="wrong"))  # noqa: S106
    assert "\n" not in str(refused.value)


def test_without_a_first_launcher_nobody_waits_for_ever(make_job):
    with pytest.raises(JobError, match=r"there is no store at .*; node 1 waited 0.1 s \(--rdzv-timeout\) for node 0"):
        NodeGroup(make_job(1, rdzv_timeout_s=0.1))


def test_without_an_etcd_it_is_the_store_that_is_missing(make_job):
    complaint = r"there is no etcd at 127.0.0.1:\d+.*; node 0 waited 0.1 s \(--rdzv-timeout\) for it$"
    with pytest.raises(JobError, match=complaint):
        NodeGroup(make_job(0, rdzv_timeout_s=0.1, rdzv=f"etcd://127.0.0.1:{free_port()}/a-job"))


def test_a_node_that_does_not_come_is_named(make_job):
    with pytest.raises(JobError, match=r"node 1, 2 did not join within 0.2 s \(--rdzv-timeout\)"):
        NodeGroup(make_job(0, nnodes=3, rdzv_timeout_s=0.2))


def test_the_others_begin_without_an_unfit_node(meet, make_job):
    unfit = NodeCheck("echo memory is short; exit 1")
    meet.ends.callback(unfit.close)
    with ThreadPoolExecutor(3) as pool:
        here = [pool.submit(NodeGroup, make_job(node, 3)) for node in (0, 1)]
        with pytest.raises(JobError, match=r"node 2 stays out of the job, because it is unfit: .*: memory is short "):
            pool.submit(NodeGroup, make_job(2, 3), unfit).result(DEADLINE_S)
        groups = [one.result(DEADLINE_S) for one in here]
    for group in reversed(groups):
        meet.ends.callback(group.close)

    starts = [group.begin(0) for group in groups]
    assert [start.ranks for start in starts] == [(0, 1, 2, 3)] * 2
    assert [start.own for start in starts] == [(0, 1), (2, 3)]


def test_without_enough_workers_the_others_wait_and_say_why(meet, make_job):
    unfit = NodeCheck("echo memory is short; exit 1")
    meet.ends.callback(unfit.close)
    settings = {"min_workers": 3}
    with ThreadPoolExecutor(2) as pool:
        here = pool.submit(NodeGroup, make_job(0, 2, rdzv_timeout_s=3, settings=settings))
        with pytest.raises(JobError):
            pool.submit(NodeGroup, make_job(1, 2, settings=settings), unfit).result(DEADLINE_S)
        with pytest.raises(JobError, match=r"node 1 did not join within 3 s .*; node 1 is unfit: .*: memory is short"):
            here.result(DEADLINE_S)


def test_a_port_that_is_taken_is_said(make_job):
    job = make_job(0)
    with socket.socket() as taken:
        taken.bind(split_place(*hub_places(job.rdzv)))
        taken.listen()

        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:"):
            NodeGroup(job)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"nnodes": 0}, "--nnodes must be at least 1, got 0"),
        ({"node": 1, "nnodes": 1, "rdzv": ""}, "--node-rank must be 0 with one node, got 1"),
        ({"node": 2}, r"--node-rank must be from 0 to 1 \(--nnodes 2\), got 2"),
        ({"rdzv": ""}, "--nnodes needs --rdzv"),
        ({"rdzv": "holdfast://10.0.0.1:29400"}, "needs a secret that all nodes share: --rdzv-token, or HOLDFAST_TOKEN"),
        ({"rdzv": "10.0.0.1:29400"}, "--rdzv must be holdfast://HOST:PORT"),
        ({"rdzv": "holdfast://a:1,b"}, "--rdzv must be holdfast://HOST:PORT.*, got 'b'"),
        ({"rdzv": "holdfast://a:1,b:1,c:1"}, r"--rdzv must name the first nodes, .* as --nnodes \(2\), got"),
        ({"rdzv": "holdfast://a:1,a:1"}, "--rdzv must name the first nodes, each once"),
        ({"rdzv": "holdfast://a:1,b:1"}, "--rdzv must name one node, or at least three, .*: of two, the loss of one"),
        ({"rdzv": "holdfast://127.0.0.1:1,b:1,c:1", "nnodes": 3}, "needs a secret that all nodes share"),
        ({"rdzv": "holdfast://host:99999"}, "--rdzv must be holdfast://HOST:PORT"),
        ({"node_timeout_s": 0.0}, "--node-timeout must be between 0.5 and 3600 seconds, got 0"),
        ({"stragglers": "rebalance"}, "--stragglers rebalance works on one node only: .* use warn or replace"),
    ],
)
def test_options_that_do_not_go_together_are_refused(make_job, given, complaint):
    job = make_job(given.pop("node", 0), **given)

    with pytest.raises(ConfigError, match=complaint):
        check_rules(NODE_RULES, job)


def test_several_nodes_need_the_gloo_fabric(make_job):
    job = make_job(0, settings={}, nnodes=2)
    other = Job(script=job.script, settings=Settings(fabric="ulfm"), nnodes=2, rdzv=job.rdzv)

    with pytest.raises(ConfigError, match="--nnodes and --rdzv need --fabric gloo, got ulfm"):
        check_rules(NODE_RULES, other)
    check_rules(NODE_RULES, job)


@pytest.mark.parametrize("token", ["right", ""])
def test_workers_of_all_nodes_share_a_token_that_is_not_that_of_the_job(meet, token):
    groups = meet(2, token=token)

    tokens = {group.begin(0).token for group in groups}

    assert len(tokens) == 1
    assert token not in tokens
    assert groups[0]._workers_token(1) not in tokens


def test_a_machine_that_cannot_connect_to_itself_says_so_at_once(make_job, monkeypatch):
    def unreachable(*_):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr("holdfast.launch.fleet.rendezvous.address_towards", unreachable)

    with pytest.raises(JobError, match=r"127\.0\.0\.1: Network is unreachable; bring its loopback interface up"):
        NodeGroup(make_job(0, nnodes=1, rdzv=""))
