"""Jobs on several nodes, a launcher each: on one machine, and on hosts made of namespaces (see ``netns.py``)."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import etcd
import pytest
import reference
from jobs import clean_env
from netns import make_hosts

from holdfast.records import read_run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("nodes_script.py")
ALL_SAMPLES = {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}
DEADLINE_S = 200
expected_hash = functools.cache(lambda: reference.train("mlp", "sgd"))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(ready, what):
    """Return what ``ready`` returns once it is true."""
    ends_s = time.monotonic() + DEADLINE_S
    while not (found := ready()):
        assert time.monotonic() < ends_s, f"{what} did not come true within {DEADLINE_S} s"
        time.sleep(0.02)
    return found


class Cluster:
    """The launchers of one job, numbered from 0.

    Args:
        folder: For all that they write.
        count: How many.
        options: Of ``holdfast run``, for all.
        hosts: Where each has a host of its own; None puts all on this machine.
        pause: Seconds before each step.
        workers: On each node.
        url: Where they meet, if not at the first.
    """

    def __init__(self, folder, count, *options, hosts=None, pause=0.1, workers=2, url=None):
        self.folder, self.count, self.options, self.hosts, self.pause = folder, count, options, hosts, pause
        self.workers = workers
        address = "127.0.0.1" if hosts is None else hosts.address(1)
        self.url = url or f"holdfast://{address}:{free_port()}"
        self.launchers = {}
        self.starts = 0
        self.hold = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait(timeout=20)
        if self.hosts is not None:
            for number in range(1, self.count + 1):
                self.hosts.heal(number)
                self.hosts.kill(number)

    def start(self, node, *more):
        """Start the launcher of a node."""
        self.starts += 1
        place = self.folder / f"start-{self.starts}-node-{node}"
        (place / "tmp").mkdir(parents=True)
        words = [
            *([] if self.hosts is None else self.hosts.inside(node + 1)),
            *(sys.executable, "-m", "holdfast", "run", "--fabric", "gloo", "-n", self.workers, "--nnodes", self.count),
            *("--node-rank", node, "--rdzv", self.url, "--rdzv-token", "a secret", "--log-dir", place / "logs"),
            *("--report", place / "report", *self.options, *more, SCRIPT, "--pause", self.pause, *self.hold),
        ]
        with (place / "output").open("wb") as output:
            launcher = subprocess.Popen(
                [str(word) for word in words],
                env=clean_env(TMPDIR=str(place / "tmp")),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        launcher.place = place
        self.launchers[node] = launcher
        return launcher

    def start_all(self):
        return [self.start(node) for node in range(self.count)]

    def hold_until(self, path):
        """Have training wait in its middle for :meth:`come_back`."""
        self.hold = ["--hold", path]

    def come_back(self, node, rank):
        """Start the launcher of a node again; training goes on when its newcomer is there."""
        back = self.start(node)
        until(lambda: list(back.place.glob(f"tmp/holdfast-*/beacon-{rank}")), f"the newcomer {rank}")
        self.hold[1].touch()
        return back

    def wait(self, *nodes):
        """Return the exit codes."""
        nodes = nodes or tuple(self.launchers)
        try:
            return {node: self.launchers[node].wait(timeout=DEADLINE_S) for node in nodes}
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None

    def output(self, node):
        return (self.launchers[node].place / "output").read_text()

    def said(self):
        """All that launchers and workers have printed, for messages."""
        files = sorted(self.folder.glob("start-*/output")) + sorted(self.folder.glob("start-*/logs/*"))
        return "\n".join(f"-- {path.relative_to(self.folder)}\n{path.read_text()[-2000:]}" for path in files)

    def committed(self, launcher):
        """By rank, the most steps that each worker of a launcher has committed."""
        found = {}
        for log in (launcher.place / "logs").glob("rank-*.log"):
            counts = [int(count) for count in re.findall(r"^committed (\d+)$", log.read_text(), re.MULTILINE)]
            found[int(log.stem.partition("-")[2])] = max(counts, default=0)
        return found

    def until_step(self, step, node=0):
        """Wait until some worker of a node is so far."""
        launcher = self.launchers[node]

        def is_there():
            assert launcher.poll() is None, self.said()
            return any(count >= step for count in self.committed(launcher).values())

        until(is_there, f"step {step} at node {node}")

    def live(self, launcher, kind):
        """The records of one kind that a launcher, while it runs, has or has heard."""
        runs = launcher.place.glob("tmp/holdfast-*-*")
        return [record for run in runs for record in read_run(run) if type(record).__name__ == kind]

    def report(self, launcher):
        report = json.loads((launcher.place / "report" / "report.json").read_text())
        lines = (launcher.place / "report" / "events.jsonl").read_text().splitlines()
        report["_events"] = [json.loads(line) for line in lines]
        return report


@pytest.fixture(scope="module")
def hosts():
    made = make_hosts(3, net="10.202.0")
    yield made
    made.remove()


def of_kind(report, kind):
    return [event for event in report["_events"] if event["event"] == kind]


def assert_complete(report):
    """Training is over, and its result is that of one process."""
    assert report["replicas"]["state_sha256"] == expected_hash()
    assert report["replicas"]["identical"] is True
    assert report["samples"] == ALL_SAMPLES


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
        assert "node 2 is lost, and with it rank 2" in cluster.output(0)
        for launcher in (first, cluster.launchers[1], back):
            report = cluster.report(launcher)
            assert_complete(report)
            assert {tuple(event["joined"]) for event in of_kind(report, "Recovered")} >= {(), (3,)}
            assert {event["rank"] for event in of_kind(report, "Finished")} == {0, 1, 3}
            assert {event["rank"] for event in of_kind(report, "RunStarted")} == {0, 1, 2, 3}


def test_who_is_cut_off_commits_nothing_beside_the_others_and_ends(hosts, tmp_path):
    with Cluster(tmp_path, 3, "--node-timeout", "4", hosts=hosts, pause=0.5, workers=1) as cluster:
        _, _, away = cluster.start_all()
        cluster.until_step(3)
        hosts.cut_off(3)
        at_cut = max(cluster.committed(cluster.launchers[0]).values())
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: 1}, cluster.said()
        assert_complete(cluster.report(cluster.launchers[0]))
        assert cluster.committed(away)[2] <= at_cut + 1
        assert "start it again with the same command" in cluster.output(2)


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
        assert "the workers of node 2 have left, as they were told to; the job goes on" in cluster.output(2)
        report = cluster.report(cluster.launchers[1])
        assert_complete(report)
        assert {event["rank"] for event in of_kind(report, "Finished")} == {1}
        assert {event["rank"] for event in of_kind(report, "Left")} == {2}, "the first one's launcher told no more"


@pytest.mark.soak
def test_a_node_that_is_taken_away_leaves_and_a_whole_job_that_is_stopped_saves(tmp_path):
    with Cluster(tmp_path, 3, *saves(tmp_path), pause=0.5, workers=1) as cluster:
        cluster.start_all()
        cluster.until_step(1)
        cluster.launchers[2].terminate()
        assert cluster.wait(2) == {2: 0}, cluster.said()
        assert "the job goes on" in cluster.output(2)
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
@pytest.mark.parametrize("away", [(2,), (1,), (1, 2)], ids=["4+2", "4+2-other", "2+2+2"])
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
@pytest.mark.parametrize("cut_s", [1.0, 8.0])
def test_who_is_cut_off_for_a_while_goes_on_or_comes_back(hosts, tmp_path, cut_s):
    with Cluster(tmp_path, 3, "--node-timeout", "4", hosts=hosts, pause=0.5, workers=1) as cluster:
        cluster.hold_until(tmp_path / "go-on")
        cluster.start_all()
        cluster.until_step(2)
        hosts.cut_off(3)
        time.sleep(cut_s)
        hosts.heal(3)
        if cut_s > 4:
            assert cluster.wait(2) == {2: 1}, cluster.said()
            cluster.come_back(2, 3)
        else:
            (tmp_path / "go-on").touch()
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: 0}, cluster.said()
        report = cluster.report(cluster.launchers[0])
        assert_complete(report)
        assert {event["rank"] for event in of_kind(report, "Finished")} == {0, 1, 3 if cut_s > 4 else 2}


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
