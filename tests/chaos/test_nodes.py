"""Jobs on several nodes, a launcher each: on one machine, and on hosts made of namespaces (see ``netns.py``)."""

import contextlib
import os
import signal

import etcd
import pytest
from clusters import DEADLINE_S, Cluster, Way, assert_complete, until
from jobs import of_kind
from netns import make_hosts

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hosts():
    made = make_hosts(3, net="10.202.0")
    yield made
    made.remove()


def test_launchers_hear_everything_and_a_lost_one_ends_only_its_own_workers(tmp_path):
    with Cluster(tmp_path, 3, "--inject", "kill:rank=3,step=2", "--node-timeout", "4", pause=0.3) as cluster:
        cluster.start_all()
        cluster.until_step(4)
        cluster.launchers[2].kill()
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: -signal.SIGKILL}, cluster.said()
        reports = [cluster.report(cluster.launchers[node]) for node in (0, 1)]
        for report in reports:
            assert_complete(report)
            ended = {event["rank"]: event["exit_code"] for event in of_kind(report, "WorkerEnded")}
            assert ended == {0: 0, 1: 0, 2: 0, 3: -signal.SIGKILL}
            assert {event["rank"] for event in of_kind(report, "RunStarted")} == set(range(6))
        assert reports[0]["_events"] == reports[1]["_events"], "both have heard the same"
        assert cluster.committed(cluster.launchers[2])[4] >= 4


def test_a_node_without_power_is_found_by_its_lease_and_comes_back_with_newcomers(hosts, tmp_path):
    with Cluster(tmp_path, 3, "--node-timeout", "4", hosts=hosts, pause=0.5, workers=1) as cluster:
        cluster.hold_until(tmp_path / "go-on")
        first, _, lost = cluster.start_all()
        cluster.until_step(2)
        hosts.kill(3)
        lost.wait(timeout=DEADLINE_S)
        until(lambda: cluster.live(first, "Recovered"), "the loss")
        back = cluster.come_back(2, 3)
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: 0}, cluster.said()
        assert "node 2 is lost, with rank 2" in cluster.output(0)
        for launcher in (first, cluster.launchers[1], back):
            report = cluster.report(launcher)
            assert_complete(report)
            assert {tuple(event["joined"]) for event in of_kind(report, "Recovered")} >= {(), (3,)}
            assert {event["rank"] for event in of_kind(report, "Finished")} == {0, 1, 3}
            assert {event["rank"] for event in of_kind(report, "RunStarted")} == {0, 1, 2, 3}


def test_a_node_that_loses_only_its_way_to_the_store_is_done_without_and_stops_nobody_else(tmp_path):
    with Cluster(tmp_path, 3, "--node-timeout", "4", pause=0.5, workers=1) as cluster:
        way = Way(cluster.url)
        first, second = cluster.start(0), cluster.start(1)
        cluster.start(2, "--rdzv", way.url)
        cluster.until_step(3)
        way.lose()
        codes = cluster.wait()
        way.close()

        assert codes == {0: 0, 1: 0, 2: 1}, cluster.said()
        assert b"a secret" not in way.seen, "the token went over the network"
        assert b'"proof"' in way.seen, "the handshakes of this launcher have been recorded"
        for launcher in (first, second):
            report = cluster.report(launcher)
            assert_complete(report)
            assert {event["rank"] for event in of_kind(report, "Finished")} == {0, 1}
            assert {tuple(event["lost"]) for event in of_kind(report, "Recovered")} == {(2,)}
        last = cluster.output(2).splitlines()[-1]
        assert last.startswith("error: node 2 can no longer take part: the connection to the store at 127.0.0.1:")
        assert "no heartbeat for 2.8 s" in last
        assert "start it again with the same command" in last


def saves(tmp_path):
    return "--checkpoint-dir", tmp_path / "ckpt", "--checkpoint-every", 2


