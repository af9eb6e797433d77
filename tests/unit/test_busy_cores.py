"""A process that regroups leaves the cores to those that end there."""

import os

import pytest

from holdfast.comm import busy_cores
from holdfast.comm.busy_cores import BusyCores


@pytest.fixture
def allowed(monkeypatch):
    """The cores that the thread may use, as the system would keep them."""
    mask = [{0, 1, 2}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mask[0])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: mask.__setitem__(0, set(cores)))
    return lambda: mask[0]


def test_inside_the_cores_that_are_busy_are_not_used_and_afterwards_all_are(allowed):
    cores = BusyCores()
    cores.note([1], 3)

    with cores:
        assert allowed() == {0, 2}

    assert allowed() == {0, 1, 2}


def test_two_that_end_one_after_the_other_are_both_avoided(allowed):
    cores = BusyCores()
    cores.note([1], 3)
    cores.note([2], 3)

    with cores:
        assert allowed() == {0}


@pytest.mark.parametrize(
    ("busy", "processes"), [((0, 1, 2), 2), ((), 2), ((5,), 2), ((1,), 9)], ids=["all", "none", "of others", "crowd"]
)
def test_it_stays_where_that_would_not_help(allowed, busy, processes):
    cores = BusyCores()
    cores.note(busy, processes)

    with cores:
        assert allowed() == {0, 1, 2}


def test_it_returns_once_the_process_has_long_ended(allowed, monkeypatch):
    monkeypatch.setattr(busy_cores, "_BUSY_S", 0.0)
    cores = BusyCores()
    cores.note([1], 3)

    with cores:
        assert allowed() == {0, 1, 2}


def test_an_error_inside_gives_the_cores_back(allowed):
    cores = BusyCores()
    cores.note([1], 3)

    with pytest.raises(OSError, match="revoked"), cores:
        raise OSError("revoked")

    assert allowed() == {0, 1, 2}
