"""What a step sends and how long it takes between hosts whose links are slow, beside DDP on Gloo.

    python benchmarks/step/hosts.py [--hosts 2 4 8] [--workers 1] [--model mlp] [--rate 1gbit] [--bucket-mb 25] [--json FILE]

Hosts are network namespaces of this machine (``tests/support/netns.py``; needs root, ``ip`` and ``tc``). Every link is
shaped in both directions (``tc ... tbf``). Cores, caches and memory are shared by all hosts, so this shows what links
cost, and not what many machines can do.

=============  ========================================================================================================
system         what runs
=============  ========================================================================================================
ddp-gloo       DistributedDataParallel on Gloo
ddp-fp16       the same with torch's ``fp16_compress_hook``, which also adds in 16 bits (that of bfloat16 refuses Gloo)
holdfast       a session, ``holdfast run --fabric gloo --nnodes N --order tree``: sums between hosts
holdfast-late  the same with ``--overlap off``: sums begin after the backward pass
holdfast-fold  holdfast with ``--order fold``: slices between hosts
holdfast-bf16  holdfast with ``--wire bf16``: rounded sums and means between hosts
wire           two hosts send each other as many bytes as the gradients have, at the same time over TCP: the limit;
               measured if it is named, with ``--hosts 2 --workers 1``
=============  ========================================================================================================

Systems take turns, in another order in each round, and each round starts new jobs. The first steps of a job are not
counted. Bytes are those of the hosts' interfaces, with all headers and acknowledgements; a *vector* is as long as the
gradients, of float32. After a job the movement of its weights is compared with that of ddp-gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import ROOT, cells, command_line, environment, interval, ratio, table, turned, write_json
from models import JOBS
from step.step_time import TOLERANCE, Training, work_ddp, work_holdfast

sys.path.insert(0, str(ROOT / "tests" / "support"))
from netns import Hosts

SYSTEMS = ("ddp-gloo", "ddp-fp16", "holdfast", "holdfast-late", "holdfast-fold", "holdfast-bf16")
WIRE = "wire"
BASE = "ddp-gloo"
ROUNDED = 2.0**-7
"""Largest relative distance from the weights of ddp-gloo where gradients are rounded to 8 bits."""
WARM_UP_STEPS = 3
PORT = 29400
CHUNK_BYTES = 1 << 20
JOB_S = 300.0
"""Time limit of a job, in seconds."""


class Meter:
    """Counts a worker's steps, and what leaves its host in them; writes both into a file.

    Args:
        moved: Returns how far its training has moved the weights.
        steps: Steps to measure, after the warm-up.
        path: The file.
    """

    def __init__(self, moved: Callable[[], list[float]], steps: int, path: Path) -> None:
        self._moved, self._steps, self._path = moved, steps, path
        self._times: list[float] = []
        self._sent = 0

    def again(self) -> bool:
        """Return whether another step is wanted; call it at the start of each step."""
        self._times.append(time.perf_counter())
        if len(self._times) == WARM_UP_STEPS + 1:
            self._sent = sent_bytes()
        if len(self._times) <= WARM_UP_STEPS + self._steps:
            return True
        starts = self._times[WARM_UP_STEPS:]
        found = {
            "steps_ms": [1e3 * (after - before) for before, after in itertools.pairwise(starts)],
            "sent_bytes": (sent_bytes() - self._sent) / self._steps,
            "moved": self._moved(),
        }
        self._path.write_text(json.dumps(found))
        return False


def sent_bytes() -> int:
    """Return what the interface of this host has sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))


def work(system: str, model: str, workers: int, steps: int, folder: str) -> None:
    """Be one worker."""
    torch.set_num_threads(1)
    training = Training(model, workers, None)
    is_ddp = system.startswith("ddp")
    rank = os.environ["RANK" if is_ddp or system == WIRE else "HOLDFAST_RANK"]
    meter: Any = Meter(training.moved if system != WIRE else list, steps, Path(folder, f"{rank}.json"))
    if system == WIRE:
        exchange(meter, rank == "0", bytes_of(model))
    elif is_ddp:
        work_ddp(training, meter, backend="gloo", rounds=system.endswith("16"))
    else:
        work_holdfast(training, meter)


def bytes_of(model: str) -> int:
    """Return the bytes of the gradients of a model."""
    return 4 * sum(p.numel() for p in JOBS[model].model().parameters())


def exchange(meter: Meter, listens: bool, size_bytes: int) -> None:
    """Send bytes to the other host and receive as many at the same time, once a step."""
    connection = connect(os.environ["MASTER_ADDR"], listens)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    content, buffer = memoryview(bytes(size_bytes)), bytearray(CHUNK_BYTES)
    while meter.again():
        sender = threading.Thread(target=connection.sendall, args=(content,))
        sender.start()
        left = size_bytes
        while left:
            got = connection.recv_into(buffer, min(left, CHUNK_BYTES))
            if not got:
                raise EOFError("the other host has closed the connection")
            left -= got
        sender.join()


