"""Communicators of NCCL that are made, aborted and made anew: what leaks, and how long survivors of a kill need.

One rank first, many times. Then three ranks on the one GPU, which NCCL takes for three hosts (``NCCL_HOSTID``): one is killed
in the middle of an all-reduce, the others abort and connect to its replacement. At last the same with
``NCCL_MULTI_RANK_GPU_ENABLE``, for NCCL from 2.31 on. Nothing here is about speed: such ranks talk by sockets.

On a CPU the same is done with Gloo. Holdfast itself uses no NCCL; this shows what it could rely on.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpus.results import Results, SectionFailed, Where

ANSWER_S = 90.0
ABORT_S = 5.0
"""A survivor that has not aborted after so long would have to end itself."""
RANKS = 3
FORCED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "NCCL_NVLS_ENABLE": "0"}
"""Otherwise torch's watchdog ends survivors of a failure."""


def run(where: Where, results: Results) -> None:
    """Run all three."""
    os.environ.update(FORCED)
    alone(where, results)
    several(where, results, "NCCL_HOSTID", {"NCCL_HOSTID": "rank"})
    if where.is_gpu and torch.cuda.nccl.version() >= (2, 31):
        several(where, results, "NCCL_MULTI_RANK_GPU_ENABLE", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    else:
        results.skip("NCCL_MULTI_RANK_GPU_ENABLE", "it needs NCCL 2.31")


def backend(device: str) -> str:
    """Return the backend of torch.distributed."""
    return "nccl" if device == "cuda" else "gloo"


def join(device: str, store: Any, rank: int, ranks: int) -> None:
    """Make a communicator."""
    limit = datetime.timedelta(seconds=ANSWER_S)
    dist.init_process_group(backend(device), store=store, rank=rank, world_size=ranks, timeout=limit)


def abort() -> float:
    """Abort the communicator in a thread, and forget it; return how long it took, seconds, or a negative number."""
    group = dist.group.WORLD
    begun_s = time.monotonic()
    thread = threading.Thread(target=group.abort, daemon=True)
    thread.start()
    thread.join(ABORT_S)
    took_s = time.monotonic() - begun_s
    if thread.is_alive():
        return -took_s
    dist.destroy_process_group()
    return took_s


def held() -> dict[str, float]:
    """Return what the process holds: threads, open files, memory of the host and of the device, MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    free = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "MiB of the host": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "MiB of the device": (free[1] - free[0]) / 2**20,
    }


def alone(where: Where, results: Results) -> None:
    """Make and abort communicators of one rank; compare what is held after a tenth with what is held at the end."""
    count = where.size(1000, 30)
    numbers = torch.ones(1024, device=where.device)
    early: dict[str, float] = {}
    begun_s = time.monotonic()
    for number in range(count):
        join(where.device, dist.HashStore(), 0, 1)
        dist.all_reduce(numbers)
        where.synchronize()
        if abort() < 0:
            raise SectionFailed(f"communicator {number} was not aborted within {ABORT_S} s")
        if number == count // 10:
            early = held()
    took_ms = 1e3 * (time.monotonic() - begun_s) / count
    grown = {what: value - early[what] for what, value in held().items()}
    text = ", ".join(f"{value:+.0f} {what}" for what, value in grown.items())
    leaks = grown["threads"] > 0 or grown["files"] > 0 or grown["MiB of the device"] > 8
    results.check(f"{count} communicators of one rank", not leaks, f"{text}; {took_ms:.1f} ms each")


# -- several ranks


def serve(orders: Connection, device: str, rank: int, extra: dict[str, str], port: int) -> None:
    """Be a rank: carry out what is ordered until the end."""
    os.environ.update(FORCED | {name: str(rank) if value == "rank" else value for name, value in extra.items()})
    numbers = torch.ones(1 << 20, device=device)
    while True:
        order, *words = orders.recv()
        try:
            orders.send(("done", obey(order, words, device, rank, port, numbers)))
        except Exception as error:
            orders.send(("failed", f"{type(error).__name__}: {str(error).splitlines()[0]}"))


def obey(order: str, words: list[Any], device: str, rank: int, port: int, numbers: torch.Tensor) -> Any:
    """Carry out an order."""
    if order == "join":
        (generation,) = words
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=ANSWER_S))
        return join(device, dist.PrefixStore(str(generation), store), rank, RANKS)
    if order == "reduce":  # begin; it can only end if all take part
        work = dist.all_reduce(numbers.fill_(1), async_op=True)
        deadline_s = time.monotonic() + words[0]
        while not work.is_completed() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if not work.is_completed():
            return None
        work.wait()  # raises its error
        return float(numbers[0])
    return abort() if order == "abort" else held()


@dataclass(slots=True)
class Member:
    """A process that serves."""

    process: Any
    orders: Connection

    def ask(self, *order: Any) -> None:
        """Send an order."""
        self.orders.send(order)

    def answer(self) -> Any:
        """Return the answer; SectionFailed if it failed or there is none."""
        if not self.orders.poll(ANSWER_S):
            raise SectionFailed(f"a rank did not answer within {ANSWER_S} s")
        kind, value = self.orders.recv()
        if kind == "failed":
            raise SectionFailed(value)
        return value


def several(where: Where, results: Results, name: str, extra: dict[str, str]) -> None:
    """Kill a rank in an all-reduce, abort, replace it, many times."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=ANSWER_S))

    def start(rank: int) -> Member:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, where.device, rank, extra, store.port), daemon=True)
        process.start()
        return Member(process, here)

    members = {rank: start(rank) for rank in range(RANKS)}
    try:
        rounds(where, results, name, members, start)
    except SectionFailed as failed:
        results.check(f"{RANKS} ranks on one device, {name}", False, str(failed))
    finally:
        for member in members.values():
            member.process.kill()


