"""The node that hosts the store is lost: the hub of another launcher takes over, and training goes on to the same bits."""

import os
import signal
import time
from pathlib import Path

import pytest
from clusters import DEADLINE_S, Cluster, assert_complete, free_port, is_connected, until
from jobs import of_kind
from netns import make_hosts

from holdfast.membership import HubStore

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hosts():
    made = make_hosts(3, net="10.204.0")
    yield made
    made.remove()


def places(count=3, hosts=None):
    """The hubs of the first launchers."""
    if hosts is None:
        return "holdfast://" + ",".join(f"127.0.0.1:{free_port()}" for _ in range(count))
    return "holdfast://" + ",".join(f"{hosts.address(n + 1)}:29400" for n in range(count))


def leading_node(url):
    """The node whose hub leads."""
    where = url.removeprefix("holdfast://")
    store = HubStore(where, "a secret", "runs")
    leader = "{}:{}".format(*store._socket.getpeername())
    store.close()
    return where.split(",").index(leader)


def kill_node(launcher):
    """Kill a launcher and all that it has started, simultaneously, as if the power of its node failed."""
    mark = f"TMPDIR={launcher.place / 'tmp'}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue
    assert launcher.wait(timeout=DEADLINE_S) == -signal.SIGKILL


class Pace:
    """Lets the workers of a job compute so many steps more."""

    def __init__(self, cluster, folder):
        self._folder, self._allowed = folder, 0
        folder.mkdir()
        cluster.hold = ["--paced", folder]

    def allow(self, steps):
        for step in range(self._allowed, self._allowed + steps):
            (self._folder / str(step)).touch()
        self._allowed += steps


def joined(cluster, node):
    return {rank for record in cluster.live(cluster.launchers[node], "Recovered") for rank in record.joined}


def test_the_first_launcher_is_killed_and_training_goes_on_to_the_same_bits(tmp_path):
    with Cluster(tmp_path, 3, "--node-timeout", 3, url=places(), workers=1, pause=0.3) as cluster:
        cluster.start_all()
        cluster.until_step(3)
        cluster.launchers[0].kill()
        codes = cluster.wait()

        assert codes == {0: -signal.SIGKILL, 1: 0, 2: 0}, cluster.said()
        for node in (1, 2):
            report = cluster.report(cluster.launchers[node])
            assert_complete(report)
            assert {event["rank"] for event in of_kind(report, "Finished")} == {1, 2}


@pytest.mark.soak
def test_the_node_that_hosts_the_store_is_lost_five_times_and_comes_back_and_no_bit_changes(tmp_path):
    with Cluster(tmp_path, 3, "--node-timeout", 3, url=places(), workers=1, pause=0) as cluster:
        pace = Pace(cluster, tmp_path / "pace")
        cluster.start_all()
        pace.allow(2)
        cluster.until_step(1)
        lost = []
        for turn in range(5):
            lost.append(leading_node(cluster.url))
            kill_node(cluster.launchers[lost[-1]])
            pace.allow(1)
            back = cluster.start(lost[-1])
            beacons = f"tmp/holdfast-*/beacon-{3 + turn}"
            until(lambda b=back, p=beacons: any(map(is_connected, b.place.glob(p))), f"newcomer {3 + turn}")
            pace.allow(1)
            watching = (lost[-1] + 1) % 3
            until(lambda w=watching, n=3 + turn: n in joined(cluster, w), f"the admission of {3 + turn}")
        pace.allow(100)
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: 0}, cluster.said()
        assert lost[0] == 0
        assert len(set(lost)) > 1
        for launcher in cluster.launchers.values():
            report = cluster.report(launcher)
            assert_complete(report)
            assert report["restarts"] == 0


@pytest.mark.soak
def test_of_a_divided_job_the_majority_goes_on_also_without_the_first_node(hosts, tmp_path):
    with Cluster(
        tmp_path, 3, "--node-timeout", 4, url=places(hosts=hosts), hosts=hosts, workers=1, pause=0.5
    ) as cluster:
        away, *_ = cluster.start_all()
        cluster.until_step(3)
        hosts.cut_off(1)
        at_cut = max(cluster.committed(cluster.launchers[1]).values())
        codes = cluster.wait()

        assert codes == {0: 1, 1: 0, 2: 0}, cluster.said()
        assert max(cluster.committed(away).values()) <= at_cut + 1
        assert "start it again with the same command" in cluster.output(0)
        for node in (1, 2):
            assert_complete(cluster.report(cluster.launchers[node]))


@pytest.mark.soak
def test_where_each_node_is_alone_none_goes_on(hosts, tmp_path):
    with Cluster(
        tmp_path, 3, "--node-timeout", 4, url=places(hosts=hosts), hosts=hosts, workers=1, pause=0.5
    ) as cluster:
        cluster.start_all()
        cluster.until_step(3)
        for number in (1, 2, 3):
            hosts.cut_off(number)
        at_cut = max(max(cluster.committed(launcher).values()) for launcher in cluster.launchers.values())
        codes = cluster.wait()

        assert all(codes.values()), cluster.said()
        for launcher in cluster.launchers.values():
            assert max(cluster.committed(launcher).values()) <= at_cut + 1


@pytest.mark.soak
def test_a_launcher_that_was_stopped_finds_that_the_job_went_on_without_it(tmp_path):
    with Cluster(tmp_path, 3, "--node-timeout", 3, url=places(), workers=1, pause=1) as cluster:
        first, *_ = cluster.start_all()
        cluster.until_step(3)
        first.send_signal(signal.SIGSTOP)
        until(lambda: cluster.live(cluster.launchers[1], "Recovered"), "the recovery")
        time.sleep(1)
        first.send_signal(signal.SIGCONT)
        codes = cluster.wait()

        assert codes == {0: 1, 1: 0, 2: 0}, cluster.said()
        for node in (1, 2):
            assert_complete(cluster.report(cluster.launchers[node]))
