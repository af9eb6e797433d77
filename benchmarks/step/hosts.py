"""What a step sends and how long it takes between hosts whose links are slow, beside DDP on Gloo.

    python benchmarks/hosts.py [--hosts 2 4 8] [--workers 1] [--model mlp] [--rate 1gbit] [--bucket-mb 25] [--json FILE]

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
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, command_line, ratio, spread, table, write_json
from models import JOBS
from step_time import TOLERANCE, Training, work_ddp, work_holdfast

sys.path.insert(0, str(ROOT / "tests" / "support"))
from netns import Hosts

SYSTEMS = ("ddp-gloo", "ddp-fp16", "holdfast", "holdfast-late", "holdfast-fold", "holdfast-bf16")
BASE = "ddp-gloo"
ROUNDED = 2.0**-7
"""Largest relative distance from the weights of ddp-gloo where gradients are rounded to 8 bits."""
WARM_UP_STEPS = 3
PORT = 29400
JOB_S = 300.0
"""Time limit of a job, in seconds."""


class Meter:
    """Counts a worker's steps, and what leaves its host in them; writes both into a file.

    Args:
        training: Its training.
        steps: Steps to measure, after the warm-up.
        path: The file.
    """

    def __init__(self, training: Training, steps: int, path: Path) -> None:
        self._training, self._steps, self._path = training, steps, path
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
            "moved": self._training.moved(),
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
    rank = os.environ["RANK" if is_ddp else "HOLDFAST_RANK"]
    meter: Any = Meter(training, steps, Path(folder, f"{rank}.json"))
    if is_ddp:
        work_ddp(training, meter, backend="gloo", rounds=system.endswith("16"))
    else:
        work_holdfast(training, meter)


def commands(options: argparse.Namespace, system: str, hosts: Hosts, count: int, script: list[str]) -> list[list[str]]:
    """Return the commands that start a job, on the hosts from 1 to ``count``."""
    if system.startswith("ddp"):
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
        env = os.environ | {"HOLDFAST_BUCKET_BYTES": str(int(options.bucket_mb * 2**20))}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "HOLDFAST_TOKEN": "benchmark" * 4}
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
    bytes_of_vector = 4 * sum(p.numel() for p in JOBS[options.model].model().parameters())
    for number in range(options.rounds):
        shift = number % len(options.systems)
        for name in [*options.systems][shift:] + [*options.systems][:shift]:
            workers = run_job(options, name, hosts, count)
            # The slowest worker of each step: all wait for it.
            found[name]["steps_ms"] += [max(times) for times in zip(*(w["steps_ms"] for w in workers), strict=True)]
            found[name]["vectors"] += [w["sent_bytes"] / bytes_of_vector for w in workers[:: options.workers]]
            moved[name] = workers[0]["moved"]
    for name, values in moved.items():
        tolerance = ROUNDED if name.endswith("16") else TOLERANCE
        if (base := moved.get(BASE)) and math.dist(values, base) > tolerance * math.hypot(*base):
            sys.exit(f"{name} on {count} hosts has other weights than {BASE}")
    return found


def show(options: argparse.Namespace, count: int, found: dict[str, dict[str, Any]]) -> str:
    """Return a table of the results."""
    head = ["system", "vectors sent a host", "p50, ms", "p10-p90", "to ddp-gloo"]
    rows = []
    for name, values in found.items():
        times = spread(values["steps_ms"])
        to = ""
        if BASE in found:
            its = ratio(values["steps_ms"], found[BASE]["steps_ms"])
            to = f"{its['ratio']:.2f} ({its['low']:.2f}-{its['high']:.2f})"
        sent = f"{statistics.mean(values['vectors']):.2f}"
        rows.append([name, sent, f"{times['p50']:.0f}", f"{times['p10']:.0f}-{times['p90']:.0f}", to])
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
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--model", choices=("cnn", "mlp", "resnet"), default="mlp")
    return parser.parse_args()


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
