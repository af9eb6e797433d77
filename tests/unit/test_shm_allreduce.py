"""The rules of the sum through shared memory: each holds, and without it there is the accident that it prevents."""

import faulthandler
import functools
import gc
import os
import signal
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from threads import PATIENCE_S, Threads, side_by_side
from torch import nn
from train_reference import train

from holdfast.comm import MeanDivisor, OrderedAllReduce, SlotSpan
from holdfast.comm.allreduce import adding, ordered
from holdfast.comm.allreduce import shm as shared
from holdfast.comm.allreduce.path import ReduceCall
from holdfast.comm.allreduce.shm import HostMemory, SharedMemoryReduce
from holdfast.comm.memory import SharedSegment, open_segment
from holdfast.data.plan import MiniBatch, PlanCursor
from holdfast.errors import PeerFailed
from holdfast.models import part as parts
from holdfast.models.gradients import BucketLayout
from holdfast.models.replicated import ReplicatedModel
from holdfast.models.step_gradients import StepGradients

SPAN = SlotSpan(0, 1000, torch.float32)


def term(number, length=SPAN.length):
    return torch.randn(length, generator=torch.Generator().manual_seed(number)) * 10.0**number


def summed(numbers, length=SPAN.length):
    total = term(numbers[0], length)
    for number in numbers[1:]:
        total += term(number, length)
    return total


def in_child(work):
    """How a forked child ended that did ``work``, as a shell says it: 0, or minus the number of a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            faulthandler.disable()
            signal.alarm(PATIENCE_S)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- 1: one writer


def shared_pair(data):
    """Memory that holds ``data``: to be written by its owner, and as others see it."""
    segment = SharedSegment(data.numel() * data.element_size())
    segment.bytes.view(data.dtype).copy_(data)
    return segment, open_segment(os.getpid(), segment.fd, segment.bytes.numel()).view(data.dtype)


def test_who_writes_what_others_read_dies_alone():
    owner, seen = shared_pair(term(0))

    def write():
        seen[7] = 1.0

    assert in_child(write) == -signal.SIGSEGV
    assert torch.equal(owner.bytes.view(torch.float32), term(0))
    assert torch.equal(seen, term(0))


def test_memory_that_anybody_may_write_is_changed_under_everybody():
    owner, _ = shared_pair(term(0))
    writable = open_segment(os.getpid(), owner.fd, owner.bytes.numel(), writable=True).view(torch.float32)

    def write():
        writable[7] = 1.0

    assert in_child(write) == 0
    assert owner.bytes.view(torch.float32)[7] == 1.0


class Halving(torch.optim.SGD):
    """An optimizer that nobody knows: it writes the gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


def with_hook(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def turn_around(*_):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.neg_()

    optimizer.register_step_pre_hook(turn_around)
    return optimizer


WRITERS = {
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True), {}),
    "unknown": (lambda p: Halving(p, lr=0.1), {}),
    "hook": (with_hook, {}),
    "clipping": (lambda p: torch.optim.SGD(p, lr=0.1), {"clip_grad_norm": 0.01}),
    "scaler": (
        lambda p: torch.optim.Adam(p, lr=0.1),
        {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0)},
    ),
}
READERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True), {}),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1), {}),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True), {}),
}


def make_replica(make_optimizer, options):
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    scaler = options.get("scaler")
    return ReplicatedModel(
        model,
        make_optimizer(model.parameters()),
        scheduler=None,
        schedule="step",
        scaler=scaler() if scaler else None,
        clip_grad_norm=options.get("clip_grad_norm"),
        lay_out=functools.partial(BucketLayout, bucket_bytes=1 << 20),
    )


BATCH = MiniBatch(step=0, epoch=0, slices=((0, 1),), owners={0: 0}, full_size=2, after=PlanCursor(epoch=0, offset=2))


def compute(replica, memory):
    """Fill ``memory`` with the term of the only slice, which is its own sum."""
    source = torch.Generator().manual_seed(1)
    replica.begin()
    replica.gradients.begin_slice(0, lambda row: memory, is_first=True)
    loss = replica.model(torch.randn(2, 6, generator=source)).square().mean()
    replica.backward(loss, 2, None)
    replica.gradients.end_slice(0, {"loss": loss.detach()}, 2)


def apply(replica, result):
    replica.add_sum(replica.buckets.layouts[0].span.of(result), [0])
    replica.apply(BATCH, ["loss"])


