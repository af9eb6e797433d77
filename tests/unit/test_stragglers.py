"""Who is called slow, and who is not, on made series with the statistics of measured ones.

The figures are those of the Alibaba PAI trace of 2020 (four jobs of ten workers): a worker's steps vary by 1 to 17 % of
their mean, workers of one job differ by up to 15 %, one worker takes 1.7 times as long for 17 steps and recovers, others
take four times as long for good, and two take 15 times as long from some step on.
"""

import random

import pytest

from holdfast.launch.health.stragglers import StragglerDetector
from holdfast.records.beacon import Beacon, BeaconPosition

STEPS = 300


def positions(step, **taken_s):
    return {
        int(name[1:]): BeaconPosition(
            beats=1, step=step, slice=0, phase="forward", pid=1, samples=(), compute_s=seconds
        )
        for name, seconds in taken_s.items()
    }


class Workers:
    """Ten workers whose steps vary by a share of their mean; what they take is told to beacons, as a session does it."""

    def __init__(self, folder, seed, noise=0.05, factor=2.0):
        self.rng = random.Random(seed)
        self.noise = noise
        self.means = [self.rng.uniform(0.425, 0.475) for _ in range(10)]
        self.paths = [folder / str(rank) for rank in range(10)]
        self.beacons = [Beacon(path) for path in self.paths]
        self.stragglers = StragglerDetector(factor)
        self.found = []

    def take_step(self, step, slow):
        for rank, beacon in enumerate(self.beacons):
            beacon.mark("forward", step)
            taken_s = self.means[rank] * slow.get(rank, 1.0) * self.rng.lognormvariate(0.0, self.noise)
            beacon.publish_computed(taken_s)
        seen = {rank: Beacon.read(path) for rank, path in enumerate(self.paths)}
        self.found += [(step, rank, score) for rank, score in self.stragglers.poll(seen).items()]
        return seen


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", [0.01, 0.17, 0.5])
def test_noise_makes_no_straggler(tmp_path, seed, noise):
    workers = Workers(tmp_path, seed, noise)
    for step in range(STEPS):
        workers.take_step(step, {})

    assert workers.found == []


def test_steps_that_hold_an_evaluation_make_no_straggler(tmp_path):
    workers = Workers(tmp_path, 1)
    for step in range(STEPS):
        workers.take_step(step, {0: 100.0} if step % 10 == 9 else {})

    assert workers.found == []


def test_who_is_slow_for_some_steps_and_recovers_is_not_named(tmp_path):
    workers = Workers(tmp_path, 1, factor=1.5)
    for step in range(STEPS):
        workers.take_step(step, {6: 1.7} if 190 <= step < 207 else {})

    assert workers.found == []


@pytest.mark.parametrize("seed", range(2))
def test_who_stays_slow_is_named_once_with_its_score(tmp_path, seed):
    workers = Workers(tmp_path, seed, noise=0.17)
    for step in range(STEPS):
        workers.take_step(step, {5: 4.0, 8: 4.0} | ({6: 15.0} if step >= 150 else {}))

    (first, second, third) = sorted(workers.found)
    assert {(first[0], first[1]), (second[0], second[1])} == {(20, 5), (20, 8)}
    assert third[1] == 6
    assert 150 + 20 <= third[0] <= 150 + 20 + 8  # a median of 15 steps notices after 8
    assert all(score == pytest.approx(4.0, rel=0.3) for _, _, score in (first, second))
    assert third[2] == pytest.approx(15.0, rel=0.3)


def test_who_has_recovered_may_be_named_again(tmp_path):
    workers = Workers(tmp_path, 3)
    for step in range(STEPS):
        workers.take_step(step, {4: 3.0} if step < 100 or step >= 200 else {})

    assert [rank for _, rank, _ in workers.found] == [4, 4]


def test_who_wavers_about_the_factor_is_named_once(tmp_path):
    workers = Workers(tmp_path, 3)
    for step in range(STEPS):
        workers.take_step(step, {4: 2.4 if step % 100 < 50 else 1.8})

    assert [rank for _, rank, _ in workers.found] == [4]


def test_a_score_compares_with_the_median_of_the_others():
    scores = StragglerDetector(2.0).scores(positions(1, r0=1.0, r1=1.0, r2=4.0, r3=0.0))

    assert scores == {0: 0.4, 1: 0.4, 2: 4.0}, "who has not computed yet has none"


def test_one_worker_alone_has_no_score():
    assert StragglerDetector(2.0).scores(positions(1, r0=1.0)) == {}
    assert StragglerDetector(2.0).poll({}) == {}


def look_through(stragglers, steps, **taken_s):
    found = {}
    for step in steps:
        found |= stragglers.poll(positions(step, **taken_s))
    return found


def test_speeds_are_news_once_there_is_a_straggler_and_when_they_change():
    stragglers = StragglerDetector(2.0)
    slow = {"r0": 0.1, "r1": 0.4, "r2": 0.1}
    assert stragglers.new_speeds(positions(0, **slow), 0.0) is None

    assert look_through(stragglers, range(21), **slow) == {1: 4.0}

    assert stragglers.new_speeds(positions(20, **slow), 1.0) == {0: 1.0, 1: 0.25, 2: 1.0}
    assert stragglers.new_speeds(positions(21, **slow), 40.0) is None
    assert stragglers.new_speeds(positions(22, r0=0.1, r1=0.43, r2=0.1), 40.0) is None, "7 % are no news"
    recovered = {"r0": 0.1, "r1": 0.1, "r2": 0.1}
    look_through(stragglers, range(23, 30), **recovered)
    assert stragglers.new_speeds(positions(30, **recovered), 30.0) is None, "it is too early to share out again"
    assert stragglers.new_speeds(positions(30, **recovered), 31.0) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_of_several_slow_workers_one_goes_at_a_time_the_slowest_first_and_nobody_twice():
    stragglers = StragglerDetector(2.0)
    slow = {"r0": 0.1, "r1": 0.4, "r2": 0.5, "r3": 0.1, "r4": 0.1}
    assert stragglers.next_to_go(positions(0, **slow), 0.0) is None, "nobody was named yet"

    assert look_through(stragglers, range(21), **slow).keys() == {1, 2}

    times_s = (5.0, 6.0, 34.0, 35.0, 100.0)
    assert [stragglers.next_to_go(positions(21, **slow), t) for t in times_s] == [2, None, None, 1, None]


def test_who_has_recovered_in_the_meantime_is_not_replaced():
    stragglers = StragglerDetector(2.0)
    look_through(stragglers, range(21), r0=0.1, r1=0.4, r2=0.1)

    assert stragglers.next_to_go(positions(21, r0=0.1, r1=0.15, r2=0.1), 5.0) is None


def test_a_new_start_forgets_who_was_slow():
    stragglers = StragglerDetector(2.0)
    slow = {"r0": 0.1, "r1": 0.4, "r2": 0.1}
    look_through(stragglers, range(21), **slow)
    stragglers.begin()

    assert stragglers.new_speeds(positions(22, **slow), 9.0) is None
    assert look_through(stragglers, range(15), **slow) == {}
    assert look_through(stragglers, range(15, 21), **slow) == {1: 4.0}
