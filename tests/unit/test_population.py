"""Who is started, and who is told to leave: a list of deaths and wishes in, ranks out."""

from __future__ import annotations

import pytest

from holdfast.launch.population import WorkerPopulation


def times(births, seconds, every_s=0.5):
    """When who is started, looking every so often."""
    moments = [i * every_s for i in range(int(seconds / every_s) + 1)]
    return [(now_s, rank) for now_s in moments for rank in births.due(now_s)]


def test_the_first_dead_worker_is_replaced_at_once_even_when_the_job_is_young():
    births = WorkerPopulation(3, 4)
    births.died(1, 2.0)

    assert births.due(2.0) == [4]
    assert births.due(100.0) == []


def test_one_death_after_the_other_is_answered_ever_later():
    births = WorkerPopulation(10, 4)
    for rank in range(5):
        births.died(rank, 0.0)

    assert times(births, 20) == [(0.0, 4), (1.0, 5), (2.0, 6), (4.0, 7), (8.0, 8)]


def test_of_many_workers_that_are_missing_a_few_are_started_at_a_time_and_a_later_request_counts():
    births = WorkerPopulation(0, 2)
    births.scale([0, 1], 1000, 0.0)

    started = births.due(0.0)

    assert started == list(range(2, 10))
    assert births.scale([0, 1, *started], 11, 0.1) == []
    assert births.due(0.1) == [10]
    assert births.due(0.2) == []


def test_nobody_waits_for_more_than_a_minute():
    births = WorkerPopulation(100, 0)
    for rank in range(12):
        births.died(rank, 0.0)

    assert max(at_s for at_s, _ in times(births, 120)) == 60.0


def test_after_a_calm_minute_a_death_counts_as_the_first():
    births = WorkerPopulation(10, 4)
    births.died(0, 0.0)
    births.died(1, 0.0)
    assert len(times(births, 5)) == 2

    births.died(2, 61.0)

    assert births.due(61.0) == [6]


def test_after_the_limit_the_dead_are_not_replaced():
    births = WorkerPopulation(2, 4)
    for rank in range(4):
        births.died(rank, 100.0 * rank)

    assert births.due(1000.0) == [4, 5]
    unlimited = WorkerPopulation(0, 4)
    unlimited.died(1, 1.0)
    assert unlimited.due(100.0) == [], "without a limit none is"


def test_scaling_up_counts_those_who_are_about_to_be_started():
    births = WorkerPopulation(5, 4)
    births.died(1, 5.0)

    assert births.scale([0, 2, 3], 5, 5.0) == []
    assert births.due(5.0) == [4, 5]


def test_scaling_down_first_gives_up_those_who_are_not_started_yet():
    births = WorkerPopulation(5, 4)
    births.scale([0, 1, 2, 3], 6, 5.0)

    assert births.scale([0, 1, 2, 3], 3, 5.0) == [3]
    assert births.due(100.0) == []


def test_scaling_up_again_does_not_count_those_who_are_leaving_and_needs_no_limit():
    births = WorkerPopulation(0, 4)
    assert births.scale([3, 1, 0, 2], 2, 5.0) == [2, 3], "the highest are told to leave"
    assert births.scale([0, 1, 2, 3], 2, 5.0) == [], "each once"

    assert births.scale([0, 1, 2, 3], 4, 6.0) == []
    assert births.due(6.0) == [4, 5]


@pytest.mark.parametrize("rank", [2, 3])
def test_who_was_told_to_leave_and_dies_instead_is_not_replaced(rank):
    births = WorkerPopulation(5, 4)
    births.scale([0, 1, 2, 3], 2, 5.0)

    births.died(rank, 6.0)

    assert births.due(100.0) == []


def test_a_job_that_is_started_again_lacks_nobody_and_gives_no_number_twice():
    births = WorkerPopulation(5, 4)
    births.died(1, 5.0)
    births.scale([0, 2, 3], 2, 5.0)

    births.begin_again(4)
    births.died(3, 200.0)

    assert births.due(300.0) == [5]
