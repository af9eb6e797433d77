"""A barrier of workers on several hosts that also takes the maximum of a few integers.

::

    each worker writes its integers, then its phase      words in the memory of its host
    the first worker of a host waits for all of them     no message
    first workers tell each other the maximum            log2(hosts) rounds of messages
    the first worker writes the maximum, then the phase  words again
    the others wait for that                             no message

Every wait also checks for failures. Words and messages carry incarnation, generation and phase, which are compared with
what they must be: a word of an earlier phase, or of a worker that was replaced, is an error and not an arrival.

Words are used where other cores see stores in program order (x86). Elsewhere, and if every host has only one worker, the
fabric takes the maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from holdfast.comm.allreduce.shm import MAX_INTEGERS, ORDERED_STORES, HostMemory
from holdfast.comm.base import Collectives
from holdfast.comm.dissemination import dissemination_rounds
from holdfast.comm.waiting import patience, wait_until, waiting
from holdfast.errors import PeerFailed

_ARRIVED, _RELEASED = 2, 5
"""Words of a worker: the phase in which it has arrived, and, of a host's first worker, the last that has ended."""
_GIVEN = slice(8, 8 + MAX_INTEGERS)
"""The integers of a worker."""
_LARGEST = slice(8 + MAX_INTEGERS, 8 + 2 * MAX_INTEGERS)
"""The maximum over all workers, at a host's first worker."""
_HEAD = 3
"""Numbers of a message before its integers: incarnation of the sender, generation, phase."""
_LOWEST = np.iinfo(np.int64).min


class HostBarrier:
    """The barrier of one generation.

    Args:
        comm: The members.
        hosts: The host of each process, from 0 without gaps.
        memory: The memory of this worker's host; nothing else may use its words.
    """

    def __init__(self, comm: Collectives, hosts: Sequence[int], memory: HostMemory) -> None:
        assert memory.words is not None, "several processes have words"
        self._comm = comm
        self._words = memory.words
        self._me = me = comm.processes.index(comm.local_ranks)
        self._host = hosts[me]
        self._firsts = [hosts.index(host) for host in range(max(hosts) + 1)]
        self._local = [process for process, host in enumerate(hosts) if host == self._host]
        self._uses_words = ORDERED_STORES and len(self._firsts) < len(hosts)
        self._known = np.array([[n, comm.generation] for n in memory.incarnations], dtype=np.int64)
        self._phase = 0
        self._patience = patience(-(-comm.num_processes // len(self._firsts)))
        self._outbox = torch.zeros(_HEAD + MAX_INTEGERS, dtype=torch.int64)
        self._inbox = torch.zeros_like(self._outbox)

    def __call__(self, values: Sequence[int] = ()) -> list[int]:
        """Wait until all workers have called it, and return the maximum of each of up to 15 integers over all.

        Raises:
            PeerFailed: if that did not happen, as far as this worker can tell.
        """
        self._phase += 1
        if not self._uses_words:
            return self._by_fabric(values)
        own_row = self._words[self._me]
        own_row[_GIVEN] = _LOWEST
        own_row[_GIVEN][: len(values)] = values
        own_row[_ARRIVED] = self._phase  # last: a worker that sees it sees the values, too (ORDERED_STORES)
        first = self._words[self._firsts[self._host]]
        with waiting:
            if self._me == self._firsts[self._host]:
                self._lead(own_row)
            else:
                self._wait(lambda: first[_RELEASED] >= self._phase)
        self._check(first[[0, 1, _RELEASED]], self._firsts[self._host])
        largest: list[int] = first[_LARGEST][: len(values)].tolist()
        return largest

    def _by_fabric(self, values: Sequence[int]) -> list[int]:
        latest, earliest, *largest = self._comm.maximum([self._phase, -self._phase, *values])
        if (latest, -earliest) != (self._phase, self._phase):
            raise PeerFailed(f"processes are in phases from {-earliest} to {latest}, and not all in {self._phase}")
        return largest

    def _lead(self, own_row: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Wait for the workers of this host, exchange the maximum with the other hosts, and release the workers."""
        self._wait(lambda: self._words[self._local, _ARRIVED].min() >= self._phase)
        for process in self._local:
            self._check(self._words[process, [0, 1, _ARRIVED]], process)
        own_row[_LARGEST] = self._between_hosts(self._words[self._local, _GIVEN].max(0))
        own_row[_RELEASED] = self._phase  # last, as above

    def _between_hosts(
        self, largest: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        outbox, inbox = self._outbox.numpy(), self._inbox.numpy()
        outbox[:_HEAD] = (*self._known[self._me], self._phase)
        outbox[_HEAD:] = largest
        for to, source in dissemination_rounds(self._host, len(self._firsts)):
            sender = self._firsts[source]
            self._comm.sendrecv([(self._firsts[to], self._outbox)], [(sender, self._inbox)])
            self._check(inbox[:_HEAD], sender)
            np.maximum(outbox[_HEAD:], inbox[_HEAD:], out=outbox[_HEAD:])
        return outbox[_HEAD:]

    def _wait(self, is_so: Callable[[], object]) -> None:
        wait_until(is_so, self._comm.check_failures, self._patience)

    def _check(self, words: np.ndarray[tuple[int], np.dtype[np.int64]], process: int) -> None:
        if (words[:2] != self._known[process]).any() or words[2] != self._phase:
            detail = f"incarnation, generation and phase are {words.tolist()}"
            raise PeerFailed(f"process {process} has not reached phase {self._phase}: {detail}")
