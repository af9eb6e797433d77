"""Processes that join each other: one that does not arrive."""

from __future__ import annotations

import dataclasses
import importlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.comm import joining
from holdfast.comm.joining import JoinedGroup
from holdfast.comm.launchers import LaunchedGroup
from holdfast.comm.surviving import SurvivingGroup
from holdfast.errors import ConfigError, StoreLost


@pytest.fixture
def group():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return LaunchedGroup(launcher="srun", rank=0, size=3, is_local=True, host="127.0.0.1", port=port)


def test_a_process_that_does_not_arrive_is_named(monkeypatch, group):
    monkeypatch.setattr(joining, "START_S", 1.0)

    with pytest.raises(StoreLost, match=r"ranks \[1, 2\] did not join within 1 s"):
        JoinedGroup(group)


def test_where_rank_0_does_not_arrive_the_meeting_place_is_named(monkeypatch, group):
    monkeypatch.setattr(joining, "START_S", 1.0)
    other = LaunchedGroup(launcher="srun", rank=1, size=3, is_local=True, host="127.0.0.1", port=group.port)

    with pytest.raises(StoreLost, match=f"the processes of srun cannot meet at 127.0.0.1:{group.port}: "):
        JoinedGroup(other)


def test_processes_that_were_told_different_things_are_refused(monkeypatch, group):
    monkeypatch.setattr(joining, "START_S", 5.0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(JoinedGroup, group)
        with pytest.raises(ConfigError, match="rank 0 would end, but rank 1 would continue: set HOLDFAST_ON_DEATH to"):
            SurvivingGroup(dataclasses.replace(group, rank=1))
        with pytest.raises(StoreLost, match="did not join"):
            first.result()


def test_a_second_job_at_the_same_place_is_refused_and_does_not_disturb_the_first(monkeypatch, group):
    """Its rank 0 cannot listen there; its other ranks would otherwise take part in the first job."""
    importlib.import_module("torch.distributed")  # the first import may take longer than the limit
    monkeypatch.setattr(joining, "START_S", 3.0)
    ranks = [dataclasses.replace(group, rank=rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(JoinedGroup, ranks[0])
        second = pool.submit(JoinedGroup, ranks[1])
        time.sleep(1.0)  # both wait for rank 2
        with pytest.raises(StoreLost, match="cannot meet at"):
            JoinedGroup(ranks[0])
        with pytest.raises(StoreLost, match="another rank 1 has joined: does another job meet at"):
            JoinedGroup(ranks[1])

        with pytest.raises(StoreLost, match=r"ranks \[2\] did not join"):
            first.result()
        with pytest.raises(StoreLost):
            second.result()


@pytest.mark.parametrize("kind", [JoinedGroup, SurvivingGroup])
def test_a_token_that_all_have_is_used_and_not_sent(monkeypatch, group, kind):
    monkeypatch.setattr(joining, "START_S", 20.0)
    monkeypatch.setenv("HOLDFAST_TOKEN", "a token of all processes")
    said = []
    ranks = [dataclasses.replace(group, rank=rank, size=2) for rank in range(2)]
    monkeypatch.setattr(joining, "_open_rendezvous", lambda its: Overheard(open_rendezvous(its), said))
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(kind, ranks))

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
    monkeypatch.setattr(joining, "START_S", 4.0)
    monkeypatch.setenv("HOLDFAST_TOKEN", "a token of rank 0")
    is_in = threading.Event()  # rank 0 does not read its token any more
    open_store = joining.open_store

    def open_and_say(url, token):
        store = open_store(url, token)
        is_in.set()
        return store

    monkeypatch.setattr(joining, "open_store", open_and_say)
    ranks = [dataclasses.replace(group, rank=rank, size=2) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(kind, ranks[0])
        assert is_in.wait(20)
        monkeypatch.setenv("HOLDFAST_TOKEN", "another token")
        with pytest.raises(ConfigError, match="HOLDFAST_TOKEN in the environment of rank 1 is not that of all ranks"):
            kind(ranks[1])
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