def rounds(where: Where, results: Results, name: str, members: dict[int, Member], start: Any) -> None:
    """Run the rounds of :func:`several`."""
    count, victim = where.size(50, 2), RANKS - 1
    aborts: list[float] = []
    connects: list[float] = []
    early: dict[str, float] = {}
    for number in range(count):
        begun_s = time.monotonic()
        of_all(members, "join", number)
        connects.append(time.monotonic() - begun_s)
        if of_all(members, "reduce", ANSWER_S) != [float(RANKS)] * RANKS:
            raise SectionFailed(f"round {number}: an all-reduce of {RANKS} ranks had another result")
        dead = members.pop(victim)
        assert dead.process.pid is not None
        for member in members.values():  # they wait for the victim, which is killed meanwhile
            member.ask("reduce", 0.5)
        os.kill(dead.process.pid, signal.SIGKILL)
        dead.process.join(ANSWER_S)
        if dead.process.exitcode != -signal.SIGKILL:
            raise SectionFailed(f"the kill did not land: exit code {dead.process.exitcode}")
        for member in members.values():
            unfinished(member)
        aborts += of_all(members, "abort")
        members[victim] = start(victim)
        if number == max(1, count // 10) - 1:
            early = members[0].ask("held") or members[0].answer()
    members[0].ask("held")
    grown = {what: value - early[what] for what, value in members[0].answer().items()}
    text = (
        f"{count} kills, abort at most {1e3 * max(aborts):.0f} ms, connecting at most {1e3 * max(connects):.0f} ms;"
        f" a survivor holds {', '.join(f'{value:+.0f} {what}' for what, value in grown.items())}"
    )
    results.check(f"{RANKS} ranks on one device, {name}", min(aborts) >= 0, text)


def unfinished(member: Member) -> None:
    """Take the answer of an all-reduce that must not have ended: with an error, or not at all."""
    if not member.orders.poll(ANSWER_S):
        raise SectionFailed("a survivor hangs in an all-reduce with a dead rank")
    kind, value = member.orders.recv()
    if kind == "done" and value is not None:
        raise SectionFailed(f"an all-reduce with a dead rank ended with {value}")


def of_all(members: dict[int, Member], *order: Any) -> list[Any]:
    """Send an order to all, and return their answers."""
    for member in members.values():
        member.ask(*order)
    return [member.answer() for member in members.values()]
