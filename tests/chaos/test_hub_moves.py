"""The first node is lost, and the store that its launcher hosted: another launcher's hub takes over, and training goes on."""

import signal

import pytest
from clusters import Cluster, assert_complete, free_port, of_kind, until
from netns import make_hosts

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hosts():
    made = make_hosts(3, net="10.204.0")
    yield made
    made.remove()


def places(count=3, hosts=None):
    if hosts is None:
        return "holdfast://" + ",".join(f"127.0.0.1:{free_port()}" for _ in range(count))
    return "holdfast://" + ",".join(f"{hosts.address(n + 1)}:29400" for n in range(count))


def workers_of(launcher):
    return [note for note in launcher.place.glob("tmp/holdfast-*/process-*")]


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
