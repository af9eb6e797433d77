"""What a process sees that reads another one's device memory while that one is killed.

This decides whether workers may add gradients directly from each other's GPU memory. A process exports memory and is killed
at a random moment, while this process copies from that memory again and again. Then: do the copies end, do they have the
right numbers, is the memory still the same after another process has allocated and written its own, and does this process's
own device still work? By CUDA IPC handles of ``cudaMalloc`` memory and, with expandable segments, by those of virtual memory.

On a CPU the memory is a shared segment, which shows that the experiment itself works: the reader must see nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from gpus.results import Results, SectionFailed, Where
from holdfast.comm.memory import OpenSegments, SharedSegment, open_segment

ANSWER_S = 60.0
COPIES = 20
"""Copies that are queued before the kill."""
KINDS = {"cudaMalloc": "expandable_segments:False", "virtual memory": "expandable_segments:True"}
"""How torch allocates what is exported, by ``PYTORCH_CUDA_ALLOC_CONF``."""
KEPT: list[Any] = []
"""What an exporter must keep until it is killed."""


def run(where: Where, results: Results) -> None:
    """Run the experiment for each kind of memory, in a process of its own."""
    for kind, allocator in KINDS.items() if where.is_gpu else {"host memory": ""}.items():
        command = [
            sys.executable,
            "-m",
            "gpus.exporter",
            where.device,
            str(where.size(200, 5)),
            str(where.size(1 << 26, 1 << 16)),
        ]
        path = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": allocator}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
        except subprocess.TimeoutExpired as expired:
            said = (expired.stdout or b"").decode().strip().splitlines()
            results.check(f"kills, {kind}", False, f"a survivor did not end; until then: {said[-1:]}")
            continue
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        if done.returncode and not where.is_gpu:
            raise SectionFailed(f"exit code {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
        text = (
            last
            if done.returncode == 0
            else f"{last}; exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        )
        results.figure(f"kills, {kind}", text)  # whatever it is: it is a question, and not a promise


def main(device: str, kills: int, length: int) -> None:
    """Kill exporters one after another, and print after each what was seen so far."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # without CUDA, which must not be initialised before a fork
    chance, seen = random.Random(0), Counter[str]()
    before: tuple[torch.Tensor, int] | None = None
    for number in range(kills):
        here, there = context.Pipe()
        process = context.Process(target=export, args=(there, device, length, number), daemon=True)
        process.start()
        if not here.poll(ANSWER_S):
            raise SystemExit("an exporter did not start")
        memory = opened(device, here.recv())
        if before is not None:  # a process has written its own memory since
            seen["the same after another allocation" if holds(*before) else "changed by another allocation"] += 1
        copies = [memory.clone() for _ in range(COPIES)]
        time.sleep(chance.uniform(0, 0.02))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        copies += [memory.clone() for _ in range(COPIES)]
        process.join(ANSWER_S)
        if process.exitcode != -signal.SIGKILL:
            raise SystemExit(f"the kill did not land: exit code {process.exitcode}")
        seen["copies right" if all(holds(copy, number) for copy in copies) else "copies wrong"] += 1
        seen["memory right after the death" if holds(memory, number) else "memory wrong after the death"] += 1
        seen["own memory works" if holds(torch.full((8,), 3, device=device), 3) else "own memory is broken"] += 1
        before = memory, number
        print(f"{number + 1} kills; " + ", ".join(f"{what}: {n}" for what, n in sorted(seen.items())), flush=True)


def holds(tensor: torch.Tensor, value: int) -> bool:
    """Return whether all elements are ``value``; waits for the device."""
    return bool((tensor == value).all())


def export(there: Connection, device: str, length: int, number: int) -> None:
    """Be an exporter: fill memory with ``number``, send its handle, write other memory until the kill."""
    if device == "cpu":
        segment = SharedSegment(4 * length)
        memory: torch.Tensor = segment.bytes.view(torch.int32)
        handle: Any = (os.getpid(), segment.fd, 4 * length)
        KEPT.append(segment)
    else:
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(length, dtype=torch.int32, device=device)
        handle = reduce_tensor(memory)
    memory.fill_(number)
    if device == "cuda":
        torch.cuda.synchronize()
    there.send(handle)
    other = torch.zeros(length, dtype=torch.int32, device=device)
    while True:
        other += 1


def opened(device: str, handle: Any) -> torch.Tensor:
    """Return the exported memory, mapped here."""
    if device == "cpu":
        pid, fd, size_bytes = handle
        return open_segment(pid, fd, size_bytes, opened=OpenSegments()).view(torch.int32)
    rebuild: Callable[..., torch.Tensor]
    rebuild, words = handle
    return rebuild(*words)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
