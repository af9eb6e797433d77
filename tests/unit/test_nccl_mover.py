"""NCCL as a mover, with a library in CPU memory in its place: what it moves, how a failure ends it, where it is refused."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from host_threads import Fabric, Thread
from threads import side_by_side

from holdfast.comm import OrderedAllReduce, device_of, make_allreduce
from holdfast.comm.allreduce import nccl_library, shm
from holdfast.comm.allreduce.mover import FabricMover
from holdfast.comm.allreduce.nccl import FORCED, NcclMover, abort_within, refuse_version
from holdfast.comm.allreduce.staged import choose_mover
from holdfast.comm.virtual import VirtualCommunicator
from holdfast.config import Settings
from holdfast.errors import ConfigError, JobError, PeerFailed


class Wire:
    """What the libraries of one job exchange through."""

    def __init__(self):
        self.lines, self.lock = {}, threading.Lock()

    def line(self, *ends):
        with self.lock:
            return self.lines.setdefault(ends, queue.SimpleQueue())


class FakeLibrary:
    """NCCL in CPU memory: an operation that is not answered never ends, and an abort may hang."""

    def __init__(self, wire, me, log):
        self.wire, self.me, self.log = wire, me, log
        self.connects, self.fails, self.hangs = True, "", False

    def make_id(self):
        return bytes([self.me]) * 128

    def connect(self, size, place, identity, generation):
        self.log.append(("connect", self.me, size, place))
        return identity, place

    def is_ready(self, communicator):
        if self.fails:
            raise RuntimeError(self.fails)
        return self.connects

    def move(self, communicator, send, receive):
        identity, place = communicator
        for places, data in send:
            self.log.append(("send", self.me, len(places), data.numel()))
            for to in places:
                self.wire.line(identity, place, to).put(data.clone())
        for source, out in receive:
            line = self.wire.line(identity, source, place)
            while line.empty():
                assert self.is_ready(communicator)
                yield
            out.copy_(line.get())
        yield

    def abort(self, generation):
        self.log.append(("abort", self.me, generation))
        if self.hangs:
            time.sleep(30)


def run(of_process, work, prepare=lambda me, library: None, **options):
    """Run ``work(mover, me)`` in each process; return each result or exception, and what the libraries did."""
    wire, log, fabric = Wire(), [], Fabric(of_process)

    def work_with(comm):
        library = FakeLibrary(wire, comm.me, log)
        prepare(comm.me, library)
        ended = threading.Event()
        mover = NcclMover(comm, of_process, library, end=ended.set, **options)
        try:
            return work(mover, comm.me)
        except PeerFailed:
            assert not ended.is_set()
            raise

    return fabric.run(work_with), log


@pytest.mark.parametrize("of_process", [(0, 0, 1, 1), (0, 1, 1), (0, 1, 2)])
def test_different_bytes_go_to_each_peer_and_the_same_ones_to_several(of_process):
    def numbers(source, to):
        return torch.full((1 + source + 2 * to,), 100.0 * source + to)

    def work(mover, me):
        peers = [place for place in mover._rail if place != me]
        taken = [(place, torch.zeros(len(numbers(place, me)))) for place in peers]
        mover.exchange([(place, numbers(me, place)) for place in peers], taken)
        assert all(torch.equal(data, numbers(place, me)) for place, data in taken)
        results = [(place, torch.zeros(2 + place, dtype=torch.float64)) for place in peers]
        mover.gather([(peers, torch.full((2 + me,), me, dtype=torch.float64))], results)
        assert all(data.tolist() == [place] * (2 + place) for place, data in results)
        return len(peers)

    answers, log = run(list(of_process), work)

    rail = 2 if of_process == (0, 0, 1, 1) else 3
    assert answers == [rail - 1] * len(of_process)
    assert sorted(entry for entry in log if entry[0] == "connect") == [
        ("connect", me, rail, me // 2 if rail == 2 else me) for me in range(len(of_process))
    ]
    copies = [entry for entry in log if entry[0] == "send" and entry[2:] == (rail - 1, 8 * (2 + entry[1]))]
    assert len(copies) == len(of_process), "a result is copied to the device once, whoever takes it"
    assert not any(entry[0] == "abort" for entry in log)


@pytest.mark.parametrize("when", ["connect", "move"])
def test_a_peer_that_never_answers_is_given_up_when_the_fabric_says_so_and_all_is_aborted(when):
    def prepare(me, library):
        library.connects = when != "connect" or me != 0

    def work(mover, me):
        if me == 1:
            time.sleep(0.1)
            raise SystemError("killed")
        mover.exchange([], [(1, torch.zeros(3))])

    answers, log = run([0, 1], work, prepare)

    assert [type(answer) for answer in answers] == [PeerFailed, SystemError]
    assert [entry for entry in log if entry[:2] == ("abort", 0)] == [("abort", 0, Thread.generation)]


def test_after_an_abort_nothing_is_moved_and_nothing_aborted_twice():
    def work(mover, me):
        mover.abort()
        mover.abort()
        with pytest.raises(PeerFailed, match="aborted"):
            mover.exchange([], [(1 - me, torch.zeros(1))])

    answers, log = run([0, 1], work)

    assert answers == [None, None]
    assert sorted(entry for entry in log if entry[0] == "abort") == [("abort", me, Thread.generation) for me in (0, 1)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NCCL error: remote process exited or there was a network error", PeerFailed),
        ("CUDA error: uncorrectable ECC error encountered", RuntimeError),
    ],
)
def test_an_error_of_a_communicator_is_a_peers_unless_it_is_of_the_own_device(text, kind):
    def work(mover, me):
        mover._library.fails = text
        mover.exchange([], [(1 - me, torch.zeros(1))])

    answers, _ = run([0, 1], work)

    assert [type(answer) for answer in answers] == [kind, kind]


def test_a_rail_that_does_not_connect_in_time_ends_the_job_and_says_which():
    def prepare(me, library):
        library.connects = False

    answers, _ = run([0, 1], lambda mover, me: None, prepare, connect_s=0.05)

    assert JobError in map(type, answers)
    assert "NCCL did not connect processes [0, 1] within 0.05 s" in map(str, answers)


# -- the deadline


def test_an_abort_that_returns_in_time_ends_nothing():
    ended = []
    abort_within(lambda: None, 5.0, lambda: ended.append(1))
    assert ended == []


def test_an_abort_that_fails_ends_the_process_since_memory_may_still_be_written(capsys):
    def abort():
        raise RuntimeError("unhandled cuda error")

    ended = []
    abort_within(abort, 5.0, lambda: ended.append(1))

    assert ended == [1]
    assert "cannot abort NCCL, so this process ends: unhandled cuda error" in capsys.readouterr().err


HANGS = """
import time
from host_threads import Fabric, Thread
from test_nccl_mover import FakeLibrary, Wire
from holdfast.comm.allreduce.nccl import NcclMover

