"""Processes that join each other: one that does not arrive."""

from __future__ import annotations

import dataclasses
import importlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.comm import joining, start_wait
from holdfast.comm.joining import JoinedGroup
from holdfast.comm.launchers import LaunchedGroup
from holdfast.comm.start_wait import StartLimit, StartWait
from holdfast.comm.surviving import SurvivingGroup
from holdfast.errors import ConfigError, StoreLost


@pytest.fixture
def group():
    importlib.import_module("torch.distributed")  # the first import may take longer than a limit
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return LaunchedGroup(launcher="srun", rank=0, size=3, is_local=True, host="127.0.0.1", port=port)


@pytest.fixture(autouse=True)
def excepthook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def surviving(group, *ranks, size=4):
    """These processes of a group that goes on without those that die."""
    return [dataclasses.replace(group, rank=rank, size=size, leaves_survivors=True) for rank in ranks]


def within(limit_s, kind=JoinedGroup, **how):
    """The kind of group, whose processes wait so long for each other."""
    return lambda its: kind(its, StartLimit(limit_s, **how))


@pytest.mark.parametrize("kind", [JoinedGroup, SurvivingGroup])
def test_a_process_that_does_not_arrive_is_named(monkeypatch, capfd, group, kind):
    monkeypatch.setattr(start_wait, "_FIRST_LINE_S", 0.3)
    monkeypatch.setattr(start_wait, "_LINE_EVERY_S", 0.4)

    with pytest.raises(StoreLost, match=r"ranks 1, 2 of 3 processes of srun did not join within 1 s"):
        within(1.0, kind)(group)

    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("holdfast: for ")]
    assert len(lines) == 3, "after 0.3 s, 0.4 s and 0.8 s"
    assert all("rank 0 waits for ranks 1, 2 of 3 processes of srun; after 1 s" in line for line in lines)


def test_the_end_is_one_line(capfd, group):
    with pytest.raises(StoreLost) as raised:
        within(0.1)(group)

    sys.excepthook(raised.type, raised.value, raised.tb)
    sys.excepthook(ValueError, ValueError("of the script"), None)

    err = capfd.readouterr().err.splitlines()
    assert "holdfast: rank 0 ends: ranks 1, 2 of 3 processes of srun did not join within 0.1 s" in err[0]
    assert err[1:] == ["ValueError: of the script"]


def test_with_a_least_number_the_job_begins_without_those_that_are_missing(capfd, group):
    with ThreadPoolExecutor(3) as pool:
        joined = list(pool.map(within(2.0, SurvivingGroup, least=3), surviving(group, 0, 2, 3)))

    assert [each.ranks for each in joined] == [[0, 2, 3]] * 3
    assert "rank 1 did not join in time; training begins with ranks 0, 2, 3" in capfd.readouterr().err
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(SurvivingGroup._leave, joined))


@pytest.mark.parametrize(
    ("leaves_survivors", "least", "then"),
    [(True, 2, "the job begins without those that are missing"), (False, 2, "the job ends"), (True, 0, "the job ends")],
)
def test_what_follows_a_wait_is_said(group, leaves_survivors, least, then):
    wait = StartWait(dataclasses.replace(group, leaves_survivors=leaves_survivors), StartLimit(60.0, least))

    assert wait._line(10.0, "rank 2") == (
        f"for 10 s rank 0 waits for rank 2 of 3 processes of srun; after 60 s (HOLDFAST_START_TIMEOUT_S) {then}"
    )


def test_a_process_on_a_machine_of_its_own_begins_alone(group):
    alone = within(0.5, SurvivingGroup, least=1)(dataclasses.replace(group, is_local=False, leaves_survivors=True))

    assert alone.ranks == [0]
    SurvivingGroup._leave(alone)


def test_with_fewer_than_the_least_number_all_end(group):
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(within(1.0, SurvivingGroup, least=3), each) for each in surviving(group, 0, 2)]

        for each in both:
            with pytest.raises(StoreLost, match=r"ranks 1, 3 of 4 processes of srun did not join within 1 s"):
                each.result()


def test_one_that_has_died_after_the_roll_was_called_is_missing_too(monkeypatch, group):
    """It said that it was there, and never came to the membership store."""
    monkeypatch.setattr(joining, "_CONNECT_S", 2.0)
    ranks = surviving(group, *range(4))
    enter = SurvivingGroup._enter
    monkeypatch.setattr(SurvivingGroup, "_enter", lambda self: enter(self) if self.group.rank != 3 else died())

    def died():
        raise InterruptedError

    with ThreadPoolExecutor(4) as pool:
        *joined, dead = [pool.submit(within(2.0, SurvivingGroup, least=3), each) for each in ranks]
        assert [each.result().ranks for each in joined] == [[0, 1, 2]] * 3
        assert isinstance(dead.exception(), InterruptedError)
        list(pool.map(SurvivingGroup._leave, [each.result() for each in joined]))


def test_one_that_dies_while_the_roll_is_called_hosts_no_hub(monkeypatch, group):
    """Rank 1 said that it was there, and was killed while rank 4 was awaited: three others host the membership store."""
    monkeypatch.setattr(joining, "_CONNECT_S", 2.0)
    ranks = surviving(group, *range(4), size=5)
    host = SurvivingGroup._host

    def host_unless_killed(self):
        if self.group.rank == 1:
            raise InterruptedError  # its hub ends with it
        time.sleep(1.0)
        return host(self)

    monkeypatch.setattr(SurvivingGroup, "_host", host_unless_killed)
    with ThreadPoolExecutor(4) as pool:
        started = [pool.submit(within(1.0, SurvivingGroup, least=3), each) for each in ranks]
        assert isinstance(started.pop(1).exception(), InterruptedError)
        joined = [each.result() for each in started]
        assert [each.ranks for each in joined] == [[0, 2, 3]] * 3
        assert [each._hub is not None for each in joined] == [True] * 3
        assert joined[0].hosts == [0, 2, 3]

        _is_survived(joined)
        list(pool.map(SurvivingGroup._leave, joined[1:]))


