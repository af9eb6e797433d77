"""What a recovery costs the membership store: many simulated workers in one process, the store and roster that jobs use.

    python benchmarks/scale/membership.py [--sizes 64,256,1024] [--per-node 8] [--recoveries 5] [--json FILE]

Each node has a relay, as ``holdfast run`` starts one, with a real connection to a real store. A simulated worker is a
roster in a thread whose store calls the relay: its connection within the node is left out. A launcher reports a death, and each survivor does what a recovery does with the store: revoke, agree, shrink, agree, agree, and
gather the addresses of the new generation. Messages are those that a node's launcher sends to the job's store and
receives from it, without heartbeats; seconds are processor time of the whole process, which plays all nodes on one core.
``--jobs-of 64`` is a control: as many workers in this process,
but in jobs of 64 that know nothing of each other. What a recovery of 1,024 workers costs more than one of 16 such jobs
at once grows with the size of the job; the rest of what grows is that so many threads share an interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import command_line, listed, processor_s, table, write_json

from holdfast.errors import PeerFailed
from holdfast.membership import Hub, HubStore, Roster, Store
from holdfast.membership.relay import Relay
from holdfast.membership.wire import dump, parse

TOKEN = "benchmark"  # noqa: S105
LEASE_S = 120.0


class CountingHub(Hub):
    """Counts the lines that cross the network, without heartbeats."""

    received = sent = 0

    def _answer(self, client: Any, line: bytes) -> None:
        if line:
            self.received += 1
        super()._answer(client, line)

    async def _admit(self, hello: Any, writer: Any) -> Any:
        client = await super()._admit(hello, writer)
        plain = client.send

        def send(line: bytes) -> None:
            if line not in (b"", b"\n"):
                self.sent += 1
            plain(line)

        client.send = send
        return client


class SimulatedStore(Store):
    """A worker's store: the relay of its node, without a socket between them."""

    own_address = "127.0.0.1"

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self._answers: dict[int, bool] = {}
        in_loop(relay, self._begin)

    def _begin(self) -> None:
        for key, value in self._relay._items.items():
            self._note(key, value)
        self._relay._clients.add(self)

    def send(self, line: bytes) -> None:
        """Receive a line of the relay, in its thread."""
        if not line:
            return
        message = parse(line)
        if "key" in message:
            self._note(message["key"], message["value"])
            return
        with self._changed:
            self._answers[message["id"]] = message["done"]
            self._wake()

    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        """See :meth:`Store.put`."""
        self._ask({"id": 1, "op": "put", "key": key, "value": value})

    def create(self, key: str, value: str) -> bool:
        """See :meth:`Store.create`."""
        return self._ask({"id": 1, "op": "create", "key": key, "value": value})

    def post(self, key: str, value: str) -> None:
        """See :meth:`Store.post`."""
        self._give({"op": "put", "key": key, "value": value})

    def post_new(self, key: str, value: str) -> None:
        """See :meth:`Store.post_new`."""
        self._give({"op": "create", "key": key, "value": value})

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._ask({"id": 1, "op": "delete", "key": key})

    def close(self) -> None:
        """Do nothing: the relay is closed."""

    def _give(self, request: dict[str, Any]) -> None:
        line = dump(request).rstrip()
        self._relay._loop.call_soon_threadsafe(lambda: self.send(self._relay._answer(self, line)))

    def _ask(self, request: dict[str, Any]) -> bool:
        self._give(request)
        answer = self.wait(lambda: self._answers.get(1))
        assert answer is not None
        del self._answers[1]
        return answer


def in_loop(relay: Relay, act: Callable[[], None]) -> None:
    """Call ``act`` in the thread of a relay, and wait for it."""
    done = threading.Event()
    relay._loop.call_soon_threadsafe(lambda: (act(), done.set()))
    done.wait()


@dataclass(frozen=True)
class Row:
    """One recovery."""

    sent: int
    received: int
    processor_s: float
    wall_s: float


