"""Sums through shared memory: where there is too little of it, where not everybody may have it, where it is in parts."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs import MPIRUN, ROOT, clean_env

from holdfast.comm import MeanDivisor, SlotSpan
from holdfast.comm.allreduce import adding
from holdfast.comm.allreduce import hierarchical as hosts
from holdfast.comm.allreduce.hierarchical import HierarchicalReduce, pieces
from holdfast.comm.allreduce.shm import HostMemory
from holdfast.errors import PeerFailed, ScriptError

WORKER = Path(__file__).with_name("memory_worker.py")
SLOT_BYTES = 200_064
"""What that worker needs for a slice: the result needs a little more."""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="root makes a worker that may do less, or is on another host")

# -- which slices may be added together before anybody else's


def added(terms, order="tree"):
    out = torch.empty(3)
    adding.ORDERS[order](sorted(terms.items()), out)
    return out


def some_terms(numbers):
    return {n: torch.randn(3, generator=torch.Generator().manual_seed(n)) * 10.0 ** (n % 7) for n in numbers}


holders_of_slices = st.dictionaries(st.integers(0, 40), st.integers(0, 3), min_size=1)


@given(holders_of_slices, st.randoms())
def test_a_group_may_be_added_first_and_stands_where_any_of_its_slices_does(holders, chance):
    terms = some_terms(holders)

    groups = adding.groups(holders)

    assert sorted(n for group in groups for n in group) == sorted(holders)
    assert all(len({holders[n] for n in group}) == 1 for group in groups)
    sums = {chance.choice(group): added({n: terms[n] for n in group}) for group in groups}
    assert torch.equal(added(sums), added(terms))


@given(holders_of_slices)
def test_groups_are_as_large_as_can_be(holders):
    groups = adding.groups(holders)

    for a, b in pairwise(groups):
        if holders[a[0]] == holders[b[0]]:
            height = max((a[0] ^ n).bit_length() for n in (*a, *b))
            together = [n for n in holders if n >> height == a[0] >> height]
            assert {holders[n] for n in together} != {holders[a[0]]}, f"{a} and {b} are one subtree: {holders}"


@pytest.mark.parametrize(
    ("holders", "groups"),
    [
        ({}, []),
        ({0: 0, 1: 0, 2: 1, 3: 1}, [(0, 1), (2, 3)]),
        ({0: 0, 1: 0, 2: 0, 3: 1, 4: 1}, [(0, 1), (2,), (3,), (4,)]),
        ({1: 0, 3: 0, 6: 1}, [(1, 3), (6,)]),
        ({0: 0, 2: 1, 3: 0}, [(0,), (2,), (3,)]),
    ],
)
def test_slices_that_do_not_take_part_leave_no_gap(holders, groups):
    assert adding.groups(holders) == groups


# -- who adds which part of the vector


workers_of_hosts = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@settings(max_examples=500, deadline=None)
@given(workers_of_hosts, st.integers(0, 200), st.sampled_from([8, 16]))
@example([1, 2], 8, 8).via("the cut at the end is none")
def test_pieces_cover_the_vector_once_and_each_is_in_one_share_of_every_host(sizes, length, line):
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]

    cut = list(pieces(of_process, length, line))

    assert [n for piece in cut for n in range(piece.part.start, piece.part.stop)] == list(range(length))
    assert all(piece.part.start % line == 0 for piece in cut)
    for piece in cut:
        assert [of_process[worker] for worker in piece.workers] == list(range(len(sizes)))
    for process in range(len(of_process)):
        mine = [piece.part for piece in cut if process in piece.workers]
        assert all(a.stop == b.start for a, b in pairwise(mine)), "a share is in one piece"


# -- the sum between hosts, whose workers are threads here


class Fabric:
    """What threads exchange through."""

    def __init__(self, count):
        self.count = count
        self.barrier = threading.Barrier(count, timeout=10)
        self.rows = [None] * count
        self.lines = {(a, b): queue.SimpleQueue() for a in range(count) for b in range(count)}
        self.sent = []


class Thread:
    """One worker's end of a fabric; an :class:`~holdfast.comm.base.Collectives`."""

    generation = 3

    def __init__(self, fabric, me):
        self.fabric, self.me = fabric, me
        self.local_ranks, self.members = (me,), tuple(range(fabric.count))
        self.processes = tuple((rank,) for rank in self.members)

    def allgather(self, part, out):
        self.fabric.rows[self.me] = part.clone()
        self.fabric.barrier.wait()
        out.copy_(torch.stack(self.fabric.rows))
        self.fabric.barrier.wait()

    def sendrecv(self, send, receive):
        for to, data in send:
            self.fabric.sent.append((self.me, to, data.numel() * data.element_size()))
            self.fabric.lines[self.me, to].put(data.clone())
        for place, out in receive:
            data = self.fabric.lines[place, self.me].get(timeout=10)
            assert data.shape == out.shape
            out.copy_(data)


