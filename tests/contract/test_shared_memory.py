"""Sums through shared memory: where there is too little of it, where not everybody may have it, where it is in parts."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import MPIRUN, ROOT, clean_env, holdfast

from holdfast.comm.allreduce import adding

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


# -- real workers


def start(workers, *command, **env):
    return subprocess.Popen(
        [*MPIRUN, "-n", str(workers), sys.executable, "-m", "holdfast.launch.supervise.worker", *map(str, command)],
        env=clean_env(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SCENES = {
    "plain": "nothing is in the way",
    "bounded:0": "no shared memory is wanted",
    "limited:0": "no memory at the lowest",
    f"limited:0:{SLOT_BYTES}": "none for the result",
    "bounded:100000": "too small a share for all",
    "barred:3": "one may not open the memory of others",
    "elsewhere:1": "one is on another host",
    "elsewhere:2:3": "half of them are",
    "elsewhere:2:3:limited:3": "half of them are, and there is no memory at one",
    f"elsewhere:2:3:limited:2:{SLOT_BYTES}": "half of them are, and there is none for the result of a host",
}


@pytest.fixture(scope="module")
def sums():
    """What each of four workers says of its sums in each scene, one after the other in one job: rank, order, way, digest, warning."""
    scenes = [scene for scene in SCENES if os.getuid() == 0 or not scene.startswith(("barred", "elsewhere"))]
    done = holdfast("run", "-n", 4, "--fabric", "ulfm", "--max-restarts", 0, WORKER, *scenes)
    said = {scene: [] for scene in scenes}
    for line in done.stdout.splitlines():
        if words := line.partition("says ")[2].split():
            said[words[0]].append(words[1:])
    assert [len(lines) for lines in said.values()] == [8] * len(scenes), done.stdout + done.stderr
    return said


@pytest.fixture
def digests(sums):
    """The digest of each order's sum, where nothing is in the way."""
    assert {line[2] for line in sums["plain"]} == {"SharedMemoryReduce"}
    assert {line[4] for line in sums["plain"]} == {"silently"}
    digests = {(line[1], line[3]) for line in sums["plain"]}
    assert len(digests) == len({digest for _, digest in digests}) == 2
    return digests


@pytest.mark.chaos
@pytest.mark.parametrize(
    "scene",
    [
        "limited:0",
        f"limited:0:{SLOT_BYTES}",
        "bounded:100000",
        pytest.param("barred:3", marks=needs_root),
        pytest.param("elsewhere:2:3:limited:3", marks=needs_root),
        pytest.param(f"elsewhere:2:3:limited:2:{SLOT_BYTES}", marks=needs_root),
    ],
    ids=SCENES.get,
)
def test_where_one_lacks_the_memory_all_send_messages_and_the_lowest_says_so(scene, sums, digests):
    said = sums[scene]

    assert {line[2] for line in said} == {"AllToAllReduce"}
    assert {(line[1], line[3]) for line in said} == digests
    assert {line[4] for line in said if line[0] == "0"} == {"not_every_worker_has_the_memory"}
    assert {line[4] for line in said if line[0] != "0"} == {"silently"}


@pytest.mark.chaos
def test_no_shared_memory_wanted_is_nothing_to_warn_of(sums, digests):
    said = sums["bounded:0"]

    assert {line[2] for line in said} == {"AllToAllReduce"}
    assert {(line[1], line[3]) for line in said} == digests
    assert {line[4] for line in said} == {"silently"}


@pytest.mark.chaos
@needs_root
@pytest.mark.parametrize("scene", ["elsewhere:1", "elsewhere:2:3"], ids=SCENES.get)
def test_workers_of_several_hosts_all_go_the_same_way_and_nobody_warns(scene, sums, digests):
    said = sums[scene]

    fold = "ChainReduce" if scene == "elsewhere:2:3" else "AllToAllReduce"  # a chain is for hosts of several workers
    assert {(line[1], line[2]) for line in said} == {("fold", fold), ("tree", "HierarchicalReduce")}
    assert {(line[1], line[3]) for line in said} == digests
    assert {line[4] for line in said} == {"silently"}


@pytest.mark.chaos
@pytest.mark.soak
def test_training_without_shared_memory_ends_with_the_same_bits():
    script = ROOT / "tests" / "support" / "train_reference.py"

    with start(3, script, "cnn", "sgd", HOLDFAST_SHARED_BYTES="1000") as job:
        try:
            out, err = job.communicate(timeout=80)
        finally:
            job.kill()

    assert f"state {reference.train('cnn', 'sgd')}" in out, out + err
    assert err.count("all-reduce uses messages instead of shared memory") == 1, err


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
