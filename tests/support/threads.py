"""Threads as workers: they share memory like the processes of one host."""

import queue
import threading

import torch

from holdfast.errors import PeerFailed

PATIENCE_S = 30


class Threads:
    """Threads of this process as workers of a communicator."""

    def __init__(self, meeting, rank, ranks, generation=0):
        self.meeting, self.members, self.local_ranks, self.generation = meeting, ranks, (rank,), generation
        self.processes = tuple((member,) for member in ranks)
        self.num_processes = len(ranks)

    def barrier(self):
        self.meeting.wall.wait(PATIENCE_S)

    def check_failures(self):
        if self.meeting.wall.broken:
            raise PeerFailed("another thread has failed")

    def allgather(self, part, out):
        self.meeting.desk[self.local_ranks[0]] = part.clone()
        self.meeting.wall.wait(PATIENCE_S)
        for row, rank in zip(out, self.members, strict=True):
            row.copy_(self.meeting.desk[rank])
        self.meeting.wall.wait(PATIENCE_S)

    def sendrecv(self, send, receive, tag=0):
        for place, data in send:
            self.meeting.posted(self.local_ranks[0], self.members[place]).put(data.clone())
        for place, data in receive:
            given = self.meeting.posted(self.members[place], self.local_ranks[0]).get(timeout=PATIENCE_S)
            assert (given.shape, given.dtype) == (data.shape, data.dtype)
            data.copy_(given)

    def maximum(self, values):
        everybodys = torch.empty(len(self.members), len(values), dtype=torch.int64)
        self.allgather(torch.tensor(values, dtype=torch.int64), everybodys)
        return everybodys.amax(0).tolist()


class Meeting:
    """The shared state through which threads synchronise."""

    def __init__(self, count):
        self.wall, self.desk = threading.Barrier(count), {}
        self.lines, self._lock = {}, threading.Lock()

    def posted(self, source, to):
        """The queue of messages from one thread to another."""
        with self._lock:
            return self.lines.setdefault((source, to), queue.SimpleQueue())


def side_by_side(ranks, work, generation=0, kind=Threads):
    """Run ``work(comm)`` in one thread for each rank; return each result or exception."""
    meeting, results = Meeting(len(ranks)), {}

    def run(rank):
        try:
            results[rank] = work(kind(meeting, rank, ranks, generation))
        except Exception as error:
            results[rank] = error
            meeting.wall.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return results
