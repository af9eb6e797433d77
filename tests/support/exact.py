"""Exactness checks for tests that kill workers: the hash of the reference, and no lost samples."""

import functools
from pathlib import Path

import reference
from decided_again import replay

from holdfast.records.encoding import record_from_dict

SCRIPT = Path(__file__).with_name("train_reference.py")
reference_hash = functools.cache(reference.train)


def check_nothing_lost(report, state, survivors):
    """All samples were committed once, the final bits are these, and these workers survived."""
    assert report["replicas"]["state_sha256"] == state
    assert report["replicas"]["identical"] is True
    assert report["samples"] == {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}
    assert report["steps"] == reference.STEPS
    assert report["workers"]["ranks_finished"] == survivors


def check_forward_lost_one_slice(report):
    """For a run with four workers in which one died in step 4, between the all-reduces of its two buckets."""
    assert report["replicas"]["identical"] is True
    assert report["samples"] == {"planned": 406, "committed": 398, "lost": 8, "repeated": 0}
    assert report["failures"][0]["lost_samples"] == 8
    assert report["failures"][0]["redone_steps"] == 0
    (lost,) = report["lost"]
    assert lost["step"] == 4
    assert len(set(lost["ids"])) == 8
    assert lost["buckets"] == [1], "bucket 0 was reduced over all workers"


def check_decided_again(report):
    """Assert that the simulator decides each recovery of a real run as its workers did, in the same order."""
    replayed = replay(record_from_dict(event) for event in report["_events"])
    assert replayed, "there was no recovery"
    assert [one.was for one in replayed] == [one.again for one in replayed]
