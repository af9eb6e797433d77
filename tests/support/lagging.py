"""A device on CPU memory whose copies run late: a missing wait, or memory used again too early, gives wrong bits.

Each stream is a thread that works in order, after random delays. A copy fills its destination with 0xFF bytes, which are
NaN, until it is complete. So does freeing memory, which the next allocation of its size gets.
"""

import contextlib
import queue
import random
import threading
import time
import weakref

import numpy as np
import torch

from holdfast.comm import device as devices
from holdfast.comm.allreduce.ordered_add import add_by_torch
from holdfast.comm.device import Device, DeviceStream

PATIENCE_S = 60
POISON = 0xFF


class LaggingDevice(Device):
    """See the module.

    Args:
        device: The CPU.
        seed: Of the delays.
        skips: Waits to leave out, to see whether that is noticed.
        computes_late: Computation is a stream with delays, too: that of :meth:`compute`. Otherwise it is the caller's.
        longest_s: Longest delay before and within a copy; half of them have none.
        stuck_at: Number of the copy that never ends, as after a kernel that never ends; 0: none.
    """

    adds = False

    def __init__(self, device, seed=0, skips=(), *, computes_late=False, longest_s=0.002, stuck_at=0):
        super().__init__(device)
        self.skips = frozenset(skips)
        self.waits = []
        self.errors = []
        self.copies = 0
        self.additions = 0
        self.queued = 0
        self.stuck_at = stuck_at
        self.bytes_to_host = 0
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._free = {}
        self.pinned = set()
        streams = DeviceStream if computes_late else (DeviceStream.TO_HOST, DeviceStream.TO_DEVICE)
        self._queues = {stream: queue.SimpleQueue() for stream in streams}
        for work in self._queues.values():
            threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work):
        while True:
            do = work.get()
            try:
                do()
            except Exception as error:
                self.errors.append(error)

    def _lag(self):
        if self._random.random() < 0.5:
            time.sleep(self._random.uniform(0, self._longest_s))

    def compute(self, do):
        """Queue ``do`` in the compute stream."""
        if DeviceStream.COMPUTE not in self._queues:
            do()
            return

        def late():
            self._lag()
            do()

        self._queues[DeviceStream.COMPUTE].put(late)

    def synchronize(self):
        self.settle()

    def settle(self):
        """Wait until all streams are empty; raise what went wrong in one of them."""
        for stream in self._queues:
            self._await(self.mark(stream))

    def _await(self, event):
        assert event.wait(PATIENCE_S), "an event was never complete"
        if self.errors:
            raise self.errors[0]

    def allocate(self, size_bytes):
        blocks = self._free.setdefault(size_bytes, [])
        block = blocks.pop() if blocks else bytearray(size_bytes)
        array = np.frombuffer(block, dtype=np.uint8)  # lives as long as the memory of the tensor
        weakref.finalize(array, self._take_back, size_bytes, block)
        return torch.from_numpy(array).zero_()

    def _take_back(self, size_bytes, block):
        block[:] = bytes([POISON]) * size_bytes
        self._free[size_bytes].append(block)

    def host_memory(self, size_bytes):
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return self.allocate(size_bytes).fill_(POISON)

    def pin(self, memory):
        self.pinned.add(memory.untyped_storage().data_ptr())

    def unpin(self, memory):
        self.pinned.remove(memory.untyped_storage().data_ptr())

    def mark(self, stream):
        event = threading.Event()
        if stream in self._queues:
            self._queues[stream].put(event.set)
        else:
            event.set()
        return event

    def hold(self, stream, event, why):
        self.waits.append(why)
        if why in self.skips:
            return
        if stream in self._queues:
            self._queues[stream].put(lambda: self._await(event))
        else:
            self._await(event)

    def wait(self, event, why):
        self.waits.append(why)
        if why not in self.skips:
            self._await(event)

    def copy(self, into, source, stream):
        assert into.shape == source.shape
        host = (into if stream is DeviceStream.TO_HOST else source).untyped_storage().data_ptr()
        was_pinned = host in self.pinned
        self.queued += 1
        is_stuck = self.queued == self.stuck_at
        if stream is DeviceStream.TO_HOST:
            self.bytes_to_host += source.nbytes

        def late():
            self._lag()
            if is_stuck:
                threading.Event().wait()
            values = source.clone()
            into.copy_(
                torch.full((into.numel() * into.itemsize,), POISON, dtype=torch.uint8).view(into.dtype).view(into.shape)
            )
            self._lag()
            into.copy_(values)
            self.copies += 1
            assert not was_pinned or host in self.pinned, "memory was unpinned during a copy"

        self._queues[stream].put(late)

    def ordered_add(self, terms, out, order, mean):
        def late():
            total = torch.empty_like(out)
            add_by_torch(terms, total, order, mean)
            out.view(torch.uint8).fill_(POISON)
            self._lag()
            out.copy_(total)
            self.additions += 1

        self.compute(late)


class AddingDevice(LaggingDevice):
    """A lagging device that adds the terms of a process that runs all workers."""

    adds = True


@contextlib.contextmanager
def lagging(kind=LaggingDevice, **options):
    """Train models in CPU memory as if it were that of a lagging device; yields the list of devices made."""
    made = []

    def make(device):
        made.append(kind(device, **options))
        return made[-1]

    before = devices.DEVICES["cpu"]
    devices.DEVICES["cpu"] = make
    devices.device_of.cache_clear()
    try:
        yield made
    finally:
        devices.DEVICES["cpu"] = before
        devices.device_of.cache_clear()
