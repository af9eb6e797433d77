"""What the planner fills in, and what it makes of goodput."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast_lab.simulate.assuming import ask
from holdfast_lab.simulate.planning import mtbf_back_s, recommended
from holdfast_lab.simulate.spare_worth import worthwhile_spares


@pytest.mark.parametrize(
    ("goodput", "answer"),
    [
        ({"relaunch": 0.90, "rollback": 0.990, "forward": 0.992}, "rollback"),  # what forward gains is no reason
        ({"relaunch": 0.90, "rollback": 0.950, "forward": 0.960}, "forward"),
        ({"relaunch": 0.989, "rollback": 0.990, "forward": 0.992}, "any"),
        ({"relaunch": 0.01, "rollback": 0.02, "forward": 0.03}, "none"),
        ({"relaunch": 0.7, "rollback": 0.8, "forward": 0.8, "partial": 0.9}, "partial"),
    ],
)
def test_rollback_is_recommended_unless_another_is_better_by_half_a_point(goodput, answer):
    assert recommended(goodput) == answer


def work_by_hand(workers: int, per_node: int, spare: int, down: float, split: str) -> float:
    """Return the work per worker, spares included, from every possible number of nodes that are down."""
    nodes, found = workers // per_node + spare, 0.0
    for away in range(nodes + 1):
        there = workers - max(0, away - spare) * per_node
        pace = 0.0 if there <= 0 else there / workers if split == "even" else 1 / math.ceil(workers / there)
        found += math.comb(nodes, away) * down**away * (1 - down) ** (nodes - away) * pace
    return found * workers / (workers + spare * per_node)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 4]), st.floats(0.001, 0.6), st.sampled_from(["slices", "even"]))
def test_spares_are_as_many_as_give_the_most_work_per_worker_hour(nodes, per_node, down, split):
    workers = nodes * per_node

    spares = worthwhile_spares(workers, per_node, down, split)

    assert spares % per_node == 0
    most = max(work_by_hand(workers, per_node, spare, down, split) for spare in range(2 * nodes + 30))
    assert work_by_hand(workers, per_node, spares // per_node, down, split) == pytest.approx(most, abs=1e-8)


@pytest.mark.parametrize(
    ("workers", "mtbf_h", "spares"),
    [
        (128, 45, 24),  # 19 % more workers halve what is lost
        (32, 45, 0),  # one node of four costs more than it gives
        (512, 720, 16),
        (16_384, 264 * 24, 56),
    ],
)
def test_a_plan_has_spares_where_a_worker_hour_gives_more_work_with_them(workers, mtbf_h, spares):
    question, known = ask({"workers": workers, "mtbf_node_s": 3600.0 * mtbf_h})

    assert question.spares == spares
    [why] = [one.why for one in known if one.name == "spares"]
    assert ("none" in why) == (spares == 0)


def test_the_more_often_nodes_fail_and_the_more_there_are_the_more_spares_are_worth_it():
    for workers in (128, 1024, 16_384):
        by_rate = [worthwhile_spares(workers, 8, down, "slices") for down in (0.0005, 0.002, 0.01, 0.03, 0.1)]
        assert by_rate == sorted(by_rate)
    by_size = [worthwhile_spares(workers, 8, 0.01, "slices") for workers in (64, 256, 1024, 4096, 16_384, 262_144)]
    assert by_size == sorted(by_size)
    assert worthwhile_spares(16_384, 8, 0.0, "slices") == 0


def test_only_a_split_model_has_a_price_of_outdated_copies_and_it_says_where_it_is_from():
    common = {"workers": 256, "mtbf_node_s": 30 * 86_400.0}

    split, known = ask(common | {"model": "split"})
    other, _ = ask(common | {"model": "split", "mirror_every": 64})
    stated, _ = ask(common | {"model": "split", "stale_iterations": 1.5})

    assert (split.mirror_every, split.stale_iterations) == (16, 4)
    assert (other.stale_iterations, stated.stale_iterations) == (16, 1.5)
    [price] = [one for one in known if one.name == "stale_iterations"]
    assert (price.source, "holdfast study scar" in price.why) == ("derived", True)
    assert "mirror_every" not in [one.name for one in ask(common | {"model": "mirrored"})[1]]
    with pytest.raises(ConfigError, match="--mirror-every is about the copies of a model that is split"):
        ask(common | {"model": "mirrored", "mirror_every": 64})
    with pytest.raises(ConfigError, match="--mirror-every 1 keeps exact copies"):
        ask(common | {"model": "split", "mirror_every": 1})


def test_the_rate_of_the_job_follows_from_that_of_a_machine_or_a_worker():
    common = {"workers": 64, "workers_per_node": 8}

    job, _ = ask(common | {"mtbf_s": 3600.0})
    node, _ = ask(common | {"mtbf_node_s": 8 * 3600.0})
    worker, _ = ask(common | {"mtbf_worker_s": 64 * 3600.0})

    assert job.mtbf_s == node.mtbf_s == worker.mtbf_s == 3600.0


def test_a_checkpoint_costs_its_size_over_the_speed_or_only_the_copy():
    common = {"workers": 64, "mtbf_s": 3600.0, "state_bytes": 100e9, "write_bytes_per_s": 5e9}

    held, _ = ask(common)
    copied, _ = ask(common | {"snapshot_bytes_per_s": 50e9, "read_bytes_per_s": 10e9})

    assert (held.save_s, held.save_background_s, held.load_s) == (20, 0, 20)
    assert (copied.save_s, copied.save_background_s, copied.load_s) == (2, 20, 10)


def test_what_leads_back_to_a_checkpoint_depends_on_the_strategy_and_on_who_holds_the_model():
    question, _ = ask({"workers": 64, "mtbf_s": 1000.0, "whole_job_share": 0.25, "model": "replicated"})
    split, _ = ask({"workers": 64, "mtbf_s": 1000.0, "whole_job_share": 0.25, "model": "split"})
    never, _ = ask({"workers": 64, "mtbf_s": 1000.0, "whole_job_share": 0.0, "model": "replicated"})

    assert mtbf_back_s(question, "restart") == 1000
    assert mtbf_back_s(question, "rollback") == mtbf_back_s(question, "reinit") == 4000
    assert mtbf_back_s(split, "rollback") == 1000
    assert mtbf_back_s(split, "partial") == 4000
    assert mtbf_back_s(never, "rollback") == math.inf