def weights(replica):
    return torch.cat([p.detach().flatten() for p in replica.model.parameters()])


def applied_alone(make_optimizer, options):
    """The weights after a step whose sum lies in private memory."""
    replica = make_replica(make_optimizer, options)
    memory = torch.zeros(replica.buckets.size_bytes, dtype=torch.uint8)
    compute(replica, memory)
    apply(replica, memory.clone())
    return weights(replica)


def applied_to_shared_memory(make_optimizer, options):
    """How a step ends whose sum lies where others read it, with the weights, and whether the sum is unchanged."""
    replica = make_replica(make_optimizer, options)
    memory = torch.zeros(replica.buckets.size_bytes, dtype=torch.uint8)
    compute(replica, memory)
    _, seen = shared_pair(memory)
    told, _ = SharedSegment(4096), None

    def step():
        apply(replica, seen)
        data = weights(replica)
        told.bytes[: data.numel() * 4].view(torch.float32).copy_(data)

    ended = in_child(step)
    data = told.bytes[: weights(replica).numel() * 4].view(torch.float32)
    return ended, data.clone(), torch.equal(seen, memory)


@pytest.mark.parametrize("name", [*WRITERS, *READERS])
def test_optimizers_leave_the_sum_alone_and_get_the_same_bits(name):
    make_optimizer, options = (WRITERS | READERS)[name]

    ended, given, is_unchanged = applied_to_shared_memory(make_optimizer, options)

    assert ended == 0
    assert torch.equal(given, applied_alone(make_optimizer, options))
    assert is_unchanged


@pytest.mark.parametrize("name", ["nesterov", "unknown", "hook"])
def test_an_optimizer_that_writes_needs_a_copy_of_its_own(name, monkeypatch):
    monkeypatch.setattr(parts, "may_write_gradients", lambda optimizer: False)

    ended, _, is_unchanged = applied_to_shared_memory(*WRITERS[name])

    assert ended == -signal.SIGSEGV
    assert is_unchanged


@pytest.mark.parametrize("name", READERS)
def test_an_optimizer_that_only_reads_gets_no_copy(name):
    replica = make_replica(*READERS[name])
    memory = torch.zeros(replica.buckets.size_bytes, dtype=torch.uint8)
    compute(replica, memory)

    apply(replica, memory)

    assert replica.buckets.copied == []


# -- 2: frozen input


def test_who_writes_its_term_during_the_sum_spoils_it():
    def work(comm, disturb):
        add = OrderedAllReduce(comm, "fold", SPAN.end)
        mine = SPAN.of(add.room(0))
        mine.copy_(term(comm.local_ranks[0]))

        def midway():
            if disturb and comm.local_ranks == (1,):
                mine.zero_()
            comm.barrier()

        return add(SPAN, {0: 0, 1: 1}, midway=midway).clone()

    for disturb in (False, True):
        results = side_by_side((0, 1), lambda comm, disturb=disturb: work(comm, disturb))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], summed([0, 1])) is not disturb


# -- 3 and 4: a gradient is detached from the result


def test_after_a_step_no_parameter_keeps_a_gradient():
    replica = make_replica(*READERS["sgd"])
    memory = torch.zeros(replica.buckets.size_bytes, dtype=torch.uint8)
    compute(replica, memory)
    apply(replica, memory)

    assert all(p.grad is None for p in replica.model.parameters())


def test_a_gradient_from_elsewhere_is_not_added_to(monkeypatch):
    begin_slice = StepGradients.begin_slice

    def leave_one(self, number, room, **first):
        for parameter in self._buckets.parameters:
            parameter.grad = torch.full_like(parameter, 1e3)
        begin_slice(self, number, room, **first)

    monkeypatch.setattr(StepGradients, "begin_slice", leave_one)

    assert train("mlp", "sgd", workers=4)[1] == reference.train("mlp", "sgd")


def test_a_stale_gradient_would_be_added_to(monkeypatch):
    monkeypatch.setattr(BucketLayout, "clear", lambda self: None)

    assert train("mlp", "sgd", workers=4)[1] != reference.train("mlp", "sgd")


def test_a_backward_pass_into_a_view_of_the_result_would_end_the_worker():
    model = nn.Linear(6, 5, bias=False)
    _, seen = shared_pair(torch.zeros(30))

    def accumulate():
        model.weight.grad = seen.view(5, 6)
        model(torch.ones(2, 6)).sum().backward()

    assert in_child(accumulate) == -signal.SIGSEGV


