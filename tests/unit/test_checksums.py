"""Sums with checksums: what changes on the way is found, by whoever adds it, whichever way it goes; else nothing is."""

import threading

import pytest
import reference
import torch
import torch.nn.functional as F
import train_flip
from threads import Threads, side_by_side
from torch.utils.data import TensorDataset
from train_split import stages
from written_plans import plan

import holdfast
from holdfast.comm import SUM, MeanDivisor, OrderedAllReduce, SlotSpan, VirtualCommunicator
from holdfast.comm.allreduce import checksums as checked
from holdfast.comm.allreduce import shm as shared
from holdfast.comm.allreduce.alltoall import AllToAllReduce
from holdfast.comm.allreduce.hierarchical import HierarchicalReduce
from holdfast.comm.allreduce.shm import SharedMemoryReduce
from holdfast.engine import exits
from holdfast.errors import MessageAltered
from holdfast.records.files import read_run
from holdfast.records.types import CorruptionFound, CorruptionHealed, Finished, Recovered, StepCommitted
from holdfast_lab.counting import CountingCommunicator

LENGTH = 4 * checked.TILE + 1003
PLAIN, CHECKED = SlotSpan(0, LENGTH, torch.float32), SlotSpan(0, LENGTH, torch.float32, checked=True)
OWNERS = {0: 0, 1: 1, 2: 2, 3: 2}
PATHS = {"shared": SharedMemoryReduce, "exchanged": AllToAllReduce, "hosts": HierarchicalReduce}
HOSTS = {"shared": (0, 0, 0), "exchanged": (0, 1, 2), "hosts": (0, 1, 1)}


def term(number, span):
    numbers = torch.randn(LENGTH, generator=torch.Generator().manual_seed(number)) * 10.0**number
    return numbers.to(span.dtype)


class Wire(Threads):
    """Threads that send messages, too; ``spoil`` may alter what one is about to receive."""

    def __init__(self, meeting, rank, ranks, generation=0):
        super().__init__(meeting, rank, ranks, generation)
        self.spoil = lambda name, rank, data: None
        self.calls = []

    def allgather(self, part, out):
        super().allgather(part, out)
        self.receives("allgather", out)

    def sendrecv(self, send, receive, tag=0):
        super().sendrecv(send, receive, tag)
        taken = [data for _, data in receive]
        is_barrier = len(taken) == 1 and taken[0].dtype == torch.int64
        self.receives("barrier" if is_barrier else "swap", taken)

    def receives(self, name, data):
        self.calls.append(name)
        self.spoil(name, self.local_ranks[0], data)


@pytest.fixture
def sums(monkeypatch):
    """Returns what sums on three workers: the result at each, what each found, and what each called."""
    host = threading.local()
    monkeypatch.setattr(shared, "host_id", lambda: host.id)

    def sums(path, span=CHECKED, before=lambda add, rank: None, spoil=lambda name, rank, data: None):
        def work(comm):
            rank, found = comm.local_ranks[0], []
            host.id = HOSTS[path][rank]
            add = OrderedAllReduce(comm, "tree" if path == "hosts" else "fold", span.end)
            mine = [n for n, owner in OWNERS.items() if owner == rank]
            for row, number in enumerate(mine):
                span.of(add.room(row)).copy_(term(number, span))
            add.seal(span, len(mine))
            add(span, OWNERS)
            comm.barrier()
            before(add, rank)
            comm.calls.clear()
            comm.spoil = spoil
            result = add(span, OWNERS, mean=MeanDivisor(3.0, 1000), altered=found.append)
            assert isinstance(add._taken, PATHS[path])
            calls = tuple(comm.calls)
            comm.barrier()
            return result.clone(), sorted(set(found)), calls

        done = side_by_side((0, 1, 2), work, kind=Wire)
        for worker in done.values():
            assert not isinstance(worker, Exception), worker
        results, found, calls = zip(*(done[rank] for rank in range(3)), strict=True)
        return results, found, calls

    return sums


