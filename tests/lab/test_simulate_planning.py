"""What the planner fills in, and what it makes of goodput."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_lab.simulate.assuming import ask, enough_spares
from holdfast_lab.simulate.planning import mtbf_back_s, recommended


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


@given(st.just(0.0) | st.floats(1e-6, 100.0))
def test_spares_suffice_for_99_percent_of_the_time_and_one_machine_less_does_not(away):
    spares = enough_spares(away, 16384, 8)

    def at_most(machines: int) -> float:
        return sum(math.exp(-away) * away**k / math.factorial(k) for k in range(machines + 1))

    assert spares % 8 == 0
    assert at_most(spares // 8) >= 0.99
    assert spares == 0 or at_most(spares // 8 - 1) < 0.99


def test_no_spares_are_proposed_where_a_quarter_of_the_machines_would_not_do():
    assert enough_spares(40, 64, 1) == 0
    assert enough_spares(1e6, 16384, 8) == 0


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