def _is_survived(joined):
    """Rank 0 dies: the store of the others goes on, led by one whose rank is no index of three."""
    joined[0]._is_leaving = True
    joined[0]._store.close()
    joined[0]._close_hub()
    ends_s = time.monotonic() + 60
    while joined[2]._store.get("dead/0") is None:
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def test_of_two_that_are_there_one_hosts_the_store(monkeypatch, group):
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(within(1.0, SurvivingGroup, least=2), surviving(group, 0, 3)))
        assert [each.hosts for each in joined] == [[0]] * 2
        assert joined[1]._hub is None
        list(pool.map(SurvivingGroup._leave, joined))


def test_where_rank_0_does_not_arrive_the_meeting_place_is_named(group):
    other = LaunchedGroup(launcher="srun", rank=1, size=3, is_local=True, host="127.0.0.1", port=group.port)

    with pytest.raises(StoreLost, match=f"rank 0 of 3 processes of srun did not join .*127.0.0.1:{group.port}: "):
        within(1.0)(other)


def test_processes_that_were_told_different_things_are_refused(group):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(within(2.5), group)
        with pytest.raises(ConfigError, match="rank 0 would end, but rank 1 would continue: set HOLDFAST_ON_DEATH to"):
            within(2.5, SurvivingGroup)(dataclasses.replace(group, rank=1))
        with pytest.raises(StoreLost, match="did not join"):
            first.result()


def test_a_second_job_at_the_same_place_is_refused_and_does_not_disturb_the_first(group):
    """Its rank 0 cannot listen there; its other ranks would otherwise take part in the first job."""
    ranks = [dataclasses.replace(group, rank=rank) for rank in range(3)]
    start = within(4.0)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(start, ranks[0])
        second = pool.submit(start, ranks[1])
        time.sleep(1.0)  # both wait for rank 2
        with pytest.raises(StoreLost, match="cannot meet at"):
            start(ranks[0])
        with pytest.raises(StoreLost, match="another rank 1 has joined: does another job meet at"):
            start(ranks[1])

        with pytest.raises(StoreLost, match="rank 2 of 3 processes of srun did not join"):
            first.result()
        with pytest.raises(StoreLost):
            second.result()


@pytest.mark.parametrize("kind", [JoinedGroup, SurvivingGroup])
def test_a_token_that_all_have_is_used_and_not_sent(monkeypatch, group, kind):
    monkeypatch.setenv("HOLDFAST_TOKEN", "a token of all processes")
    said = []
    ranks = [dataclasses.replace(group, rank=rank, size=2) for rank in range(2)]
    monkeypatch.setattr(joining, "_open_rendezvous", lambda its, wait: Overheard(open_rendezvous(its, wait), said))
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(within(20.0, kind), ranks))

    assert [each.token for each in joined] == ["a token of all processes"] * 2
    assert said
    assert not any("a token of all" in value for value in said)
    with pytest.raises(ConfigError, match="this process has HOLDFAST_TOKEN in its environment, and rank 0 has not"):
        joined[1]._token_of("a token that rank 0 has drawn")
    monkeypatch.delenv("HOLDFAST_TOKEN")
    with pytest.raises(ConfigError, match="rank 0 has HOLDFAST_TOKEN in its environment, and this process has not"):
        joined[1]._token_of("")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kind._leave, joined))


@pytest.mark.parametrize("kind", [JoinedGroup, SurvivingGroup])
def test_a_token_that_is_not_that_of_rank_0_is_refused_at_once(monkeypatch, group, kind):
    monkeypatch.setattr(joining, "_CONNECT_S", 4.0)
    monkeypatch.setenv("HOLDFAST_TOKEN", "a token of rank 0")
    is_in = threading.Event()  # rank 0 does not read its token any more
    open_store = joining.open_store

    def open_and_say(url, token):
        store = open_store(url, token)
        is_in.set()
        return store

    def enter_with_another(self):
        if self.group.rank:
            assert is_in.wait(20)
            monkeypatch.setenv("HOLDFAST_TOKEN", "another token")
        return enter(self)

    enter = kind._enter
    monkeypatch.setattr(joining, "open_store", open_and_say)
    monkeypatch.setattr(kind, "_enter", enter_with_another)
    ranks = [dataclasses.replace(group, rank=rank, size=2) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(within(4.0, kind), ranks[0])
        with pytest.raises(ConfigError, match="HOLDFAST_TOKEN in the environment of rank 1 is not that of all ranks"):
            within(4.0, kind)(ranks[1])
        assert not first.done(), "it was not refused at once"
        with pytest.raises(StoreLost, match="did not join"):
            first.result()


open_rendezvous = joining._open_rendezvous


class Overheard:
    """The store of a rendezvous, and what is written to it."""

    def __init__(self, store, said):
        self._store, self._said = store, said

    def set(self, key, value):
        self._said.append(str(value))
        self._store.set(key, value)

    def __getattr__(self, name):
        return getattr(self._store, name)