def flip(numbers, index):
    numbers.view(torch.int32)[index] ^= 1 << 22


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_change_no_bit_of_the_sum_and_ring_no_alarm(sums, path, dtype):
    plain, _, _ = sums(path, SlotSpan(0, LENGTH, dtype))
    results, found, _ = sums(path, SlotSpan(0, LENGTH, dtype, checked=True))

    assert all(torch.equal(result, plain[0]) for result in results)
    assert found == ([], [], [])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("index", [0, 2 * checked.TILE + 7, LENGTH - 1])
def test_whatever_bit_of_a_term_changes_after_it_was_sealed_one_finds_it(sums, path, index):
    def alter(add, rank):
        if rank == 2:
            flip(CHECKED.of(add.room(1)), index)

    clean, _, _ = sums(path)
    results, found, _ = sums(path, before=alter)

    assert sorted(found) == [[], [], [3]], "slice 3, by the one who adds the tile"
    assert not torch.equal(results[0], clean[0]), "it was added all the same"


def test_what_changes_between_hosts_is_found_where_it_arrives(sums):
    """Beyond what was sealed by the owner of a slice: the sum of a group, made by its host."""

    def alter(name, rank, data):
        if name == "swap" and rank == 0 and any(part.dim() == 2 for part in data):
            flip(next(part for part in data if part.dim() == 2 and part.dtype == torch.float32)[0], 5)

    _, found, _ = sums("hosts", spoil=alter)

    assert [bool(numbers) for numbers in found] == [True, False, False]


@pytest.mark.parametrize("path", ["exchanged", "hosts"])
def test_a_result_that_changes_on_its_way_back_is_found_by_who_takes_it(sums, path):
    def alter(name, rank, data):
        swaps.append(name == "swap" and rank == 1)
        if swaps[-1] and sum(swaps) == 2:  # the first one brings terms
            flip(data[0], 9)

    swaps = []
    clean, _, _ = sums(path)
    results, found, _ = sums(path, spoil=alter)

    assert found == ([], [SUM], [])
    assert not torch.equal(results[1], clean[1])


def test_what_it_costs_in_messages(sums):
    """Between workers checksums are messages of the same exchange; nothing at all without them."""
    plain = {path: sums(path, PLAIN)[2][1] for path in PATHS}
    with_checksums = {path: sums(path)[2][1] for path in PATHS}

    assert plain == {
        "shared": (), "exchanged": ("swap", "swap"), "hosts": ("barrier", "swap", "swap", "barrier"),
    }  # fmt: skip
    assert with_checksums == plain


def test_one_process_that_plays_all_looks_too():
    add, found = OrderedAllReduce(VirtualCommunicator(2), "fold", CHECKED.end), []
    for number in (0, 1):
        CHECKED.of(add.room(number)).copy_(term(number, CHECKED))
    add.seal(CHECKED, 2)
    flip(CHECKED.of(add.room(1)), 3)

    add(CHECKED, {0: 0, 1: 1}, altered=found.append)

    assert found == [1]


# -- in training, with workers of one process

FLIP = "flip:rank={},step={},target=message,bucket={},count=1,bits=22"


def train(tmp_path, *specs, guard="heal", guard_sums=True, **settings):
    """The hash of the state that training ends with, and the records."""
    tmp_path.mkdir(exist_ok=True)
    arguments = {"fabric": "virtual", "workers": 3, "guard": guard, "guard_sums": guard_sums, "faults": plan(*specs)}
    _, state = train_flip.train(run_dir=str(tmp_path), epochs=2, **arguments, **settings)
    return state, read_run(tmp_path)


