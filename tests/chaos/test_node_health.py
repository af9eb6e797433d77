"""An unfit node stays out of the job; the others train without it, and it joins once it is fit."""

import pytest
from clusters import DEADLINE_S, Cluster, assert_complete
from jobs import of_kind

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_an_unfit_node_stays_out_the_others_train_without_it_and_it_joins_once_it_is_fit(tmp_path):
    with Cluster(tmp_path, 3, "--node-timeout", "4", pause=0.02, workers=1) as cluster:
        cluster.hold_until(tmp_path / "go-on")
        first, _ = cluster.start(0), cluster.start(1)
        unfit = cluster.start(2, "--health-check", "echo the disk is dead; exit 7")
        assert unfit.wait(timeout=DEADLINE_S) == 1
        said = cluster.output(2).strip().splitlines()[-1]
        assert said.startswith("error: node 2 stays out of the job, because it is unfit: "), said
        assert "the command ended with 7: the disk is dead (--health-check)" in said
        cluster.until_step(2)
        cluster.come_back(2, 2)
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: 0}, cluster.said()
        report = cluster.report(first)
        assert_complete(report)
        assert {event["rank"] for event in of_kind(report, "Finished")} == {0, 1, 2}
        assert {tuple(event["joined"]) for event in of_kind(report, "Recovered")} == {(2,)}


def test_an_unfit_single_node_starts_nothing(tmp_path):
    with Cluster(tmp_path, 1, "--health-check", "exit 1", workers=2) as cluster:
        cluster.launchers[0] = cluster.start(0)

        assert cluster.wait() == {0: 1}
        assert "the command ended with 1" in cluster.output(0)
        assert "committed" not in cluster.output(0)