def test_with_etcd_no_launcher_is_special_and_a_member_of_etcd_may_die_too(tmp_path):
    with contextlib.ExitStack() as ends:
        store = ends.enter_context(etcd.Cluster(tmp_path, 3))
        options = {"pause": 0.8, "workers": 1, "url": store.url("a-job")}
        cluster = ends.enter_context(Cluster(tmp_path, 3, **options))
        cluster.start_all()
        cluster.until_step(1)
        cluster.launchers[0].kill()
        assert store.kill(0) == -signal.SIGKILL
        left = until(lambda: cluster.live(cluster.launchers[1], "Recovered"), "the first recovery")[-1]
        assert left.survivors == (1, 2)
        cluster.launchers[2].terminate()
        codes = cluster.wait()

        assert codes == {0: -signal.SIGKILL, 1: 0, 2: 0}, cluster.said()
        assert "the workers of node 2 have left as requested; the job continues" in cluster.output(2)
        report = cluster.report(cluster.launchers[1])
        assert_complete(report)
        assert {event["rank"] for event in of_kind(report, "Finished")} == {1}
        assert {event["rank"] for event in of_kind(report, "Left")} == {2}, "the first one's launcher told no more"


def test_with_etcd_a_job_whose_launchers_all_died_begins_anew(tmp_path):
    """As soon as their leases are over, which say that it goes on."""
    with contextlib.ExitStack() as ends:
        store = ends.enter_context(etcd.Cluster(tmp_path))
        options = {"pause": 0.3, "workers": 1, "url": store.url("a-job")}
        cluster = ends.enter_context(Cluster(tmp_path, 2, *saves(tmp_path), "--node-timeout", "4", **options))
        died = cluster.start_all()
        cluster.until_step(3)
        for launcher in died:
            launcher.kill()
        assert cluster.wait() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
        assert len(store.keys("holdfast/a-job/0/launchers/node/")) == 2

        cluster.pause = 0  # with another argument: the dead ones would refuse it
        again = [cluster.start(node, "--resume") for node in range(2)]
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0}, cluster.said()
        for launcher in again:
            assert_complete(cluster.report(launcher))
            assert {event["rank"] for event in of_kind(cluster.report(launcher), "RunStarted")} == {0, 1}
        assert not store.keys("holdfast/a-job/0/"), "what the dead ones left is gone"


def test_with_etcd_what_a_launcher_was_started_with_that_is_gone_does_not_bind_the_next(tmp_path):
    with contextlib.ExitStack() as ends:
        store = ends.enter_context(etcd.Cluster(tmp_path))
        options = {"pause": 0, "workers": 1, "url": store.url("a-job")}
        cluster = ends.enter_context(Cluster(tmp_path, 2, **options))
        cluster.pause = "0.0"
        cluster.start(0)
        until(lambda: store.keys("holdfast/a-job/0/launchers/node/"), "the first launcher")
        cluster.pause = 0
        cluster.start(1)
        assert cluster.wait(1) == {1: 2}
        assert (
            "node 1 was started with ARGS ['--pause', '0'], the other nodes with ['--pause', '0.0']"
            in cluster.output(1)
        )
        cluster.launchers[0].terminate()
        assert cluster.wait(0) == {0: 1}
        assert cluster.output(0) == "holdfast: stopped before the job began\n"

        cluster.start_all()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said()


def test_a_node_that_is_taken_away_leaves_and_a_whole_job_that_is_stopped_saves(tmp_path):
    with Cluster(tmp_path, 3, *saves(tmp_path), "--left-code", 7, pause=0.5, workers=1) as cluster:
        cluster.start_all()
        cluster.until_step(1)
        cluster.launchers[2].terminate()
        assert cluster.wait(2) == {2: 7}, cluster.said()
        assert "the job continues" in cluster.output(2)
        cluster.until_step(max(cluster.committed(cluster.launchers[0]).values()) + 1)
        for node in (0, 1):
            cluster.launchers[node].terminate()
        codes = cluster.wait(0, 1)

        assert codes == {0: 4, 1: 4}, cluster.said()
        assert {event["rank"] for event in of_kind(cluster.report(cluster.launchers[0]), "Left")} == {2}


