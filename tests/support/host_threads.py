"""Workers on several hosts that are threads of one process: each host has its own words, and messages are counted."""

import contextlib
import queue
import threading

import numpy as np
import torch

from holdfast.comm.allreduce.host_barrier import HostBarrier
from holdfast.comm.allreduce.shm import HostMemory
from holdfast.comm.dissemination import dissemination_rounds
from holdfast.errors import PeerFailed, ScriptError

WORDS = 40
"""64-bit words of a worker; see HostMemory."""
SUM_TYPE = torch.float32
"""Of the numbers that are added; the words of barriers are integers."""


class Fabric:
    """What threads exchange through."""

    def __init__(self, of_process):
        self.of_process, self.count = of_process, len(of_process)
        self.failed = threading.Event()
        self.lines = {(a, b): queue.SimpleQueue() for a in range(self.count) for b in range(self.count)}
        self.words = [words_of(self.count) for _ in set(of_process)]
        self.sent = []
        """Sender, receiver, bytes, and whether they are numbers to be added."""

    def bytes_by_host(self):
        sent = [0] * len(self.words)
        for source, _, size, is_sum in self.sent:
            sent[self.of_process[source]] += size * is_sum
        return sent

    def messages_by_process(self):
        """Messages of barriers."""
        return [
            sum(source == process and not is_sum for source, _, _, is_sum in self.sent) for process in range(self.count)
        ]

    def run(self, work, comm=None):
        """Run ``work(comm)`` for each process; return each result, or what it raised."""
        answers = [None] * self.count

        def run(me):
            try:
                answers[me] = work((comm or Thread)(self, me))
            except Exception as error:
                answers[me] = error
                if not isinstance(error, ScriptError):  # raised by all alike
                    self.failed.set()

        threads = [threading.Thread(target=run, args=(me,)) for me in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return answers

    def barrier(self, comm):
        words = self.words[self.of_process[comm.me]]
        memory = HostMemory([], torch.empty(0), torch.empty(0), words, range(self.count))
        return HostBarrier(comm, self.of_process, memory)


class Thread:
    """One worker's end of a fabric; an :class:`~holdfast.comm.base.Collectives`."""

    generation = 3

    def __init__(self, fabric, me):
        self.fabric, self.me = fabric, me
        self.local_ranks, self.members = (me,), tuple(range(fabric.count))
        self.processes = tuple((rank,) for rank in self.members)
        self.num_processes = fabric.count

    def check_failures(self):
        if self.fabric.failed.is_set():
            raise PeerFailed("another thread has failed")

    def sendrecv(self, send, receive):
        for to, data in send:
            size = data.numel() * data.element_size()
            self.fabric.sent.append((self.me, to, size, data.dtype.is_floating_point))
            self.fabric.lines[self.me, to].put(data.clone())
        for place, out in receive:
            data = self._await(self.fabric.lines[place, self.me])
            assert data.shape == out.shape
            out.copy_(data)

    def maximum(self, values):
        largest = torch.tensor(values, dtype=torch.int64)
        heard = torch.empty_like(largest)
        for to, source in dissemination_rounds(self.me, self.fabric.count):
            self.sendrecv([(to, largest)], [(source, heard)])
            torch.maximum(largest, heard, out=largest)
        return largest.tolist()

    def _await(self, line):
        for _ in range(10_000):
            with contextlib.suppress(queue.Empty):
                return line.get(timeout=1e-3)
            self.check_failures()
        raise AssertionError("no message within 10 s")


def words_of(count):
    """The words of one host, as its workers find them."""
    words = np.zeros((count, WORDS), dtype=np.int64)
    words[:, 0], words[:, 1] = range(count), Thread.generation
    return words