class Alone(Thread):
    def sendrecv(self, send, receive):
        pass

library = FakeLibrary(Wire(), 0, [])
library.hangs = True
mover = NcclMover(Alone(Fabric([0, 1]), 0), [0, 1], library, abort_s=0.2)
mover.abort()
print("still here")
"""


def test_a_process_whose_abort_hangs_ends_by_sigkill():
    path = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(sys.modules["host_threads"].__file__)])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([path, *sys.path])}

    words = [sys.executable, "-c", HANGS]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "it took longer than 0.2 s" in done.stderr
    assert "still here" not in done.stdout


# -- generations


class Recorder:
    """A mover that records what is done to it."""

    def __init__(self, log, generation):
        self.log, self.generation = log, generation
        log.append(("make", generation))

    def abort(self):
        self.log.append(("abort", self.generation))


def test_a_mover_lasts_a_generation_and_is_aborted_before_the_next_one_is_made(monkeypatch):
    hosts = threading.local()
    monkeypatch.setattr(shm, "host_id", lambda: hosts.id)
    log = []

    def work(comm):
        hosts.id = comm.local_ranks[0]
        mine = log if hosts.id == 0 else []
        add = OrderedAllReduce(comm, "tree", 64, make_mover=lambda comm, hosts: Recorder(mine, comm.generation))
        for comm.generation in (0, 0, 1):
            add.room(0)
            add.open()
        add._path_of_generation(((0, 1), (2, 3)))  # more slots of the same generation

    assert set(side_by_side((0, 1), work).values()) == {None}
    assert log == [("make", 0), ("abort", 0), ("make", 1)]


class FakeNccl:
    """The part of nccl4py that is used to abort."""

    def __init__(self):
        self.log, self.group = [], contextlib.nullcontext

    def communicator(self, name):
        return types.SimpleNamespace(abort=lambda: self.log.append(name), is_valid=False)


def test_an_abort_leaves_the_communicators_of_later_generations_alone(monkeypatch):
    nccl = FakeNccl()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: types.SimpleNamespace(synchronize=lambda: None))
    library = nccl_library.NcclLibrary(nccl, torch.device("cuda:0"))
    library._communicators = [(0, nccl.communicator("a0")), (0, nccl.communicator("b0")), (1, nccl.communicator("a1"))]

    library.abort(0)
    library.abort(0)

    assert nccl.log == ["a0", "b0"]
    with pytest.raises(RuntimeError, match="communicator was aborted"):
        library.is_ready(nccl.communicator("a0"))


# -- where it is refused


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ((2, 26, 9), "NCCL 2.26.9 is too old: install 2.27.0 or newer"),
        ((2, 27, 0), ""),
        ((2, 28, 2), ""),
        ((2, 28, 3), "NCCL 2.28.3 crashes when a communicator is aborted: install 2.28.9 or newer"),
        ((2, 28, 8), "NCCL 2.28.8 crashes when a communicator is aborted: install 2.28.9 or newer"),
        ((2, 28, 9), ""),
        ((2, 31, 2), ""),
    ],
)
def test_versions_that_cannot_be_aborted_are_refused(version, why):
    assert refuse_version(version) == why


def test_without_the_setting_messages_of_the_fabric_are_used():
    make_mover = choose_mover(Settings().between_hosts, torch.device("cpu"))
    assert isinstance(make_mover(VirtualCommunicator(2), [0]), FabricMover)


def test_nccl_is_never_chosen_where_it_would_not_be_used():
    with pytest.raises(ConfigError, match="between_hosts nccl needs order tree, got auto"):
        Settings(between_hosts="nccl")
    with pytest.raises(ConfigError, match="between_hosts must be one of fabric, nccl, got 'ncll'"):
        Settings(between_hosts="ncll", order="tree")
    with pytest.raises(ConfigError, match="nccl, which cannot be used: the model is on cpu, and not on an NVIDIA GPU"):
        make_allreduce(VirtualCommunicator(1), "tree", 64, device=device_of(torch.device("cpu")), between_hosts="nccl")


@pytest.fixture
def machine(monkeypatch):
    """Returns what says which NCCL is there; CUDA is made up, and no stream is made."""
    nccl_library.library_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nccl_library, "NcclLibrary", lambda nccl, device: (nccl, device))
    for name in FORCED:
        monkeypatch.setenv(name, "1")

    def has(version):
        libnccl = version and types.SimpleNamespace(version=types.SimpleNamespace(release=version))
        package = types.SimpleNamespace(get_version=lambda: types.SimpleNamespace(libnccl=libnccl))
        monkeypatch.setitem(sys.modules, "nccl.core", package)
        return package

    yield has
    nccl_library.library_of.cache_clear()


def test_what_is_missing_is_said_in_one_line(machine, monkeypatch):
    device = torch.device("cuda:0")

    def refusal():
        with pytest.raises(ConfigError) as caught:
            nccl_library.library_of(device)
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith("; or leave between_hosts at fabric")
        return str(caught.value)

    monkeypatch.setitem(sys.modules, "nccl.core", None)
    assert "nccl4py is not installed: pip install 'nccl4py[cu13]'" in refusal()
    machine(None)
    assert "libnccl is not installed" in refusal()
    machine((2, 28, 5))
    assert "NCCL 2.28.5 crashes" in refusal()
    assert os.environ["NCCL_NVLS_ENABLE"] == "1", "nothing is changed by a refusal"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "this process cannot use CUDA" in refusal()


def test_watchdogs_are_switched_off_whatever_the_environment_says(machine):
    package = machine((2, 29, 7))

    assert nccl_library.library_of(torch.device("cuda:0")) == (package, torch.device("cuda:0"))
    assert {name: os.environ[name] for name in FORCED} == FORCED
    assert set(FORCED.values()) == {"0"}