def of(kind, records):
    return [record for record in records if isinstance(record, kind)]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The hash of the undisturbed training, without checksums."""
    return train(tmp_path_factory.mktemp("quiet"), guard="off", guard_sums=False)[0]


@pytest.mark.parametrize("strategy", ["rollback", "forward"])
def test_an_altered_message_is_found_and_its_step_alone_is_done_again(tmp_path, quiet, strategy):
    infinite = "flip:rank=0,step=13,target=message,percent=100,scale=1e39"
    state, records = train(tmp_path, FLIP.format(1, 0, 0), FLIP.format(2, 9, 1), infinite, strategy=strategy)

    found, healed = of(CorruptionFound, records), of(CorruptionHealed, records)
    assert state == quiet
    assert [(r.step, r.what, r.ranks, r.policy) for r in found] == [
        (0, "message", (1,), "heal"),
        (9, "message", (2,), "heal"),
        (13, "message", (0,), "heal"),
    ]
    assert [r.where[0].split(" of ")[0] for r in found] == ["bucket 0", "bucket 1", "bucket 0"]
    assert [(r.found_at, r.went_back_to, r.source) for r in healed] == [(n, n, "step") for n in (0, 9, 13)]
    assert {(r.step, r.decision, r.redone_steps) for r in of(Recovered, records)} == {
        (n, "heal", 1) for n in (0, 9, 13)
    }


def test_without_checksums_nobody_sees_it_and_all_replicas_are_wrong_alike(tmp_path, quiet):
    """The negative control."""
    state, records = train(tmp_path, FLIP.format(1, 0, 0), guard_sums=False)

    assert state != quiet
    assert of(CorruptionFound, records) == []


def test_a_warning_names_the_worker_and_training_goes_on(tmp_path, quiet):
    state, records = train(tmp_path, FLIP.format(1, 3, 1), guard="warn")

    (found,) = of(CorruptionFound, records)
    assert (found.step, found.what, found.ranks) == (3, "message", (1,))
    assert state != quiet
    assert len({r.state_sha256 for r in of(Finished, records)}) == 1


def test_with_the_default_policy_training_stops_before_the_step_is_applied(tmp_path):
    with pytest.raises(MessageAltered, match="altered on its way in step 3"):
        train(tmp_path, FLIP.format(1, 3, 1), guard="stop")

    assert of(CorruptionFound, read_run(tmp_path))[0].ranks == (1,)
    assert [r.step for r in of(StepCommitted, read_run(tmp_path))][-1:] in ([2], [3])


def test_a_message_that_is_altered_whenever_it_is_sent_is_no_soft_error(tmp_path, monkeypatch):
    seal = OrderedAllReduce.seal

    def seal_and_alter(add, span, rows):
        seal(add, span, rows)
        flip(span.of(add.shared_room(0)), 0)

    monkeypatch.setattr(OrderedAllReduce, "seal", seal_and_alter)

    with pytest.raises(MessageAltered, match="altered in step 0 in each of 4 attempts"):
        train(tmp_path)


def test_a_run_without_faults_keeps_its_bits_and_rings_no_alarm(tmp_path, quiet):
    state, records = train(tmp_path)

    assert state == quiet
    assert of(CorruptionFound, records) == of(Recovered, records) == []


@pytest.mark.parametrize(
    ("target", "rank", "where"),
    [("message", 3, "bucket 0 of stage 3"), ("handover", 1, "the message from stage 1 to stage 2")],
)
def test_what_stages_of_a_pipeline_give_each_other_is_looked_at(tmp_path, target, rank, where):
    model = holdfast.Pipeline(stages(), F.cross_entropy)
    faults = plan(f"flip:rank={rank},step=1,target={target},scale=3")
    settings = {"workers": 4, "run_dir": str(tmp_path), "faults": faults, "guard": "warn", "guard_sums": True}
    session = holdfast.Session(model, lambda p: torch.optim.SGD(p, lr=0.01), **settings)
    x, y = reference.data()
    for step in session.steps(TensorDataset(x[:16], y[:16]), 8):
        step.compute()

    (found,) = of(CorruptionFound, read_run(tmp_path))
    assert (found.step, found.what, found.ranks) == (1, "message", (rank,))
    assert found.where[0].startswith(where)


def test_messages_of_training_are_as_many_as_without(monkeypatch):
    """On one host all lies in memory; and the closing sum has one number more."""
    monkeypatch.setattr(exits, "end_job_on_errors", lambda check: None)  # the job is this process

    def sent(**settings):
        comm, model = CountingCommunicator(VirtualCommunicator(4)), torch.nn.Linear(3, 2)
        session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), workers=4, comm=comm, **settings)
        x = torch.ones(8, 3)
        for step in session.steps(TensorDataset(x, x[:, 0].long()), 4):
            for inputs, targets in step:
                step.backward(F.cross_entropy(model(inputs), targets))
        return comm.calls, comm.sent_bytes["maximum"]

    (calls, size_bytes), (calls_checked, size_bytes_checked) = sent(), sent(guard_sums=True)

    assert calls_checked == calls
    assert 0 < size_bytes < size_bytes_checked
