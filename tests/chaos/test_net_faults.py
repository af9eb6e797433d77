"""Faults that strike a whole node, injected: its power fails, its network; and jobs that such faults divide."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import Cluster, assert_complete, until
from jobs import clean_env, inject, of_kind
from netns import ip, make_hosts

from holdfast.launch.fleet import network_partition as cut
from holdfast.launch.supervise.processes import value_of
from holdfast.launch.supervise.worker_context import LAUNCHER
from holdfast.records.beacon import Beacon

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hosts():
    made = make_hosts(4, net="10.203.0")
    yield made
    made.remove()


def failures(report):
    return [(f["rank"], f["kind"], f["injected"], f["step"], f["phase"]) for f in report["failures"]]


def is_up(hosts, number):
    (device,) = json.loads(hosts.run(number, "ip", "-json", "link", "show", "dev", "eth0").stdout)
    return "UP" in device["flags"]


def test_of_a_node_whose_power_fails_nothing_is_left_and_the_others_know_what_was_injected(tmp_path):
    spec = "nodeloss:node=1,step=3,phase=allreduce"
    with Cluster(tmp_path, 2, *inject(spec), "--node-timeout", 2, pause=0.0) as cluster:
        launchers = cluster.start_all()
        lost = str(launchers[1].pid)
        codes = cluster.wait()

        assert codes == {0: 0, 1: -signal.SIGKILL}, cluster.said()
        served = {value_of(int(entry.name), LAUNCHER) for entry in Path("/proc").glob("[0-9]*")} - {None}
        assert {value for value in served if value.split()[0] == lost} == set()
        assert list(launchers[1].place.glob("tmp/holdfast-*/process-*")), "nobody had time to clear up"
        assert cluster.live(launchers[1], "WorkerEnded") == [], "nobody had time to tell"
        assert max(cluster.committed(launchers[1]).values()) <= 3
        report = cluster.report(launchers[0])
        assert_complete(report)
        assert failures(report) == [(rank, "nodeloss", True, 3, "allreduce") for rank in (2, 3)]
        (fired,) = of_kind(report, "FaultFired")
        assert (fired["node"], fired["workers"]) == (1, [2, 3])
        plan = json.loads((launchers[0].place / "report" / "plan.json").read_text())
        assert (plan["specs"], plan["struck"]) == ([spec], [0])


def test_a_node_is_cut_off_for_a_moment_and_another_for_so_long_that_it_must_come_back(hosts, tmp_path):
    specs = inject("partition:node=1,step=1,seconds=1", "partition:node=2,step=4,phase=backward,seconds=5")
    with Cluster(tmp_path, 3, *specs, "--node-timeout", 4, hosts=hosts, pause=0.2, workers=1) as cluster:
        cluster.hold_until(tmp_path / "go-on")
        first, _, away = cluster.start_all()
        assert cluster.wait(2) == {2: 1}, cluster.said()
        assert "node 2 can no longer take part" in cluster.output(2)
        assert is_up(hosts, 3)
        back = cluster.come_back(2, 3)
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: 0}, cluster.said()
        assert "the network of node 1 is restored" in cluster.output(1)
        assert cluster.committed(away)[2] <= 5
        for launcher in (first, back):
            report = cluster.report(launcher)
            assert_complete(report)
            assert {event["rank"] for event in of_kind(report, "Finished")} == {0, 1, 3}
            assert [(fired["kind"], fired["node"], fired["step"]) for fired in of_kind(report, "FaultFired")] == [
                ("partition", 1, 1),
                ("partition", 2, 4),
            ]
            assert failures(report) == [(2, "partition", True, 4, "backward")]


def test_the_network_comes_back_whatever_becomes_of_the_launcher(hosts):
    ip("-n", hosts.name(1), "route", "add", "10.99.0.0/16", "via", hosts.address(2))
    before = hosts.run(1, "ip", "route").stdout
    words = ["ip", "netns", "exec", hosts.name(1), sys.executable, "-I", cut.__file__, "0", "eth0"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cutting:
        assert cutting.stdout.readline() == "cut\n"
        assert not is_up(hosts, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            cutting.send_signal(number)
        cutting.stdin.close()  # as the kernel does it when the launcher is killed
        assert cutting.wait(timeout=60) == 0

    assert is_up(hosts, 1)
    assert hosts.run(1, "ip", "route").stdout == before


def test_a_launcher_that_may_not_cut_the_network_says_so_before_training(hosts, tmp_path):
    words = [*hosts.inside(2), "setpriv", "--bounding-set=-net_admin", sys.executable, "-m", "holdfast", "run"]
    words += ["--fabric", "gloo", "--nnodes", 3, "--node-rank", 1, "--rdzv", f"holdfast://{hosts.address(1)}:29400"]
    words += [
        *inject("partition:node=1,step=2"),
        "--rdzv-token",
        "a secret",
        Path(__file__).with_name("nodes_script.py"),
    ]
    done = subprocess.run(
        list(map(str, words)), env=clean_env(), capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        "error: --inject partition:node=1,step=2: disabling the network device eth0 needs CAP_NET"
    )
    assert done.stderr.count("\n") == 1


def most_in_vain(launcher):
    beacons = launcher.place.glob("tmp/holdfast-*/beacon-*[0-9]")
    return max((position.in_vain for path in beacons if (position := Beacon.read(path)) is not None), default=0)


@pytest.mark.parametrize("stall_s", [2, 600])
def test_workers_that_recover_again_and_again_for_nothing_are_started_again_and_not_before_the_time(tmp_path, stall_s):
    broken = tmp_path / "broken"
    options = ("--stall-timeout", stall_s, "--max-restarts", 20)
    with Cluster(tmp_path, 2, *options, workers=1, pause=0.2) as cluster:
        cluster.hold = ["--fail", broken]
        launchers = cluster.start_all()
        cluster.until_step(2)
        broken.touch()
        until(lambda: launchers[0].poll() is not None or most_in_vain(launchers[0]) >= 10, "recoveries in vain")
        if stall_s == 2:
            until(lambda: cluster.live(launchers[0], "JobRestarted"), "the restart")
        broken.unlink()
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0}, cluster.said()
        for launcher in launchers:
            report = cluster.report(launcher)
            assert_complete(report)
            reasons = [event["reason"] for event in of_kind(report, "JobRestarted")]
            assert len(reasons) == report["restarts"]
            assert bool(reasons) == (stall_s == 2), reasons
            assert report["failures"] == []


@pytest.mark.soak
@pytest.mark.parametrize("away", [(2, 3), (3,)], ids=["2+2", "3+1"])
def test_of_a_job_whose_switch_falls_apart_only_the_part_with_the_store_goes_on(hosts, tmp_path, away):
    with Cluster(tmp_path, 4, "--node-timeout", 4, hosts=hosts, pause=0.5, workers=1) as cluster:
        cluster.start_all()
        cluster.until_step(3)
        hosts.divide([node + 1 for node in away])
        at_cut = max(cluster.committed(cluster.launchers[0]).values())
        codes = cluster.wait()

        assert codes == {node: int(node in away) for node in range(4)}, cluster.said()
        assert_complete(cluster.report(cluster.launchers[0]))
        for node in away:
            assert max(cluster.committed(cluster.launchers[node]).values()) <= at_cut + 1