def main() -> None:
    """Measure each size and print the table."""
    parser = command_line(__doc__, per_node=8, recoveries=5)
    parser.add_argument("--sizes", type=listed(int), default=[64, 256, 1024])
    parser.add_argument("--jobs-of", type=int, metavar="WORKERS", help="split the workers into jobs of this size")
    options = parser.parse_args()
    smallest = min([*options.sizes, options.jobs_of or math.inf])
    if smallest <= options.recoveries:
        parser.error(f"--sizes and --jobs-of must be larger than --recoveries, got {smallest}")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # threads would hand the interpreter from core to core
    threading.stack_size(256 << 10)
    sys.setswitchinterval(10.0)  # else each of thousands of threads asks for the interpreter 200 times a second
    rows = {size: measure(size, options) for size in options.sizes}
    cells = []
    for size, of_size in rows.items():
        nodes = -(-size // options.per_node)
        names = ("sent", "received", "processor_s", "wall_s")
        sent, received, processor, wall = (statistics.median(getattr(row, name) for row in of_size) for name in names)
        by_node = [f"{sent / nodes:.1f}", f"{received / nodes:.1f}"]
        cells.append([str(size), str(nodes), *by_node, f"{processor:.2f}", f"{wall:.2f}"])
    heads = ["workers", "nodes", "sent by a node", "received by a node", "processor time (s)", "seconds"]
    print(table("A recovery at the membership store", heads, cells))
    write_json(
        options.json, settings=vars(options), rows={size: [vars(row) for row in each] for size, each in rows.items()}
    )


@dataclass(frozen=True)
class Job:
    """A job: its hub, the store of a launcher, and its workers that live."""

    hub: CountingHub
    launcher: Store
    rosters: list[Roster]

    def lose_one(self) -> None:
        """Let the launcher report the death of the lowest worker."""
        self.launcher.put(f"dead/{self.rosters.pop(0).rank}", "killed")


def measure(size: int, options: argparse.Namespace) -> list[Row]:
    """Return a row for each recovery of ``size`` workers."""
    of = min(size, options.jobs_of or size)
    with contextlib.ExitStack() as stack:
        jobs = [open_job(stack, of, options) for _ in range(size // of)]
        print(f"{size} workers are connected", file=sys.stderr)
        return [recover(jobs) for _ in range(options.recoveries)]


def open_job(stack: contextlib.ExitStack, size: int, options: argparse.Namespace) -> Job:
    """Start a job with ``size`` workers."""
    hub = stack.enter_context(CountingHub(TOKEN, lease_s=LEASE_S))
    stores = list(open_stores(stack, hub, size, options.per_node))
    rosters = [Roster(store, rank, range(size)) for rank, store in enumerate(stores)]
    launcher = HubStore(hub.address, TOKEN, "job")
    stack.callback(launcher.close)
    return Job(hub, launcher, rosters)


def open_stores(stack: contextlib.ExitStack, hub: Hub, size: int, per_node: int) -> Iterator[Store]:
    """Yield the store of each worker."""
    for rank in range(size):
        if rank % per_node == 0:
            upstream = HubStore(hub.address, TOKEN, "job")
            own = range(rank, rank + per_node)
            relay = Relay(
                upstream, "job", TOKEN, node=str(rank // per_node), ranks=lambda own=own: own, lease_s=LEASE_S
            )
            stack.callback(upstream.close)
            stack.enter_context(relay)
        store = SimulatedStore(relay)
        stack.callback(store.close)
        yield store


def recover(jobs: list[Job]) -> Row:
    """Let each job lose a worker, and the others recover; threads are started before and not counted."""
    began_s = used_s = 0.0

    def begin() -> None:
        nonlocal began_s, used_s
        for job in jobs:
            job.hub.received = job.hub.sent = 0
        began_s, used_s = time.monotonic(), processor_s()
        for job in jobs:
            job.lose_one()

    in_threads([lambda roster=roster: survive(roster) for job in jobs for roster in job.rosters[1:]], begin)
    row = Row(
        sum(job.hub.received for job in jobs),
        sum(job.hub.sent for job in jobs),
        processor_s() - used_s,
        time.monotonic() - began_s,
    )
    for job in jobs:
        survivors = tuple(roster.rank for roster in job.rosters)
        assert all(roster.members == survivors for roster in job.rosters)
    return row


def survive(roster: Roster) -> None:
    """Do what a recovery does with the store."""
    while True:
        version = roster.store.version
        try:
            roster.check()
        except PeerFailed:
            break
        roster.store.wait(lambda version=version: True if roster.store.version != version else None)
    roster.revoke()
    roster.agree(False)
    roster.shrink()
    if not (roster.agree(True) and roster.agree(True)):
        raise AssertionError("another member was reported dead")
    roster.gather("here")


def in_threads(acts: list[Callable[[], None]], then: Callable[[], None]) -> None:
    """Run ``acts`` at the same time, and ``then`` once all of them have started."""
    errors: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[act], daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    then()
    for thread in threads:
        thread.join(600)
    if errors:
        raise errors[0]


if __name__ == "__main__":
    main()
