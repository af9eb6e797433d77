"""Of groups of workers that have lost contact, one claims the next generation."""

from __future__ import annotations

import threading

import pytest

from holdfast.comm.claims import GenerationClaims


def test_one_group_has_a_generation_and_all_of_its_members_find_that(tmp_path):
    claims = GenerationClaims(tmp_path, "prterun-host-1@1")

    assert claims.claim(1, (0, 1))
    assert claims.claim(1, (0, 1)), "the second member"
    assert not claims.claim(1, (2,)), "the worker on the other side"
    assert claims.claim(2, (0,)), "a later generation of the first group"


def test_another_start_of_the_job_has_generations_of_its_own(tmp_path):
    assert GenerationClaims(tmp_path, "prterun-host-1@1").claim(1, (0, 1))
    assert GenerationClaims(tmp_path, "prterun-host-2@1").claim(1, (2,))


def test_of_two_groups_that_claim_at_once_exactly_one_goes_on(tmp_path):
    for generation in range(50):
        said: dict[int, bool] = {}
        groups = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
        begin = threading.Barrier(len(groups))

        def claim(rank, generation=generation, said=said, groups=groups, begin=begin):
            begin.wait(10)
            said[rank] = GenerationClaims(tmp_path, "start").claim(generation, groups[rank])

        threads = [threading.Thread(target=claim, args=[rank]) for rank in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

        assert said[0] is said[1]
        assert said[2] is said[3]
        assert said[0] is not said[2]


def test_a_folder_that_cannot_be_asked_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        GenerationClaims(tmp_path / "removed", "start").claim(1, (0,))


@pytest.mark.parametrize(
    ("run_dir", "local", "claims"), [("", "2", False), ("run", "3", False), ("run", None, False), ("run", "2", True)]
)
def test_only_workers_of_several_hosts_with_a_folder_in_common_claim(tmp_path, run_dir, local, claims):
    environ = {"OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "prterun-a/b-1@1"}
    if local is not None:
        environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = local
    made = GenerationClaims.under_mpirun(str(tmp_path) if run_dir else "", environ)

    assert (made is not None) is claims
    assert made is None or made.claim(1, (0, 1))