# -- 5: no zeros as terms


def sum_of_negative_zeros():
    def work(comm):
        add = OrderedAllReduce(comm, "fold", SPAN.end)
        SPAN.of(add.room(0)).fill_(-0.0)
        return add(SPAN, {0: 0, 1: 1}).clone()

    return side_by_side((0, 1), work)


def test_negative_zeros_stay_negative():
    for result in sum_of_negative_zeros().values():
        assert torch.signbit(result).all()


def test_added_to_zeros_they_would_lose_their_sign(monkeypatch):
    def from_zero(terms, out):
        out.zero_()
        for _, one in terms:
            out.add_(one)

    monkeypatch.setitem(adding.ORDERS, "fold", from_zero)

    for result in sum_of_negative_zeros().values():
        assert not torch.signbit(result).any()


def test_who_has_no_slice_gives_no_term():
    def work(comm):
        add = OrderedAllReduce(comm, "fold", SPAN.end)
        if comm.local_ranks != (1,):
            SPAN.of(add.room(0)).fill_(-0.0)
        return add(SPAN, {0: 0, 1: 2}).clone()

    for result in side_by_side((0, 1, 2), work).values():
        assert torch.signbit(result).all()


# -- 6: the barrier is not trusted


class Liar:
    """The communicator of one of two processes; its barriers return at once."""

    members, local_ranks, processes, generation, num_processes = (0, 1), (0,), ((0,), (1,)), 3, 2

    def barrier(self):
        pass

    def check_failures(self):
        raise PeerFailed("a worker has died, so not every worker has reached phase 1 or 2")


def sum_with_a_liar(other_is_at):
    """The sum of process 0, while the line of process 1 says how far it is."""
    words = np.zeros((2, 8), dtype=np.int64)
    words[:, :2] = [[11, 3], [22, 3]]
    words[1, 2:5] = (other_is_at, SPAN.length, shared._memory_kind(SPAN.dtype, "fold"))
    memory = torch.zeros(SPAN.end, dtype=torch.uint8)
    terms = [[term(0).view(torch.uint8)], [torch.zeros(4 * SPAN.length, dtype=torch.uint8)]]
    return SharedMemoryReduce(Liar(), HostMemory(terms, memory, memory, words, (11, 22))), words


def sum_once(add):
    return add(SPAN, ((0,), (1,)), ReduceCall("fold"))


@pytest.mark.parametrize("other_is_at", [0, 1])
def test_a_barrier_that_lies_is_not_believed(other_is_at):
    add, words = sum_with_a_liar(other_is_at)

    with pytest.raises(PeerFailed, match="not every worker"):
        sum_once(add)

    assert words[0, 2] == other_is_at + 1, "it came as far as the other one, and one further"


@pytest.mark.parametrize("column", [0, 1], ids=["another process", "another generation"])
def test_words_of_somebody_else_are_found_out(column):
    add, words = sum_with_a_liar(other_is_at=2)
    words[1, column] += 1

    with pytest.raises(PeerFailed, match=r"not every worker .* phase 1"):
        sum_once(add)


def test_unchecked_the_liar_gives_a_wrong_sum(monkeypatch):
    monkeypatch.setattr(SharedMemoryReduce, "_barrier", lambda self: self._comm.barrier())
    add, _ = sum_with_a_liar(other_is_at=0)

    assert not torch.equal(sum_once(add), summed([0, 1])), "the second term was not there yet"


# -- 7: new generation, fresh memory


def test_a_generation_gets_memory_of_its_own():
    """Whoever writes into the memory of the generation before harms nobody."""
    adders = {}

    def first(comm):
        add = adders[comm.local_ranks[0]] = OrderedAllReduce(comm, "fold", SPAN.end)
        SPAN.of(add.room(0)).copy_(term(comm.local_ranks[0]))
        add(SPAN, {0: 0, 1: 1, 2: 2})
        return add._path._memory.result

    def second(comm):
        add = adders[comm.local_ranks[0]]
        add._comm = comm
        result = add(SPAN, {0: 0, 1: 1})
        comm.barrier()
        if comm.local_ranks == (0,):
            late.fill_(255)
        comm.barrier()
        return result.clone()

    late = side_by_side((0, 1, 2), first)[2]
    for result in side_by_side((0, 1), second, generation=1).values():
        assert torch.equal(result, summed([0, 1]))
    assert (late == 255).all()


