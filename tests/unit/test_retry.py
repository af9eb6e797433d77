"""What survivors of the torch.distributed backend do with a collective that a failure has interrupted."""

import itertools

import pytest

from holdfast.recovery.retry import ATTEMPTS, CollectiveProgress, Retry


def decide(**changes):
    usual = {"completed": 3, "number": 3, "is_broken": False, "has_lost": False, "failures": 0}
    return CollectiveProgress(**usual | changes).decide()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Retry.AGAIN),
        ({"failures": ATTEMPTS - 1}, Retry.AGAIN),
        ({"failures": ATTEMPTS}, Retry.NO_FAILURE),
        ({"has_lost": True}, Retry.LOST),
        ({"completed": -1}, Retry.AGAIN),  # no survivor knows the group yet
        ({"completed": 4, "has_lost": True, "failures": ATTEMPTS}, Retry.KEEP),
        ({"completed": 4, "is_broken": True}, Retry.UNUSABLE),
    ],
)
def test_the_shared_progress_decides(changes, expected):
    assert decide(**changes) is expected


def test_what_one_survivor_has_completed_no_other_runs_again():
    """However often it failed here: otherwise one of them would wait for the others in it."""
    for failures, has_lost in itertools.product(range(ATTEMPTS + 2), (False, True)):
        assert decide(completed=4, failures=failures, has_lost=has_lost) is Retry.KEEP
