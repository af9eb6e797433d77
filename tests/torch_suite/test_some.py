"""A few of PyTorch's own tests over this backend, for every run of the tests; ``make torch-suite`` runs all of them."""

import pytest
from running import Result, run

SOME = ("test_sparse_all_reduce_sum", "test_barrier_timeout_full_group")


@pytest.mark.parametrize(
    "fabric", ["gloo", pytest.param("ulfm", marks=pytest.mark.soak)]
)  # each rank imports for seconds
def test_some_of_pytorchs_own_tests_pass(fabric):
    assert run(f"holdfast-{fabric}", SOME) == dict.fromkeys(SOME, Result("passed"))


@pytest.mark.soak
def test_a_test_that_fails_is_not_counted_and_those_after_it_are_run():
    """Over Open MPI, where the ranks run one test after the other."""
    missing = "test_that_does_not_exist"
    found = run("holdfast-ulfm", [missing, SOME[0]], limit_s=60)
    assert [found[name].outcome for name in (missing, SOME[0])] == ["failed", "passed"]
    assert missing in found[missing].why