# -- 8: nothing left behind, too little memory is an error at the start


def test_shared_memory_has_no_name_that_could_be_left_behind():
    segment = SharedSegment(1 << 16)
    start = segment.bytes.data_ptr()

    (mine,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(f"{start:x}-")]

    assert mine.endswith("/memfd:holdfast (deleted)")
    assert "rw-s" in mine


def test_it_lasts_as_long_as_anybody_maps_it_and_no_longer():
    segment = SharedSegment(1 << 16)
    segment.bytes.fill_(7)
    pid, fd = os.getpid(), segment.fd
    seen = open_segment(pid, fd, 1 << 16)

    del segment

    assert (seen == 7).all()
    with pytest.raises(OSError, match=str(fd)):
        open_segment(pid, fd, 1 << 16)


def open_files():
    return sum("memfd:holdfast" in os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())


def test_segments_are_closed_when_nobody_needs_them():
    gc.collect()
    before = open_files()
    segment = SharedSegment(4096)
    assert open_files() > before

    del segment

    assert open_files() == before


def add_where_one_has_too_little(monkeypatch, shared_bytes):
    def work(comm):
        add = OrderedAllReduce(comm, "fold", SPAN.end, shared_bytes=shared_bytes if comm.local_ranks == (1,) else -1)
        SPAN.of(add.room(0)).copy_(term(comm.local_ranks[0]))
        return add, add(SPAN, {0: 0, 1: 1}).clone()

    monkeypatch.setattr(Threads, "alltoall", alltoall, raising=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = side_by_side((0, 1), work)
    return results, [str(w.message) for w in said]


def alltoall(self, send, out):
    self.meeting.desk[self.local_ranks[0], "rows"] = send.clone()
    self.meeting.wall.wait(PATIENCE_S)
    for row, rank in zip(out, self.members, strict=True):
        row.copy_(self.meeting.desk[rank, "rows"][self.members.index(self.local_ranks[0])])
    self.meeting.wall.wait(PATIENCE_S)


def test_too_little_memory_is_an_error_when_it_is_reserved(monkeypatch):
    def full(fd, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_files()

    with pytest.raises(OSError, match="No space left"):
        SharedSegment(4096)

    assert open_files() == before


# -- 9: all take shared memory, or all take the other path


def test_when_one_has_too_little_memory_all_send_messages_and_one_says_so(monkeypatch):
    results, said = add_where_one_has_too_little(monkeypatch, shared_bytes=SPAN.end)

    assert [add.in_place for add, _ in results.values()] == [False, False]
    assert all(torch.equal(result, summed([0, 1])) for _, result in results.values())
    assert len(said) == 1
    assert "not every worker has the memory" in said[0]


def test_when_all_have_enough_all_share_it(monkeypatch):
    results, said = add_where_one_has_too_little(monkeypatch, shared_bytes=1 << 20)

    assert [add.in_place for add, _ in results.values()] == [True, True]
    assert all(torch.equal(result, summed([0, 1])) for _, result in results.values())
    assert said == []


def test_more_than_the_host_has_free_is_not_tried(monkeypatch):
    monkeypatch.setattr(ordered, "free_bytes", lambda: 2 * SPAN.end)

    results, said = add_where_one_has_too_little(monkeypatch, shared_bytes=-1)

    assert [add.in_place for add, _ in results.values()] == [False, False]
    assert len(said) == 1


# -- 10: the last survivor holds all slices


def test_slices_of_the_dead_fit_in_until_one_worker_holds_them_all():
    adders, slices = {}, 6
    expected = summed(range(slices))
    for generation, ranks in enumerate([(0, 1, 2, 3), (0, 2, 3), (2, 3), (2,)]):
        owners = {number: ranks[number * len(ranks) // slices] for number in range(slices)}

        def work(comm, owners=owners):
            add = adders.setdefault(comm.local_ranks[0], OrderedAllReduce(comm, "fold", SPAN.end))
            add._comm = comm
            mine = sorted(number for number, rank in owners.items() if rank == comm.local_ranks[0])
            for row, number in enumerate(mine):
                SPAN.of(add.room(row)).copy_(term(number))
            return add(SPAN, owners, mean=MeanDivisor(2.0, 10)).clone()

        for result in side_by_side(ranks, work, generation).values():
            assert torch.equal(result, torch.cat([expected[:10] / 2, expected[10:]]))
    assert len(adders[2]._room) == slices
