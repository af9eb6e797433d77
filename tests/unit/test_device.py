"""Gradients that are not in host memory: the staged all-reduce, on a device whose copies and computation lag."""

import pytest
import torch
from lagging import AddingDevice, LaggingDevice
from threads import side_by_side

from holdfast.comm import MeanDivisor, OrderedAllReduce, SlotSpan, VirtualCommunicator, make_allreduce
from holdfast.comm import device as devices
from holdfast.comm.allreduce.staged import DeviceAllReduce, StagedAllReduce
from holdfast.comm.device import CpuDevice, Wait, device_of

CPU = torch.device("cpu")
FIRST = SlotSpan(0, 1000, torch.float32)
SPANS = (FIRST, SlotSpan(FIRST.end, 333, torch.float32))
SIZE = SPANS[-1].end
OWNERS = {0: 0, 1: 0, 2: 1}
"""Slice: worker. Worker 2 has none, as a hot spare has none; its device is the slowest."""
STEPS = 8


def term(step, span, number):
    generator = torch.Generator().manual_seed(1000 * step + 10 * span.length + number)
    return torch.randn(span.length, generator=generator) * 10.0**number


def expected(step, span):
    total = term(step, span, 0).clone()
    for number in range(1, len(OWNERS)):
        total += term(step, span, number)
    return total / 3


def train(comm, device, add, *, steps=range(STEPS)):
    """Queue the work of some steps in the device, as training does; return what its optimizer reads in each of them."""
    read = []
    mine = [number for number, rank in OWNERS.items() if rank in comm.local_ranks]
    for step in steps:
        add.begin()
        for span in SPANS:
            for row, number in enumerate(mine):
                view, values = span.of(add.room(row)), term(step, span, number)
                device.compute(lambda view=view, values=values: view.copy_(values))
        for span in SPANS:
            result = add(span, OWNERS, mean=MeanDivisor(3, span.length))
            device.compute(lambda result=result, step=step, span=span: read.append((step, span, result.clone())))
    return read


def trained(seed, skips=(), generations=1):
    """Train with three workers; return whether each result had the expected bits, or the errors."""
    made = {
        rank: LaggingDevice(CPU, 10 * seed + rank, skips, computes_late=True, longest_s=0.01 if rank == 2 else 0.001)
        for rank in range(3)
    }
    adds = {}

    def work(comm):
        rank = comm.local_ranks[0]
        add = adds.setdefault(rank, StagedAllReduce(comm, "fold", SIZE, made[rank]))
        add._comm = comm
        steps = range(STEPS * comm.generation, STEPS * (comm.generation + 1))
        return train(comm, made[rank], add, steps=steps)

    done = [
        result for generation in range(generations) for result in side_by_side((0, 1, 2), work, generation).values()
    ]
    errors = [result for result in done if isinstance(result, Exception)]
    for device in made.values() if not errors else ():
        try:
            device.settle()
        except AssertionError as error:
            errors.append(error)
    return errors or [
        torch.equal(result.view(torch.int32), expected(step, span).view(torch.int32))
        for read in done
        for step, span, result in read
    ]


def test_the_bits_are_those_of_additions_in_slice_order():
    right = trained(seed=1, generations=2)

    assert right == [True] * (3 * STEPS * len(SPANS) * 2)


@pytest.mark.parametrize("wait", Wait, ids=lambda wait: wait.name)
def test_no_wait_can_be_left_out(wait):
    """The negative control of the test above, for each wait."""
    for seed in range(20):
        right = trained(seed, {wait}, generations=2)
        if right != [True] * len(right):
            return
    pytest.fail(f"nothing went wrong without {wait}")


def test_a_single_process_waits_for_the_same():
    device = LaggingDevice(CPU, computes_late=True)
    comm = VirtualCommunicator(3)

    read = train(comm, device, make_allreduce(comm, "fold", SIZE, device=device))
    device.settle()

    assert all(torch.equal(result, expected(step, span)) for step, span, result in read)
    assert set(device.waits) == set(Wait) - {Wait.UNPINNED}


def test_a_device_that_adds_by_itself_copies_nothing_and_waits_for_nothing():
    device, comm = AddingDevice(CPU, computes_late=True), VirtualCommunicator(3)
    add = make_allreduce(comm, "fold", SIZE, device=device)

    read = train(comm, device, add)
    device.settle()

    assert type(add) is DeviceAllReduce
    assert len(read) == STEPS * len(SPANS) == device.additions
    assert all(torch.equal(result, expected(step, span)) for step, span, result in read)
    assert (device.copies, device.waits) == (0, [])


def test_a_model_on_the_cpu_is_all_reduced_as_ever():
    add = make_allreduce(VirtualCommunicator(3), "fold", SIZE, device=device_of(CPU))

    assert type(add) is OrderedAllReduce
    assert add.start_copy is None
    assert add.room(0) is add.shared_room(0)
    assert type(device_of(CPU)) is CpuDevice


def test_freed_memory_is_poisoned_and_used_again_only_after_its_copies():
    device = LaggingDevice(CPU)
    memory = device.allocate(64)
    address = memory.data_ptr()
    device.copy(torch.zeros(64, dtype=torch.uint8), memory, devices.DeviceStream.TO_HOST)
    device.settle()

    del memory
    again = device.allocate(64)

    assert again.data_ptr() == address
    assert not again.any()


def test_closing_waits_for_copies_and_unpins_all_memory():
    device = LaggingDevice(CPU, computes_late=True)
    add = StagedAllReduce(VirtualCommunicator(3), "fold", SIZE, device)
    train(VirtualCommunicator(3), device, add, steps=range(2))
    assert device.pinned

    add.close()

    assert not device.pinned
    device.settle()