def connect(address: str, listens: bool) -> socket.socket:
    """Return a connection of the two hosts."""
    if listens:
        with socket.create_server((address, PORT)) as server:
            server.settimeout(JOB_S)
            return server.accept()[0]
    end_s = time.monotonic() + JOB_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=JOB_S)
        except ConnectionRefusedError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def commands(options: argparse.Namespace, system: str, hosts: Hosts, count: int, script: list[str]) -> list[list[str]]:
    """Return the commands that start a job, on the hosts from 1 to ``count``."""
    if system == WIRE or system.startswith("ddp"):
        env = ["env", f"MASTER_ADDR={hosts.address(1)}", f"MASTER_PORT={PORT}", f"WORLD_SIZE={count * options.workers}"]
        return [
            [*hosts.inside(1 + rank // options.workers), *env, f"RANK={rank}", sys.executable, *script]
            for rank in range(count * options.workers)
        ]
    order = "fold" if system.endswith("fold") else "tree"
    run = [sys.executable, "-m", "holdfast", "run", "--fabric", "gloo", "--nnodes", str(count), "--order", order]
    run += ["--rdzv", f"holdfast://{hosts.address(1)}:{PORT}", "-n", str(options.workers), "--max-restarts", "0"]
    if system.endswith("late"):
        run += ["--overlap", "off"]
    if system.endswith("bf16"):
        run += ["--wire", "bf16"]
    return [[*hosts.inside(1 + node), *run, "--node-rank", str(node), *script] for node in range(count)]


def run_job(options: argparse.Namespace, system: str, hosts: Hosts, count: int) -> list[dict[str, Any]]:
    """Run one job and return what each worker has measured."""
    workers = count * options.workers
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        asked = json.dumps([system, options.model, workers, options.steps, folder])
        env = environment(
            HOLDFAST_BUCKET_BYTES=str(int(options.bucket_mb * 2**20)), HOLDFAST_TOKEN="benchmark" * 4,
            GLOO_SOCKET_IFNAME="eth0",
        )  # fmt: skip
        script = [str(Path(__file__).resolve()), "work", asked]
        started = [
            subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            for command in commands(options, system, hosts, count, script)
        ]
        ends_s = time.monotonic() + JOB_S
        try:
            for process in started:
                process.wait(max(1.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # whatever is missing is reported below
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        paths = [Path(folder, f"{rank}.json") for rank in range(workers)]
        if not all(map(Path.exists, paths)):
            log.seek(0)
            sys.exit(f"{system} on {count} hosts failed:\n{log.read()[-3000:]}")
        return [json.loads(path.read_text()) for path in paths]


def measure(options: argparse.Namespace, hosts: Hosts, count: int) -> dict[str, dict[str, Any]]:
    """Return what each system sends a step and host, and how long its steps take, on ``count`` hosts."""
    found: dict[str, dict[str, Any]] = {name: {"steps_ms": [], "vectors": []} for name in options.systems}
    moved: dict[str, list[float]] = {}
    bytes_of_vector = bytes_of(options.model)
    for number in range(options.rounds):
        for name in turned(options.systems, number):
            workers = run_job(options, name, hosts, count)
            # The slowest worker of each step: all wait for it.
            found[name]["steps_ms"] += [max(times) for times in zip(*(w["steps_ms"] for w in workers), strict=True)]
            found[name]["vectors"] += [w["sent_bytes"] / bytes_of_vector for w in workers[:: options.workers]]
            moved[name] = workers[0]["moved"]
    for name, values in moved.items():
        tolerance = ROUNDED if name.endswith("16") else TOLERANCE
        if values and (base := moved.get(BASE)) and math.dist(values, base) > tolerance * math.hypot(*base):
            sys.exit(f"{name} on {count} hosts has other weights than {BASE}")
    return found


def show(options: argparse.Namespace, count: int, found: dict[str, dict[str, Any]]) -> str:
    """Return a table of the results."""
    head = ["system", "vectors sent a host", "p50, ms", "p10-p90", "to ddp-gloo"]
    rows = []
    for name, values in found.items():
        p50, p10, p90 = cells(values["steps_ms"], 0)
        to = interval(ratio(values["steps_ms"], found[BASE]["steps_ms"])) if BASE in found else ""
        rows.append([name, f"{statistics.mean(values['vectors']):.2f}", p50, f"{p10}-{p90}", to])
    title = f"{options.model}, {count} hosts of {options.workers} workers, links of {options.rate}"
    return table(f"{title}; {os.cpu_count()} cores for all", head, rows)


def shape(hosts: Hosts, count: int, rate: str) -> None:
    """Limit what each host sends and receives."""
    how = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
    for number in range(1, count + 1):
        hosts.run(number, "tc", "qdisc", "add", "dev", "eth0", *how)
        hosts.run(0, "tc", "qdisc", "add", "dev", f"port{number}", *how)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__,
        hosts=[2, 4, 8],
        workers=(1, "workers of each host"),
        rate=("1gbit", "of each link, as tc takes it"),
        bucket_mb=(25.0, "size of holdfast's buckets, MiB; DDP's are 25"),
        steps=(10, "measured steps of a job"),
        rounds=3,
        systems=([*SYSTEMS], None, (*SYSTEMS, WIRE)),
        model=("mlp", None, ("cnn", "mlp", "resnet")),
    )
    options = parser.parse_args()
    if WIRE in options.systems and (options.hosts, options.workers) != ([2], 1):
        parser.error(f"--systems {WIRE} needs --hosts 2 --workers 1")
    return options


def main() -> None:
    """Measure everything and print a table for each number of hosts."""
    options = parse()
    results = []
    hosts = Hosts(max(options.hosts), net="10.209.0")
    try:
        hosts.make()
        shape(hosts, max(options.hosts), options.rate)
        for count in options.hosts:
            found = measure(options, hosts, count)
            print(f"{show(options, count, found)}\n", flush=True)
            results.append({"hosts": count, "systems": found})
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"hosts need root, ip, tc, unshare and network namespaces: {getattr(error, 'stderr', '') or error}")
    finally:
        hosts.remove()
    write_json(options.json, options=vars(options), results=results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(*json.loads(sys.argv[2]))
    else:
        main()