def sums_of_threads(fabric, of_process, terms, slots, length, mean=None, comm=Thread, times=1):
    """Return each process's sum, or what it raised; the numbers of all results start as NaN."""
    span = SlotSpan(64, length, torch.float32)
    room = torch.full((span.end,), 255, dtype=torch.uint8)
    memory = []
    for held in slots:
        memory.append([room.clone() for _ in held])
        for n, of_slot in zip(held, memory[-1], strict=True):
            span.of(of_slot).copy_(terms[n])
    results = [room.clone() for _ in set(of_process)]
    answers = [None] * fabric.count

    def work(me):
        mine = of_process[me]
        reach = [m if of_process[p] == mine else [] for p, m in enumerate(memory)]
        try:
            of_host = HostMemory(reach, results[mine], results[mine], incarnations=range(fabric.count))
            add = HierarchicalReduce(comm(fabric, me), of_process, of_host)
            for _ in range(times):
                answers[me] = add(span, slots, "tree", mean, lambda: None).clone()
        except Exception as error:
            answers[me] = error

    threads = [threading.Thread(target=work, args=(me,)) for me in range(fabric.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@settings(max_examples=40, deadline=None)
@given(
    workers_of_hosts,
    st.dictionaries(st.integers(0, 20), st.integers(0, 99)),
    st.integers(0, 300),
    st.integers(0, 300),
    st.randoms(use_true_random=False),
)
def test_the_sum_between_hosts_has_the_bits_of_the_tree_over_all_slices(sizes, owners, length, divided, chance):
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]
    chance.shuffle(of_process)  # processes of one host need not be neighbours
    numbers = {host: i for i, host in enumerate(dict.fromkeys(of_process))}
    of_process = [numbers[host] for host in of_process]
    slots = [sorted(n for n, at in owners.items() if at % len(of_process) == p) for p in range(len(of_process))]
    terms = {n: torch.randn(length, generator=torch.Generator().manual_seed(n)) * 10.0 ** (n % 5) for n in owners}
    expected = torch.empty(length)
    adding.tree(sorted(terms.items()), expected)
    expected[:divided] /= 3

    fabric = Fabric(len(of_process))
    answers = sums_of_threads(fabric, of_process, terms, slots, length, MeanDivisor(3, divided), times=2)

    for answer in answers:
        assert torch.equal(answer, expected)
        assert torch.equal(answer.signbit(), expected.signbit())
    assert all(of_process[a] != of_process[b] for a, b, _ in fabric.sent), "inside a host nobody sends"


@pytest.mark.parametrize("sizes", [(2, 2), (4, 4), (3, 1), (2, 3, 4)])
def test_each_chunk_crosses_once_however_many_workers_a_host_has(sizes):
    of_process = [host for host, size in enumerate(sizes) for _ in range(size)]
    terms, length = some_terms(range(8)), 1200
    terms = {n: term.repeat(length // 3) for n, term in terms.items()}
    firsts = list(accumulate(sizes, initial=0))[:-1]
    slots = [[] for _ in of_process]
    for n in terms:  # contiguous and aligned: the first host half of them, the others what is left
        slots[firsts[0 if n < 4 else 1 if n < 6 or len(sizes) == 2 else 2]].append(n)

    fabric = Fabric(len(of_process))
    sums_of_threads(fabric, of_process, terms, slots, length)

    each_way = (len(sizes) - 1) * 4 * length  # a vector's sums to who finishes them, and its results to all hosts
    assert sum(size for *_, size in fabric.sent) == 2 * each_way


def test_adding_slices_together_that_are_no_subtree_is_found_out(monkeypatch):
    """The negative control: a host adds everything that it holds."""
    holders = {n: n // 3 for n in range(6)}
    terms, slots = some_terms(holders), [[0, 1, 2], [3, 4, 5]]
    monkeypatch.setattr(hosts, "groups", lambda _: [(0, 1, 2), (3, 4, 5)])

    answers = sums_of_threads(Fabric(2), [0, 1], terms, slots, 3)

    assert not torch.equal(answers[0], added(terms))


@pytest.mark.parametrize("column", [0, 1, 2], ids=["another-process", "another-generation", "an-earlier-phase"])
@pytest.mark.parametrize("call", [1, 2], ids=["A", "B"])
def test_a_worker_that_was_not_heard_from_fails_the_sum(column, call):
    class Deaf(Thread):
        """The collective says that it completed, and the last row is an old one."""

        calls = 0

        def allgather(self, part, out):
            super().allgather(part, out)
            self.calls += 1
            if self.calls == call:
                out[-1, column] -= 1

    answers = sums_of_threads(Fabric(2), [0, 1], some_terms([0, 1]), [[0], [1]], 3, comm=Deaf)

    assert [type(answer) for answer in answers] == [PeerFailed, PeerFailed]


def test_vectors_of_different_lengths_are_refused_by_all():
    class Longer(Thread):
        def allgather(self, part, out):
            super().allgather(part, out)
            out[1, 3] = 4

    answers = sums_of_threads(Fabric(2), [0, 1], some_terms([0, 1]), [[0], [1]], 3, comm=Longer)

    assert [type(answer) for answer in answers] == [ScriptError, ScriptError]
    assert "different lengths, in rank order [3, 4]" in str(answers[0])


# -- real workers


def start(workers, *command, **env):
    return subprocess.Popen(
        [*MPIRUN, "-n", str(workers), sys.executable, "-m", "holdfast.launch.worker", *map(str, command)],
        env=clean_env(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sums(*command, workers=4):
    """What each worker says of its sums, in order of ranks: order, way, digest, warning."""
    with start(workers, WORKER, *command) as job:
        try:
            out, err = job.communicate(timeout=80)
        finally:
            job.kill()
    said = sorted(line.split()[1:] for line in out.splitlines() if line.startswith("says"))
    assert len(said) == 2 * workers, out + err
    return said


@pytest.fixture(scope="module")
def undisturbed():
    """The digest of each order's sum, where nothing is in the way."""
    said = sums("plain")
    assert {line[2] for line in said} == {"SharedMemoryReduce"}
    assert {line[4] for line in said} == {"silently"}
    digests = {order: {line[3] for line in said if line[1] == order} for order in ("fold", "tree")}
    assert [len(found) for found in digests.values()] == [1, 1]
    assert digests["fold"] != digests["tree"]
    return {order: found.pop() for order, found in digests.items()}


@pytest.mark.chaos
@pytest.mark.parametrize(
    "command",
    [
        ("limited", 0),
        ("limited", 2),
        ("limited", 0, SLOT_BYTES),
        ("bounded", 100_000),
        pytest.param(("barred", 3), marks=needs_root),
    ],
    ids=[
        "no-memory-at-the-lowest",
        "no-memory-at-one",
        "none-for-the-result",
        "too-small-a-share-for-all",
        "one-may-not-open",
    ],
)
def test_where_one_lacks_the_memory_all_send_messages_and_the_lowest_says_so(command, undisturbed):
    said = sums(*command)

    assert {line[2] for line in said} == {"AllToAllReduce"}
    assert {(line[1], line[3]) for line in said} == set(undisturbed.items())
    assert {line[4] for line in said if line[0] == "0"} == {"not_every_worker_has_the_memory"}
    assert {line[4] for line in said if line[0] != "0"} == {"silently"}


@pytest.mark.chaos
def test_no_shared_memory_wanted_is_nothing_to_warn_of(undisturbed):
    said = sums("bounded", 0)

    assert {line[2] for line in said} == {"AllToAllReduce"}
    assert {(line[1], line[3]) for line in said} == set(undisturbed.items())
    assert {line[4] for line in said} == {"silently"}


@pytest.mark.chaos
@needs_root
@pytest.mark.parametrize("ranks", [(1,), (2, 3)], ids=["one-of-them", "half-of-them"])
def test_workers_of_several_hosts_all_go_the_same_way_and_nobody_warns(ranks, undisturbed):
    said = sums("elsewhere", *ranks)

    assert {(line[1], line[2]) for line in said} == {("fold", "AllToAllReduce"), ("tree", "HierarchicalReduce")}
    assert {(line[1], line[3]) for line in said} == set(undisturbed.items())
    assert {line[4] for line in said} == {"silently"}


@pytest.mark.chaos
@needs_root
@pytest.mark.parametrize("limit", [(3,), (2, SLOT_BYTES)], ids=["no-memory-at-one", "none-for-the-result-of-a-host"])
def test_between_hosts_too_all_share_memory_or_nobody_does(limit, undisturbed):
    said = sums("elsewhere", 2, 3, "limited", *limit)

    assert {line[2] for line in said} == {"AllToAllReduce"}
    assert {(line[1], line[3]) for line in said} == set(undisturbed.items())
    warned = [(line[0], line[1]) for line in said if line[4] == "not_every_worker_has_the_memory"]
    assert warned == [("0", "tree")], "in the order fold, hosts send messages anyway"
    assert [line[4] for line in said].count("silently") == len(said) - 1


@pytest.mark.chaos
@pytest.mark.parametrize("shared_bytes", ["0", "1000"])
def test_training_without_shared_memory_ends_with_the_same_bits(shared_bytes):
    script = ROOT / "tests" / "support" / "train_reference.py"

    with start(3, script, "cnn", "sgd", HOLDFAST_SHARED_BYTES=shared_bytes) as job:
        try:
            out, err = job.communicate(timeout=80)
        finally:
            job.kill()

    assert f"state {reference.train('cnn', 'sgd')}" in out, out + err
    assert err.count("all-reduce uses messages instead of shared memory") == int(shared_bytes != "0"), err


def memory_of(pids):
    """What these processes hold or map of ours: inodes of memory without a name, and files with one."""
    nameless, named = set(), set()
    for pid in pids:
        for link in Path("/proc", str(pid), "fd").iterdir():
            target = str(link.readlink())
            if "memfd:holdfast" in target:
                nameless.add(link.stat().st_ino)
            elif "holdfast" in Path(target).name and target.startswith("/dev/shm/"):
                named.add(target)
        for line in Path("/proc", str(pid), "maps").read_text().splitlines():
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and "memfd:holdfast" in path[0]:
                nameless.add(int(inode))
            elif path and path[0].startswith("/dev/shm/") and "holdfast" in Path(path[0]).name:
                named.add(path[0])
    return nameless, named


def holders_of(inodes):
    """Which processes of this machine still map or hold one of them."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            nameless, _ = memory_of([folder.name])
        except OSError:  # it ended meanwhile, or is not ours
            continue
        if nameless & inodes:
            found.add(int(folder.name))
    return found


@pytest.mark.chaos
def test_a_killed_job_leaves_no_memory_behind():
    job = start(3, WORKER, "waits")
    workers = []
    while len(workers) < 3:
        line = job.stdout.readline()
        assert line, job.stderr.read()
        if line.startswith("says") and len(line.split()) == 3:
            workers.append(int(line.split()[2]))

    inodes, files = memory_of(workers)
    assert len(inodes) == 2 * (5 + 1), "a slot for every slice, and the result, of two sums"
    assert files == set()
    assert set(workers) <= holders_of(inodes)
    for pid in (*workers, job.pid):
        os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=30)

    end = time.monotonic() + 20
    while holders_of(inodes) and time.monotonic() < end:
        time.sleep(0.05)
    assert holders_of(inodes) == set()
