"""Who computes which slices, against all there is to choose from; and how many slices there are."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.base.options import losses_of
from holdfast.comm.allreduce.adding import groups
from holdfast.config import Settings
from holdfast.data.assignment import assign_slices, choose_slices, even_ranges
from holdfast.errors import ConfigError


def all_counts(slices, workers):
    """All the ways to give each of some workers a number of slices."""
    if workers == 1:
        return [(slices,)]
    return [(n, *rest) for n in range(slices + 1) for rest in all_counts(slices - n, workers - 1)]


def ends_at(counts, ranks, speeds):
    return max(count / speeds.get(rank, 1.0) for rank, count in zip(ranks, counts, strict=True))


def moved(holders, at_home):
    return sum(not at_home[rank][0] <= n < at_home[rank][1] for n, rank in enumerate(holders))


def runs(counts, ranks):
    return [rank for rank, count in zip(ranks, counts, strict=True) for _ in range(count)]


jobs = st.tuples(
    st.integers(1, 9),
    st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1, max_size=4))),
    st.dictionaries(st.integers(0, 4), st.sampled_from([0.1, 0.25, 0.5, 0.73, 0.9, 1.1, 1.5, 3.0])),
)


def at_home_of(slices, seats, alive):
    return {rank: home for rank, home in enumerate(even_ranges(slices, seats)) if rank in alive}


@settings(max_examples=60, deadline=None)
@given(jobs, st.booleans())
def test_nobody_could_finish_earlier(job, aligned):
    slices, (seats, alive), speeds = job
    at_home = at_home_of(slices, seats, alive)
    ranks = list(at_home)

    holders = assign_slices(slices, at_home, speeds, aligned=aligned)

    assert len(holders) == slices
    assert holders == sorted(holders), "runs, in the order of the ranks"
    best = min(ends_at(counts, ranks, speeds) for counts in all_counts(slices, len(ranks)))
    assert ends_at([holders.count(rank) for rank in ranks], ranks, speeds) == best


@settings(max_examples=60, deadline=None)
@given(jobs)
@example((7, (4, {0, 1, 2, 3}), {1: 0.1}))
def test_as_few_slices_move_as_that_allows_or_one_more(job):
    """Each run ends where it moves fewest; in one of a thousand cases another end would save a slice later on."""
    slices, (seats, alive), speeds = job
    at_home = at_home_of(slices, seats, alive)
    ranks = list(at_home)

    holders = assign_slices(slices, at_home, speeds)

    latest = ends_at([holders.count(rank) for rank in ranks], ranks, speeds)
    fair = [counts for counts in all_counts(slices, len(ranks)) if ends_at(counts, ranks, speeds) <= latest]
    least = {rank: min(1, holders.count(rank)) for rank in ranks}
    fair = [counts for counts in fair if all(n >= least[rank] for n, rank in zip(counts, ranks, strict=True))]
    fewest = min(moved(runs(counts, ranks), at_home) for counts in fair)
    assert moved(holders, at_home) in (fewest, fewest + 1)


def test_survivors_stay_at_home_and_share_what_the_dead_had():
    def after(lost, **options):
        return assign_slices(16, at_home_of(16, 4, {0, 1, 2, 3} - {lost}), {}, **options)

    assert after(None) == runs([4, 4, 4, 4], range(4))
    assert after(1) == runs([6, 6, 4], (0, 2, 3))
    assert after(0) == runs([6, 6, 4], (1, 2, 3))
    assert after(3) == runs([4, 6, 6], (0, 1, 2))


def rows(holders):
    """How many groups the busiest sends in the order of a tree."""
    made = [holders[group[0]] for group in groups(dict(enumerate(holders)))]
    return max(made.count(rank) for rank in made)


def test_in_a_tree_runs_end_where_large_groups_do():
    at_home = at_home_of(32, 4, range(4))
    speeds = [dict(enumerate(some)) for some in itertools.product((1.0, 0.8, 0.5), repeat=4)]

    aligned = [rows(assign_slices(32, at_home, some, aligned=True)) for some in speeds]
    nearest = [rows(assign_slices(32, at_home, some)) for some in speeds]

    assert max(aligned) <= 4 < max(nearest)
    assert sum(aligned) < 0.95 * sum(nearest)


# -- how many


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("losses", [1, 2])
def test_the_chosen_number_keeps_what_it_promises(workers, losses):
    """Against what is really handed out, whoever dies."""
    choice = choose_slices(workers, losses, 1024)
    borne = min(losses, workers - 1)

    assert choice.slices % workers == 0
    assert 1024 // choice.slices >= 8
    assert choice.longer <= 1.15
    for lost in range(borne + 1):
        for dead in itertools.islice(itertools.combinations(range(workers), lost), 40):
            alive = set(range(workers)) - set(dead)
            holders = assign_slices(choice.slices, at_home_of(choice.slices, workers, alive), {})
            busiest = max(holders.count(rank) for rank in alive) * 1024 / choice.slices
            assert busiest / (1024 / len(alive)) <= choice.longer + 1e-9


def test_no_smaller_number_would_do():
    choice = choose_slices(8, 2, 4096)
    left = [6, 7, 8]

    assert choice.slices == 32
    for slices in (8, 16, 24):
        assert max(-(-slices // n) * n / slices for n in left) > 1.15


def test_slices_do_not_become_too_small_and_the_line_says_what_it_costs():
    assert [choose_slices(*asked).line for asked in ((4, 0, 512), (4, 0, 32), (2, 0, 64), (1, 0, 64))] == [
        "8 slices of a mini-batch: after the loss of 1 of 4 workers a step takes at most 13 % longer than an even split; 64 "
        "samples each instead of 128, and small ones cost more per sample (docs/explanation/performance-slices.md)",
        "4 slices of a mini-batch: after the loss of 1 of 4 workers a step takes at most 50 % longer than an even split; 8 "
        "samples each, one slice per worker, because smaller ones would cost more than they gain",
        "2 slices of a mini-batch: after the loss of 1 of 2 workers a step takes as long as an even split; 32 samples each, "
        "one slice per worker",
        "1 slice of a mini-batch: with one worker there is nothing to share",
    ]


def test_the_choice_is_asked_for_in_words_and_a_number_goes_before():
    assert (losses_of("auto", "slices"), losses_of("auto:3", "slices")) == (0, 3)
    assert Settings.from_env({"HOLDFAST_SLICES": "auto:2"}).auto_slices == 2
    assert Settings.from_env({}, slices="auto").auto_slices == 0
    given = Settings.from_env({"HOLDFAST_SLICES": "6"}, slices="auto")
    assert (given.slices, given.auto_text) == (6, "")
    for wrong in ("auto:0", "auto:", "auto:-1", "auto:x", "automatic", "many"):
        with pytest.raises(ConfigError, match="slices must be a number, auto, or auto:F to bear the loss of F workers"):
            Settings.from_env({}, slices=wrong)