def test_without_the_first_launcher_all_save_and_stop_and_the_job_can_be_resumed(tmp_path):
    with Cluster(tmp_path, 2, *saves(tmp_path), pause=0.5) as cluster:
        cluster.start_all()
        cluster.until_step(3)
        cluster.launchers[0].kill()
        codes = cluster.wait()
        reached = {
            rank: n for launcher in cluster.launchers.values() for rank, n in cluster.committed(launcher).items()
        }
        assert codes == {0: -signal.SIGKILL, 1: 4}, cluster.said()
        assert len(set(reached.values())) == 1, f"all stop before the same step: {reached}"

        cluster.pause = 0
        again = [cluster.start(node, "--resume") for node in range(2)]
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0}, cluster.said()
        for launcher in again:
            assert_complete(cluster.report(launcher))
            assert min(cluster.committed(launcher).items())[1] == 14
        first = of_kind(cluster.report(again[0]), "RunStarted")[0]
        assert first["step"] >= max(reached.values()), "it goes on where it stopped"


@pytest.mark.soak
def test_where_no_worker_is_left_that_reaches_the_store_all_save_and_stop_though_nobody_tells_them(tmp_path):
    with Cluster(tmp_path, 3, *saves(tmp_path), pause=0.5, workers=1) as cluster:
        first, *_ = cluster.start_all()
        cluster.until_step(2)
        (note,) = first.place.glob("tmp/holdfast-*/process-0")
        os.kill(int(note.read_text().split()[0]), signal.SIGTERM)
        until(lambda: cluster.live(first, "Left"), "the leave of the first node's only worker")
        cluster.until_step(5, node=1)
        first.kill()
        codes = cluster.wait()

        assert codes == {0: -signal.SIGKILL, 1: 4, 2: 4}, cluster.said()
        reached = {node: cluster.committed(cluster.launchers[node]) for node in (1, 2)}
        assert reached[1][1] == reached[2][2], f"both stop before the same step: {reached}"


@pytest.mark.soak
def test_when_all_workers_die_at_once_the_launchers_start_the_job_again_together(tmp_path):
    with Cluster(tmp_path, 2, *saves(tmp_path), pause=0.3) as cluster:
        launchers = cluster.start_all()
        cluster.until_step(5)
        for launcher in launchers:
            for note in launcher.place.glob("tmp/holdfast-*/process-*"):
                os.kill(int(note.read_text().split()[0]), signal.SIGKILL)
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0}, cluster.said()
        for launcher in launchers:
            report = cluster.report(launcher)
            assert_complete(report)
            assert report["restarts"] == 1
            assert of_kind(report, "JobRestarted")[0]["workers"] == [4]


@pytest.mark.soak
@pytest.mark.parametrize("away", [(2,), (1, 2)], ids=["4+2", "2+2+2"])
def test_of_a_divided_job_at_most_one_part_goes_on(hosts, tmp_path, away):
    with Cluster(tmp_path, 3, "--node-timeout", "4", hosts=hosts, pause=0.5) as cluster:
        cluster.start_all()
        cluster.until_step(3)
        for node in away:
            hosts.cut_off(node + 1)
        at_cut = max(cluster.committed(cluster.launchers[0]).values())
        codes = cluster.wait()

        assert codes == {node: int(node in away) for node in range(3)}, cluster.said()
        assert_complete(cluster.report(cluster.launchers[0]))
        for node in away:
            assert max(cluster.committed(cluster.launchers[node]).values()) <= at_cut + 1
            assert "start it again with the same command" in cluster.output(node)


@pytest.mark.soak
def test_a_worker_that_is_stuck_alone_on_its_node_is_found_because_others_wait_for_it(tmp_path):
    options = ("--inject", "spin:rank=1,step=4", "--hang-timeout", "1.5")
    with Cluster(tmp_path, 3, *options, pause=0.1, workers=1) as cluster:
        cluster.start_all()
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: 0}, cluster.said()
        report = cluster.report(cluster.launchers[0])
        assert_complete(report)
        assert {event["rank"] for event in of_kind(report, "WorkerEnded") if event["exit_code"] == -9} == {1}
        fenced = of_kind(cluster.report(cluster.launchers[1]), "WorkerFenced")
        assert [event["rank"] for event in fenced] == [1]
